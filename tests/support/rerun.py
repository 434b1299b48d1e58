"""A recorder of passes for the CPU: a replay runs the pass again, in the same memory and on what its inputs now hold.

That is what a graph's replay does too, so it shows what becomes of buffers and copies; it shows nothing about streams.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable


class Rerun:
    """Runs passes again.

    Args:
        failure: raised instead of recording the pass of this number, counted from 0.
        pause_s: seconds that a replay waits before it reads its inputs.

    Attributes:
        pool_bytes: 1,000 for each recorded pass.
    """

    def __init__(self, failure: tuple[int, Exception] | None = None, pause_s: float = 0.0) -> None:
        self.pool_bytes = 0
        self._failure = failure
        self._pause_s = pause_s
        self._count = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._failure is not None and self._failure[0] == self._count:
            raise self._failure[1]
        self._count += 1
        self.pool_bytes += 1000
        work()

        def replay() -> None:
            time.sleep(self._pause_s)
            work()

        return replay

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
