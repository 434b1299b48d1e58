"""From a configuration to a run that may start: workload, preflight, freeze. Loads no torch until it freezes.

The order is the promise: everything that can be refused is refused before a weight is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash import capturable, folder, section, sources, tracking
from dflash.config import RunConfig
from dflash.errors import Faults, TrainingStoppedError, UnplannedError
from dflash.placement import numbered
from dflash.ranks import Ranks
from dflash.spec import Spec
from dflash.workload import WORKLOAD
from kernelbake.errors import BundleError, CoverageError, InputError, LockedError
from kernelbake.preflight import INTERPRETED, Preflight, WorkloadSection, preflight, workload_of

if TYPE_CHECKING:
    from dflash.proof import Proof
    from kernelbake.freeze import Frozen

OnProgress = Callable[[int, int, str], None]

_IMPORTED = ("dflash.trainer", "dflash.attention.kernels", "kernelbake.dispatch", "kernelbake.freeze")
"""Beside the target's modeling, which imports the kernels of Gated DeltaNet: what takes long."""
_IMPORTS = "imports"
"""Name of the thread that imports."""


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


def settle(run: RunConfig, *, stock: bool = False, output: bool = False) -> Plan:
    """Puts the configuration and the bundle's manifest together; refuses what can be told before anything is loaded.

    Args:
        run: what was asked for.
        stock: whether Triton is to tune and compile as usual.
        output: whether the output folder, and the checkpoint to go on from, are looked at, too.

    Raises:
        InputError: no bundle, or another plug-in's. After these all at once: packages that are missing, an output
            folder or a checkpoint that cannot be used, a target that cannot be found; and if it can, shapes, graphs or
            a stock run that cannot be, and data that are not there or faulty.
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
    faults = Faults()
    faults.of(lambda: tracking.check(run.tracking))
    if output:
        faults.of(lambda: folder.check(run))
    spec = faults.of(lambda: section.of_run(run, held.section))
    if spec is None:
        faults.refuse()
    assert spec is not None
    plan = Plan(run, spec, held)
    if plan.interpreted:
        faults.of(lambda: _check_interpreter(run, spec))
    if stock:
        faults.of(lambda: check_stock(plan))
    faults.of(lambda: capturable.check(run.graphs, spec, interpreted=plan.interpreted))
    faults.of(lambda: sources.check(spec))
    faults.refuse()
    return plan


def _check_interpreter(run: RunConfig, spec: Spec) -> None:
    """Refuses what Triton's interpreter cannot do.

    Raises:
        InputError: a second device, or a dtype that it computes wrongly.
    """
    if not set(run.pairs) <= set(numbered(max((pair.target for pair in run.pairs), default=0) + 1)):
        raise InputError(
            "devices: the bundle was made by the interpreter, which has one device; wanted `0`",
            hint="--dp-pairs makes several pairs on it",
        )
    if spec.axes.dtype != "float32":
        raise InputError(
            f"batch.dtype: `{spec.axes.dtype}` with a bundle that was made by the interpreter; wanted `float32`",
            hint="Triton's interpreter computes bfloat16 wrongly in the Gated-DeltaNet kernels",
        )


def check_stock(plan: Plan) -> None:
    """Refuses a stock run where nothing can be tuned.

    Raises:
        InputError: Triton's interpreter runs the kernels, and Triton times candidates on a GPU only.
    """
    if plan.interpreted:
        raise InputError(
            "train: --stock with a bundle that was made by the interpreter; wanted a GPU's, as Triton tunes on a GPU",
            hint="leave --stock away: the bundle's choices run in the interpreter, too",
        )


def placed(run: RunConfig, ranks: Ranks) -> RunConfig:
    """The run of this process: with ``torchrun`` each has the pair of its local rank.

    Raises:
        InputError: ``torchrun`` started another number of processes on this host than there are pairs.
    """
    if ranks.world == 1:
        return run
    given = run.devices is not None or run.dp_pairs is not None
    pairs = run.pairs if given else numbered(ranks.local_world)
    if len(pairs) != ranks.local_world:
        raise InputError(
            f"torchrun: `{ranks.local_world}` processes on this host for `{len(pairs)}` pairs; wanted one each",
            hint="--nproc-per-node sets the processes; without torchrun one process has all pairs as threads",
        )
    return dataclasses.replace(run, devices=(pairs[ranks.local_rank],), dp_pairs=None)


@contextlib.contextmanager
def importing(plan: Plan) -> Iterator[None]:
    """Imports what the run needs while the block waits for the preflight, whose process imports the same.

    The block ends when all is there, so that no thread is left when the process is frozen. What cannot be imported says
    so when its turn comes. A refusal or a signal waits for no import; ``still_importing`` says how to end then.
    """
    _settle_environment(plan)
    thread = threading.Thread(target=_import_all, args=(plan.spec.target.architecture,), name=_IMPORTS, daemon=True)
    thread.start()
    yield
    thread.join()


def still_importing() -> bool:
    """Whether a thread of ``importing`` is at work; a process ends well then by ``os._exit`` only."""
    return any(thread.name == _IMPORTS for thread in threading.enumerate())


def _import_all(architecture: str) -> None:
    with contextlib.suppress(Exception):
        from dflash import devices

        with devices.importing_fla():
            for module in (f"transformers.models.{architecture}.modeling_{architecture}", *_IMPORTED):
                importlib.import_module(module)


def check(plan: Plan, on_progress: OnProgress) -> Preflight:
    """The preflight of this very run, in a child process.

    Raises:
        CoverageError: with everything that the bundle lacks.
        MisfitError: other versions or kernel sources.
    """
    assert plan.run.bundle is not None
    try:
        return preflight(Path(plan.run.bundle), WORKLOAD.resolve(plan.spec), on_progress=on_progress)
    except CoverageError as error:
        lacking = set(plan.spec.loss.terms).difference(Spec.parse(plan.held.section).loss.terms)
        if lacking:
            own = (
                f"this loss has launches of its own: add `{', '.join(sorted(lacking))}` to `loss.terms` of the manifest"
            )
            error.hint = "; ".join(filter(None, (own, error.hint)))
        raise


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
        sinks: who is told of every step beside the log.
    """

    frozen: Frozen | None
    proof: Proof
    sinks: tuple[tracking.Sink, ...] = ()

    def notes(self) -> tuple[str, ...]:
        """What a person should know of the freeze: the bundle that all pairs launch from, and what it overrules."""
        if self.frozen is None:
            return ()
        return (f"freeze: bundle `{self.frozen.name}`, {self.frozen.digest}", *self.frozen.notes)


