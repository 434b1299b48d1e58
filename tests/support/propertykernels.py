"""Kernels for random workloads: their keys and constants follow shapes in the ways that kernel libraries know."""

from __future__ import annotations

import triton
import triton.language as tl


def _configs(*blocks: int) -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}, num_warps=warps) for block in blocks for warps in (2, 4)]


@triton.heuristics({"HAS_BIAS": lambda args: args["bias"] is not None})
@triton.autotune(configs=_configs(32, 64), key=["D", "NB", "HAS_BIAS"])
@triton.jit
def norm(x, bias, y, rows, eps, D: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < rows * D) + eps, mask=at < rows * D)


def _fits(configs, nargs, **kwargs):
    size = {**nargs, **kwargs}["D"]
    return [config for config in configs if config.kwargs["BLOCK"] <= size] or configs[:1]


@triton.autotune(
    configs=_configs(16, 64, 128),
    key=["H", "D", "IS_VARLEN"],
    prune_configs_by={"early_config_prune": _fits},
    restore_value=["state"],
)
@triton.heuristics(
    {"IS_VARLEN": lambda args: args["bounds"] is not None, "EVEN": lambda args: args["T"] % args["BLOCK"] == 0}
)
@triton.jit
def scan(
    x, state, bounds, chunks, T, num_chunks, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    IS_VARLEN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tl.store(x + T, num_chunks)


@triton.autotune(configs=_configs(64)[:1], key=["n"])
@triton.jit
def scale(x, y, n, stride_b, stride_t, factor, BLOCK: tl.constexpr):
    tl.store(y + n * stride_b, tl.load(x + stride_t) * factor)


@triton.jit
def reduce(x, out, n, PER_PROGRAM: tl.constexpr):
    tl.store(out, tl.load(x + n * PER_PROGRAM))


@triton.jit
def reduce_backward(grad, x, n, PER_PROGRAM: tl.constexpr):
    tl.store(x + n * PER_PROGRAM, tl.load(grad))
