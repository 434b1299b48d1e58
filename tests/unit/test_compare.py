"""A plan beside launches that were made: any difference is named, in either direction."""

from __future__ import annotations

import dataclasses

import samples

from kernelbake.compare import compare
from kernelbake.keys import Kernel
from kernelbake.plan import Launch, Plan

PLAN: Plan = samples.contents().plan
FIRST, SECOND = (case.id for case in PLAN.cases)


def test_equal_sets_have_no_difference() -> None:
    found = compare(PLAN, PLAN.launches)
    assert not found
    assert found.common == sum(len(launch.variants) for launch in PLAN.launches) == 8


def test_an_unknown_key_is_unplanned() -> None:
    extra = samples.launch(PLAN.launches[0].kernel, 8192, FIRST)
    found = compare(PLAN, [*PLAN.launches, extra])
    assert found.unplanned == (f"{extra}: not planned",) * 2
    assert not found.unmet


def test_an_unknown_class_of_arguments_is_unplanned_and_says_where_it_differs() -> None:
    launch = PLAN.launches[0]
    plan = dataclasses.replace(
        PLAN, launches=(dataclasses.replace(launch, variants=launch.variants[:1]), *PLAN.launches[1:])
    )
    found = compare(plan, PLAN.launches)
    assert found.unplanned == (f"{launch}: not planned with x: made `x:*bf16%D`; planned `x:*bf16`",)


def test_what_no_case_that_ran_has_made_is_unmet() -> None:
    of_first = [launch for launch in PLAN.launches if FIRST in launch.cases]
    found = compare(PLAN, of_first)
    assert set(found.unmet) == {str(launch) for launch in PLAN.launches if SECOND in launch.cases}
    assert not found.unplanned
    assert not compare(PLAN, of_first, [FIRST])


def test_other_candidates_at_one_key_are_no_equal_launch() -> None:
    launch = PLAN.launches[0]
    half = Launch(
        launch.kernel,
        launch.key,
        launch.candidates[:1],
        tuple(dataclasses.replace(item, specializations=item.specializations[:1]) for item in launch.variants),
    )
    found = compare(PLAN, [half, *PLAN.launches[1:]])
    assert found.unplanned == (f"{launch}: planned with other candidates",) * 2
    assert found.unmet == (str(launch),) * 2


def test_kernels_of_one_short_name_are_two() -> None:
    launch = PLAN.launches[0]
    other = dataclasses.replace(launch, kernel=Kernel("another.module", launch.kernel.qualname))
    assert len(compare(PLAN, [*PLAN.launches, other]).unplanned) == 2
