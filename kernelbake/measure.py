"""Measuring for real, inside the worker: the workload's own steps, every launch intercepted and tuned where it is met.

A launch whose winner is known runs with the winner; one met for the first time is tuned there, on copies of its live
arguments, and then runs with the winner as well. So every kernel sees inputs that other chosen kernels made, and the
whole step is recorded: a launch that the plan does not hold ends the build.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from kernelbake import triton_api
from kernelbake.calls import Call, Resolved, Resolver
from kernelbake.devices import CpuDevice, CudaDevice, Device
from kernelbake.errors import BuildError
from kernelbake.keys import Case
from kernelbake.livesite import LiveSite, hook_of
from kernelbake.manifest import MeasurePolicy
from kernelbake.parts import Parts
from kernelbake.plan import Launch, Plan
from kernelbake.profiles import DeviceProfile
from kernelbake.recorder import intercepted
from kernelbake.runners import CudaCode, InterpretedCode
from kernelbake.shadow import find_workload
from kernelbake.tune import Failed, Report, stand_in, tune
from kernelbake.words import counted
from kernelbake.worker_main import Known
from kernelbake.workload import Oracle, Session


class PlanMismatchError(BuildError):
    """The real step launches what the plan does not hold."""


class Watch:
    """Which launches to describe the outputs of, each once: by default all of some launches, where they are first met.

    Args:
        launches: their places in the plan.
        met: launch and variant of those that were met before.
    """

    def __init__(self, launches: Collection[int], met: Collection[tuple[int, int]] = ()) -> None:
        self._launches, self._done = frozenset(launches), set(met)

    def due(self, launch: int, variant: int, case: str) -> Mapping[int, str] | None:
        """Positions and names of the tensors to describe in any case; None if the launch is not to be looked at."""
        if launch not in self._launches or (launch, variant) in self._done:
            return None
        self._done.add((launch, variant))
        return {}


class Conductor:
    """Stands in for every launch while the steps run.

    Args:
        plan: what may be launched.
        decided: winners by place of the launch.
        owned: places of the launches to decide here; others take what works.
        code, device, policy, report: as in ``LiveSite`` and ``tune``.
        oracles: by kernel name.
        watch: launches of which it is reported what they write.

    Attributes:
        case: id of the case whose step runs; set by whoever runs the cases.
        met: launch and variant of every call so far, by their places.
        tuning_ms: wall time spent on tuning; the rest of the steps goes to running them.
        busy_ms: time of it for which the device was busy.
        parts: where all the time goes.
    """

    def __init__(
        self,
        plan: Plan,
        decided: Mapping[int, int],
        owned: Collection[int],
        code: CudaCode | InterpretedCode,
        device: Device,
        policy: MeasurePolicy,
        report: Progress,
        oracles: Mapping[str, Oracle],
        watch: Watch | None = None,
    ) -> None:
        self._watch, self.case = watch, ""
        self._plan, self._code, self._device, self._policy, self._report = plan, code, device, policy, report
        self._places = {launch.id: place for place, launch in enumerate(plan.launches)}
        self._decided, self._owned = dict(decided), frozenset(owned)
        self._oracles = oracles
        profile = DeviceProfile.from_json(plan.profile)
        self._resolver = Resolver(triton_api.gpu_target(profile.arch, profile.warp_size))
        self._variants = [_variants(launch) for launch in plan.launches]
        self._unplanned: dict[str, None] = {}
        self.met: dict[tuple[int, int], None] = {}
        self.tuning_ms = self.busy_ms = 0.0
        self.parts = Parts()

    def __call__(self, original: Any, launchable: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        rest = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        call = Call(launchable, tuple(args), rest, kwargs["grid"])
        with torch.no_grad():
            place = self._places.get(self._resolver.key(call))
            if place is None:
                self._unplanned[self._describe(call)] = None
                return None
            if self._unplanned:
                return None  # the inputs are not what they would be; only what else is unplanned matters now
            if place not in self._decided:
                self._decided[place] = self._tune(place, call)
            return self._launch(place, call)

    def check_planned(self) -> None:
        """Ends the build if a step has launched what the plan does not hold.

        Raises:
            PlanMismatchError: naming all that it launched.
        """
        if self._unplanned:
            raise PlanMismatchError(
                "measure: the step launches what the plan does not hold; wanted planned launches only",
                reasons=self._unplanned,
                hint="the workload's step depends on something that a shadow run cannot see",
            )

    def never_met(self) -> list[str]:
        """Planned launches that no step has made so far."""
        met = {place for place, _ in self.met}
        return [str(launch) for place, launch in enumerate(self._plan.launches) if place not in met]

    def _describe(self, call: Call) -> str:
        name = triton_api.kernel_of(call.launchable).name
        _, token = self._resolver.key(call)
        return f"{name} {token or '(not tuned)'}"

    def _resolve(self, place: int, call: Call, candidate: int) -> Resolved:
        """The call under a candidate; it must be of a planned variant."""
        launch = self._plan.launches[place]
        resolved = self._resolver.resolve(call, launch.candidates[candidate])
        variant = self._variants[place][candidate].get(resolved.specialization.token)
        if variant is None:
            planned = [variant.specializations[candidate] for variant in launch.variants]
            nearest = min((resolved.specialization.differences(other, "made", "planned") for other in planned), key=len)
            self._unplanned[f"{launch}: specialization with {', '.join(nearest)}"] = None
            self.check_planned()
        return resolved

    def _tune(self, place: int, call: Call) -> int:
        start, busy_ms = time.perf_counter(), self._device.busy_ms
        launch = self._plan.launches[place]
        with self.parts.part("decide"):
            site = self._site(place, call, self._policy, self._oracles.get(launch.kernel.name))
            decide = tune if place in self._owned else stand_in
            winner = decide(self._policy, self._report, place, launch, site)
        self.tuning_ms += (time.perf_counter() - start) * 1e3
        self.busy_ms += self._device.busy_ms - busy_ms
        return winner

    def _site(self, place: int, call: Call, policy: MeasurePolicy, oracle: Oracle | None) -> LiveSite:
        resolve = functools.partial(self._resolve, place, call)
        with self.parts.part("copies"):
            launch = self._plan.launches[place]
            return LiveSite(launch, call, resolve, self._code, self._device, policy, oracle, self.parts)

    def _observe(self, place: int, variant: int, call: Call) -> None:
        """Reports what the winner writes, before it runs on the trainer's own tensors."""
        also = self._watch.due(place, variant, self.case) if self._watch is not None else None
        if also is None:
            return
        launch = self._plan.launches[place]
        with self.parts.part("outputs"):
            site = self._site(place, call, self._policy.model_copy(update={"repeats": 1}), None)
            try:
                data = site.outputs(self._decided[place], also)
            except Failed as failure:
                raise BuildError(f"{launch}: its winner is rejected ({failure}); wanted it to run") from failure
            self._report.outputs(place, variant, {"case": self.case, **data})

    def _launch(self, place: int, call: Call) -> Any:
        """Runs the winner on the trainer's own tensors, as a frozen process will."""
        candidate = self._decided[place]
        resolved = self._resolve(place, call, candidate)
        variant = self._variants[place][candidate][resolved.specialization.token]
        self.met[place, variant] = None
        self._observe(place, variant, call)
        hook_of(call.launchable, resolved.config, call.args, resolved.kwargs)()
        runner = self._code.runner(call.launchable, resolved)
        return runner(call.args, resolved.kwargs, list(resolved.bound.values()))


