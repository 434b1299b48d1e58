"""Measuring for real, inside the worker: the workload's own steps, every launch intercepted and tuned where it is met.

A launch whose winner is known runs with the winner; one met for the first time is tuned there, on copies of its live
arguments, and then runs with the winner as well. So every kernel sees inputs that other chosen kernels made, and the
whole step is recorded: a launch that the plan does not hold ends the build.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from kernelbake import summaries, triton_api
from kernelbake.calls import Call, Resolved, Resolver
from kernelbake.choose import Difference
from kernelbake.devices import CpuDevice, CudaDevice, Device
from kernelbake.errors import BuildError
from kernelbake.keys import Case
from kernelbake.manifest import MeasurePolicy
from kernelbake.numerics import Arguments, Result
from kernelbake.outcome import Reason, Rejected
from kernelbake.parts import Parts
from kernelbake.plan import Launch, Plan
from kernelbake.profiles import DeviceProfile
from kernelbake.recorder import intercepted
from kernelbake.runners import CudaCode, InterpretedCode
from kernelbake.shadow import find_workload
from kernelbake.touched import left_alone, reads
from kernelbake.tune import Checked, Failed, Report, stand_in, tune
from kernelbake.worker_main import Known
from kernelbake.workload import Oracle, Session

# ---------------------------------------------------------------------------------------------- one call, live


@dataclasses.dataclass
class _Candidate:
    """A candidate at a site, ready to run on the working copies.

    Args:
        hook: what its config runs before each launch.
        before: first contents for whatever was written, then the hook.
        launch: the launch.
        estimate_ms: how long it takes, once that was seen.
        overwrites: whether it has shown that nothing has to be restored before it runs again.
    """

    hook: Callable[[], None]
    before: Callable[[], None]
    launch: Callable[[], Any]
    estimate_ms: float | None = None
    overwrites: bool = False


class LiveSite:
    """A call met in a step; candidates run on working copies of its arguments.

    Args:
        launch: the planned launch.
        call: the call.
        resolve: gives the call under the config of a candidate.
        code: the candidates' code.
        device: where they run.
        policy: how to measure.
        oracle: the workload's reference for this kernel, if it has one.
        parts: where the time goes.
    """

    def __init__(
        self,
        launch: Launch,
        call: Call,
        resolve: Callable[[int], Resolved],
        code: CudaCode | InterpretedCode,
        device: Device,
        policy: MeasurePolicy,
        oracle: Oracle | None,
        parts: Parts,
    ) -> None:
        self._call, self._code, self._device, self._policy, self._parts = call, code, device, policy, parts
        self._resolve = functools.cache(resolve)
        self._oracle = oracle
        self._ready: dict[int, _Candidate] = {}
        self._silent: list[int] | None = None
        bound = self._resolve(0).bound
        _check_room(launch, list(bound.values()), device)
        self._arguments = device.run(lambda: Arguments(list(bound), list(bound.values()), policy.tolerance))
        self._reference = oracle.reference(dict(bound)) if oracle is not None else None

    def prepare(self, candidate: int) -> None:
        self._prepare(candidate)

    def identity(self, candidate: int) -> str:
        with self._parts.part("load"):
            return self._code.identity(self._call.launchable, self._resolve(candidate))

    def answers(self) -> bool:
        return self._device.answers()

    def difference(self, one: Result, other: Result) -> Difference:
        with self._parts.part("compare"):
            return self._device.run(lambda: self._arguments.difference(one, other))

    def outputs(self, candidate: int, also: Mapping[int, str]) -> dict[str, Any]:
        """What a launch reads and writes, described: ``inputs``, ``tensors``, and the ``tolerance`` between two runs.

        Args:
            candidate: which.
            also: positions and names of tensors to describe even if they look unchanged.

        Raises:
            Failed: it writes outside of its arguments, or its code cannot be had.
        """
        ready, arguments = self._prepare(candidate), self._arguments
        result, run = self._check(ready).output, functools.partial(self._run, ready, restored=True)
        touched = sorted({*result.plain, *result.poisoned, *(place for place in also if place < len(arguments.live))})
        alone = left_alone(arguments, result, touched, run)
        read = {*alone.read, *(place for place in touched if reads(arguments, result, place, run))}
        inputs = {*read, *arguments.all_but(touched)}
        return {
            "inputs": summaries.inputs(arguments, inputs, self._resolve(candidate).bound),
            "tensors": summaries.written(arguments, result, also, alone.kept),
            "tolerance": arguments.tolerance,
        }

    def check(self, candidate: int) -> Checked:
        ready = self._prepare(candidate)
        with self._parts.part("check"):
            return self._check(ready)

    def _check(self, ready: _Candidate) -> Checked:
        arguments = self._arguments
        self._run(ready)
        changed = self._device.run(arguments.changed)
        first = self._device.run(lambda: arguments.contents(changed))
        worst, same_bits = Difference(0.0), True
        for _ in range(self._policy.repeats - 1):
            self._run(ready)
            if not self._device.run(lambda: arguments.holds(first)):
                same_bits = False
                found = arguments.difference(Result(arguments.contents(changed), {}), Result(first, {}))
                worst = found if found.error >= worst.error else worst
        if self._silent is None:
            self._silent = self._written_in_silence(ready, changed)
        filled = self._fill({*changed, *self._silent})
        self._run(ready, restored=True)
        result = self._device.run(lambda: self._finish(first, filled))
        ready.overwrites = self._device.run(lambda: arguments.overwrites(result))
        expected = None
        if self._oracle is not None and self._reference is not None:
            expected = arguments.expected(result, self._reference, self._oracle.tolerance)
        return Checked(result, worst, same_bits, expected)

    def _fill(self, positions: Collection[int]) -> list[int]:
        """Poisons working copies, the others with their first contents; returns which could be."""

        def fill() -> list[int]:
            self._arguments.restore()
            return self._arguments.poison(positions)

        return self._device.run(fill)

    def _finish(self, plain: Mapping[int, torch.Tensor], filled: Sequence[int]) -> Result:
        """The result after the poisoned run; everything then has its first contents again."""
        arguments = self._arguments
        arguments.changed()
        poisoned = arguments.contents(filled)
        arguments.unpoison(filled)
        arguments.restore()
        return Result(plain, poisoned)

    def _written_in_silence(self, ready: _Candidate, changed: Collection[int]) -> list[int]:
        """Tensors that a launch writes although they looked the same afterwards: what it wrote was there already.

        Every other floating tensor is filled with poison for one run; an input keeps it. Integers are left alone, since
        a kernel may take them for addresses.
        """
        arguments = self._arguments
        filled = self._fill(arguments.all_but(changed))
        self._run(ready, restored=True)
        written = [position for position in filled if not arguments.untouched(position)]
        arguments.unpoison(filled)
        return written

    def warm(self, candidate: int) -> None:
        ready = self._prepare(candidate)
        with self._parts.part("warm"):
            first = self._times(ready, 1, cold=False)
            ready.estimate_ms = max(first[0], 1e-3)
            count = int(self._policy.warmup_ms / ready.estimate_ms)
            if count:
                times = self._times(ready, min(count, 1000), cold=False)
                ready.estimate_ms = max(sorted(times)[len(times) // 2], 1e-3)

    def sample(self, candidate: int, *, brief: bool) -> list[float]:
        ready, policy = self._prepare(candidate), self._policy
        with self._parts.part("sample"):
            estimate = ready.estimate_ms or policy.samples_ms
            count = max(policy.min_samples, min(policy.max_samples, int(policy.samples_ms / estimate)))
            return self._times(ready, policy.min_samples if brief else count, cold=True)

    def _times(self, ready: _Candidate, count: int, *, cold: bool) -> list[float]:
        return self._device.times(ready.hook if ready.overwrites else ready.before, ready.launch, count, cold=cold)

    def _run(self, ready: _Candidate, *, restored: bool = False) -> None:
        """Once, from the first contents of all arguments unless they are set already, and waits for the end."""

        def action() -> torch.Tensor:
            (ready.hook if restored else ready.before)()
            ready.launch()
            return self._arguments.straying()

        if self._arguments.strayed(self._device.run(action)):
            raise Failed(Rejected(Reason.WRONG, "it writes outside of its arguments"))

    def _prepare(self, candidate: int) -> _Candidate:
        if candidate not in self._ready:
            self._ready[candidate] = self._made_ready(candidate)
        return self._ready[candidate]

    def _made_ready(self, candidate: int) -> _Candidate:
        with self._parts.part("load"):
            resolved = self._resolve(candidate)
            runner = self._code.runner(self._call.launchable, resolved)
            args = tuple(self._arguments.replaced(arg) for arg in self._call.args)
            kwargs = {name: self._arguments.replaced(value) for name, value in resolved.kwargs.items()}
            bound = [self._arguments.replaced(value) for value in resolved.bound.values()]
            hook = _hook(self._call.launchable, resolved.config, args, kwargs)

            def before() -> None:
                self._arguments.restore()
                hook()

            return _Candidate(hook, before, functools.partial(runner, args, kwargs, bound))


def _nothing() -> None:
    """No hook."""


def _hook(launchable: Any, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], None]:
    """What a config wants to run before each launch, on the arguments given here."""
    if config is None or config.pre_hook is None:
        return _nothing
    autotuner = triton_api.autotuner_of(launchable)
    assert autotuner is not None
    named = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs}
    return lambda: config.pre_hook(dict(named))


def _check_room(launch: Launch, values: Sequence[Any], device: Device) -> None:
    """Refuses before memory runs out in the middle: copies of all arguments and twice as much for results."""
    free = device.free_bytes()
    need = 3 * Arguments.bytes_needed(values)
    if free is not None and need > free:
        device.release()
        free = device.free_bytes()
    if free is not None and need > free:
        raise BuildError(
            f"{launch}: measuring it needs {need} bytes for copies of its arguments; the GPU has {free} free",
            hint="measure on a GPU with more memory, or bake smaller cases",
        )


# ---------------------------------------------------------------------------------------------- the step


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
            nearest = min((resolved.specialization.differences(other) for other in planned), key=len)
            self._unplanned[f"{launch}: specialization with {'; '.join(nearest)} (planned)"] = None
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
        _hook(call.launchable, resolved.config, call.args, resolved.kwargs)()
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
        raise PlanMismatchError(
            f"measure: {len(missing)} planned launches are made by no step; wanted all of them", reasons=missing
        )
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
