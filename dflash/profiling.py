"""Where the time of a step goes, part by part and pair by pair; and a trace of a few steps. Loads torch.

A clock marks where a part begins and ends: on a GPU with events on the stream that does the part's work, on the CPU
with the host's clock. Marks are read when the device has passed them, so a profiled run waits for nothing that another
does not wait for, launches the same kernels and has the same numbers.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from dflash.errors import TrainingStoppedError
from dflash.pairs import IDLE, TARGET, Pair

T = TypeVar("T")

TRACED_STEPS = 3
_SETTLING_STEPS = 2


@dataclasses.dataclass
class Times:
    """Seconds, added up over steps.

    Args:
        device: between the part's first and last work on its device; the host's where that is the CPU.
        host: in which the pair's thread was launching it, or waiting in it.
    """

    device: float = 0.0
    host: float = 0.0


@dataclasses.dataclass
class _Span:
    """A part at work; ``begin`` and ``end`` are events, or seconds of the host's clock."""

    part: str
    device: torch.device
    begun: float
    begin: Any
    end: Any = None
    host: float = 0.0


class Clock:
    """Times the parts of one pair's steps; used by the pair's thread, read when the run is over.

    Args:
        target_device, drafter_device: of the pair.
    """

    def __init__(self, target_device: torch.device, drafter_device: torch.device) -> None:
        self.parts: dict[str, Times] = {}
        self.idle = 0.0
        """Seconds in which the drafter's device had nothing to do within steps, as seen from its stream."""
        self.num_steps = 0
        self._devices = (target_device, drafter_device)
        self._step: list[_Span] = []
        self._waiting: collections.deque[list[_Span]] = collections.deque()
        self._spare: dict[torch.device, list[torch.cuda.Event]] = {device: [] for device in self._devices}
        self._first: tuple[dict[str, Times], float] | None = None

    def starts(self) -> None:
        """A step begins: what was done since the last one, a validation say, is not counted."""
        self._step = []

    def begins(self, part: str) -> None:
        """A part begins, and the one before it ends."""
        now = time.perf_counter()
        if self._step and self._step[-1].end is None:
            last = self._step[-1]
            last.end, last.host = self._mark(last.device), now - last.begun
        if part != IDLE:
            device = self._devices[part != TARGET]
            self._step.append(_Span(part, device, now, self._mark(device)))
        elif self._step:
            self._waiting.append(self._step)
            self._step = []
            self._read()

    def finish(self) -> None:
        """Reads all that is left, which waits for the devices."""
        for device in {device for device in self._devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        self._read()
        if self._first is not None and not self.num_steps:
            self.parts, self.idle = self._first
            self.num_steps = 1

    def _mark(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        spare = self._spare[device]  # an event stays with the device on which it was first recorded
        event = spare.pop() if spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _read(self) -> None:
        """Adds up the steps that the devices have done. The first one warms up, and counts only if it is alone."""
        while self._waiting and all(_is_over(span.end) for span in self._waiting[0]):
            spans = self._waiting.popleft()
            parts = {span.part: Times() for span in spans}
            for span in spans:
                parts[span.part].device += _seconds(span.begin, span.end)
                parts[span.part].host += span.host
            here = [span for span in spans if span.device == self._devices[1]]
            busy = sum(_seconds(span.begin, span.end) for span in here)
            idle = max(_seconds(here[0].begin, here[-1].end) - busy, 0.0)
            for span in spans:
                self._spare[span.device] += [mark for mark in (span.begin, span.end) if not isinstance(mark, float)]
            if self._first is None:
                self._first = (parts, idle)
                continue
            self.num_steps += 1
            self.idle += idle
            for part, times in parts.items():
                total = self.parts.setdefault(part, Times())
                total.device += times.device
                total.host += times.host


def _is_over(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3


@dataclasses.dataclass(frozen=True)
class PairProfile:
    """Means over the steps but the first, in ms.

    Args:
        pair: its number.
        steps: counted.
        parts: for each part, in the order of work, its time on the device and on the host.
        idle_ms: in which the drafter's device had nothing to do between parts.
    """

    pair: int
    steps: int
    parts: dict[str, tuple[float, float]]
    idle_ms: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a profiled run came to, in ms a step.

    Args:
        step_ms: from one step's beginning to the next one's.
        data_ms: in which the run waited for its batches; nothing is launched meanwhile.
        rest_ms: in which the host did neither that nor a part's work: it read results, wrote the log, made ready.
        pairs: of this process.
    """

    step_ms: float
    data_ms: float
    rest_ms: float
    pairs: tuple[PairProfile, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``summary.json``."""
        pairs = [
            {
                **dataclasses.asdict(pair),
                "parts": {part: {"device_ms": device, "host_ms": host} for part, (device, host) in pair.parts.items()},
            }
            for pair in self.pairs
        ]
        return {**dataclasses.asdict(self), "pairs": pairs}


class Profiler:
    """Puts a clock into every pair.

    Args:
        pairs: of this process.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._waits = array.array("d")
        self._clocks: dict[int, Clock] = {}
        for pair in pairs:
            pair.clock = self._clocks[pair.number] = Clock(pair.target.device, pair.device)

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; how long each was waited for is kept."""
        while True:
            begin = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waits.append(time.perf_counter() - begin)
            yield batch

    def profile(self, seconds: Sequence[float]) -> Profile:
        """What was measured, beside how long each step took; waits for the devices."""
        made = []
        for number, clock in self._clocks.items():
            clock.finish()
            scale = 1e3 / max(clock.num_steps, 1)
            parts = {part: (times.device * scale, times.host * scale) for part, times in clock.parts.items()}
            made.append(PairProfile(number, clock.num_steps, parts, clock.idle * scale))
        counted = seconds[1:] or seconds
        each = len(self._waits) // max(len(seconds), 1)
        waits = self._waits[each:] if len(seconds) > 1 else self._waits
        scale = 1e3 / max(len(counted), 1)
        step, data = sum(counted) * scale, sum(waits) * scale
        launching = max((sum(host for _, host in pair.parts.values()) for pair in made), default=0.0)
        return Profile(step, data, max(step - data - launching, 0.0), tuple(made))


@contextlib.contextmanager
def traced(path: Path | None, steps: int) -> Iterator[Callable[[], None]]:
    """Writes a trace of three steps, for chrome://tracing or Perfetto; what it yields is called after each step.

    Args:
        path: of the trace, JSON; None traces nothing.
        steps: of the run; the first two are left out where there are more.

    Raises:
        TrainingStoppedError: the trace cannot be written.
    """
    if path is None:
        yield lambda: None
        return
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, schedule

    def write(done: Any) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise TrainingStoppedError(f"profile: the trace `{path}` cannot be written ({error})") from error

    settling = min(_SETTLING_STEPS, max(steps - TRACED_STEPS, 0))
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a run too short for a step that warms the profiler up
        when = schedule(wait=max(settling - 1, 0), warmup=min(settling, 1), active=TRACED_STEPS, repeat=1)
    with profile(
        activities=activities,
        schedule=when,
        on_trace_ready=write,
        acc_events=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),  # pairs run in threads of their own
    ) as profiler:
        yield profiler.step
