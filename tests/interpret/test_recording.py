"""Real launches recorded beside a plan, with stock Triton and frozen, from one thread and from several."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import frozenkernels as kernels
import frozenlab as lab
import pytest
import torch
from frozenlab import Call, call
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from kernelbake import freeze, profiles, triton_api
from kernelbake.errors import PlanError
from kernelbake.plan import Plan
from kernelbake.preflight import recording
from kernelbake.recorder import Recording

SIZE = 100


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(SIZE, dtype=torch.float32), torch.zeros(SIZE)


CALLS = [
    call(kernels.plain, *tensors(), SIZE, BLOCK=32),
    call(kernels.tuned, *tensors(), 2.0, SIZE),
    call(kernels.optional, *tensors(), None, None, SIZE, D=3, FLAG=False),
    call(kernels.optional, *tensors(), torch.ones(SIZE), 0.5, SIZE, D=3, FLAG=True),
    call(kernels.restoring, *tensors(), 3.0, SIZE),
]


def make(one: Call) -> None:
    one.launchable[(1,)](*one.args, **one.kwargs)


@pytest.fixture
def plan() -> Plan:
    return lab.plan_of(CALLS, profiles.load("interpreter"))


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock Triton that tries a candidate before it launches, as a tuner does, without a clock."""

    def run(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        for config in (self.configs[0], self.configs[-1]):
            result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        return result

    monkeypatch.setattr(Autotuner, "run", run)


@pytest.fixture
def frozen() -> Iterator[None]:
    with freeze.freeze(lab.bake(CALLS, interpreted=True)):
        yield


@pytest.fixture(params=["stock", "frozen"])
def either(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(request.param)


@pytest.mark.usefixtures("either")
def test_what_was_planned_is_what_is_launched(plan: Plan) -> None:
    with recording(plan) as difference:
        for one in CALLS:
            make(one)
        assert not difference()
        assert difference().common == len(CALLS)


@pytest.mark.usefixtures("either")
def test_what_was_not_launched_yet_is_named(plan: Plan) -> None:
    with recording(plan) as difference:
        for one in CALLS[:-1]:
            make(one)
        assert difference().unmet == (f"frozenkernels.restoring {plan.launches[-1].key}",)
        make(CALLS[-1])
        assert not difference()


@pytest.mark.usefixtures("stock")
def test_a_launch_outside_the_plan_is_named(plan: Plan) -> None:
    x, y = tensors()
    with recording(plan) as difference:
        for one in CALLS:
            make(one)
        kernels.tuned[(1,)](x, y, 2.0, 64)
        kernels.plain[(1,)](x[1:], y, SIZE, BLOCK=32)
        found = difference()
    assert not found.unmet
    assert found.unplanned == (
        "frozenkernels.plain (not tuned): not planned with x: made `x:*fp32`; planned `x:*fp32%D`",
        "frozenkernels.tuned n=64 [x:float32,y:float32]: not planned",
    )


@pytest.mark.usefixtures("frozen")
def test_threads_record_into_one(plan: Plan) -> None:
    """Frozen only: Triton's own interpreter serves one thread."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                for one in CALLS:
                    copied = [item.clone() if isinstance(item, torch.Tensor) else item for item in one.args]
                    make(dataclasses.replace(one, args=tuple(copied)))
        except BaseException as error:
            failed.append(error)

    with recording(plan) as difference:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not difference()
    assert not failed


@pytest.mark.usefixtures("stock")
def test_cases_are_told_apart() -> None:
    made = Recording(triton_api.gpu_target(90))
    with made.recorded():
        for made.case in ("a", "b"):
            make(CALLS[0])
        made.case = "c"
        make(CALLS[1])
    cases = {launch.kernel.qualname: launch.cases for launch in made.launches()}
    assert cases == {"plain": ("a", "b"), "tuned": ("c",)}


@pytest.mark.usefixtures("stock")
def test_a_call_that_no_plan_can_hold_is_refused_where_it_is_made(plan: Plan) -> None:
    with recording(plan), pytest.raises(PlanError, match="kernel `frozenkernels.plain`"):
        kernels.plain[(1,)](*tensors(), SIZE, BLOCK=object())


def test_nothing_is_left_behind(plan: Plan) -> None:
    before = [vars(kind).get("run") for kind in (Autotuner, KernelInterface)]
    getitem = KernelInterface.__getitem__
    with recording(plan):
        assert KernelInterface.__getitem__ is not getitem
    assert KernelInterface.__getitem__ is getitem
    assert [vars(kind).get("run") for kind in (Autotuner, KernelInterface)] == before
