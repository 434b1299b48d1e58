"""What a step of a shadow run would hold in memory: storages of fake tensors as they come and go.

A fake tensor has a storage of the real size and no memory. It dies when the real one would: by reference counts, of
Python and of autograd's graph. So the living ones add up to what torch's allocator would say, but for what libraries
behind an operation take and never hand out (workspaces).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kernelbake.keys import Case
from kernelbake.workload import Footprint, PartPeak

ALLOCATION_BYTES = 512
"""torch's allocator for CUDA hands out multiples of so many bytes."""


class _Event(NamedTuple):
    """A storage was made, or has died (a negative change)."""

    number: int
    change: int
    part: str


class Ledger:
    """The storages of one kind of device, and what a step does to them.

    A storage that a step makes and leaves behind (moments of an optimizer's first step, a buffer that is kept) is no
    part of the step's footprint: later steps find it there.

    Args:
        device_type: of the tensors counted, ``cuda`` or ``cpu``.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by address: its number, and what tells of its end
        self._made = 0
        self._part: Callable[[], str] | None = None
        self._events: list[_Event] = []

    def note(self, result: Any) -> None:
        """Enters the storages that an operation's result brings."""
        for item in result if type(result) in (list, tuple) else (result,):
            device = getattr(item, "fake_device", None)
            if device is not None and device.type == self._device_type:
                storage = item.untyped_storage()
                if storage._cdata not in self._living:
                    self._enter(storage)

    def begin(self, part: Callable[[], str]) -> None:
        """A step begins.

        Args:
            part: says, at any time, what the step is at work on.
        """
        self._events, self._part = [], part

    def end(self, case: Case) -> Footprint:
        """A step of this case has ended, and its results are no longer held."""
        events, self._events, self._part = self._events, [], None
        kept = {number for number, _ in self._living.values()}
        return Footprint(case, _parts([event for event in events if event.number not in kept]))

    def _enter(self, storage: Any) -> None:
        self._made += 1
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        gone = functools.partial(self._remove, storage._cdata, size)
        self._living[storage._cdata] = self._made, weakref.ref(storage, gone)
        self._record(self._made, size)

    def _remove(self, address: int, size: int, _: weakref.ref[Any]) -> None:
        number, _ = self._living.pop(address)
        self._record(number, -size)

    def _record(self, number: int, change: int) -> None:
        if self._part is not None:
            self._events.append(_Event(number, change, self._part()))


def _parts(events: Sequence[_Event]) -> tuple[PartPeak, ...]:
    """What each part found and the most that was held during it, above what was there before the step."""
    held = 0
    found: dict[str, tuple[int, int]] = {}
    own: dict[str, list[_Event]] = {}
    for event in events:
        begun, peak = found.get(event.part, (held, held))
        held += event.change
        found[event.part] = begun, max(peak, held)
        own.setdefault(event.part, []).append(event)
    return tuple(PartPeak(name, begun, peak, _passing(own[name])) for name, (begun, peak) in found.items())


def _passing(events: Sequence[_Event]) -> tuple[int, ...]:
    """The allocations of a part that it frees itself, and their ends, as ``PartPeak.changes``."""
    ended = {event.number for event in events if event.change < 0}
    made: dict[int, int] = {}
    changes = []
    for event in events:
        if event.change > 0 and event.number in ended:
            made[event.number] = len(made) + 1
            changes.append(event.change)
        elif event.change < 0 and event.number in made:
            changes.append(-made[event.number])
    return tuple(changes)
