"""Which arguments a kernel may write to, read off its source. The functions below are never run."""

from __future__ import annotations

from typing import Any

import pytest

from kernelbake.writes import written_parameters

tl: Any = None


def stores(x, y, n):
    tl.store(y + n, tl.load(x))


def moves_the_pointer_first(x, y, n):
    y += n * 4
    p_y = tl.make_block_ptr(y, (n,), (1,), (0,), (16,), (0,))
    tl.store(p_y, tl.load(x), boundary_check=(0,))


def reads_bounds(bounds, y, n):
    begin = tl.load(bounds + tl.program_id(0)).to(tl.int32)
    y = y + begin * n
    tl.store(y, 0.0)


def counts(marks, counter, n):
    tl.atomic_add(counter + tl.load(marks), 1)


def through_a_descriptor(x, y, n):
    out = tl.make_tensor_descriptor(y, (n,), (1,), (16,))
    out.store([0], tl.load(x))


def helper(out, value):
    tl.store(out, value)


def reading_helper(at):
    return tl.load(at) + 1


def through_a_helper(x, y, n):
    helper(y + n, reading_helper(x))


def through_a_keyword(x, y, n):
    helper(value=tl.load(x), out=y)


def recursive(x, n):
    recursive(x, n - 1)
    tl.store(x, n)


def in_a_loop(x, y, n):
    for p in (x, y):
        tl.store(p, n)


def in_a_branch(x, y, flag):
    p = x if flag else y
    if (q := p + 1) is not None:
        tl.store(q, 0)


def annotated(x, y, n):
    p: Any = y
    tl.store(p, tl.load(x))


def only_reads(x, y, n):
    return tl.sum(tl.load(x) * tl.load(y)) + n


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (stores, {"y"}),
        (moves_the_pointer_first, {"y"}),
        (reads_bounds, {"y"}),
        (counts, {"counter"}),
        (through_a_descriptor, {"y"}),
        (through_a_helper, {"y"}),
        (through_a_keyword, {"y"}),
        (recursive, {"x"}),
        (in_a_loop, {"x", "y"}),
        (in_a_branch, {"x", "y"}),
        (annotated, {"y"}),
        (only_reads, set()),
    ],
)
def test_pointers_are_followed_to_stores(function: Any, written: set[str]) -> None:
    numbers = {"n", "flag"}
    assert written_parameters(function) - numbers == written


def test_a_function_of_another_place_is_found_by_the_given_resolver() -> None:
    def calls_by_another_name(x, y):
        somewhere_else(y, tl.load(x))  # noqa: F821

    assert written_parameters(calls_by_another_name) == frozenset()
    assert written_parameters(calls_by_another_name, {"somewhere_else": helper}.get) == {"y"}
