"""Plain data → checked values, with every fault collected. Stdlib only.

One ``Reader`` reads one mapping. A value that is missing or wrong leaves a fault and yields the default (or a harmless
stand-in), so that reading goes on and a person sees all faults at once; ``good`` tells whether fields may be compared.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kernelbake.workload import Fault

REQUIRED: Final = object()
"""The default of a field that must be given."""

LARGEST: Final = 2**63 - 1
"""Whole numbers above it fit no generator's seed, no tensor and no file."""
LARGEST_FP32: Final = 3.4028234e38


def shown(value: Any) -> str:
    """A value as a message shows it, cut to a readable length."""
    text = repr(value)
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


class Reader:
    """Reads the fields of one mapping.

    Args:
        data: the mapping; anything else is a fault, and then every field has its default.
        path: dotted path of the mapping, ``""`` at the top.
        faults: where faults are added.
    """

    def __init__(self, data: Any, path: str, faults: list[Fault]) -> None:
        self.path = path
        self._faults = faults
        self._known: list[str] = []
        self._bad: set[str] = set()
        if isinstance(data, Mapping):
            self._data: Mapping[Any, Any] = data
        else:
            self._data = {}
            self._whole = False
            faults.append(Fault(path, f"found {shown(data)}; wanted a mapping"))
            return
        self._whole = True

    def fault(self, name: str, message: str) -> None:
        """Adds a fault of the field."""
        self._bad.add(name)
        self._faults.append(Fault(f"{self.path}.{name}".lstrip("."), message))

    def good(self, *names: str) -> bool:
        """Whether none of these fields has a fault."""
        return self._whole and not self._bad.intersection(names)

    def has(self, name: str) -> bool:
        """Whether the field is given."""
        return name in self._data

    def raw(self, name: str) -> Any:
        """The field as it stands, None where it is absent; the caller checks it."""
        self._known.append(name)
        return self._data.get(name)

    def _take(self, name: str, default: Any, wanted: str) -> tuple[bool, Any]:
        self._known.append(name)
        if name in self._data:
            value = self._data[name]
            if value is None and default is None:
                return False, None
            return True, value
        if default is REQUIRED and self._whole:
            self.fault(name, f"missing; wanted {wanted}")
        return False, default

    def integer(self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int | None = None) -> Any:
        """A whole number from ``low`` to ``high``; ``True`` and ``1.0`` are none."""
        wanted = f"a whole number of at least {low}" + (f" and at most {high}" if high is not None else "")
        given, value = self._take(name, default, wanted)
        if not given:
            return low if value is REQUIRED else value
        if type(value) is int and low <= value <= (LARGEST if high is None else high):
            return value
        if type(value) is int and value > LARGEST and high is None:
            wanted += f" and at most {LARGEST}"
        self.fault(name, f"found {shown(value)}; wanted {wanted}")
        return low if default in (REQUIRED, None) else default

    def number(self, name: str, default: Any = REQUIRED, *, low: float = 0.0, high: float = math.inf) -> Any:
        """A finite number from ``low`` to ``high``; text that looks like one is a fault that says so."""
        wanted = f"a number of at least {low:g}" + (f" and at most {high:g}" if high != math.inf else "")
        given, value = self._take(name, default, wanted)
        if not given:
            return low if value is REQUIRED else value
        if type(value) in (int, float) and _is_finite(value) and low <= value <= high:
            return float(value)
        text = "; it is text, so leave the quotes away" if isinstance(value, str) and _is_number(value) else ""
        self.fault(name, f"found {shown(value)}{text}; wanted {wanted}")
        return low if default in (REQUIRED, None) else default

    def text(self, name: str, default: Any = REQUIRED, *, choices: Iterable[str] = ()) -> Any:
        """Text that is not empty; one of ``choices`` where they are given."""
        options = tuple(choices)
        wanted = "one of " + ", ".join(f"`{option}`" for option in options) if options else "text"
        given, value = self._take(name, default, wanted)
        if not given:
            return "" if value is REQUIRED else value
        if isinstance(value, str) and value.strip() and (not options or value in options):
            if _is_name(value):
                return value
            wanted = "text without characters that no path can have"
        self.fault(name, f"found {shown(value)}; wanted {wanted}")
        return (options[0] if options else "") if default in (REQUIRED, None) else default

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        """``true`` or ``false``; numbers and words are none."""
        given, value = self._take(name, default, "`true` or `false`")
        if not given:
            return False if value is REQUIRED else value
        if type(value) is bool:
            return value
        self.fault(name, f"found {shown(value)}; wanted `true` or `false`")
        return False if default in (REQUIRED, None) else default

    def integers(self, name: str, default: Any = REQUIRED, *, low: int = 1) -> Any:
        """A list of whole numbers, not empty and strictly ascending; faults name positions."""
        given, value = self._take(name, default, "a list of ascending whole numbers")
        if not given:
            return () if value is REQUIRED else value
        if not isinstance(value, list | tuple) or not value:
            self.fault(name, f"found {shown(value)}; wanted a list of ascending whole numbers, at least one")
            return () if default in (REQUIRED, None) else default
        for position, item in enumerate(value):
            if type(item) is int and item > LARGEST:
                self._item(name, position, f"found {shown(item)}; wanted a whole number of at most {LARGEST}")
            elif type(item) is not int or item < low:
                self._item(name, position, f"found {shown(item)}; wanted a whole number of at least {low}")
            elif item in value[:position]:
                self._item(name, position, f"`{item}` stands here a second time")
            elif position and type(value[position - 1]) is int and item < value[position - 1]:
                self._item(name, position, f"`{item}` after `{value[position - 1]}`; wanted ascending order")
        return tuple(value) if name not in self._bad else ()

    def texts(self, name: str, default: Any = REQUIRED, *, choices: Iterable[str] = ()) -> Any:
        """A list of texts from ``choices``, not empty, in any order."""
        options = tuple(choices)
        wanted = "a list of " + ", ".join(f"`{option}`" for option in options)
        given, value = self._take(name, default, wanted)
        if not given:
            return () if value is REQUIRED else value
        if not isinstance(value, list | tuple) or not value:
            self.fault(name, f"found {shown(value)}; wanted {wanted}, at least one")
            return () if default in (REQUIRED, None) else default
        for position, item in enumerate(value):
            if not isinstance(item, str) or item not in options:
                self._item(name, position, f"found {shown(item)}; wanted {wanted.removeprefix('a list of ')}")
            elif item in value[:position]:
                self._item(name, position, f"`{item}` stands here a second time")
        return tuple(value) if name not in self._bad else ()

    def section(self, name: str, *, required: bool = True) -> Reader:
        """A reader of a mapping below; an empty one where it is not given and not required."""
        self._known.append(name)
        if name not in self._data and self._whole and required:
            self.fault(name, "missing; wanted a mapping")
            return Reader({}, f"{self.path}.{name}".lstrip("."), [])
        return Reader(self._data.get(name, {}), f"{self.path}.{name}".lstrip("."), self._faults)

    def done(self) -> None:
        """Every key that no field has asked for is a fault."""
        for key in self._data:
            if key not in self._known:
                close = difflib.get_close_matches(str(key), self._known, 1)
                hint = f"did you mean `{close[0]}`" if close else "known: " + ", ".join(f"`{k}`" for k in self._known)
                self.fault(str(key), f"unknown key; {hint}")

    def _item(self, name: str, position: int, message: str) -> None:
        self._bad.add(name)
        self._faults.append(Fault(f"{self.path}.{name}.{position}".lstrip("."), message))


def _is_finite(value: float) -> bool:
    """Whether a number is finite as a float; a whole number may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_name(text: str) -> bool:
    """Whether the system could take the text as a path: no zero byte, no half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
