"""The watchdog: a run in which nothing moves for too long is stopped, and says where it stood.

It also hears of other ranks that failed, for a rank whose GPU waits for them has no other way to. Loads no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
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

_LATE = 4
"""So many intervals behind its time, the watchdog was not slow: the process was stopped (Ctrl-Z, SIGSTOP, a frozen
container), and nothing could move."""

_GRACE_S = 15.0
"""How long the main thread has to raise what the watchdog found, before the process is ended without it."""


class _Idle:
    """How long nothing moved, without the time in which the whole process was stopped.

    Args:
        interval: between two looks, in seconds.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._moved = self._looked = time.monotonic()
        self._stopped = 0.0

    def seconds(self, moved: float) -> float:
        """To be asked every interval.

        Args:
            moved: when something last moved, by ``time.monotonic``.
        """
        now = time.monotonic()
        late, self._looked = now - self._looked - self._interval, now
        if moved > self._moved:
            self._moved, self._stopped = moved, 0.0
        if late > _LATE * self._interval:
            self._stopped = min(self._stopped + late, now - self._moved)
        return now - self._moved - self._stopped


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
        self._handles_ctrl_z = self._stands_still = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._stand_still_for_ctrl_z()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._on_stuck is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._handles_ctrl_z:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _stand_still_for_ctrl_z(self) -> None:
        """Takes the timer away while a shell or a scheduler holds the process: it would end it at ``fg``."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._on_stuck is None or not is_main or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
            return

        def stand_still(number: int, frame: FrameType | None) -> None:
            self._stands_still = True
            faulthandler.cancel_dump_traceback_later()
            signal.raise_signal(signal.SIGSTOP)  # returns when the process goes on
            self._stands_still = False

        signal.signal(signal.SIGTSTP, stand_still)
        self._handles_ctrl_z = True

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
        idle = _Idle(interval)
        while not self._ended.wait(interval):
            self._arm()
            seconds = idle.seconds(max(self._moved, self._watched.last_move()))
            word = self._ranks.left_word()
            if word is not None:
                self._alarm.ring(self._ranks.elsewhere(*word))
            elif not self._paused and seconds > self._seconds:
                self._alarm.ring(self._watched.describe(self._seconds))
            if self._alarm.failure is not None:
                break
        if self._alarm.failure is not None and self._outlives_grace() and self._on_stuck is not None:
            self._on_stuck(self._alarm.failure)

    def _arm(self) -> None:
        """For code that hangs with Python's lock held, where this thread cannot run: a timer that needs no Python."""
        if self._on_stuck is not None and not self._stands_still:
            faulthandler.dump_traceback_later(self._seconds + 4 * _GRACE_S, exit=True)

    def _outlives_grace(self) -> bool:
        """Whether the main thread does not end; saving what there is takes its time."""
        idle = _Idle(0.1)
        while not self._ended.wait(0.1):
            self._arm()
            patience = max(_GRACE_S, self._seconds) if self._paused else _GRACE_S
            if idle.seconds(self._moved) > patience:
                return True
        return False
