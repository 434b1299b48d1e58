"""flash-linear-attention's memos of what follows from document boundaries, one for each thread.

The library remembers the last few results of such functions in a queue that all threads share. A thread that looks
through it while another one adds a result gets ``RuntimeError: deque mutated during iteration``; and pairs side by side
would push each other's results out, which costs a wait for the device in every layer.
"""

from __future__ import annotations

import collections
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any

_QUEUE = "cached"
"""Name under which a memoized function holds its queue (flash-linear-attention 0.5.1 and 0.6.0)."""


class OwnQueue(threading.local):
    """What a memo does with its queue, on a queue of the calling thread.

    Args:
        length: the most results that a thread remembers.
    """

    def __init__(self, length: int | None) -> None:
        self._entries: collections.deque[Any] = collections.deque(maxlen=length)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def append(self, entry: Any) -> None:
        self._entries.append(entry)


def keep_apart() -> int:
    """Gives every memoized function of the library that is imported a queue for each thread; says how many had none."""
    count = 0
    for name, module in list(sys.modules.items()):
        if name == "fla" or name.startswith("fla."):
            count += sum(_keep_apart(function) for function in list(vars(module).values()))
    return count


def _keep_apart(function: Any) -> bool:
    if not inspect.isfunction(function) or not hasattr(function, "__wrapped__") or _QUEUE not in _names(function):
        return False
    cell = (function.__closure__ or ())[_names(function).index(_QUEUE)]
    if not isinstance(cell.cell_contents, collections.deque):
        return False
    cell.cell_contents = OwnQueue(cell.cell_contents.maxlen)
    return True


def _names(function: Any) -> tuple[str, ...]:
    return tuple(function.__code__.co_freevars)
