"""From a request that nothing is known against to an evaluation: target, drafter, prompts. Loads torch."""

from __future__ import annotations

import dataclasses

import torch

from dflash import data, devices, evaluate, export, request, sources
from dflash import target as targets
from dflash.drafter import Drafter
from dflash.evaluate import OnProgress, Prompt, Report, Settings
from dflash.placement import Devices
from dflash.request import Request, Settled
from dflash.target import Target
from kernelbake.errors import InputError

__all__ = ["Opened", "Request", "open_", "run"]


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


def open_(asked: Request, settled: Settled | None = None) -> Opened:
    """Reads the prompts, then loads target and drafter.

    Args:
        asked: the request.
        settled: what ``request.settle`` made of it, if it has.

    Raises:
        InputError: something is missing, broken, or does not belong together.
    """
    settled = settled or request.settle(asked)
    there, here = _devices(asked.devices)
    spec = settled.spec
    from transformers.utils import logging

    logging.set_verbosity_error()  # it recommends packages that would change what is measured
    source = sources.open_source(spec)
    if asked.data is None:
        source = data.hold_out(source, spec.data.held_out)[1]
    prompts = evaluate.prompts(source, asked.prompts, longest=asked.longest_prompt)
    served = export.load(settled.folder)
    dtype = devices.DTYPES[spec.axes.dtype]
    target = targets.load_target(spec.target, served.spec.target_layer_ids, there, dtype, seed=settled.seed)
    settings = Settings(
        asked.max_new_tokens, served.spec.block_size, evaluate.stop_ids(target), asked.temperature, asked.seed
    )
    return Opened(target, served.build(here, dtype), prompts, settings, source.name)


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