def steps(session: Session, cases: Iterable[Case], conductor: Conductor, device: Device, report: Progress) -> None:
    """Runs a step of each case.

    Raises:
        PlanMismatchError: one launches what the plan does not hold.
    """
    with torch.autograd.set_multithreading_enabled(False), intercepted(conductor):
        for case in cases:
            conductor.case = case.id
            with conductor.parts.part("step"):
                session.step(case)
                device.wait()
            conductor.check_planned()
            report.case_done(case.id, conductor.met)


def _variants(launch: Launch) -> list[dict[str, int]]:
    """For each candidate: token of the specialization → place of the variant."""
    return [
        {variant.specializations[candidate].token: place for place, variant in enumerate(launch.variants)}
        for candidate in range(len(launch.candidates))
    ]


# ---------------------------------------------------------------------------------------------- the worker's work


class Progress(Report, Protocol):
    """What the worker tells the builder besides the fate of candidates."""

    def imported(self) -> None:
        """All libraries are imported; returns when the device may be used."""
        ...

    def ready(self) -> Known:
        """The workload is open; returns what earlier workers have found out, once measuring may begin."""
        ...

    def outputs(self, launch: int, variant: int, data: Mapping[str, Any]) -> None:
        """What the winner of a launch wrote: ``case``, ``tensors`` and ``tolerance``."""
        ...

    def case_done(self, case: str, met: Collection[tuple[int, int]]) -> None:
        """A step ran to its end with every launch decided; which launches and variants were met up to now."""
        ...


