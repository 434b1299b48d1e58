"""The preflight: is every launch of *this* run in the bundle? Asked before a weight is loaded; nothing fake comes here.

A child process plans the run's own configuration while this process checks the bundle. Loads no torch, but for
``recording``, which holds the launches that a run really makes against its plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelbake import bundle, planner
from kernelbake.bounds import Limits
from kernelbake.bundle import Bundle
from kernelbake.compare import Difference, compare
from kernelbake.errors import CoverageError, MisfitError
from kernelbake.plan import Coverage, Missing, Plan, coverage
from kernelbake.profiles import DeviceProfile
from kernelbake.words import counted
from kernelbake.workload import Footprint

INTERPRETED = "interpreted"

Compare = Callable[[], Difference]
"""Gives the difference between a plan and what was launched so far."""


@dataclasses.dataclass(frozen=True)
class WorkloadSection:
    """What a bundle was made for.

    Args:
        plugin: name of the workload plug-in.
        section: the plug-in's section of the manifest, resolved.
        name: the manifest's name.
        digest: the bundle's.
        made: ``measured``, ``compiled-only`` or ``interpreted``.
        profile: the device profile.
    """

    plugin: str
    section: Mapping[str, Any]
    name: str
    digest: str
    made: str
    profile: DeviceProfile


@dataclasses.dataclass(frozen=True)
class Preflight:
    """A run that its bundle covers.

    Args:
        coverage: complete; ``unused`` says what the bundle holds beyond.
        plan: the run's.
        new_cases: ids of cases that the bundle's manifest does not name and that it covers all the same.
        digest: the bundle's.
        seconds: wall time of the whole preflight, imports of the child included.
        footprints: what a step of each case holds in memory.
    """

    coverage: Coverage
    plan: Plan
    new_cases: tuple[str, ...]
    digest: str
    seconds: float
    footprints: tuple[Footprint, ...] = ()


def workload_of(path: Path | str, *, trusted: Sequence[Path | str] = ()) -> WorkloadSection:
    """What a bundle was made for; the run without a configuration of its own is this one.

    Args:
        path: the bundle.
        trusted: files with public keys; if there are any, the bundle has to be signed by one of them.

    Raises:
        BundleError: the bundle cannot be trusted.
        InputError: it, or a key, cannot be read.
    """
    held = bundle.read(path)
    if trusted:
        from kernelbake import signing

        signing.check(held, trusted)
    return _section(held)


def preflight(
    path: Path | str,
    section: Mapping[str, Any] | None = None,
    *,
    on_progress: planner.OnProgress | None = None,
    paths: Sequence[Path | str] = (),
) -> Preflight:
    """Plans a run and compares it with a bundle.

    Args:
        path: the bundle.
        section: the run's own section for the bundle's plug-in; the bundle's where it is None.
        on_progress: called with cases done, cases in all, and what is being done.
        paths: further folders in which the planning process looks for modules.

    Raises:
        CoverageError: the bundle lacks something that the run needs, all of it is listed; or it was not measured yet.
        MisfitError: the bundle was made with another Triton or from other kernel sources.
        BundleError: the bundle cannot be trusted.
        PlanError: the run cannot be planned.
    """
    start = time.monotonic()
    header = bundle.read_header(path)
    bundle.refuse_unmeasured(header["made"], header["name"], "preflight")
    with planner.started(interpreted=header["made"] == INTERPRETED) as child:
        held = bundle.read(path)
        own = _section(held)
        plan = child.plan(
            own.plugin,
            own.section if section is None else section,
            own.profile,
            on_progress=on_progress,
            paths=paths,
            limits=Limits(max_variants=sys.maxsize),  # what is not in the bundle is refused anyway
        )
    found = coverage(plan, held.inventory())
    refuse(plan, held, found, "preflight")
    known = {case.id for case in held.plan.cases}
    new = tuple(case.id for case in plan.cases if case.id not in known)
    return Preflight(found, plan, new, held.digest, time.monotonic() - start, child.footprints)


@contextlib.contextmanager
def recording(plan: Plan) -> Iterator[Compare]:
    """Records the launches of this process while the block runs, frozen or not, from any number of threads.

    Args:
        plan: a preflight's, to compare with.

    Yields:
        a function that gives the difference so far. The interpreter and the compiler are told apart by the plan.

    Raises:
        PlanError: in the launching thread, for a call that no plan can hold.
    """
    from kernelbake import recorder, triton_api

    profile = DeviceProfile.from_json(plan.profile)
    made = recorder.Recording(triton_api.gpu_target(profile.arch, profile.warp_size))
    with made.recorded():
        yield lambda: compare(plan, made.launches())


def _section(held: Bundle) -> WorkloadSection:
    resolved = held.manifest_resolved
    return WorkloadSection(
        plugin=resolved["workload"]["plugin"],
        section=resolved["workload"]["section"],
        name=held.name,
        digest=held.digest,
        made=held.made,
        profile=DeviceProfile.from_json(resolved["gpu"]),
    )


def refuse(plan: Plan, held: Bundle, found: Coverage, where: str) -> None:
    """Refuses what keeps a plan from running on a bundle.

    Args:
        plan: what is to be run.
        held: the bundle.
        found: how the two compare.
        where: who asks, for messages.

    Raises:
        MisfitError: another Triton, or other kernel sources.
        CoverageError: something is missing, all of it is listed; or nothing in the bundle was measured yet.
    """
    _refuse_misfit(plan, held, found, where)
    bundle.refuse_unmeasured(held.made, held.name, where)
    _refuse_gaps(plan, held, found, where)


def _refuse_misfit(plan: Plan, held: Bundle, found: Coverage, where: str) -> None:
    """Another Triton or another kernel source makes every other difference a consequence."""
    here, there = plan.versions.get("triton"), held.plan.versions.get("triton")
    reasons = [f"triton.version: here `{here}`; bundle: `{there}`"] if here != there else []
    reasons += [str(missing) for missing in found.missing if missing.kind == "source"]
    if reasons:
        raise MisfitError(
            f"{where}: bundle `{held.name}` was made from other code than this run would use; wanted the same",
            hint="build the bundle again with the versions installed here",
            reasons=reasons,
        )


def _refuse_gaps(plan: Plan, held: Bundle, found: Coverage, where: str) -> None:
    if found.complete:
        return
    missing: Sequence[Missing] = found.missing
    cases = len({case for item in missing for case in item.cases})
    needs = "needs" if cases == 1 else "need"
    needing = f"{cases:,} of {counted(len(plan.cases), 'case')} {needs}" if cases else "the plan needs"
    raise CoverageError(
        f"{where}: bundle `{held.name}` lacks {counted(len(missing), 'thing')} that {needing}; wanted all",
        hint="build a bundle from a manifest that names these cases, or run the cases that this one has",
        reasons=map(str, missing),
    )
