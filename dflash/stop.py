"""Signals as a wish to stop. Loads no torch."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from dflash.errors import InterruptedRunError


class Interrupted(BaseException):
    """A signal came while there was nothing to save.

    It is no ``Exception``: data, templates and libraries may fail at anything, and what handles their errors would take
    a signal for one of them and go on.

    Args:
        number: of the signal.

    Attributes:
        error: what to say of it.
    """

    def __init__(self, number: int) -> None:
        self.error = InterruptedRunError(number, "no step was made yet, nothing is lost")
        super().__init__(self.error.message)


class Stop:
    """Signals as a wish: the first ends the run after the current step, the second at once.

    Until ``armed``, there is no step to finish and nothing to save, and a signal ends the run where it is.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.armed = False

    def install(self) -> None:
        """Handles SIGINT, SIGTERM and the SIGHUP of a lost terminal from now on; does so in the main thread only.

        A SIGHUP or SIGINT that is ignored stays so: ``nohup``, or the ``&`` of a script, means that the run goes on.
        """
        if threading.current_thread() is threading.main_thread():
            terminals = [number for number in (signal.SIGHUP, signal.SIGINT) if not _ignored(number)]
            for number in (signal.SIGTERM, *terminals):
                signal.signal(number, self._on)

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number
        if not self.armed:
            raise Interrupted(number)


def _ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
