"""Where the time of measuring goes: wall time by part, each without the parts inside it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Parts:
    """A clock with one hand for each part.

    Attributes:
        seconds: by name of the part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._current: str | None = None
        self._since = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what runs inside towards a part, and no longer towards the one around it."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str | None) -> str | None:
        now = time.perf_counter()
        outer = self._current
        if outer is not None:
            self.seconds[outer] = self.seconds.get(outer, 0.0) + now - self._since
        self._current, self._since = name, now
        return outer
