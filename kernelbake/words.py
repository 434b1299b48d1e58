"""Words in messages: counts (``1 key``, ``2 keys``), and lines folded to the width of a terminal."""

from __future__ import annotations

import itertools
import re

_SPACES = re.compile(r" (?!ms\b)")
"""At which a line is broken: not between a number and its unit."""
_MARKS = ",._:/"
"""Behind which a word that is wider than a line is broken."""


def counted(count: int, one: str, many: str | None = None) -> str:
    """``1 key``, ``2 keys``, ``1,024 entries``.

    Args:
        count: how many.
        one: the noun, or a phrase, of a single one.
        many: of several; where it is None, ``one`` with its last word's plural ending.
    """
    return f"{count:,} {one if count == 1 else many or _plural(one)}"


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "z", "ch", "sh")) else f"{noun}s"


def fold(text: str, width: int | None, hang: int = 4) -> list[str]:
    """A line as several, none wider than a terminal; nothing of it is left out but spaces at which it is broken.

    Args:
        text: the line.
        width: of the terminal in columns; None leaves the line whole.
        hang: columns by which all lines but the first are indented; the first is not broken within them.
    """
    if width is None:
        return [text]
    hang = min(hang, width // 2)
    lines = []
    while len(text) > width:
        spaces = (space.start() for space in _SPACES.finditer(text, hang + 1))
        cut = max(itertools.takewhile(lambda place: place <= width, spaces), default=0)
        if not text[:cut].strip():
            cut = _inside_a_word(text, width, hang)
        lines.append(text[:cut].rstrip())
        text = " " * hang + text[cut:].lstrip()
    return [*lines, text]


def _inside_a_word(text: str, width: int, hang: int) -> int:
    """Where a word that is wider than a line is broken: behind a mark, unless that makes more lines of it."""
    cut = max(text.rfind(mark, hang + 1, width) for mark in _MARKS) + 1
    return cut if cut and (2 * cut > width or len(text) - cut <= width - hang) else width
