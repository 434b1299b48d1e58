"""Where candidates run while they are measured, and the clock that goes with each place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

_SPIN_CYCLES = 200_000
"""About 0.1 ms: how long the device is kept waiting at the start of a batch, so that the host is ahead from then on."""

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

    def run(self, action: Callable[[], T]) -> T:
        """Does something and waits for its end; the time in between counts as busy."""
        ...

    def times(self, before: Callable[[], None], launch: Callable[[], None], count: int, *, cold: bool) -> list[float]:
        """Times of single launches in ms; ``before`` runs ahead of each, outside the timed region."""
        ...

    def free_bytes(self) -> int | None:
        """Device memory that can be had at once; None where it does not matter."""
        ...

    def release(self) -> None:
        """Gives memory back that is kept for later."""
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
        self._events: list[Any] = []
        self._flush = torch.empty(_FLUSH_FACTOR * max(l2_bytes, 1 << 20), dtype=torch.uint8, device="cuda")

    def wait(self) -> None:
        torch.cuda.synchronize()

    def run(self, action: Callable[[], T]) -> T:
        start, end = self._pooled(2)
        start.record()
        result = action()
        end.record()
        torch.cuda.synchronize()
        self.busy_ms += start.elapsed_time(end)
        return result

    def times(self, before: Callable[[], None], launch: Callable[[], None], count: int, *, cold: bool) -> list[float]:
        first, last, *events = self._pooled(2 * count + 2)
        stream, flush = torch.cuda.current_stream(), self._flush
        torch.cuda._sleep(_SPIN_CYCLES)
        first.record(stream)
        for place in range(0, 2 * count, 2):
            before()
            if cold:
                flush.zero_()
            events[place].record(stream)
            launch()
            events[place + 1].record(stream)
        last.record(stream)
        torch.cuda.synchronize()
        self.busy_ms += first.elapsed_time(last)
        return [events[place].elapsed_time(events[place + 1]) for place in range(0, 2 * count, 2)]

    def _pooled(self, count: int) -> list[Any]:
        """Events that nothing waits for any more; making them takes longer than recording them."""
        while len(self._events) < count:
            self._events.append(torch.cuda.Event(enable_timing=True))
        return self._events[:count]

    def free_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info()[0])

    def release(self) -> None:
        torch.cuda.empty_cache()

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

    def run(self, action: Callable[[], T]) -> T:
        start = time.perf_counter_ns()
        result = action()
        self.busy_ms += (time.perf_counter_ns() - start) / 1e6
        return result

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

    def release(self) -> None:
        """Nothing is kept."""

    def answers(self) -> bool:
        return True
