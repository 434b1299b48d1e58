"""Frozen decisions under Triton's interpreter: real numerics, no code, and the same refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import frozenkernels as kernels
import frozenlab as lab
import pytest
import torch
import triton
from frozenlab import call
from triton.runtime.interpreter import InterpretedFunction

from kernelbake import bundle as bundles
from kernelbake import freeze, profiles
from kernelbake.bundle import Contents
from kernelbake.errors import FrozenMissError, MisfitError

SIZE = 100


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(SIZE, dtype=torch.float32), torch.zeros(SIZE)


def grid(meta: dict[str, Any]) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def contents(baked: lab.FakeBundle) -> Contents:
    """What a build by the interpreter would write."""
    record = tuple(
        {
            "kernel": launch.kernel.to_json(),
            "key": launch.key.to_json() if launch.key else None,
            "config": config.to_json(),
            "outcome": "ok",
        }
        for launch in baked.plan.launches
        for config in launch.candidates
    )
    resolved = lab.resolved("lab", profiles.load("interpreter"))
    text = b"format: 1\nname: lab\n"
    return Contents(
        "lab", "interpreted", text, resolved, baked.fingerprint, baked.plan, baked.choices, record, entries={}
    )


CALLS = [
    call(kernels.plain, *tensors(), SIZE, BLOCK=32),
    call(kernels.tuned, *tensors(), 2.0, SIZE),
    call(kernels.optional, *tensors(), None, None, SIZE, D=3, FLAG=False),
    call(kernels.optional, *tensors(), torch.ones(SIZE), 0.5, SIZE, D=3, FLAG=True),
    call(kernels.hooked, *tensors(), 2.0, SIZE),
    call(kernels.restoring, *tensors(), 3.0, SIZE),
    call(kernels.computed, *tensors(), SIZE),
    call(kernels.called, tensors()[0], SIZE, FUNCTION=kernels.twice, BLOCK=32),
]


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[freeze.Frozen]:
    """Frozen onto a bundle that was written to a file and read back; the file is gone by then."""
    path = tmp_path / "bundle.tar"
    bundles.write(path, contents(lab.bake(CALLS, interpreted=True)))
    with freeze.freeze(path) as handle:
        path.unlink()
        yield handle


def test_the_frozen_configs_run_and_give_the_right_numbers(frozen: freeze.Frozen) -> None:
    x, y = tensors()
    kernels.plain[grid](x, y, SIZE, BLOCK=32)
    torch.testing.assert_close(y, x + 1)
    kernels.tuned[grid](x, y, 2.0, SIZE)
    torch.testing.assert_close(y, x * 2)
    kernels.optional[grid](x, y, None, None, SIZE, D=3, FLAG=False)
    torch.testing.assert_close(y, x)
    kernels.optional[grid](x, y, torch.ones(SIZE), 0.5, n=SIZE, D=3, FLAG=True)
    torch.testing.assert_close(y, (x + 1) * 0.5 + 3)
    kernels.restoring[grid](x=x, y=y, alpha=3.0, n=SIZE)
    torch.testing.assert_close(y, x * 3)
    kernels.called[(4,)](x, SIZE, FUNCTION=kernels.twice, BLOCK=32)
    torch.testing.assert_close(x, torch.arange(SIZE) * 2.0)
    assert frozen.counters == freeze.Counters(hits=6, misses=0, loads=0, refusals=0)
    assert frozen.devices == ()


def test_the_winner_of_the_bundle_is_the_config_that_runs(frozen: freeze.Frozen) -> None:
    kernels.HOOKED.clear()
    kernels.hooked[grid](*tensors(), 2.0, SIZE)
    assert [given["BLOCK"] for given in kernels.HOOKED] == [128]
    [choice] = [c for c in lab.bake(CALLS, interpreted=True).choices if c.kernel.qualname == "hooked"]
    assert dict(choice.winner.meta) == {"BLOCK": 128}


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda: kernels.tuned[(1,)](*tensors(), 2.0, SIZE + 1), "no choice for autotune key `n=101"),
        (lambda: kernels.plain[(1,)](*tensors(), SIZE, BLOCK=64), "no code for `x:*fp32%D"),
        (lambda: kernels.plain[(1,)](tensors()[0][1:], tensors()[1], SIZE, BLOCK=32), "no code for `x:*fp32 y"),
        (lambda: kernels.inplace[(1,)](tensors()[0], 1.0, SIZE, BLOCK=32), "not in the bundle"),
        (lambda: kernels.tuned.warmup(*tensors(), 2.0, SIZE, grid=(1,)), "`warmup` would compile"),
        (lambda: triton.jit(kernels.plain.fn)[(1,)](*tensors(), SIZE, BLOCK=32), "defined again after the freeze"),
    ],
    ids=["key", "constexpr", "alignment", "kernel", "warm-up", "object"],
)
def test_what_was_not_planned_is_refused(launch: Any, message: str, frozen: freeze.Frozen) -> None:
    with pytest.raises(FrozenMissError) as caught:
        launch()
    assert message in caught.value.message
    assert frozen.counters.hits == 0


def test_launches_from_many_threads_do_not_mix(frozen: freeze.Frozen) -> None:
    """The interpreter itself keeps its position and its patches in one place; launches take turns."""
    barrier = threading.Barrier(4)

    def work(index: int) -> bool:
        x, y = torch.full((SIZE,), float(index)), torch.zeros(SIZE)
        barrier.wait()
        for _ in range(5):
            kernels.tuned[grid](x, y, 2.0, SIZE)
            kernels.plain[grid](y, x, SIZE, BLOCK=32)
        return bool((x == _after(index, 5)).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert frozen.counters.hits == 4 * 5 * 2


def _after(value: float, rounds: int) -> float:
    for _ in range(rounds):
        value = value * 2 + 1
    return value


def test_a_forked_child_may_launch(frozen: freeze.Frozen) -> None:
    import os

    child = os.fork()
    if child == 0:
        x, y = tensors()
        kernels.plain[grid](x, y, SIZE, BLOCK=32)
        os._exit(0 if torch.equal(y, x + 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_the_interpreter_the_bundle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    baked = lab.bake(CALLS, interpreted=True)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(MisfitError) as caught:
        freeze.freeze(baked)  # type: ignore[arg-type]
    [reason] = caught.value.reasons
    assert reason.startswith("`TRITON_INTERPRET=` decides who runs the kernels; wanted `TRITON_INTERPRET=1`")


def test_release_gives_the_interpreter_back(frozen: freeze.Frozen) -> None:
    frozen.release()
    x, y = tensors()
    kernels.inplace[(4,)](x, 1.0, SIZE, BLOCK=32)
    assert InterpretedFunction.run.__module__ == "triton.runtime.interpreter"
    kernels.plain.warmup(x, y, SIZE, BLOCK=32, grid=(1,))
