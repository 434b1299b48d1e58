"""Candidates that do what a script says, for the builder's tests: no kernel, no device, no clock.

A plan of made-up kernels comes from ``plan``; ``run`` is the engine that a worker takes instead of the real one. What a
candidate does is its meta-parameter ``DO``; several are joined by ``+``:

``time=1.5``, ``hang``, ``abort``, ``segfault``, ``raise``, ``memory``, ``resources``, ``wrong``, ``random``, ``noise``,
``stray``, ``gaps``, ``first``, ``later``, ``interrupt``, ``inf``, ``nan``, ``zero``, ``negative``, ``list``, ``exit``,
``flaky``, ``noise-first`` (at the first check), ``noise-later`` (at all others).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kernelbake import profiles
from kernelbake.choose import Difference
from kernelbake.fingerprint import Fingerprint
from kernelbake.keys import AutotuneKey, Case, Config, Kernel, Parameter, Specialization
from kernelbake.manifest import CompileOptions, Manifest, MeasurePolicy
from kernelbake.outcome import Reason, Rejected
from kernelbake.plan import KernelFacts, Launch, Plan, Variant
from kernelbake.tune import Checked, Failed, Report, tune

ENGINE = "scripted:run"
SOURCE = "sha256:" + "5" * 64


def launch(name: str, scripts: Sequence[str], *, key: int | None = 1, cases: Sequence[str] = ("size=1",)) -> Launch:
    """A launch of a made-up kernel, one candidate for each script."""
    kernel = Kernel("scripted_kernels", name)
    configs = tuple(Config((("DO", script), ("N", place)), num_warps=4) for place, script in enumerate(scripts))
    specializations = tuple(
        Specialization(
            (Parameter("x", "*fp32", "D"), Parameter("DO", "constexpr", script), Parameter("N", "constexpr", n))
        )
        for n, script in enumerate(scripts)
    )
    autotune_key = None if key is None else AutotuneKey((("n", key),), (("x", "torch.float32"),))
    return Launch(kernel, autotune_key, configs, (Variant(specializations, tuple(cases), ((1,),)),))


def plan(launches: Sequence[Launch], cases: int = 1) -> Plan:
    """A plan of made-up launches."""
    kernels = {
        found.kernel.name: KernelFacts(
            found.kernel, ("Autotuner", "JITFunction"), ("x", "DO", "N"), ("n",), SOURCE, SOURCE, len(found.candidates)
        )
        for found in launches
    }
    return Plan(
        profile=profiles.load("interpreter").to_json(),
        versions={},
        implementations={},
        cases=tuple(Case((("size", size + 1),)) for size in range(cases)),
        skipped=(),
        kernels=kernels,
        launches=tuple(sorted(launches, key=lambda found: found.id)),
    )


def policy(**changes: Any) -> MeasurePolicy:
    """A policy whose rounds cost next to nothing."""
    return MeasurePolicy(**{"warmup_ms": 0.0, "rounds": 2, "max_extra_rounds": 1, "time_limit_s": 5.0, **changes})


def manifest(name: str = "scripted", *, pause_s: float = 0.0, **changes: Any) -> Manifest:
    """A manifest for the interpreter; its plug-in is never opened.

    Args:
        name: the bundle's.
        pause_s: the longest pause before a launch, at random.
        changes: to the policy.
    """
    return Manifest(
        format=1,
        name=name,
        profile=profiles.load("interpreter"),
        plugin="scripted",
        section={"pause_s": pause_s},
        measure=policy(**changes),
        compile=CompileOptions(),
        text=b"name: scripted\n",
        source="scripted.yaml",
    )


def fingerprint(wanted: Plan, **changes: Any) -> Fingerprint:
    """A fingerprint that goes with a scripted plan."""
    from kernelbake.fingerprint import sources_digest
    from kernelbake.host import gpu_fields

    return Fingerprint.of(
        {
            **gpu_fields(profiles.load("interpreter")),
            "triton.version": "3.7.1",
            "triton.key": SOURCE,
            "triton.environment": {},
            "kernel.sources": sources_digest(wanted.kernels.values()),
            **changes,
        }
    )


class ScriptedSite:
    """Implements ``tune.Site``: what each candidate does, and what it leaves behind, follows from its script."""

    def __init__(self, found: Launch) -> None:
        self._scripts = [str(dict(config.meta)["DO"]).split("+") for config in found.candidates]
        self._calls = [0] * len(self._scripts)
        self._samples = [0] * len(self._scripts)

    def prepare(self, candidate: int) -> None:
        """Nothing is loaded."""

    def identity(self, candidate: int) -> str:
        for part in self._scripts[candidate]:
            if part.startswith("same="):
                return part
        return str(candidate)

    def check(self, candidate: int) -> Checked:
        self._calls[candidate] += 1
        script = self._scripts[candidate]
        for part in script:
            _ACTIONS.get(part, lambda: None)()
        output = [1.0, 2.0, 3.0]
        if "wrong" in script or ("flaky" in script and self._calls[candidate] > 1):
            output[1] = 2.5
        if "gaps" in script:
            output[2] = float("nan")
        if "random" in script:
            return Checked(output, Difference(0.5, "`out` is off by 5.00e-01"), False)
        first = self._calls[candidate] == 1
        noisy = "noise" in script or ("noise-first" in script and first) or ("noise-later" in script and not first)
        return Checked(output, Difference(1e-4 if noisy else 0.0), not noisy)

    def difference(self, one: Any, other: Any) -> Difference:
        gap = max(
            abs(a - b) if a == a and b == b else float(a == a) + float(b == b) for a, b in zip(one, other, strict=True)
        )
        return Difference(gap, f"`out` is off by {gap:.2e}" if gap > 0.01 else "")

    def warm(self, candidate: int) -> None:
        if "hang-later" in self._scripts[candidate]:
            time.sleep(3600)

    def sample(self, candidate: int, *, brief: bool) -> Any:
        script = self._scripts[candidate]
        self._samples[candidate] += 1
        for name, value in _TIMES.items():
            if name in script:
                return value
        number = next((float(part[5:]) for part in script if part.startswith("time=")), 1.0)
        if "first" in script:  # fast on the first call only
            return [number / 100, *[number] * 4] if self._samples[candidate] == 1 else [number] * 5
        return [number] * 5

    def answers(self) -> bool:
        return True


def _abort() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def _segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> None:
    time.sleep(3600)


def _raise() -> None:
    raise RuntimeError("PassManager::run failed")


def _memory() -> None:
    raise OutOfMemoryError("CUDA out of memory")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _stray() -> None:
    raise Failed(Rejected(Reason.WRONG, "it writes outside of its arguments"))


def _resources() -> None:
    raise OutOfResources("out of resource: shared memory, Required: 200000, Hardware limit: 101376")


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class OutOfResources(Exception):
    """Named as Triton's."""

    required, limit = 200000, 101376


