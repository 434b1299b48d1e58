"""Hostile bundles, made by a script: at least one for each MUST of the format.

``FILES`` maps a name to what makes the file. Every one carries the rules that a reader has to name and a text that one
of the violations has to contain. The files themselves are made in ``hostile_archive``, ``hostile_index``,
``hostile_documents`` and ``hostile_meaning``; ``load`` imports these and gives the whole table.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path

import samples
from forge import Forged

from kernelbake import archive, bundle
from kernelbake.rules import Rule


@dataclasses.dataclass(frozen=True)
class Hostile:
    """One hostile file.

    Args:
        rules: the rules that its refusal has to name; others may stand beside them.
        place: a text that one of the violations has to contain, in its place or its message.
        make: writes the file.
    """

    rules: tuple[Rule, ...]
    place: str
    make: Callable[[Path], None]


FILES: dict[str, Hostile] = {}

Maker = Callable[[Forged], "bytes | None"]


def attack(name: str, *rules: Rule, place: str = "") -> Callable[[Maker], Maker]:
    """Registers a function that changes a sound bundle, or returns the bytes of the file, as an attack."""

    def register(function: Maker) -> Maker:
        def make(path: Path) -> None:
            forged = sound().copy()
            data = function(forged)
            path.write_bytes(forged.data() if data is None else data)

        assert name not in FILES, name
        FILES[name] = Hostile(rules, place, make)
        return function

    return register


def special(name: str, *rules: Rule, place: str = "") -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a function that puts something at the path itself."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        assert name not in FILES, name
        FILES[name] = Hostile(rules, place, function)
        return function

    return register


@functools.cache
def sound_bytes(made: str = "measured", profile: str = "h200", *, launchers: bool = False) -> bytes:
    """The bytes of a sound bundle."""
    contents = samples.contents(made=made, profile=profile, launchers=launchers)
    members, _ = bundle._members(contents, 0)
    return b"".join(archive.pack(members, 0))


@functools.cache
def sound(made: str = "measured", profile: str = "h200", *, launchers: bool = False) -> Forged:
    """A sound bundle in parts; copy it before changing it."""
    return Forged.of(sound_bytes(made, profile, launchers=launchers))


def load() -> dict[str, Hostile]:
    """All hostile files, in the order of the rules."""
    for module in ("hostile_archive", "hostile_index", "hostile_documents", "hostile_meaning"):
        importlib.import_module(module)
    return FILES
