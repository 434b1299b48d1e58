"""From a configuration to a run that may start: workload, preflight, freeze. Loads no torch until it freezes.

The order is the promise: everything that can be refused is refused before a weight is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash import capturable, section
from dflash.config import RunConfig
from dflash.errors import TrainingStoppedError
from dflash.spec import Spec
from dflash.workload import WORKLOAD
from kernelbake.errors import BundleError, InputError, LockedError
from kernelbake.preflight import INTERPRETED, Preflight, WorkloadSection, preflight, workload_of

if TYPE_CHECKING:
    from dflash.proof import Proof
    from kernelbake.freeze import Frozen

OnProgress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run as it would be made.

    Args:
        run: what was asked for.
        spec: the workload's section of this run.
        held: what the bundle was made for.
    """

    run: RunConfig
    spec: Spec
    held: WorkloadSection

    @property
    def interpreted(self) -> bool:
        return self.held.made == INTERPRETED


def trusted(run: RunConfig) -> list[Path]:
    """The key files of which one must have signed the bundle."""
    return [Path(run.require_signature)] if run.require_signature is not None else []


def settle(run: RunConfig) -> Plan:
    """Puts the configuration and the bundle's manifest together.

    Raises:
        InputError: no bundle, another plug-in's bundle, a target that cannot be found, shapes that cannot be, graphs
            that are asked for and cannot be.
        BundleError: the bundle cannot be trusted, or is not signed as required.
    """
    if run.bundle is None:
        raise InputError(
            "train: no bundle; wanted --frozen-cache, a bundle whose manifest names workload, target and data",
            hint="`kernelbake build --manifest sm90.yaml` makes one; --stock compares with Triton's own tuning",
        )
    held = workload_of(run.bundle, trusted=trusted(run))
    if held.plugin != WORKLOAD.name:
        raise InputError(f"bundle `{run.bundle}`: made for workload `{held.plugin}`; wanted `{WORKLOAD.name}`")
    spec = section.of_run(run, held.section)
    _check_devices(run, interpreted=held.made == INTERPRETED)
    capturable.check(run.graphs, spec, interpreted=held.made == INTERPRETED)
    return Plan(run, spec, held)


def _check_devices(run: RunConfig, *, interpreted: bool) -> None:
    if interpreted and (run.devices.target or run.devices.drafter):
        raise InputError("devices: the bundle was made by the interpreter, which has one device; wanted `0`")


def check(plan: Plan, on_progress: OnProgress) -> Preflight:
    """The preflight of this very run, in a child process.

    Raises:
        CoverageError: with everything that the bundle lacks.
        MisfitError: other versions or kernel sources.
    """
    assert plan.run.bundle is not None
    return preflight(Path(plan.run.bundle), WORKLOAD.resolve(plan.spec), on_progress=on_progress)


@contextlib.contextmanager
def holding(output: Path) -> Iterator[None]:
    """Makes the output folder and holds its lock: two runs would mix their logs and remove each other's checkpoints.

    The kernel frees the lock however the process ends.

    Raises:
        InputError: the folder cannot be made or written to.
        LockedError: another run writes there.
    """
    path = output / ".lock"
    try:
        output.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InputError(
            f"output: `{output}` cannot be written to ({error.strerror}); wanted a folder for checkpoints and logs"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LockedError(
                f"output: another run holds `{path}`; wanted a folder that no run writes to",
                hint="wait for it, end it, or give another --output",
            ) from error
        except OSError:
            pass  # a file system without locks (some network ones) gives what it can
        yield
    finally:
        os.close(handle)


@dataclasses.dataclass(frozen=True)
class Started:
    """A process in which training may begin.

    Args:
        frozen: the frozen bundle; None of a stock run.
        proof: counts what must not happen from now on.
    """

    frozen: Frozen | None
    proof: Proof


@contextlib.contextmanager
def started(plan: Plan, *, stock: bool) -> Iterator[Started]:
    """Freezes this process, or leaves it as it is, and starts counting.

    Args:
        plan: the run.
        stock: whether Triton tunes and compiles as usual, for comparison.

    Raises:
        BundleError, MisfitError: as ``kernelbake.freeze.freeze``.
    """
    if plan.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from dflash import devices, proof

    assert plan.run.bundle is not None
    with contextlib.ExitStack() as stack:
        frozen = None
        if not stock:
            from kernelbake.freeze import freeze

            numbers = sorted({plan.run.devices.target, plan.run.devices.drafter})
            with devices.importing_fla():
                wanted = None if plan.interpreted else numbers
                frozen = stack.enter_context(freeze(plan.run.bundle, wanted, trusted=trusted(plan.run)))
            _check_same_bundle(plan, frozen.digest)
        stack.enter_context(WORKLOAD.prepare(interpreted=plan.interpreted))
        from transformers.utils import logging

        logging.set_verbosity_error()  # what matters of its warnings is an error of ours, or stands in the bundle
        yield Started(frozen, proof.start())


def _check_same_bundle(plan: Plan, digest: str) -> None:
    """Refuses a file that was replaced since it was read: the preflight then spoke of another one.

    Raises:
        BundleError: it was.
    """
    if digest != plan.held.digest:
        raise BundleError(
            f"bundle `{plan.run.bundle}`: `{digest}`; wanted `{plan.held.digest}`, which it was a moment ago",
            hint="the file was replaced while the run started: start it again",
        )


def write_summary(output: Path, started_: Started, reports: list[Any], peaks: Sequence[Any] = ()) -> None:
    """Writes ``summary.json``: what a run came to, also when it was stopped.

    Args:
        output: the run's folder.
        started_: its process.
        reports: of its steps.
        peaks: memory of each device, predicted and measured.

    Raises:
        TrainingStoppedError: it cannot be written.
    """
    counters = dataclasses.asdict(started_.frozen.counters) if started_.frozen is not None else None
    summary = {
        "bundle": started_.frozen.digest if started_.frozen is not None else None,
        "frozen": counters,
        "proof": dataclasses.asdict(started_.proof),
        "steps": len(reports),
        "losses": [report.loss for report in reports],
        "memory": [dataclasses.asdict(peak) for peak in peaks],
    }
    path = output / "summary.json"
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(summary, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise TrainingStoppedError(
            f"summary: `{path}` cannot be written ({error.strerror}); wanted room and a folder that can be written to"
        ) from error
