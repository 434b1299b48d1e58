"""Several threads on several devices: stock Triton crashes or mixes their tensors, the frozen runtime does neither.

The device carries launches out on real memory, so that a tensor of another thread shows as wrong bits.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fakegpu
import frozenkernels as kernels
import frozenlab as lab
import pytest
import torch
from fakegpu import Launched, floats
from frozenlab import call

from kernelbake import triton_api
from kernelbake.errors import FrozenMissError

SIZES = (16, 32, 48, 64)
WIDTH = 4
"""Elements that the fake device computes, of tensors that are as long as the launch says."""


def carry_out(launch: Launched) -> None:
    """What each kernel does to memory."""
    if launch.name == "inplace":
        x, value, _ = launch.values
        memory = floats(x, WIDTH)
        for i in range(WIDTH):
            memory[i] += value
        return
    x, y, *rest = launch.values
    source, target = floats(x, WIDTH), floats(y, WIDTH)
    for i in range(WIDTH):
        target[i] = source[i] + 1 if launch.name == "plain" else source[i] * rest[0]


@pytest.fixture
def gpu() -> Iterator[fakegpu.FakeDriver]:
    tuners = (kernels.tuned, kernels.hooked, kernels.restoring)
    with fakegpu.active(fakegpu.FakeDriver(carry_out)) as driver:
        driver.keep = False
        yield driver
    for tuner in tuners:
        tuner.cache.clear()
        tuner.nargs = None
        vars(tuner).pop("do_bench", None)
        vars(tuner).pop("restore_copies", None)


ROUNDS = 1000
"""Launches of each kernel in each thread."""


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[int], None], driver: fakegpu.FakeDriver) -> list[BaseException]:
    """Runs the work in a pool, a device for each thread, all let go at once; returns what they raised."""
    barrier = threading.Barrier(count)

    def one(index: int) -> BaseException | None:
        driver.set_current_device(index % 4)
        barrier.wait()
        try:
            work(index)
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(count) as pool:
        return [error for error in pool.map(one, range(count)) if error is not None]


class Buffers:
    """The tensors of one thread, full of its number."""

    def __init__(self, index: int) -> None:
        self.value = float(index + 1)
        self.size = SIZES[index % len(SIZES)]
        self.x, self.y, self.z = (torch.full((64,), self.value) for _ in range(3))

    @property
    def addresses(self) -> set[int]:
        return {tensor.data_ptr() for tensor in (self.x, self.y, self.z)}


def calls() -> list[lab.Call]:
    found = []
    for size in SIZES:
        x, y = torch.zeros(64), torch.zeros(64)
        found += [
            call(kernels.plain, x, y, size, BLOCK=64),
            call(kernels.inplace, x, 1.0, size, BLOCK=64),
            call(kernels.hooked, x, y, 2.0, size),
            call(kernels.restoring, x, y, 3.0, size),
        ]
    return found


# ---------------------------------------------------------------------------------------------- the story of cold keys


def delayed(driver: fakegpu.FakeDriver) -> None:
    """The thread of device 0 takes longer over its benchmarks, so that the others end under it."""
    driver.delay = lambda: 0.12 if driver.get_current_device() == 0 else 0.02


def cold(launches: list[Any]) -> Callable[[int], None]:
    def work(index: int) -> None:
        own = Buffers(index)
        launches.append(own)
        kernels.tuned[(1,)](own.x, own.y, 2.0, own.size)
        assert own.y[0].item() == 2 * own.value

    return work


def test_stock_triton_crashes_at_cold_keys(gpu: fakegpu.FakeDriver) -> None:
    delayed(gpu)
    errors = in_threads(4, cold([]), gpu)
    assert any("'NoneType' object is not a mapping" in str(error) for error in errors), errors


def test_the_frozen_runtime_does_not(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    delayed(gpu)
    bundle = lab.bake([call(kernels.tuned, torch.zeros(64), torch.zeros(64), 2.0, size) for size in SIZES])
    with lab.frozen(bundle, monkeypatch, devices=range(4)) as frozen:
        assert in_threads(4, cold([]), gpu) == []
        assert frozen.counters.hits == 4
        assert frozen.counters.misses == 0
    assert kernels.tuned.nargs is None
    assert kernels.tuned.cache == {}


def grow(launch: Launched) -> None:
    """A kernel that adds one to its first tensor, and takes a while."""
    memory = floats(launch.values[0], WIDTH)
    for i in range(WIDTH):
        memory[i] += 1
    time.sleep(0.03)


def grown(owns: Sequence[Buffers]) -> Callable[[int], None]:
    return lambda index: kernels.restoring[(1,)](owns[index].x, owns[index].y, 3.0, owns[index].size)


def test_stock_triton_loses_what_it_should_restore(gpu: fakegpu.FakeDriver) -> None:
    """Copies lie on the shared object: a thread gets another's back, or none, and sums count its benchmarks too."""
    gpu._on_launch = grow
    owns = [Buffers(index) for index in range(4)]
    errors = in_threads(4, grown(owns), gpu)
    assert errors or [own for own in owns if own.x[0].item() != own.value + 1]


