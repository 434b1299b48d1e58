"""One call met in a step: candidates run on working copies of its live arguments, are checked, and are timed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from kernelbake import summaries, triton_api
from kernelbake.calls import Call, Resolved
from kernelbake.choose import Difference
from kernelbake.devices import Device
from kernelbake.errors import BuildError
from kernelbake.manifest import MeasurePolicy
from kernelbake.numerics import Arguments, Result
from kernelbake.outcome import Reason, Rejected
from kernelbake.parts import Parts
from kernelbake.plan import Launch
from kernelbake.runners import CudaCode, InterpretedCode
from kernelbake.touched import left_alone, reads
from kernelbake.tune import Checked, Failed
from kernelbake.workload import Oracle


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
        check_room(launch, list(bound.values()), device)
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
            hook = hook_of(self._call.launchable, resolved.config, args, kwargs)

            def before() -> None:
                self._arguments.restore()
                hook()

            return _Candidate(hook, before, functools.partial(runner, args, kwargs, bound))


def _nothing() -> None:
    """No hook."""


def hook_of(launchable: Any, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], None]:
    """What a config wants to run before each launch, on the arguments given here."""
    if config is None or config.pre_hook is None:
        return _nothing
    autotuner = triton_api.autotuner_of(launchable)
    assert autotuner is not None
    named = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs}
    return lambda: config.pre_hook(dict(named))


def check_room(launch: Launch, values: Sequence[Any], device: Device) -> None:
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
