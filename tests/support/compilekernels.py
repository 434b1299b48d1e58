"""Kernels whose compilation does what a bad candidate's does: raises, aborts, hangs, needs too much."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _misbehave(how):
    import os
    import signal
    import time

    if how == "abort":
        os.abort()
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        time.sleep(3600)
    if how == "exit":
        os._exit(7)
    if how == "runtime":
        raise RuntimeError("PassManager::run failed")
    if how == "assertion":
        raise AssertionError("not this tile")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "quit":
        raise SystemExit(3)
    return 0


@triton.jit
def misbehaving(x, HOW: tl.constexpr):
    tl.store(x, _misbehave(HOW))


@triton.jit
def product(
    a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + start + inner[None, :])
        right = tl.load(b + (start + inner[:, None]) * N + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16))
