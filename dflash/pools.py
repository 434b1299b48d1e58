"""What a pool of torch's caching allocator grows to under a sequence of allocations: its rules, without the memory.

Facts, of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` in torch 2.11, with default settings
and one stream:

- Sizes are rounded up to multiples of 512 bytes.
- Up to 1 MiB a block is cut from a segment of 2 MiB, below 10 MiB from one of 20 MiB; a larger one gets a segment of
  its own, rounded up to 2 MiB. The two kinds, up to 1 MiB and above, never share segments.
- An allocation takes the smallest free block of its kind that is large enough, of equals that of the lowest address.
  What is left over becomes a free block if it has at least 512 bytes, in large segments more than 1 MiB.
- A freed block is joined with free neighbours of its segment.
- While a graph is captured no segment is given back.

Loads no torch. A sequence is that of ``kernelbake.workload.PartPeak``: a positive number allocates so many bytes, −k
frees what the k-th allocation of the sequence, counted from 1, has made.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

MIB = 2**20
UNIT_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_BYTES = 10 * MIB
MIDDLE_SEGMENT_BYTES = 20 * MIB
LARGE_UNIT_BYTES = 2 * MIB


class Block:
    """A piece of a segment.

    Args:
        address: where it begins; no two segments overlap or touch.
        num_bytes: its size.
        is_small: whether its segment is one of small blocks.
    """

    def __init__(self, address: int, num_bytes: int, is_small: bool) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.is_small = is_small
        self.is_free = False
        self.before: Block | None = None
        self.behind: Block | None = None

    def cut(self, num_bytes: int) -> Block:
        """Shortens the block to so many bytes; what is left becomes the next one."""
        rest = Block(self.address + num_bytes, self.num_bytes - num_bytes, self.is_small)
        rest.before, rest.behind = self, self.behind
        if self.behind is not None:
            self.behind.before = rest
        self.behind, self.num_bytes = rest, num_bytes
        return rest

    def swallow(self) -> None:
        """Takes the next block in."""
        assert self.behind is not None
        self.num_bytes += self.behind.num_bytes
        self.behind = self.behind.behind
        if self.behind is not None:
            self.behind.before = self


class Pool:
    """A pool of one stream, empty at first.

    Attributes:
        reserved_bytes: of all its segments.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._end = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, then address

    def allocate(self, num_bytes: int) -> Block:
        """The block that an allocation gets; it may be larger than what was asked for."""
        wanted = _rounded(max(num_bytes, 1), UNIT_BYTES)
        is_small = wanted <= SMALL_BYTES
        free = self._free[is_small]
        place = bisect.bisect_left(free, (wanted,))
        block = free.pop(place)[-1] if place < len(free) else self._segment(wanted, is_small)
        block.is_free = False
        left = block.num_bytes - wanted
        if left >= UNIT_BYTES if is_small else left > SMALL_BYTES:
            self._offer(block.cut(wanted))
        return block

    def free(self, block: Block) -> None:
        """Gives a block back."""
        if block.behind is not None and block.behind.is_free:
            self._withdraw(block.behind)
            block.swallow()
        if block.before is not None and block.before.is_free:
            block = block.before
            self._withdraw(block)
            block.swallow()
        self._offer(block)

    def run(self, changes: Iterable[int]) -> None:
        """Makes a sequence's allocations; what it has not freed at its end is freed then."""
        made: dict[int, Block] = {}
        count = 0
        for change in changes:
            if change > 0:
                count += 1
                made[count] = self.allocate(change)
            else:
                self.free(made.pop(-change))
        for block in made.values():
            self.free(block)

    def _segment(self, wanted: int, is_small: bool) -> Block:
        if is_small:
            size = SMALL_SEGMENT_BYTES
        else:
            size = MIDDLE_SEGMENT_BYTES if wanted < LARGE_BYTES else _rounded(wanted, LARGE_UNIT_BYTES)
        block = Block(self._end, size, is_small)
        self._end += size
        self.reserved_bytes += size
        return block

    def _offer(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.num_bytes, block.address, block))

    def _withdraw(self, block: Block) -> None:
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, (block.num_bytes, block.address))]


def peak_bytes(changes: Sequence[int]) -> int:
    """The most that a sequence holds at a time."""
    sizes = [0, *(change for change in changes if change > 0)]
    held = most = 0
    for change in changes:
        held += change if change > 0 else -sizes[-change]
        most = max(most, held)
    return most


def beside(num_bytes: int, changes: Iterable[int]) -> tuple[int, ...]:
    """A sequence in which so many bytes more are held from its beginning to its end."""
    return num_bytes, *(change if change > 0 else change - 1 for change in changes)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
