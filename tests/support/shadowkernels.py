"""Small kernels for tests of the planner: one for each thing that decides about a key or a specialization."""

from __future__ import annotations

import triton
import triton.language as tl


def _configs(*blocks: int, **options: int) -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}, **options) for block in blocks]


@triton.jit
def plain(x, y, n, stride, BLOCK: tl.constexpr):
    """Neither tuned nor wrapped."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at * stride, mask=at < n), mask=at < n)


@triton.jit(do_not_specialize=["n", "SIZE"])
def marked(x, n, SIZE: tl.constexpr):
    """A mark on a constexpr has no effect; one on an argument has."""
    tl.store(x + SIZE, n)


@triton.jit(do_not_specialize_on_alignment=["x"])
def unaligned(x, n):
    tl.store(x, n)


@triton.jit
def optional(x, bias, scale, flag, pair, n):
    value = tl.load(x) * scale + pair[0]
    if bias is not None:
        value += tl.load(bias)
    tl.store(x + n, value + flag)


@triton.autotune(configs=_configs(32, 64, 128), key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0, "LARGE": lambda args: args["EVEN"]})
@triton.jit
def heuristics_inside(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr, LARGE: tl.constexpr):
    """What heuristics say depends on the candidate, and on each other."""
    tl.store(x + n % BLOCK, 1.0)


@triton.heuristics({"B": lambda args: args["x"].shape[0], "HAS_BIAS": lambda args: args["bias"] is not None})
@triton.autotune(configs=_configs(32, 64), key=["B", "HAS_BIAS"])
@triton.jit
def heuristics_outside(x, bias, BLOCK: tl.constexpr, B: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The key holds what heuristics say."""
    tl.store(x + B % BLOCK, 1.0)


def _small_only(configs, nargs, **kwargs):
    limit = nargs.get("n") or kwargs["n"]
    return [config for config in configs if config.kwargs["BLOCK"] <= limit]


@triton.autotune(configs=_configs(16, 32, 64, 128), key=["n"], prune_configs_by={"early_config_prune": _small_only})
@triton.jit
def pruned(x, n, BLOCK: tl.constexpr):
    tl.store(x + n % BLOCK, 1.0)


def _prefer_large(BLOCK, **_):
    return -BLOCK


@triton.autotune(
    configs=_configs(16, 32, 64, 128), key=["n"], prune_configs_by={"perf_model": _prefer_large, "top_k": 2}
)
@triton.jit
def modelled(x, n, BLOCK: tl.constexpr):
    tl.store(x + n % BLOCK, 1.0)


@triton.autotune(configs=_configs(64, num_warps=8, num_stages=1), key=["n"])
@triton.jit
def single(x, n, BLOCK: tl.constexpr):
    """One config: nothing is looked up."""
    tl.store(x + n % BLOCK, 1.0)


@triton.autotune(configs=_configs(32, 64), key=["n", "BLOCK"] if triton.__version__ < "3.9" else ["n"])
@triton.jit
def keyed(x, y, n, BLOCK: tl.constexpr):
    """Up to Triton 3.8 a key may name what is tuned; it is dropped."""
    tl.store(y + n % BLOCK, tl.load(x))


HOOKED: list[dict] = []


@triton.autotune(configs=[triton.Config({"BLOCK": 32}, pre_hook=HOOKED.append)], key=["n"])
@triton.jit
def hooked(x, n, BLOCK: tl.constexpr):
    tl.store(x + n % BLOCK, 1.0)


@triton.autotune(configs=_configs(32, 64), key=["n"], restore_value=["cache"], reset_to_zero=["total"])
@triton.jit
def restored(x, cache, total, n, BLOCK: tl.constexpr):
    value = tl.load(x + n % BLOCK)
    if cache is not None:
        tl.store(cache, value)
    tl.atomic_add(total, value)


@triton.jit
def double(value):
    return value * 2


@triton.jit
def triple(value):
    return value * 3


@triton.jit
def chosen(x, n, FUNCTION: tl.constexpr, DTYPE: tl.constexpr):
    """A device function and a dtype as constants."""
    tl.store(x + n, FUNCTION(tl.load(x)).to(DTYPE))


@triton.jit
def counting(marks, counts, n):
    """Reads marks, writes counts."""
    tl.atomic_add(counts + tl.load(marks), n)
