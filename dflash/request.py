"""What is asked of an evaluation, as far as it can be told, and refused, without loading anything. Loads no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dflash import hub, rows, saved, served, sources
from dflash.errors import Faults
from dflash.folder import DRAFTER
from dflash.placement import Devices
from dflash.saved import State
from dflash.served import Described
from dflash.spec import RANDOM, STDLIB, Axes, DataSpec, Spec, TargetSpec
from kernelbake.errors import InputError

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
class Settled:
    """An evaluation that nothing is known against.

    Args:
        folder: of the exported drafter.
        spec: the section of the drafter's run, with what was asked for instead; its data are those to be read.
        seed: of random weights of the target.
    """

    folder: Path
    spec: Spec
    seed: int


def settle(request: Request) -> Settled:
    """Puts a request and what the drafter's folder says together.

    Raises:
        InputError: all at once: something is missing, broken, or does not belong together.
    """
    faults = Faults()
    folder = faults.of(lambda: _exported(request.drafter))
    described = faults.of(lambda: served.describe(folder)) if folder is not None else None
    found = faults.of(lambda: _run(request.drafter))
    state, planned = found if found is not None else (None, None)
    is_known = found is not None and folder is not None
    is_named = request.target not in (None, RANDOM)  # known whatever the folder is
    target = faults.of(lambda: _target(request, planned)) if is_known or is_named else None
    if is_known and request.data is None:
        faults.of(lambda: _check_held_out(planned))
    if folder is None or described is None or target is None:
        faults.of(lambda: _check_named(request.data))
        faults.refuse()
    assert folder is not None
    assert described is not None
    assert target is not None
    spec = _spec(request, described, planned, target)
    faults.of(lambda: described.check_target(target))
    faults.of(lambda: sources.check(spec))
    faults.refuse()
    return Settled(folder, spec, state.seed if state is not None else 0)


def _exported(given: Path) -> Path:
    """The folder of the exported drafter itself.

    Raises:
        InputError: there is none.
    """
    if not given.is_dir():
        raise InputError(f"eval: `{given}` is no folder; wanted a run's output folder or an exported drafter")
    if (given / DRAFTER).is_dir():
        return given / DRAFTER
    if saved.whole(given):
        raise InputError(
            f"eval: `{given}` holds checkpoints and no drafter; wanted a run that made all its steps",
            hint="`dflash train … --resume latest` ends it; with --steps at the newest checkpoint's, at once",
        )
    return given


def _run(given: Path) -> tuple[State, Spec] | tuple[None, None]:
    """What the run of an output folder was; nothing of a folder that is none."""
    state = saved.newest_state(given)
    return (state, Spec.parse(state.spec)) if state is not None else (None, None)


def _target(request: Request, planned: Spec | None) -> TargetSpec:
    if request.target is not None:
        return hub.resolve(request.target, planned.target if planned is not None else None)
    if planned is None:
        raise InputError(
            f"eval: `{request.drafter}` is no run's output folder; wanted one, or --target with the target's model",
            hint="a drafter says which shape its target has, but not which model it is",
        )
    return planned.target


def _check_held_out(planned: Spec | None) -> None:
    if planned is None or not planned.data.held_out:
        raise InputError(
            "eval: the run held no samples out of its data; wanted --data with samples that it was not trained on",
            hint="train with `--set data.held_out=200` to keep some apart",
        )


def _check_named(source: str | None) -> None:
    if source not in (None, STDLIB):
        rows.check_named(source)


def _spec(request: Request, described: Described, planned: Spec | None, target: TargetSpec) -> Spec:
    """The section of the drafter's run, with what was asked for instead."""
    spec = planned
    if spec is None:
        axes = Axes((LONGEST,), (1,), "largest", (1,), ("padded",), "bfloat16")
        spec = Spec(target, described.spec, axes, DataSpec(STDLIB, None, "truncate"))
    spec = dataclasses.replace(spec, target=target)
    if request.dtype is not None:
        spec = dataclasses.replace(spec, axes=dataclasses.replace(spec.axes, dtype=request.dtype))
    if request.data is None:
        return spec
    named = dataclasses.replace(spec.data, source=request.data, too_long="truncate")
    axes = dataclasses.replace(spec.axes, buckets=(LONGEST,)) if request.data != STDLIB else spec.axes
    return dataclasses.replace(spec, data=named, axes=axes)
