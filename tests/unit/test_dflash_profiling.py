"""The clock of a pair's parts: what counts as whose time, on the host's clock and with events that are not over yet."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import profiling
from dflash.pairs import IDLE
from dflash.profiling import Clock, Profiler

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host's clock, which stands unless a test moves it."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: clock.now)
    return clock


def step(clock: Clock, seconds: Any, **parts: float) -> None:
    clock.starts()
    for part, length in parts.items():
        clock.begins(part)
        seconds.now += length
    clock.begins(IDLE)


def test_a_part_lasts_until_the_next_begins_and_the_first_step_warms_up(seconds: Any) -> None:
    clock = Clock(CPU, CPU)
    step(clock, seconds, target=100.0, drafter=100.0)
    for _ in range(2):
        step(clock, seconds, target=1.0, drafter=2.0, optimizer=0.5)
        seconds.now += 9.0
    clock.finish()
    assert clock.num_steps == 2
    assert {part: times.device for part, times in clock.parts.items()} == {"target": 2, "drafter": 4, "optimizer": 1}
    assert clock.idle == 0


def test_a_single_step_counts_as_nothing_else_does(seconds: Any) -> None:
    clock = Clock(CPU, CPU)
    step(clock, seconds, target=3.0)
    clock.finish()
    assert (clock.num_steps, clock.parts["target"].device) == (1, 3.0)


def test_what_is_done_between_steps_is_not_counted(seconds: Any) -> None:
    """A validation goes through the same parts and ends in none."""
    clock = Clock(CPU, CPU)
    step(clock, seconds, target=1.0)
    for part in ("target", "drafter"):
        clock.begins(part)
        seconds.now += 50.0
    step(clock, seconds, target=1.0)
    clock.finish()
    assert {part: times.host for part, times in clock.parts.items()} == {"target": 1.0}


class Event:
    """An event of a device that has not come to it yet; like CUDA's, it belongs to the device that first records it."""

    device_now = 0.0
    moments: Iterator[float] = iter(())

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0
        self.device: torch.device | None = None

    def record(self, stream: torch.device) -> None:
        assert self.device in (None, stream)
        self.device, self.at = stream, next(Event.moments)

    def query(self) -> bool:
        return self.at <= Event.device_now

    def elapsed_time(self, other: Event) -> float:
        assert other.device == self.device
        return (other.at - self.at) * 1e3


def test_events_are_read_when_their_device_has_passed_them(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
    """The host launches at once; the drafter's device waits two seconds for the target's."""
    moments = itertools.chain(*[(base, base + 3, base + 5, base + 9) for base in (0.0, 20.0, 40.0)])
    monkeypatch.setattr(Event, "device_now", 0.0)
    monkeypatch.setattr(Event, "moments", moments)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    clock = Clock(torch.device("cuda", 0), torch.device("cuda", 1))
    clock._first = ({}, 0.0)
    step(clock, seconds, target=0.0, drafter=0.0)
    assert clock.num_steps == 0
    assert len(clock._waiting) == 1
    monkeypatch.setattr(Event, "device_now", 10.0)
    step(clock, seconds, target=0.0, drafter=0.0)
    assert clock.num_steps == 1
    assert {part: times.device for part, times in clock.parts.items()} == {"target": 3.0, "drafter": 4.0}
    step(clock, seconds, target=0.0, drafter=0.0)  # with the events of the first step, each on its own device
    assert [len(spare) for spare in clock._spare.values()] == [0, 0]
    assert next(moments, None) is None


def test_waits_for_batches_and_the_rest_are_the_hosts(seconds: Any) -> None:
    pair = types.SimpleNamespace(number=3, target=types.SimpleNamespace(device=CPU), device=CPU, clock=None)
    profiler = Profiler([pair])  # type: ignore[list-item]

    def slow() -> Any:
        for number in range(4):
            seconds.now += 1.0
            yield number

    batches = profiler.timed(slow())
    for _ in range(2):
        assert pair.clock is not None
        next(batches), next(batches)
        step(pair.clock, seconds, target=5.0)
    found = profiler.profile([100.0, 8.0])
    assert (found.step_ms, found.data_ms, found.rest_ms) == (8000.0, 2000.0, 1000.0)
    assert found.pairs[0].pair == 3
    assert found.pairs[0].parts == {"target": (5000.0, 5000.0)}
    assert found.to_json()["pairs"][0]["parts"]["target"] == {"device_ms": 5000.0, "host_ms": 5000.0}


def test_a_run_shorter_than_a_trace_is_traced_without_a_warning(tmp_path: Path) -> None:
    """Warnings are errors here."""
    path = tmp_path / "made" / "trace.json"
    with profiling.traced(path, steps=2) as traced:
        for _ in range(2):
            torch.ones(2) + 1
            traced()
    assert "aten::add" in path.read_text()
