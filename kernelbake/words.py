"""Counts in messages: ``1 key``, ``2 keys``."""

from __future__ import annotations


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