@contextlib.contextmanager
def started(plan: Plan, *, stock: bool) -> Iterator[Started]:
    """Freezes this process, or leaves it as it is, and starts counting.

    Args:
        plan: the run.
        stock: whether Triton tunes and compiles as usual, for comparison.

    Raises:
        BundleError, MisfitError: as ``kernelbake.freeze.freeze``.
        InputError: someone who is to be told cannot be.
    """
    _settle_environment(plan)
    from dflash import devices, proof

    assert plan.run.bundle is not None
    with contextlib.ExitStack() as stack:
        leads = os.environ.get("RANK", "0") == "0"  # of torchrun
        sinks = stack.enter_context(tracking.opened(plan.run)) if leads else ()
        frozen = None
        if not stock:
            from kernelbake.freeze import freeze

            numbers = sorted({gpu for pair in plan.run.pairs for gpu in (pair.target, pair.drafter)})
            with devices.importing_fla():
                wanted = None if plan.interpreted else numbers
                frozen = stack.enter_context(freeze(plan.run.bundle, wanted, trusted=trusted(plan.run)))
            _check_same_bundle(plan, frozen.digest)
        stack.enter_context(WORKLOAD.prepare(interpreted=plan.interpreted))
        from transformers.utils import logging

        logging.set_verbosity_error()  # what matters of its warnings is an error of ours, or stands in the bundle
        yield Started(frozen, proof.start(), sinks)


def _settle_environment(plan: Plan) -> None:
    """What has to be so before Triton and torch are imported."""
    if plan.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


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


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The launches that a run made, beside its plan.

    Args:
        common: launches, told apart by key and class of arguments, that are planned and were made.
        unplanned: made and not planned, one line each.
        unmet: planned and not made: the run has met no batch that needs them.
    """

    common: int
    unplanned: tuple[str, ...]
    unmet: tuple[str, ...]

    def line(self) -> str:
        """For people."""
        plural = "es" if self.common != 1 else ""
        return (
            f"recorded: {self.common} launch{plural} as planned, {len(self.unplanned)} outside the plan, "
            f"{len(self.unmet)} planned and not met"
        )

    def check(self) -> None:
        """Refuses launches outside the plan.

        Raises:
            UnplannedError: with all of them.
        """
        if self.unplanned:
            raise UnplannedError(
                f"record: {len(self.unplanned)} launches outside the plan; wanted only what the preflight planned",
                reasons=self.unplanned,
                hint="the plan is wrong: please report it with the lines above",
            )


@contextlib.contextmanager
def recording(found: Preflight) -> Iterator[Callable[[], Recorded]]:
    """Holds every launch of this process against the plan of its preflight; what it yields says how it stands."""
    from kernelbake import preflight as preflights

    with preflights.recording(found.plan) as difference:

        def recorded() -> Recorded:
            made = difference()
            return Recorded(made.common, made.unplanned, made.unmet)

        yield recorded


def write_summary(
    output: Path, started_: Started, losses: Sequence[float], peaks: Sequence[Any] = (), **more: dict[str, Any] | None
) -> None:
    """Writes ``summary.json``: what a run came to, also when it was stopped.

    Args:
        output: the run's folder.
        started_: its process.
        losses: of its steps.
        peaks: memory of each device, predicted and measured.
        more: what else was asked for: ``profile``, ``recorded``; None was not.

    Raises:
        TrainingStoppedError: it cannot be written.
    """
    counters = dataclasses.asdict(started_.frozen.counters) if started_.frozen is not None else None
    summary = {
        "bundle": started_.frozen.digest if started_.frozen is not None else None,
        "frozen": counters,
        "proof": dataclasses.asdict(started_.proof),
        "steps": len(losses),
        "losses": list(losses),
        "memory": [dataclasses.asdict(peak) for peak in peaks],
        **{name: value for name, value in more.items() if value is not None},
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
