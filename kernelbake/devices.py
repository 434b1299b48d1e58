"""Where candidates run while they are measured, and the clock that goes with each place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

_SPIN_CYCLES = 400_000
"""How long the device is kept waiting at the start of a batch, so that the host is ahead of it from then on."""

_FLUSH_FACTOR = 2
"""The flushed buffer is this many times the level-2 cache."""


class Device(Protocol):
    """Where candidates run, and the clock that goes with it.

    Attributes:
        busy_ms: time for which the device was kept busy by candidates, copies, flushes and comparisons.
    """

    busy_ms: float

    def wait(self) -> None:
        """Until everything that was launched has ended; raises what it ended with."""
        ...

    def run(self, action: Callable[[], None]) -> None:
        """Does something and waits for its end; the time in between counts as busy."""
        ...

    def times(self, before: Callable[[], None], launch: Callable[[], None], count: int, *, cold: bool) -> list[float]:
        """Times of single launches in ms; ``before`` runs ahead of each, outside the timed region."""
        ...

    def free_bytes(self) -> int | None:
        """Device memory that can be had; None where it does not matter."""
        ...

    def answers(self) -> bool:
        """Whether it still works."""
        ...


class CudaDevice:
    """The current CUDA device, timed by events: the host runs ahead, so that its time does not count.

    Args:
        l2_bytes: its level-2 cache.
    """

    def __init__(self, l2_bytes: int) -> None:
        self.busy_ms = 0.0
        self._flush = torch.empty(_FLUSH_FACTOR * max(l2_bytes, 1 << 20), dtype=torch.uint8, device="cuda")

    def wait(self) -> None:
        torch.cuda.synchronize()

    def run(self, action: Callable[[], None]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        self.busy_ms += start.elapsed_time(end)

    def times(self, before: Callable[[], None], launch: Callable[[], None], count: int, *, cold: bool) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        first.record()
        for start, end in events:
            before()
            if cold:
                self._flush.zero_()
            start.record()
            launch()
            end.record()
        last.record()
        torch.cuda.synchronize()
        self.busy_ms += first.elapsed_time(last)
        return [start.elapsed_time(end) for start, end in events]

    def free_bytes(self) -> int | None:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def answers(self) -> bool:
        try:
            torch.cuda.synchronize()
            return bool(torch.ones(1, device="cuda").item() == 1.0)
        except Exception:
            return False


class CpuDevice:
    """The interpreter's: launches end before they return, and the wall clock is what there is."""

    def __init__(self) -> None:
        self.busy_ms = 0.0

    def wait(self) -> None:
        """Nothing is under way."""

    def run(self, action: Callable[[], None]) -> None:
        start = time.perf_counter_ns()
        action()
        self.busy_ms += (time.perf_counter_ns() - start) / 1e6

    def times(self, before: Callable[[], None], launch: Callable[[], None], count: int, *, cold: bool) -> list[float]:
        times = []
        for _ in range(count):
            before()
            start = time.perf_counter_ns()
            launch()
            times.append((time.perf_counter_ns() - start) / 1e6)
        self.busy_ms += sum(times)
        return times

    def free_bytes(self) -> int | None:
        return None

    def answers(self) -> bool:
        return True
