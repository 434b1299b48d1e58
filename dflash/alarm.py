"""What the threads of a run wait at: whoever fails rings, and nobody waits any longer. Loads no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kernelbake.errors import KernelbakeError


class Rung(Exception):
    """Another thread failed; what it failed with is in the alarm."""


class Alarm:
    """The first failure of a run, and the place where threads wait for each other.

    Attributes:
        failure: the first failure, once there is one.
    """

    def __init__(self) -> None:
        self.failure: KernelbakeError | None = None
        self._condition = threading.Condition()

    def ring(self, failure: KernelbakeError) -> None:
        """Ends all waiting; the first failure counts."""
        with self._condition:
            self.failure = self.failure or failure
            self._condition.notify_all()

    def check(self) -> None:
        """Raises ``Rung`` once somebody rang."""
        if self.failure is not None:
            raise Rung

    def tell(self) -> None:
        """Says that something has changed that others may wait for."""
        with self._condition:
            self._condition.notify_all()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Waits for what others ``tell``.

        Raises:
            Rung: somebody failed before it was so.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None or is_so())
            if not is_so():
                raise Rung
