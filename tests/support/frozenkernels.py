"""Kernels of every shape that the frozen launch path has to serve. Their bodies matter only where they are compiled."""

from __future__ import annotations

import triton
import triton.language as tl


def _configs(*sizes: int, pre_hook=None) -> list[triton.Config]:
    return [triton.Config({"BLOCK": size}, num_warps=4 if size < 128 else 8, pre_hook=pre_hook) for size in sizes]


@triton.jit
def plain(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1.0, mask=at < n)


@triton.jit
def inplace(x, value, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + value, mask=at < n)


@triton.autotune(configs=_configs(64, 128), key=["n"])
@triton.jit
def tuned(x, y, alpha, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * alpha, mask=at < n)


@triton.autotune(configs=_configs(64, 128), key=["D", "n", "HAS_BIAS"])
@triton.heuristics({"HAS_BIAS": lambda args: args["bias"] is not None, "NO_SCALE": lambda args: args["scale"] is None})
@triton.jit
def optional(
    x, y, bias, scale, n, D: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, NO_SCALE: tl.constexpr,
    FLAG: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=at < n)
    if not NO_SCALE:
        value *= scale
    if FLAG:
        value += D
    tl.store(y + at, value, mask=at < n)


@triton.heuristics({"HAS_BIAS": lambda args: args["bias"] is not None})
@triton.autotune(configs=_configs(64, 128), key=["n", "HAS_BIAS"])
@triton.jit
def outer_heuristic(x, bias, n, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=at < n)
    tl.store(x + at, value, mask=at < n)


@triton.autotune(configs=_configs(128), key=["n"])
@triton.jit
def one_config(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.autotune(configs=_configs(64, 128), key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def computed(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + EVEN, mask=at < n)


HOOKED: list = []
"""What the hook below was given, while a test wants to know."""


HOOK: list = [None]
"""What the hook calls instead, where a test puts it here."""


def _note(arguments) -> None:
    (HOOK[0] or HOOKED.append)(arguments)


@triton.autotune(configs=_configs(64, 128, pre_hook=_note), key=["n"])
@triton.jit
def hooked(x, y, alpha, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * alpha, mask=at < n)


@triton.autotune(configs=_configs(64, 128), key=["n"], restore_value=["x"], reset_to_zero=["y"])
@triton.jit
def restoring(x, y, alpha, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * alpha, mask=at < n)


@triton.jit
def defaults(x, n, value=2.0, other=None, BLOCK: tl.constexpr = 64):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + value, mask=at < n)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x"])
def unspecialized(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def annotated(x, n: tl.int64, value: tl.float32, flag: tl.int1, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + value, mask=at < n)


@triton.jit
def typed(x, n, KIND: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, (tl.load(x + at, mask=at < n) + KIND).to(DTYPE), mask=at < n)


@triton.jit
def twice(value):
    return value * 2


@triton.jit
def called(x, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, FUNCTION(tl.load(x + at, mask=at < n)), mask=at < n)


@triton.jit
def meta_first(x, BLOCK: tl.constexpr, n, value):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + value, mask=at < n)


tuned_meta_first = triton.autotune(configs=_configs(64, 128), key=["n"])(meta_first)
meta_first = tuned_meta_first
