"""Which GPUs each pair has, as options and the configuration say it. Loads no torch.

A GPU belongs to one pair: two pairs on it would share its memory and its time, and each is planned as if it had both.
More batches on the same GPU are what accumulation is for.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from dflash.schema import Reader

WANTED = "wanted `T` or `T:D`, the numbers of a pair's GPUs, with a comma between pairs"


@dataclasses.dataclass(frozen=True)
class Devices:
    """One pair's devices: numbers of GPUs; under the interpreter all are the CPU."""

    target: int
    drafter: int

    @classmethod
    def parse(cls, text: str) -> Devices:
        """``"0"`` or ``"0:1"``.

        Raises:
            ValueError: the text is neither.
        """
        parts = text.split(":")
        if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
            raise ValueError(text)
        return cls(int(parts[0]), int(parts[-1]))

    def __str__(self) -> str:
        return f"{self.target}:{self.drafter}"


def numbered(count: int) -> tuple[Devices, ...]:
    """Pairs of one GPU each: 0, 1, …"""
    return tuple(Devices(number, number) for number in range(count))


def read(reader: Reader) -> tuple[tuple[Devices, ...] | None, int | None]:
    """The keys ``devices`` and ``dp_pairs``, None where they are left open; they must agree."""
    found, count = reader.raw("devices"), reader.integer("dp_pairs", None)
    if found is None:
        return None, count
    texts, parsed = _texts(found), [_parsed(text) for text in _texts(found)]
    for text, devices in zip(texts, parsed, strict=True):
        if devices is None:
            reader.fault("devices", f"found `{text:.40}`; {WANTED}")
    for message in shared(parsed):
        reader.fault("devices", message)
    given = tuple(devices for devices in parsed if devices is not None)
    if len(given) < len(parsed):
        return None, count
    if count is not None and reader.good("dp_pairs") and count != len(given):
        reader.fault("dp_pairs", f"found `{count}` with `{len(given)}` pairs in `devices`; wanted the same number")
    return given, count


def _parsed(text: str) -> Devices | None:
    try:
        return Devices.parse(text)
    except ValueError:
        return None


def _texts(found: Any) -> list[str]:
    parts = found if isinstance(found, list) else [found]
    return [text for part in parts for text in str(part).split(",")]


def shared(given: Sequence[Devices | None]) -> list[str]:
    """What is wrong with GPUs that stand in two pairs, one line each; None is a pair that nobody can read."""
    return [
        f"found GPU `{gpu}` in pairs `{one}` and `{other}`; wanted each GPU in one pair (--accumulate gives it more)"
        for (one, first), (other, second) in itertools.combinations(enumerate(given), 2)
        if first is not None and second is not None
        for gpu in sorted({first.target, first.drafter} & {second.target, second.drafter})
    ]