def test_the_frozen_runtime_restores_nothing_and_loses_nothing(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu._on_launch = grow
    owns = [Buffers(index) for index in range(4)]
    with lab.frozen(lab.bake(calls()), monkeypatch, devices=range(4)):
        assert in_threads(4, grown(owns), gpu) == []
    assert [own.x[0].item() for own in owns] == [own.value + 1 for own in owns]


# ---------------------------------------------------------------------------------------------- stress


def stress(driver: fakegpu.FakeDriver, threads: int, rounds: int) -> tuple[int, list[BaseException]]:
    """Wrong results and errors of threads that launch four kernels over and over, each on its own tensors."""
    wrong: list[str] = []
    local = threading.local()

    def hook_saw(arguments: dict[str, Any]) -> None:
        if arguments["x"] is not local.own.x or arguments["y"] is not local.own.y:
            wrong.append("the hook got another thread's tensors")

    def carry(launch: Launched) -> None:
        strangers = {value for value in launch.values if isinstance(value, int) and value > 1 << 20}
        if not strangers <= local.own.addresses or launch.device != driver.get_current_device():
            wrong.append("the device got another thread's tensors")
        carry_out(launch)

    def work(index: int) -> None:
        local.own = own = Buffers(index)
        for _ in range(rounds):
            kernels.plain[(1,)](own.x, own.y, own.size, BLOCK=64)
            _compare(own.y, own.value + 1, wrong)
            kernels.inplace[(1,)](own.z, 1.0, own.size, BLOCK=64)
            kernels.hooked[(1,)](own.x, own.y, 2.0, n=own.size)
            _compare(own.y, own.value * 2, wrong)
            kernels.restoring[(1,)](x=own.x, y=own.y, alpha=3.0, n=own.size)
            _compare(own.y, own.value * 3, wrong)
        _compare(own.z, own.value + rounds, wrong)
        _compare(own.x, own.value, wrong)

    driver._on_launch = carry
    kernels.HOOK[0] = hook_saw
    try:
        errors = in_threads(threads, work, driver)
    finally:
        kernels.HOOK[0] = None
    return len(wrong), errors


def _compare(tensor: torch.Tensor, value: float, wrong: list[str]) -> None:
    memory = floats(tensor.data_ptr(), WIDTH)
    if any(memory[i] != value for i in range(WIDTH)):
        wrong.append(f"{list(memory)} instead of {value}")


def test_eight_threads_launch_four_kernels_without_a_wrong_bit(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.frozen(lab.bake(calls()), monkeypatch, devices=range(4)) as frozen:
        wrong, errors = stress(gpu, 8, ROUNDS)
        assert (wrong, errors) == (0, [])
        assert frozen.counters.hits == 8 * ROUNDS * 4
        assert frozen.counters.misses == frozen.counters.refusals == 0


def test_the_same_stress_breaks_stock_triton(gpu: fakegpu.FakeDriver) -> None:
    delayed(gpu)
    wrong, errors = stress(gpu, 8, 3)
    assert wrong or errors


def test_counters_are_exact_while_some_threads_miss(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = lab.bake([call(kernels.tuned, torch.zeros(64), torch.zeros(64), 2.0, 64)])

    def work(index: int) -> None:
        own = Buffers(index)
        for number in range(200):
            if number % 4:
                kernels.tuned[(1,)](own.x, own.y, 2.0, 64)
            else:
                with pytest.raises(FrozenMissError):
                    kernels.tuned[(1,)](own.x, own.y, 2.0, 65)

    with lab.frozen(bundle, monkeypatch, devices=range(4)) as frozen:
        assert in_threads(8, work, gpu) == []
        assert (frozen.counters.hits, frozen.counters.misses) == (1200, 400)


# ---------------------------------------------------------------------------------------------- per thread


def test_a_thread_without_an_allocator_gets_one(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's allocator is a matter of each thread; a kernel with scratch memory needs one in all of them."""
    asked: list[tuple[int, int]] = []

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        asked.append((size, alignment))
        return torch.empty(size, dtype=torch.int8)

    one = call(kernels.plain, torch.zeros(64), torch.zeros(64), 64, BLOCK=64)
    stock = fakegpu.metadata
    monkeypatch.setattr(
        fakegpu, "metadata", lambda name, **more: stock(name, global_scratch_size=128, global_scratch_align=16, **more)
    )
    import triton

    triton.set_allocator(allocate)
    try:
        with lab.frozen(lab.bake([one]), monkeypatch, devices=range(4)) as frozen:
            assert in_threads(2, lambda index: one.launchable[(3,)](*one.args, **one.kwargs), gpu) == []
            assert "memory" in frozen.unfused["frozenkernels.plain"]
    finally:
        triton.set_allocator(triton.runtime._allocation.NullAllocator())
    assert asked == [(3 * 128, 16)] * 2
    assert triton_api.current_allocator() is None


def test_devices_are_loaded_before_any_thread_launches(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = lab.bake(calls())
    with lab.frozen(bundle, monkeypatch, devices=range(4)) as frozen:
        loads = gpu.utils.loads
        assert frozen.counters.loads == loads == 4 * len(bundle.entries)
        assert in_threads(8, lambda index: _one_of_each(Buffers(index)), gpu) == []
        assert gpu.utils.loads == loads


def _one_of_each(own: Buffers) -> None:
    launches: Sequence[Callable[[], Any]] = (
        lambda: kernels.plain[(1,)](own.x, own.y, own.size, BLOCK=64),
        lambda: kernels.restoring[(1,)](own.x, own.y, 3.0, own.size),
    )
    for launch in launches:
        launch()
