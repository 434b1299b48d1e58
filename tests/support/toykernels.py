"""Small kernels for tests of the builder: tuned, untuned, in place, accumulating, and some wrong on purpose."""

from __future__ import annotations

import triton
import triton.language as tl


def _configs(*sizes: int, warps: tuple[int, ...] = (4,)) -> list[triton.Config]:
    return [triton.Config({"BLOCK": size}, num_warps=number) for size in sizes for number in warps]


@triton.autotune(configs=_configs(32, 64, 128), key=["n"])
@triton.jit
def scale(x, y, alpha, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * alpha, mask=at < n)


@triton.jit
def shift(x, n, BLOCK: tl.constexpr):
    """In place and not tuned."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1.0, mask=at < n)


@triton.autotune(configs=_configs(32, 64), key=["n"], restore_value=["total"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def accumulate(x, total, bias, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Adds to what is there already; ``bias`` may be absent."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        value = tl.load(x + at)
    else:
        value = tl.load(x + at, mask=at < n, other=0.0)
    if bias is not None:
        value += tl.load(bias + at, mask=at < n, other=0.0)
    tl.store(total + at, tl.load(total + at, mask=at < n) + value, mask=at < n)


@triton.jit(do_not_specialize=("first",))
def mark(x, loss, positive, first, n, BLOCK: tl.constexpr):
    """Fills some rows of larger outputs, one of them of truth values."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(loss + first + at, value * value, mask=at < n)
    tl.store(positive + first + at, value > 0, mask=at < n)


@triton.autotune(configs=_configs(16, 32, 64, 128), key=["n"])
@triton.jit
def wrong_at_128(x, y, n, BLOCK: tl.constexpr):
    """One of four configs doubles everything."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if BLOCK == 128:
        value = value * 2.0
    tl.store(y + at, value, mask=at < n)


@triton.autotune(configs=_configs(16, 32, 64), key=["n"])
@triton.jit
def strays_at_64(x, y, n, BLOCK: tl.constexpr):
    """One of three configs writes without a mask, past the end of its output."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if BLOCK == 64:
        tl.store(y + at, value)
    else:
        tl.store(y + at, value, mask=at < n)


@triton.autotune(configs=_configs(16, 32, 64), key=["n"])
@triton.jit
def leaves_gaps_at_64(x, y, n, BLOCK: tl.constexpr):
    """One of three configs writes every other element only, of an output that is right by chance."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if BLOCK == 64:
        tl.store(y + at, value, mask=(at < n) & (at % 2 == 0))
    else:
        tl.store(y + at, value, mask=at < n)


@triton.autotune(configs=_configs(16, 32, 64), key=["n"])
@triton.jit
def mostly_wrong(x, y, n, BLOCK: tl.constexpr):
    """Two of three configs agree on a wrong result."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if BLOCK > 16:
        value = value + 1.0
    tl.store(y + at, value, mask=at < n)
