"""One thread for each pair: given its part of every step, stopped with all others by the first failure. Loads torch."""

from __future__ import annotations

import contextvars
import dataclasses
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

from dflash.alarm import Alarm, Rung
from dflash.buckets import Batch, Shape
from dflash.errors import HangError, PairError, RankLostError, TrainingStoppedError
from dflash.pairs import TARGET, Pair, StepTensors
from kernelbake.errors import KernelbakeError

Exhausted = Callable[[torch.OutOfMemoryError, int, torch.device, str, Shape], TrainingStoppedError]
"""Makes the error of a pair that found no memory left: of its number, the device, the part, the batch's shape."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A pair's part of a step.

    Args:
        batches: in their order.
        upcoming: the pair's first batch of the next step, for a target pass ahead of its time; None at the end.
        weight_sum: what the loss is divided by: the weights of all batches of the step, on all pairs and ranks.
        lr: learning rate.
    """

    batches: Sequence[Batch]
    upcoming: Batch | None
    weight_sum: float
    lr: float


class Crew:
    """The threads of the pairs, from entering its context to leaving it.

    They are daemons: one that hangs keeps no process alive. Each sets its devices before anything else, and runs in the
    context of the thread that made it.

    Args:
        pairs: of this process.
        alarm: of the run.
        exhausted: makes the error of a pair without memory.
    """

    def __init__(self, pairs: Sequence[Pair], alarm: Alarm, exhausted: Exhausted) -> None:
        self.pairs = pairs
        self.alarm = alarm
        self._exhausted = exhausted
        self._given = False
        self.failed: list[Pair] = []
        self._inboxes: list[queue.SimpleQueue[Work | None]] = [queue.SimpleQueue() for _ in pairs]
        self._results: dict[int, StepTensors] = {}
        self._threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._run, place), name=f"pair {pair.number}", daemon=True
            )
            for place, pair in enumerate(pairs)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        if kind is None:
            for thread in self._threads:
                thread.join()

    def step(self, works: Sequence[Work]) -> list[StepTensors]:
        """Launches a step on all pairs, and returns when all of it is launched.

        Raises:
            KernelbakeError: what the first pair that failed failed with.
        """
        self._results.clear()
        self._given = True
        for inbox, work in zip(self._inboxes, works, strict=True):
            inbox.put(work)
        try:
            self.alarm.wait_until(lambda: len(self._results) == len(self.pairs))
        except Rung as rung:
            assert self.alarm.failure is not None
            raise self.alarm.failure from rung
        self._given = False
        return [self._results[place] for place in range(len(self.pairs))]

    def busy(self) -> list[Pair]:
        """The pairs that have not launched all of their step."""
        return [pair for place, pair in enumerate(self.pairs) if self._given and place not in self._results]

    def last_move(self) -> float:
        """When a pair last went on, by ``time.monotonic``."""
        return max(pair.since for pair in self.pairs)

    def settle(self, seconds: float) -> list[Pair]:
        """After a failure: the pairs whose threads have ended, once all have or the time is over."""
        end = time.monotonic() + seconds
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return [pair for pair, thread in zip(self.pairs, self._threads, strict=True) if not thread.is_alive()]

    def _run(self, place: int) -> None:
        pair, inbox = self.pairs[place], self._inboxes[place]
        try:
            pair.enter()
            while (work := inbox.get()) is not None:
                self.alarm.check()
                result = pair.step(work.batches, work.lr, weight_sum=work.weight_sum, upcoming=work.upcoming)
                self._results[place] = result
                self.alarm.tell()
        except Rung:
            return
        except BaseException as error:  # of any kind: the thread's last words must reach the caller
            self.failed.append(pair)
            self.alarm.ring(failure_of(pair, error, self._exhausted))


def failure_of(pair: Pair, error: BaseException, exhausted: Exhausted) -> KernelbakeError:
    """What a pair failed with, for people: its number, its devices, the part of the step, and the traceback.

    The exit code is that of a stopped training, unless the error has one of its own, as a launch that the bundle lacks.
    """
    if isinstance(error, RankLostError):
        return error
    if isinstance(error, torch.OutOfMemoryError) and pair.shape is not None:
        device = pair.target.device if pair.part == TARGET else pair.device
        return exhausted(error, pair.number, device, pair.part, pair.shape)
    text = str(error) if isinstance(error, KernelbakeError) else f"{type(error).__name__}: {_said(error)}"
    summary, *rest = text.splitlines()
    return PairError(
        f"pair {pair.number} ({pair.places}) failed in the {pair.part}, at {pair.shape}: {summary}",
        reasons=[*(line.strip() for line in rest), *"".join(traceback.format_exception(error)).splitlines()],
        hint=None,
        exit_code=error.exit_code if isinstance(error, KernelbakeError) else None,
    )


def _said(error: BaseException) -> str:
    """What an exception says; one of a library may fail at that, and must not take the thread's last words along."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be made: {type(failure).__name__}>"


def hang_of(crew: Crew, seconds: float, place: str) -> KernelbakeError:
    """What to say of a run in which nothing moved for so long: every pair that hangs, those that wait, all stacks.

    Args:
        crew: of the run.
        seconds: how long.
        place: where the main thread is.
    """
    busy = crew.busy()
    states = {pair: pair.stuck() if pair in busy else None for pair in crew.pairs}
    stuck = [f"pair {pair.number} ({pair.places}) hangs in {state}" for pair, state in states.items() if state]
    if not stuck:  # each waits for another: whoever was not given what it waits for
        stuck = [f"pair {pair.number} ({pair.places}) does not get on in the {pair.part}" for pair in busy]
    waiting = [
        f"pair {pair.number} ({pair.places}) waits" for pair in crew.pairs if pair not in busy or not states[pair]
    ]
    return HangError(
        f"nothing moved for {seconds:.0f} s: {'; '.join(stuck) or f'no pair is at work, the run is at the {place}'}",
        reasons=[*waiting, *_stacks()],
        hint="--watchdog-seconds says how long a step may take",
    )


def _stacks() -> list[str]:
    frames = sys._current_frames()
    lines: list[str] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            lines.append(f"thread `{thread.name}`:")
            lines += "".join(traceback.format_stack(frame)).rstrip().splitlines()
    return lines
