"""A bundle's winners run again, inside a worker: loaded through the freeze, then launched by the workload's real steps.

At the launches of which the outputs are wanted, the winner runs on copies of the live arguments first, as in the build,
and what it writes is described. The steps go on with the winners throughout, so every launch sees the inputs that it
saw then, as far as this machine's other libraries give the same bits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelbake import bundle, freeze
from kernelbake.errors import CoverageError, InputError
from kernelbake.manifest import MeasurePolicy
from kernelbake.measure import Conductor, PlanMismatchError, Progress, Watch, device_of, steps
from kernelbake.plan import Plan
from kernelbake.shadow import find_workload


class _Wanted(Watch):
    """Certain launches, each in a certain case; announced before they run, so that a crash has a name.

    Args:
        report: where.
        wanted: launch, variant, case, and positions and names of the tensors to describe.
        decided: winners by place of the launch.
    """

    def __init__(self, report: Progress, wanted: list[Any], decided: Mapping[int, int]) -> None:
        super().__init__(())
        self._report, self._decided = report, decided
        self._wanted = {(launch, variant, case): also for launch, variant, case, also in wanted}

    def due(self, launch: int, variant: int, case: str) -> Mapping[int, str] | None:
        also = self._wanted.pop((launch, variant, case), None)
        if also is None:
            return None
        self._report.start(launch, self._decided[launch], lambda: None)
        return {int(position): name for position, name in also.items()}


def run(job: Mapping[str, Any], plan: Plan, report: Progress) -> dict[str, Any]:
    """Loads a bundle and runs a step of every case that is wanted, the plan's last case first.

    Args:
        job: as for ``measure.run``, and ``bundle``, ``digest``, ``devices`` and ``wanted``.
        plan: the bundle's.
        report: where everything is told.

    Returns:
        ``loads``, the binaries that the freeze loaded, and ``load_s``, how long that took.

    Raises:
        BundleError, MisfitError: as ``freeze``.
        CoverageError: a step launches what the bundle does not hold.
        InputError: the file is no longer the one that was asked for.
    """
    policy = MeasurePolicy(**job["policy"])
    interpreted = job["interpreted"]
    plugin = find_workload(job["plugin"])
    spec = plugin.parse(job["section"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(plugin.prepare(interpreted=interpreted))
        start = time.perf_counter()
        loads = _loaded(Path(job["bundle"]), job["digest"], job["devices"])
        load_s = time.perf_counter() - start
        report.imported()
        session = plugin.open(spec, device="cpu" if interpreted else "cuda", seed=policy.seed)
        known = report.ready()
        device, code = device_of(job, plan)
        watch = _Wanted(report, job["wanted"], known.decided)
        conductor = Conductor(plan, known.decided, (), code, device, policy, report, {}, watch)
        cases = {case for _, _, case, _ in job["wanted"]}
        try:
            steps(session, [case for case in reversed(plan.cases) if case.id in cases], conductor, device, report)
        except PlanMismatchError as error:
            raise CoverageError(
                "device: the step launches what the bundle does not hold; wanted planned launches only",
                reasons=error.reasons,
                hint="the workload's code has changed since the build; build the bundle again",
            ) from error
    return {"loads": loads, "load_s": load_s}


def _loaded(path: Path, digest: str, devices: list[int]) -> int:
    """Freezes this process onto the bundle for a moment, which checks and loads all of it; how much was loaded."""
    held = bundle.read(path)
    if held.digest != digest:
        raise InputError(f"bundle `{path}`: it has changed since it was read; wanted digest `{digest}`")
    with freeze.freeze(held, devices or None) as frozen:
        return frozen.counters.loads
