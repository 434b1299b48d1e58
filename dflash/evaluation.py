"""From options to an evaluation: which target, which drafter, which prompts. Loads torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from dflash import checkpoint, data, devices, evaluate, export, hub, sources
from dflash import target as targets
from dflash.drafter import Drafter
from dflash.evaluate import OnProgress, Prompt, Report, Settings
from dflash.export import Served
from dflash.placement import Devices
from dflash.spec import STDLIB, Axes, DataSpec, Spec
from dflash.target import Target
from kernelbake.errors import InputError

EXPORTED = "drafter"
"""The folder of the served drafter below a run's output."""

LONGEST = 1 << 17
"""Samples of ``--data`` are cut here, in tokens: only what stands before the response is used."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for.

    Args:
        drafter: a run's output folder, or an exported drafter.
        target: Hub id or folder; None is the run's.
        data: held-out samples; None is those that the run held out of its own.
        prompts: how many at most.
        longest_prompt: longer ones are passed over, in tokens.
        max_new_tokens: of a response.
        temperature: 0 is greedy.
        seed: of draws and of the untrained drafter.
        devices: of target and drafter; None is the CPU.
        dtype: of weights; None is the run's.
    """

    drafter: Path
    target: str | None = None
    data: str | None = None
    prompts: int = 50
    longest_prompt: int = 4096
    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    devices: Devices | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Opened:
    """An evaluation that may begin."""

    target: Target
    network: Drafter
    prompts: list[Prompt]
    settings: Settings
    source: str


def run(opened: Opened, on_progress: OnProgress) -> Report:
    """Measures the drafter, one without training, and copying."""
    return evaluate.evaluate(
        opened.target,
        evaluate.contenders(opened.network, opened.target, seed=opened.settings.seed),
        opened.prompts,
        opened.settings,
        source=opened.source,
        on_progress=on_progress,
    )


def open_(request: Request) -> Opened:
    """Reads the prompts, then loads target and drafter.

    Raises:
        InputError: something is missing, broken, or does not belong together.
    """
    folder = _exported(request.drafter)
    served = export.load(folder)
    spec, seed = _spec(request, served)
    served.check_target(spec.target)
    from transformers.utils import logging

    logging.set_verbosity_error()  # it recommends packages that would change what is measured
    source = _held_out(request, spec)
    prompts = evaluate.prompts(source, request.prompts, longest=request.longest_prompt)
    there, here = _devices(request.devices)
    dtype = devices.DTYPES[spec.axes.dtype]
    target = targets.load_target(spec.target, served.spec.target_layer_ids, there, dtype, seed=seed)
    settings = Settings(
        request.max_new_tokens, served.spec.block_size, evaluate.stop_ids(target), request.temperature, request.seed
    )
    return Opened(target, served.build(here, dtype), prompts, settings, source.name)


def _exported(given: Path) -> Path:
    """The folder of the exported drafter itself.

    Raises:
        InputError: there is none.
    """
    if not given.is_dir():
        raise InputError(f"eval: `{given}` is no folder; wanted a run's output folder or an exported drafter")
    if (given / EXPORTED).is_dir():
        return given / EXPORTED
    if checkpoint.newest_state(given) is not None:
        raise InputError(
            f"eval: `{given}` holds checkpoints and no drafter; wanted a run that made all its steps",
            hint="`dflash train … --resume latest` ends it; with --steps at the newest checkpoint's, at once",
        )
    return given


def _spec(request: Request, served: Served) -> tuple[Spec, int]:
    """The section of the drafter's run, with another target where one is named, and the seed of random weights."""
    found = checkpoint.newest_state(request.drafter)
    if found is None:
        if request.target is None:
            raise InputError(
                f"eval: `{request.drafter}` is no run's output folder; wanted one, or --target with the target's model",
                hint="a drafter says which shape its target has, but not which model it is",
            )
        target = hub.resolve(request.target, None)
        dtype = request.dtype or "bfloat16"
        axes = Axes((LONGEST,), (1,), "largest", (1,), ("padded",), dtype)
        return Spec(target, served.spec, axes, DataSpec(STDLIB, None, "truncate")), 0
    spec = Spec.parse(found.spec)
    if request.target is not None:
        spec = dataclasses.replace(spec, target=hub.resolve(request.target, spec.target))
    if request.dtype is not None:
        spec = dataclasses.replace(spec, axes=dataclasses.replace(spec.axes, dtype=request.dtype))
    return spec, found.seed


def _held_out(request: Request, spec: Spec) -> data.Source:
    if request.data is not None:
        named = dataclasses.replace(spec.data, source=request.data, too_long="truncate")
        axes = dataclasses.replace(spec.axes, buckets=(LONGEST,)) if request.data != STDLIB else spec.axes
        return sources.open_source(dataclasses.replace(spec, data=named, axes=axes))
    if not spec.data.held_out:
        raise InputError(
            "eval: the run held no samples out of its data; wanted --data with samples that it was not trained on",
            hint="train with `--set data.held_out=200` to keep some apart",
        )
    return data.hold_out(sources.open_source(spec), spec.data.held_out)[1]


def _devices(asked: Devices | None) -> tuple[torch.device, torch.device]:
    if asked is None:
        return torch.device("cpu"), torch.device("cpu")
    count = torch.cuda.device_count()
    if max(asked.target, asked.drafter) >= count:
        wanted = f"wanted the numbers of {count} CUDA GPUs here" if count else "wanted a CUDA GPU"
        both = f"GPUs `{asked.target}` and `{asked.drafter}`"
        found = both if asked.target != asked.drafter else f"GPU `{asked.target}`"
        raise InputError(f"eval: {found}; {wanted}", hint="--cpu uses the CPU")
    return torch.device("cuda", asked.target), torch.device("cuda", asked.drafter)