def run(job: Mapping[str, Any], plan: Plan, report: Progress) -> dict[str, Any]:
    """Opens the workload and runs a step of every case that was not done before, the plan's last case first.

    Cases are listed from small to large, and a decision that serves several of them is made where it is first met: so
    it is made where most of the time goes.

    Args:
        job: from the builder: ``plugin``, ``section``, ``interpreted``, ``policy``, ``codes``, ``folder``,
            ``owned``.
        plan: the plan.
        report: where everything is told.

    Returns:
        ``busy_ms`` of the device and ``wall_ms`` of the tuning, and ``seconds`` of wall time by part: ``copies`` of
        arguments, to ``load`` code, ``check``, ``compare``, ``warm``, ``sample``, ``decide`` (the rest of the tuning:
        the journal), ``outputs``, and ``step`` (the workload's own).

    Raises:
        BuildError: as ``tune``, and for a launch outside the plan, or a planned one that no step makes.
    """
    policy = MeasurePolicy(**job["policy"])
    interpreted = job["interpreted"]
    plugin = find_workload(job["plugin"])
    spec = plugin.parse(job["section"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(plugin.prepare(interpreted=interpreted))
        for launch in plan.launches:
            triton_api.find(launch.kernel)
        report.imported()
        session = plugin.open(spec, device="cpu" if interpreted else "cuda", seed=policy.seed)
        known = report.ready()
        device, code = device_of(job, plan)
        oracles, watch = plugin.oracles(spec), Watch(job["owned"], known.met)
        conductor = Conductor(plan, known.decided, job["owned"], code, device, policy, report, oracles, watch)
        conductor.met.update(dict.fromkeys(known.met))
        cases = [case for case in reversed(plan.cases) if case.id not in known.cases]
        steps(session, cases, conductor, device, report)
    missing = conductor.never_met()
    if missing:
        launches = counted(len(missing), "planned launch is", "planned launches are")
        raise PlanMismatchError(f"measure: {launches} made by no step; wanted all to be made", reasons=missing)
    seconds = {name: round(spent, 3) for name, spent in sorted(conductor.parts.seconds.items())}
    return {"busy_ms": conductor.busy_ms, "wall_ms": conductor.tuning_ms, "seconds": seconds}


def device_of(job: Mapping[str, Any], plan: Plan) -> tuple[Device, CudaCode | InterpretedCode]:
    """Where candidates of a job run, and the code for them."""
    if job["interpreted"]:
        return CpuDevice(), InterpretedCode()
    profile = DeviceProfile.from_json(plan.profile)
    triton.set_allocator(_scratch)
    codes = json.loads(Path(job["codes"]).read_bytes())
    return CudaDevice(profile.l2_bytes), CudaCode(codes, Path(job["folder"]))


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory that a kernel wants for itself during a launch."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
