"""Damage to a bundle's bytes: one byte changed, or the file cut. All of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator


def flips(data: bytes, number: int, seed: int) -> Iterator[tuple[int, bytes]]:
    """Position and damaged copy: one byte anywhere, headers and padding included, changed to any other value."""
    source = random.Random(seed)
    for _ in range(number):
        position = source.randrange(len(data))
        damaged = bytearray(data)
        damaged[position] ^= source.randrange(1, 256)
        yield position, bytes(damaged)


def cuts(data: bytes, number: int, seed: int) -> Iterator[tuple[int, bytes]]:
    """Length and beginning of the data; every tenth cut stands at the end of a block, where a reader could miss it."""
    source = random.Random(seed)
    for count in range(number):
        length = source.randrange(len(data))
        length -= length % 512 if count % 10 == 0 else 0
        yield length, data[:length]
