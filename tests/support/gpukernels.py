"""Kernels for tests on a real GPU: each has one config that hangs, crashes or wavers, and others that are right."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


def _configs(*sizes: int) -> list[triton.Config]:
    return [triton.Config({"BLOCK": size}, num_warps=4) for size in sizes]


@triton.autotune(configs=_configs(32, 64, 128), key=["n"])
@triton.jit
def hangs_at_128(x, y, gate, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BLOCK == 128:
        closed = tl.load(gate, volatile=True)
        while closed == 0:
            closed = tl.load(gate, volatile=True)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.autotune(configs=_configs(16, 32, 64, 128, 256), key=["n"])
@triton.jit
def crashes_at_32(x, y, n, BLOCK: tl.constexpr):
    """The second of five writes where nothing is; the error stays until the process ends."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    value = tl.load(x + at, mask=at < n)
    if BLOCK == 32:
        tl.store(y + at + (1 << 42), value, mask=at < n)
    tl.store(y + at, value, mask=at < n)


@triton.autotune(configs=_configs(32, 64, 128), key=["n"])
@triton.jit
def wavers_at_128(x, y, n, BLOCK: tl.constexpr):
    """One config adds up to 1e-2 of what it likes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if BLOCK == 128:
        value += (cuda.globaltimer() % 97).to(tl.float32) * 1e-4
    tl.store(y + at, value, mask=at < n)


@triton.autotune(configs=_configs(32, 64), key=["n"], restore_value=["pool"])
@triton.jit
def touches_little(pool, n, BLOCK: tl.constexpr):
    """In place, on the first elements of something large."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pool + at, tl.load(pool + at, mask=at < n) + 1.0, mask=at < n)