_ACTIONS = {
    "hang": _hang,
    "abort": _abort,
    "segfault": _segfault,
    "raise": _raise,
    "memory": _memory,
    "interrupt": _interrupt,
    "stray": _stray,
    "resources": _resources,
    "exit": lambda: os._exit(3),
}

_TIMES: dict[str, Any] = {
    "inf": [1.0, float("inf")],
    "nan": [float("nan")],
    "zero": [0.0, 1.0],
    "negative": [-1.0],
    "list": [[1.0, 2.0]],
    "nothing": [],
}


def run(job: Mapping[str, Any], wanted: Plan, report: Any) -> dict[str, Any]:
    """The engine: every case launches what the plan says it does, in the plan's order."""
    return walk(job, wanted, report, pause_s=float(job["section"].get("pause_s", 0.0)))


def walk(job: Mapping[str, Any], wanted: Plan, report: Any, *, pause_s: float) -> dict[str, Any]:
    report.imported()
    known = report.ready()
    decided = set(known.decided)
    met: dict[tuple[int, int], None] = {}
    for case in wanted.cases:
        if case.id in known.cases:
            continue
        for place, found in enumerate(wanted.launches):
            if case.id in found.cases:
                if place not in decided:
                    time.sleep(pause_s * random.random())
                    tune(MeasurePolicy(**job["policy"]), _as_report(report), place, found, ScriptedSite(found))
                    decided.add(place)
                met[place, 0] = None
        report.case_done(case.id, met)
    return {"busy_ms": 1.0, "wall_ms": 2.0}


def _as_report(report: Any) -> Report:
    found: Report = report
    return found
