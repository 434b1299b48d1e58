"""The shadow run: a workload's real steps on fake tensors, with every launch recorded instead of made.

``python -m kernelbake.shadow`` is the child process of ``kernelbake.planner``: it reads one request, a line of JSON,
from stdin, writes events, one JSON object a line, to stdout, and ends when stdin closes, which it does when the parent
is gone. One process plans for one device profile: kernel libraries read hardware facts when they are imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from kernelbake import bounds, fakedevice, fakepatches, faketensors, footprint, triton_api, workload, writes
from kernelbake.errors import KernelbakeError, PlanError
from kernelbake.fakeresults import extent
from kernelbake.keys import Case
from kernelbake.plan import KernelFacts, Launch, Plan, collect
from kernelbake.profiles import DeviceProfile
from kernelbake.recorder import Observer, intercepted, named, signature

SEED = 0
REROUTING_PACKAGES = ("flash_qla", "tilelang", "causal_conv1d", "kernels")
"""Packages that take calls over from Triton kernels merely by being importable."""
REROUTING_VARIABLES = "FLA_"
CACHE_VARIABLES = ("FLA_CACHE_", "FLA_CONFIG_", "FLA_GPU_", "FLA_TENSOR_CACHE_", "FLA_DISABLE_TENSOR_CACHE")
"""Variables of this prefix decide which implementation serves a call, but for those that only steer caches."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the planner asks for.

    Args:
        plugin: name of an installed plug-in, or ``module:attribute``.
        section: the plug-in's section of the manifest.
        profile: the device profile, as data.
        interpreted: whether kernels are run by Triton's interpreter; ``TRITON_INTERPRET`` is then set.
        paths: folders put before ``sys.path``.
        limits: what a plan may grow to.
    """

    plugin: str
    section: Mapping[str, Any]
    profile: Mapping[str, Any]
    interpreted: bool
    paths: Sequence[str]
    limits: Mapping[str, Any]


_HINTS = {
    "UnknownValueError": "let the step read no result, and take what decides about shapes from integers on the host",
}
_COMPILE_HINT = "`torch.compile` makes kernels of its own, which no plan can hold; run the step without it"

Report = Callable[[int, int, str], None]
"""Called with cases done, cases in all, and what is being done."""


def run(
    request: Request, report: Report = lambda done, total, message: None
) -> tuple[Plan, tuple[workload.Footprint, ...]]:
    """Plans the workload in this process, which is good for nothing else afterwards.

    Returns:
        the plan, and the footprint of each case's step.

    Raises:
        PlanError: the workload cannot be planned, with the reason.
        InputError: the plug-in is not installed or refuses its section.
        UnsupportedError: this Triton is not one that is known, or something has replaced functions of it.
    """
    profile = DeviceProfile.from_json(request.profile)
    limits = bounds.Limits(**request.limits)
    triton_api.check_interfaces()
    if not request.interpreted:
        fakedevice.install(profile)
    plugin = find_workload(request.plugin)
    spec = plugin.parse(request.section)
    cases = plugin.cases(spec)
    total = len(cases.planned)
    report(0, total, "loading kernel libraries")
    implementations = {**_packages(), **_variables(), **plugin.implementations(spec)}
    log = LaunchLog(Observer(_target(profile), faketensors.stand_in, run_hooks=True), limits)
    device = "cpu" if request.interpreted else "cuda"
    ledger, footprints = footprint.Ledger(device), []
    with plugin.prepare(interpreted=request.interpreted), shadowed(log, ledger):
        report(0, total, "building the modules")
        with explained("open"):
            session = plugin.open(spec, device=device, seed=SEED)
        gc.freeze()  # libraries and modules are here to stay; collecting around them costs more than the steps
        for done, case in enumerate(cases.planned):
            report(done, total, case.id)
            log.case = case
            ledger.begin(lambda: str(getattr(session, "part", "step")))
            with explained(f"case `{case.id}`"):
                session.step(case)
            footprints.append(ledger.end(case))
    report(total, total, "merging launches")
    launches = log.launches()
    plan = Plan(
        profile=profile.to_json(),
        versions=_versions(),
        implementations=implementations,
        cases=cases.planned,
        skipped=cases.skipped,
        kernels=_facts(launches),
        launches=launches,
        unbounded=bounds.check(launches, cases.planned, limits),
    )
    return plan, tuple(footprints)


def find_workload(name: str) -> workload.Workload:
    """The installed plug-in of that name, or the object at ``module:attribute``."""
    if ":" not in name:
        return workload.load(name)
    module, _, attribute = name.partition(":")
    try:
        found: workload.Workload = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"workload `{name}`: not found: {error}") from error
    return found


class LaunchLog:
    """Records the launches of one case after another; equal calls are worked out once."""

    def __init__(self, observer: Observer, limits: bounds.Limits) -> None:
        self.case = Case(())
        self._limits = limits
        self._observer = observer
        self._known: dict[Any, Launch] = {}
        self._unkeyed: list[Launch] = []
        self._seen: dict[tuple[str, int], tuple[str, Launch]] = {}
        self._written: dict[int, frozenset[str]] = {}

    def record(self, original: Any, launchable: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Stands in for the ``run`` of a kernel."""
        known = signature(launchable, args, kwargs)
        launch = self._known.get(known) if known is not None else None
        if launch is None:
            self._identify(launchable)
            self._measure(launchable, args, kwargs)
            launch = self._observer.observe(launchable, args, kwargs)
            if known is not None:
                self._known[known] = launch
            else:
                self._unkeyed.append(launch)  # keeps its id from being used again
        self._seen.setdefault((self.case.id, id(launch)), (self.case.id, launch))
        self._forget_written(launchable, args, kwargs)

    def _measure(self, launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuses tensors whose offsets do not fit into the 32 bits in which kernels compute them."""
        reasons = []
        for name, item in named(launchable, args, kwargs).items():
            for tensor in _tensors_in(item):
                elements = extent(tensor.shape, tensor.stride())
                if elements > self._limits.max_elements:
                    reasons.append(f"argument `{name}` of shape {tuple(tensor.shape)} spans {elements} elements")
        if reasons:
            raise PlanError(
                f"kernel `{triton_api.kernel_of(launchable).name}`: an argument spans more elements than 32 bits can "
                f"count; wanted at most {self._limits.max_elements}",
                hint="give the workload a smaller batch or length",
                reasons=reasons,
            )

    def _forget_written(self, launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """What the kernel would have written is not known from here on."""
        call = named(launchable, args, kwargs)
        known = {name: [item for item in _tensors_in(call[name]) if faketensors.is_known(item)] for name in call}
        if not any(known.values()):
            return
        function = triton_api.innermost(launchable)
        if id(function) not in self._written:
            self._written[id(function)] = writes.written_parameters(function.fn)
        for name in self._written[id(function)]:
            for tensor in known.get(name, ()):
                faketensors.forget(tensor)

    def _identify(self, launchable: Any) -> None:
        """Refuses a kernel that cannot be found again by its name: made in a function, or replaced since."""
        kernel = triton_api.kernel_of(launchable)
        try:
            found = triton_api.find(kernel)
        except LookupError as error:
            raise PlanError(str(error), hint="a kernel must be found by its name at the top of its module") from error
        if triton_api.innermost(found) is not triton_api.innermost(launchable):
            message = f"kernel `{kernel.name}`: the launched object is not the one of that name; wanted one object"
            raise PlanError(message)

    def launches(self) -> tuple[Launch, ...]:
        """All launches recorded, merged."""
        try:
            return collect(self._seen.values())
        except ValueError as error:
            raise PlanError(str(error)) from error


def _facts(launches: Sequence[Launch]) -> dict[str, KernelFacts]:
    """The facts of every kernel launched, and of every device function that was given to one as a value."""
    try:
        return triton_api.facts_of(launches)
    except (TypeError, LookupError) as error:
        raise PlanError(str(error)) from error


def _tensors_in(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, tuple | list):
        for part in item:
            yield from _tensors_in(part)


def _target(profile: DeviceProfile) -> Any:
    return triton_api.gpu_target(profile.arch, profile.warp_size)


@contextlib.contextmanager
def shadowed(log: LaunchLog, ledger: footprint.Ledger | None = None) -> Iterator[None]:
    """Runs a block on fake tensors, with its launches recorded instead of made and its tensors entered in a ledger."""
    mode = faketensors.ShadowMode(ledger)
    with intercepted(log.record), fakepatches.entered(mode), _no_compilation():
        yield


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
    """Refuses ``torch.compile``, whose kernels no plan can hold, instead of tracing fake tensors."""
    previous = torch.compiler.set_stance("fail_on_recompile")
    with previous:
        yield


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Turns whatever a workload raises into one error that says where."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{where}: {error.message}", hint=error.hint, reasons=error.reasons) from error
    except KernelbakeError:
        raise
    except Exception as error:
        frames = [
            f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"
            for frame in traceback.extract_tb(error.__traceback__)
            if "torch" not in Path(frame.filename).parts and frame.filename != __file__
        ]
        text = str(error).strip().splitlines() or [""]
        hint = _HINTS.get(type(error).__name__) or (_COMPILE_HINT if "torch.compile" in text[0] else None)
        raise PlanError(
            f"{where}: `{type(error).__name__}`: {text[0]}", hint=hint, reasons=[*text[1:4], *frames[-6:]]
        ) from error


def _versions() -> dict[str, str]:
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for name, package in (("fla", "fla-core"), ("transformers", "transformers")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    return found


def _packages() -> dict[str, str]:
    facts = {}
    for name in REROUTING_PACKAGES:
        facts[f"package {name}"] = "importable" if importlib.util.find_spec(name) else "absent"
    return facts


def _variables() -> dict[str, str]:
    return {
        f"variable {name}": value
        for name, value in sorted(os.environ.items())
        if name.startswith(REROUTING_VARIABLES) and not name.startswith(CACHE_VARIABLES)
    }


# ---------------------------------------------------------------------------------------------- the child process


def main() -> int:
    """Serves one request; the exit status is 0 also where the plan was refused, since the refusal is an event."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a workload that prints must not garble the events
    request = Request(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:0] = request.paths

    def report(done: int, total: int, message: str) -> None:
        print(json.dumps({"event": "progress", "done": done, "total": total, "message": message}), file=events)

    try:
        plan, footprints = run(request, report)
    except KernelbakeError as error:
        refusal = {"event": "refused", "kind": type(error).__name__, "message": error.message}
        print(json.dumps({**refusal, "hint": error.hint, "reasons": error.reasons}), file=events)
        return 0
    held = [item.to_json() for item in footprints]
    package = str(Path(__file__).resolve().parent)
    print(json.dumps({"event": "plan", "package": package, "plan": plan.to_json(), "footprints": held}), file=events)
    return 0


def _end_with_parent() -> None:
    """The parent holds the other end of stdin open as long as it lives."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    try:
        status = main()
    except BaseException:  # told whole, and without the interpreter's own end, which another thread would disturb
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # no destructors: nothing here is worth an orderly end
