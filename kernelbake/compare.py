"""A plan beside launches that were really made. Pure values; any difference is named, in either direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from kernelbake.plan import Launch, Plan, Variant


@dataclasses.dataclass(frozen=True)
class Difference:
    """What a plan and real launches do not have in common, one line each.

    Args:
        unplanned: launches that were made and not planned.
        unmet: launches that were planned, for the cases that ran, and not made.
        common: the number of launches, told apart by key and class of arguments, that both have.
    """

    unplanned: tuple[str, ...]
    unmet: tuple[str, ...]
    common: int

    def __bool__(self) -> bool:
        return bool(self.unplanned or self.unmet)


def compare(plan: Plan, seen: Iterable[Launch], cases: Iterable[str] | None = None) -> Difference:
    """Compares a plan with recorded launches.

    Args:
        plan: the plan.
        seen: launches as ``recorder.Recording`` gives them.
        cases: ids of the cases that ran; all of the plan's where None.
    """
    ran = {case.id for case in plan.cases} if cases is None else set(cases)
    made = {_identity(launch, variant): launch for launch in seen for variant in launch.variants}
    planned = {_identity(launch, variant): launch for launch in plan.launches for variant in launch.variants}
    wanted = {_identity(launch, variant) for launch, variant in _of_cases(plan, ran)}
    unplanned = [_line(plan, identity, made[identity]) for identity in made if identity not in planned]
    unmet = [str(planned[identity]) for identity in wanted if identity not in made]
    return Difference(tuple(sorted(unplanned)), tuple(sorted(unmet)), len(made.keys() & planned.keys()))


_Identity = tuple[tuple[str, str], tuple[str, ...]]


def _identity(launch: Launch, variant: Variant) -> _Identity:
    return launch.id, tuple(specialization.token for specialization in variant.specializations)


def _of_cases(plan: Plan, ran: set[str]) -> Iterator[tuple[Launch, Variant]]:
    for launch in plan.launches:
        for variant in launch.variants:
            if ran.intersection(variant.cases):
                yield launch, variant


def _line(plan: Plan, identity: _Identity, launch: Launch) -> str:
    """What was launched, and where the nearest planned variant of the same key differs."""
    known = plan.launch(launch.id)
    if known is None:
        return f"{launch}: not planned"
    mine = next(item for item in launch.variants if _identity(launch, item) == identity)
    if known.candidates != launch.candidates:
        return f"{launch}: planned with other candidates"
    first = mine.specializations[0]
    found = (first.differences(item.specializations[0], "made", "planned") for item in known.variants)
    nearest = min(found, key=len, default=())
    return f"{launch}: not planned with {', '.join(nearest)}"
