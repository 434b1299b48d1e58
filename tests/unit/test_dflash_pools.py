"""What torch's allocator would reserve: its rules one by one, and a pool that was measured on a GPU."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from dflash import pools
from dflash.pools import MIB, Pool

MEASURED = Path(__file__).parents[1] / "golden" / "files" / "graph-pool.json"


def reserved(*changes: int) -> int:
    pool = Pool()
    pool.run(changes)
    return pool.reserved_bytes


def test_the_pool_of_three_captures_is_what_torch_reserved_on_an_h200() -> None:
    """Three passes of a 27B target, 4096, 2048 and 512 tokens, as a shadow run told them; the pool was measured."""
    told = json.loads(MEASURED.read_text())
    pool = Pool()
    for changes in told["passes"]:
        pool.run(changes)
    assert pool.reserved_bytes == told["reserved_bytes"]
    assert pool.reserved_bytes > 2 * pools.peak_bytes(told["passes"][0]), "most of it is gaps"


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (95 * MIB, 96 * MIB),
    ],
)
def test_a_segment_has_the_size_of_its_kind(size: int, segment: int) -> None:
    assert reserved(size) == segment


def test_small_blocks_share_a_segment_in_units_of_512_bytes() -> None:
    assert reserved(*[1] * 4096) == 2 * MIB
    assert reserved(*[1] * 4097) == 4 * MIB
    assert reserved(*[513] * 2049) == 4 * MIB


def test_the_two_kinds_share_nothing() -> None:
    assert reserved(40 * MIB, -1, MIB) == 42 * MIB
    assert reserved(MIB, -1, 2 * MIB) == 22 * MIB


def test_what_is_left_over_serves_others_if_it_is_large_enough() -> None:
    assert reserved(40 * MIB, -1, 30 * MIB, 10 * MIB) == 40 * MIB
    assert reserved(40 * MIB, -1, 39 * MIB - 512, MIB + 512) == 40 * MIB
    assert reserved(40 * MIB, -1, 39 * MIB, MIB + 512) == 60 * MIB, "1 MiB stays with the block it is left over from"


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    assert reserved(60 * MIB, 40 * MIB, -1, -2, 40 * MIB, 60 * MIB) == 100 * MIB
    assert reserved(40 * MIB, 60 * MIB, -1, -2, 30 * MIB, 60 * MIB) == 100 * MIB


def test_of_equal_blocks_the_first_is_taken() -> None:
    pool = Pool()
    one, other = pool.allocate(40 * MIB), pool.allocate(40 * MIB)
    pool.free(other)
    pool.free(one)
    assert pool.allocate(40 * MIB) is one


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3)])
def test_neighbours_become_one_block_again(order: tuple[int, ...]) -> None:
    pieces = (60 * MIB, -1, 20 * MIB, 20 * MIB, 20 * MIB)
    assert reserved(*pieces, *(-(number + 1) for number in order), 60 * MIB) == 60 * MIB


def test_segments_do_not_become_one() -> None:
    assert reserved(20 * MIB, 20 * MIB, -1, -2, 40 * MIB) == 80 * MIB


def test_what_a_sequence_leaves_is_free_for_the_next() -> None:
    pool = Pool()
    for _ in range(3):
        pool.run([30 * MIB, 50 * MIB, -1])
    assert pool.reserved_bytes == 80 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_blocks_in_use_never_overlap_and_all_comes_back(seed: int) -> None:
    draw, pool, used, asked = random.Random(seed), Pool(), [], {}
    for _ in range(400):
        if used and draw.random() < 0.5:
            block = used.pop(draw.randrange(len(used)))
            del asked[block]
            pool.free(block)
        else:
            size = draw.choice([draw.randint(1, 4096), draw.randint(1, 4 * MIB), draw.randint(MIB, 50 * MIB)])
            block = pool.allocate(size)
            assert size <= block.num_bytes
            used.append(block)
            asked[block] = size
        spans = sorted((block.address, block.address + block.num_bytes) for block in used)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert sum(asked.values()) <= pool.reserved_bytes
    for block in used:
        pool.free(block)
    free = [block for kind in pool._free.values() for *_, block in kind]
    assert sum(block.num_bytes for block in free) == pool.reserved_bytes
    assert all(block.before is None and block.behind is None for block in free), "each is a whole segment"


def test_peaks_and_what_lies_beside_a_sequence() -> None:
    changes = (5, 7, -1, 3, -2, 20, -3)
    assert pools.peak_bytes(changes) == 23
    assert pools.peak_bytes(()) == 0
    assert pools.beside(100, changes) == (100, 5, 7, -2, 3, -3, 20, -4)
    assert pools.peak_bytes(pools.beside(100, changes)) == 123
