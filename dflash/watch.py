"""The watchdog: a run in which nothing moves for too long is stopped, and says where it stood.

It also hears of other ranks that failed, for a rank whose GPU waits for them has no other way to. Loads no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

from dflash.alarm import Alarm
from dflash.ranks import Ranks
from kernelbake.errors import KernelbakeError


class Watched(Protocol):
    """What is watched."""

    def last_move(self) -> float:
        """When it last went on, by ``time.monotonic``."""
        ...

    def describe(self, seconds: float) -> KernelbakeError:
        """What to say when nothing moved for so long."""
        ...


OnStuck = Callable[[KernelbakeError], None]

_GRACE_S = 15.0
"""How long the main thread has to raise what the watchdog found, before the process is ended without it."""


class Watch:
    """A thread that looks at the time since anything moved, from entering its context to leaving it.

    Args:
        alarm: of the run; rung when nothing moves.
        seconds: how long nothing may move.
        watched: the pairs.
        ranks: this rank among the others.
        on_stuck: called when not even the main thread goes on after the alarm; it should end the process. None: nothing
            is done, and the main thread raises as soon as it can.
    """

    def __init__(
        self,
        alarm: Alarm,
        seconds: float,
        watched: Watched,
        ranks: Ranks,
        on_stuck: OnStuck | None,
    ) -> None:
        self._alarm = alarm
        self._seconds = seconds
        self._watched = watched
        self._ranks = ranks
        self._on_stuck = on_stuck
        self._moved = time.monotonic()
        self._paused = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._on_stuck is not None:
            faulthandler.cancel_dump_traceback_later()

    def moved(self) -> None:
        """The main thread went on."""
        self._moved = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For work that may take its time: a checkpoint, a validation, whoever reads reports."""
        self._paused = True
        try:
            yield
        finally:
            self._moved = time.monotonic()
            self._paused = False

    def _run(self) -> None:
        interval = min(self._seconds / 4, 0.5)
        while not self._ended.wait(interval):
            self._arm()
            word = self._ranks.left_word()
            if word is not None:
                self._alarm.ring(self._ranks.elsewhere(*word))
            elif not self._paused and time.monotonic() - max(self._moved, self._watched.last_move()) > self._seconds:
                self._alarm.ring(self._watched.describe(self._seconds))
            if self._alarm.failure is not None:
                break
        if self._alarm.failure is not None and self._outlives_grace() and self._on_stuck is not None:
            self._on_stuck(self._alarm.failure)

    def _arm(self) -> None:
        """For code that hangs with Python's lock held, where this thread cannot run: a timer that needs no Python."""
        if self._on_stuck is not None:
            faulthandler.dump_traceback_later(self._seconds + 4 * _GRACE_S, exit=True)

    def _outlives_grace(self) -> bool:
        """Whether the main thread does not end; saving what there is takes its time."""
        rung = time.monotonic()
        while not self._ended.wait(0.1):
            self._arm()
            patience = max(_GRACE_S, self._seconds) if self._paused else _GRACE_S
            if time.monotonic() - max(rung, self._moved) > patience:
                return True
        return False
