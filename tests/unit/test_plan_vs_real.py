"""The benchmark that holds a plan against stock Triton's memory: it must see every kind of difference."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import samples

from kernelbake.plan import Plan

PLAN: Plan = samples.contents().plan


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in ("common", "plan_vs_real"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import plan_vs_real

    return plan_vs_real


def real(benchmark: Any, plan: Plan, *, winners_only: bool = False) -> Any:
    """What stock Triton would remember: all candidates of each key's first class, the winner of any other."""
    specializations = {
        (launch.kernel.name, item.token)
        for launch in plan.launches
        for place, variant in enumerate(launch.variants)
        for item in (variant.specializations[:1] if place or winners_only else variant.specializations)
    }
    return benchmark.Real(frozenset(map(benchmark._key, plan.launches)), frozenset(specializations), 1.0)


def test_what_stock_triton_would_remember_is_no_difference(benchmark: Any) -> None:
    assert benchmark.compare(PLAN, real(benchmark, PLAN)) == ([], [])


def test_nothing_at_all_is_a_difference_everywhere(benchmark: Any) -> None:
    unmet, unplanned = benchmark.compare(PLAN, benchmark.Real(frozenset(), frozenset(), 0.0))
    assert not unplanned
    assert [line.split()[0] for line in unmet] == ["candidates"] * 4 + ["class"] * 8 + ["key"] * 4


def test_a_launch_that_the_plan_lacks_is_found(benchmark: Any) -> None:
    lacking = dataclasses.replace(PLAN, launches=PLAN.launches[1:])
    unmet, unplanned = benchmark.compare(lacking, real(benchmark, PLAN))
    assert not unmet
    assert [line.split()[0] for line in unplanned] == ["key"] + ["specialization"] * 3


def test_candidates_that_were_never_tried_are_found(benchmark: Any) -> None:
    unmet, unplanned = benchmark.compare(PLAN, real(benchmark, PLAN, winners_only=True))
    assert not unplanned
    assert len(unmet) == 4
    assert all(line.endswith(": 1 of 2 were tried") for line in unmet)


def test_a_plan_of_some_cases_keeps_what_they_need(benchmark: Any) -> None:
    first = PLAN.cases[0].id
    found = benchmark.restricted(PLAN, {first})
    assert [case.id for case in found.cases] == [first]
    assert {launch.id for launch in found.launches} == {launch.id for launch in PLAN.launches if first in launch.cases}
