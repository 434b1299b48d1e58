"""Anchor attention against compiled flex attention, and the block loss against its two matrix products.

Both sides run in one process, each captured as a CUDA graph, and are timed in turn; a figure is the median of rounds.
Flex gets its block mask for free. FLOPs count unmasked pairs of row and key only: 2 products forward, 5 backward.
Compilers run first, in processes of their own that leave their results on disk; the same processes compare random
calls with float64. Nothing else runs while something is timed.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch
from common import say

sys.path[:0] = [str(common.ROOT), str(common.ROOT / "tests" / "support")]

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
MAIN, HALF = (4096, 512), (4096, 256)
COMPARED = (MAIN, *itertools.product((2048, 8192), (128, 256, 512)))
ROUNDS = 7
ROUND_MS = 25.0
VOCABULARY, ROWS, HIDDEN, CHUNK_ROWS = 248_320, 8192, 5120, 1024
WORKERS = 12
AGREEMENT = 2e-2
"""Largest relative distance of the two sides' results: beyond, they do not compute the same."""


def main() -> None:
    """Runs everything and writes ``attention_<gpu>.json`` at the end; what is known is printed as it comes."""
    parser = common.parser(__doc__)
    parser.add_argument("--name", default="attention_h200", help="name of the results file")
    options = parser.parse_args()
    recorder = common.Recorder(options.name, __file__, options.commit, options.results)
    prepare(recorder)
    ceilings = measure_ceilings()
    say(f"ceilings: {ceilings}")
    attention(recorder, ceilings)
    head_loss(recorder)
    path = recorder.write()
    json.dump(recorder.figures, sys.stdout, indent=1)
    print(f"\n{path}")


# ---------------------------------------------------------------------------------------------- compilers and errors


def prepare(recorder: common.Recorder) -> None:
    """Compiles everything, and records the largest relative errors of output and gradients against float64."""
    import attention_cases as cases

    configs = range(max(_number_of_configs()))
    jobs: list[tuple[Callable[..., float], tuple[Any, ...]]] = [
        *((compile_flex, shape) for shape in COMPARED),
        *((errors_of_candidate, (index, name)) for name in ("float32", "bfloat16") for index in configs),
        *((errors_of_form, (form, name)) for name in ("float32", "bfloat16") for form in range(len(cases.FORMS))),
    ]
    worst = {"float32": 0.0, "bfloat16": 0.0}
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(WORKERS, len(os.sched_getaffinity(0)) - 1))
    found: dict[str, float] = {}
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(function, *given): (function, given) for function, given in jobs}
        for future in concurrent.futures.as_completed(futures):
            function, given = futures[future]
            name = f"{function.__name__} {' '.join(map(str, given))}"
            found[name] = future.result()
            say(f"{name}: {found[name]:.3g}")
            if function is not compile_flex:
                worst[given[1]] = max(worst[given[1]], found[name])
    recorder.add("max_rel_err_bf16", worst["bfloat16"])
    recorder.add("max_rel_err_fp32", worst["float32"])
    recorder.raw["errors"] = {name: value for name, value in found.items() if not name.startswith("compile")}
    recorder.raw["random_shapes"] = cases.RANDOM_SHAPES


def _number_of_configs() -> tuple[int, int]:
    from dflash.attention import candidates

    return len(candidates.FORWARD), len(candidates.BACKWARD)


def compile_flex(context_length: int, num_blocks: int) -> float:
    """Leaves flex's code for a shape in the compiler's caches on disk; how long that took, in seconds."""
    begin = time.perf_counter()
    Flex(context_length, num_blocks, inputs(context_length, num_blocks)).step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return time.perf_counter() - begin


def errors_of_form(form: int, dtype: str) -> float:
    """The largest error of all random calls of a form."""
    import attention_cases as cases

    seeds = range(form, cases.RANDOM_SHAPES, len(cases.FORMS))
    worst = max(max(cases.random_errors(seed, getattr(torch, dtype)).values()) for seed in seeds)
    torch.cuda.empty_cache()
    return worst


def errors_of_candidate(index: int, dtype: str) -> float:
    """The largest error of a call with the heads that are timed, for the candidates of this index."""
    import attention_cases as cases

    case = cases.AttentionCase(
        context_length=900, num_blocks=30, block_size=BLOCK_SIZE, kv_heads=KV_HEADS, group=HEADS // KV_HEADS,
        head_dim=HEAD_DIM, seed=index,
    )  # fmt: skip
    with cases.fixed_config(lambda configs: configs[index % len(configs)]):
        worst = max(cases.errors(case, getattr(torch, dtype), "cuda").values())
    torch.cuda.empty_cache()
    return worst


# ---------------------------------------------------------------------------------------------- timing


def graph(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The step's launches, captured after three runs of it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return captured


def elapsed_ms(run: Callable[[], Any], repeats: int) -> float:
    """Mean device time of a run."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def in_turn(runs: Sequence[Callable[[], Any]], rounds: int = ROUNDS) -> list[list[float]]:
    """Times of each run in every round, in ms; the runs take turns."""
    repeats = [max(1, math.ceil(ROUND_MS / max(elapsed_ms(run, 2), 1e-3))) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, count, found in zip(runs, repeats, times, strict=True):
            found.append(elapsed_ms(run, count))
    return times


def peak_bytes(step: Callable[[], Any]) -> int:
    """Memory that a step takes above what is allocated before it, results included."""
    step()
    torch.cuda.synchronize()
    before = int(torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    torch.cuda.synchronize()
    peak = int(torch.cuda.max_memory_allocated()) - before
    del kept
    return peak


def measure_ceilings() -> dict[str, float]:
    """TFLOP/s of a large bf16 product of random numbers, and TB/s of a large copy, bytes read and written."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    out = torch.empty_like(a)
    product, copy = in_turn([lambda: torch.mm(a, b, out=out), lambda: target.copy_(source)])
    return {
        "bf16_tflops": 2 * 8192**3 / statistics.median(product) / 1e9,
        "copy_tb_per_s": 2 * source.numel() / statistics.median(copy) / 1e9,
    }


# ---------------------------------------------------------------------------------------------- attention


def inputs(context_length: int, num_blocks: int) -> dict[str, torch.Tensor]:
    """Random q, k, v, gradient and sorted anchors of one sequence."""
    random = torch.Generator(device="cuda").manual_seed(context_length + num_blocks)
    rows = num_blocks * BLOCK_SIZE
    keys = context_length + rows
    made = {
        name: torch.randn(1, length, heads, HEAD_DIM, device="cuda", generator=random).bfloat16()
        for name, length, heads in (
            ("q", rows, HEADS),
            ("k", keys, KV_HEADS),
            ("v", keys, KV_HEADS),
            ("grad", rows, HEADS),
        )
    }
    positions = torch.randperm(context_length, device="cuda", generator=random)[:num_blocks]
    made["anchors"] = positions.sort().values.int()[None]
    return made


class Ours:
    """Forward and backward of anchor attention, tuned by Triton's own autotuner at the first call of a size class."""

    def __init__(self, context_length: int, made: dict[str, torch.Tensor]) -> None:
        self.context_length, self.made = context_length, made
        self.leaves = [made[name].clone().requires_grad_() for name in ("q", "k", "v")]

    def forward(self) -> torch.Tensor:
        from dflash.attention.api import anchor_attention

        q, k, v = self.leaves
        return anchor_attention(
            q, k, v, self.made["anchors"], block_size=BLOCK_SIZE, context_length=self.context_length
        )

    def step(self) -> tuple[torch.Tensor, ...]:
        out = self.forward()
        return (out, *torch.autograd.grad(out, self.leaves, self.made["grad"]))


class Flex:
    """The same through ``flex_attention``, compiled for exactly this shape with torch's default options."""

    def __init__(self, context_length: int, num_blocks: int, made: dict[str, torch.Tensor]) -> None:
        import torch._inductor.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._inductor.config.compile_threads = 1  # a pool of compilers takes longer to start than these two kernels
        torch._dynamo.reset()
        anchors, rows = made["anchors"][0], num_blocks * BLOCK_SIZE

        def visible(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            block = row // BLOCK_SIZE
            own = (key >= context_length) & ((key - context_length) // BLOCK_SIZE == block)
            return own | ((key < context_length) & (key < anchors[block]))

        self.mask = create_block_mask(visible, None, None, rows, context_length + rows, device=str(anchors.device))
        self.attention = torch.compile(flex_attention, dynamic=False)
        self.leaves = [made[name].transpose(1, 2).contiguous().requires_grad_() for name in ("q", "k", "v")]
        self.grad = made["grad"].transpose(1, 2).contiguous()

    def mask_bytes(self) -> int:
        """Memory of the block mask, needed until the backward pass; our side makes its bounds within the step."""
        kinds = ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
        names = (f"{prefix}{kind}" for prefix in ("", "full_") for kind in kinds)
        tensors = (getattr(self.mask, name) for name in names)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.attention(*self.leaves, block_mask=self.mask, enable_gqa=True)
        return out

    def step(self) -> tuple[torch.Tensor, ...]:
        out = self.forward()
        return (out, *torch.autograd.grad(out, self.leaves, self.grad))


def attention(recorder: common.Recorder, ceilings: dict[str, float]) -> None:
    """All shapes; one, of which only our own time is needed, without the other side."""
    shapes: dict[tuple[int, int], dict[str, Any]] = {}
    for shape in (*COMPARED, HALF):
        shapes[shape] = measure(shape, ceilings, compared=shape in COMPARED)
    ratios = {shape: shapes[shape]["ratio"] for shape in COMPARED}
    halvings = {
        f"{context} {2 * num} -> {num}": shapes[context, num]["ours_ms"] / shapes[context, 2 * num]["ours_ms"]
        for context, num in shapes
        if (context, 2 * num) in shapes
    }
    recorder.add("ratio_to_flex_4096_512", ratios[MAIN])
    recorder.add("worst_ratio_to_flex", max(ratios.values()))
    recorder.add("halving_ratio", max(halvings.values()))
    peaks = [
        shapes[shape]["peak_bytes"] / (shapes[shape]["flex_peak_bytes"] + shapes[shape]["flex_mask_bytes"])
        for shape in COMPARED
    ]
    recorder.add("peak_ratio_to_flex", max(peaks))
    recorder.add("roofline_share", shapes[MAIN]["roofline_share"])
    recorder.raw["ceilings"] = ceilings
    recorder.raw["halvings"] = halvings
    recorder.raw["shapes"] = {f"{context} {num}": found for (context, num), found in shapes.items()}


def measure(shape: tuple[int, int], ceilings: dict[str, float], *, compared: bool) -> dict[str, Any]:
    """Times, memory and roofline of one shape."""
    made = inputs(*shape)
    flex = Flex(*shape, made) if compared else None
    sides: list[Ours | Flex] = [Ours(shape[0], made), *([flex] if flex is not None else [])]
    results = [side.step() for side in sides]
    agreement = [
        ((mine.transpose(1, 2) - theirs).norm() / theirs.norm()).item()
        for mine, theirs in zip(results[0], results[-1] if compared else (), strict=compared)
    ]
    if any(not distance <= AGREEMENT for distance in agreement):
        sys.exit(f"benchmark: the sides differ by {agreement} at {shape}; wanted at most {AGREEMENT}")
    del results
    peaks = [peak_bytes(side.step) for side in sides]
    graphs = [graph(run) for side in sides for run in (side.step, side.forward)]
    times = in_turn([captured.replay for captured in graphs])
    medians = [statistics.median(found) for found in times]
    found: dict[str, Any] = {"ours_ms": medians[0], "ours_forward_ms": medians[1], "peak_bytes": peaks[0]}
    found.update(roofline(made, shape[1], medians[0], ceilings), winners=winners(), rounds_ms=times)
    text = f"attention {shape}: {medians[0]:.3f} ms, {found['tflops']:.0f} TFLOP/s"
    if flex is not None:
        ratio = statistics.median(mine / theirs for mine, theirs in zip(times[0], times[2], strict=True))
        found.update(ratio=ratio, flex_ms=medians[2], flex_forward_ms=medians[3], flex_peak_bytes=peaks[1])
        found["flex_mask_bytes"] = flex.mask_bytes()
        found["agreement_with_flex"] = agreement
        text += f", flex {medians[2]:.3f} ms, ratio {ratio:.3f}, peak {peaks[0] >> 20} of {peaks[1] >> 20} MiB"
    say(text)
    return found


def roofline(
    made: dict[str, torch.Tensor], num_blocks: int, milliseconds: float, ceilings: dict[str, float]
) -> dict[str, float]:
    """FLOPs, bytes, and the share of what the machine's own ceilings would allow."""
    pairs = made["anchors"].long().sum().item() * BLOCK_SIZE + num_blocks * BLOCK_SIZE**2
    flops = 7 * 2 * HEAD_DIM * HEADS * pairs
    moved = sum(
        made[name].numel() * 2 * count for name, count in (("q", 5), ("k", 3), ("v", 3), ("grad", 2))
    )  # q read twice, out written and read, dq written; k and v read twice, dk and dv written; grad read twice
    floor = max(flops / ceilings["bf16_tflops"] / 1e9, moved / ceilings["copy_tb_per_s"] / 1e9)
    return {
        "flops": flops,
        "bytes": moved,
        "tflops": flops / milliseconds / 1e9,
        "roofline_share": floor / milliseconds,
    }


def winners() -> dict[str, str]:
    """The configs that Triton's autotuner took last."""
    from dflash.attention import kernels

    return {
        function.base_fn.__name__: str(function.best_config)
        for function in (kernels.anchor_forward_kernel, kernels.anchor_backward_kernel)
    }


# ---------------------------------------------------------------------------------------------- head and loss


def head_loss(recorder: common.Recorder) -> None:
    """Forward and backward of head and cross entropy against the two matrix products that it cannot do without."""
    from dflash import losses

    random = torch.Generator(device="cuda").manual_seed(0)
    head = torch.randn(VOCABULARY, HIDDEN, device="cuda", generator=random).bfloat16() * 0.02
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", generator=random).bfloat16().requires_grad_()
    labels = torch.randint(0, VOCABULARY, (ROWS,), device="cuda", generator=random)
    weights = torch.rand(ROWS, device="cuda", generator=random)

    def step() -> torch.Tensor:
        loss, _ = losses.block_loss(hidden, head, labels, weights, chunk_rows=CHUNK_ROWS)
        return torch.autograd.grad(loss, hidden)[0]

    peak = peak_bytes(step)
    rows = hidden.detach()
    logits = torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16, device="cuda")
    gradient = torch.empty_like(rows)

    def products() -> None:
        torch.mm(rows, head.t(), out=logits)
        torch.mm(logits, head, out=gradient)

    times = in_turn([step, products])
    recorder.add("head_loss_ratio", statistics.median(mine / theirs for mine, theirs in zip(*times, strict=True)))
    recorder.add("head_loss_peak_bytes", peak)
    recorder.raw["head_loss"] = {
        "vocabulary": VOCABULARY,
        "rows": ROWS,
        "hidden": HIDDEN,
        "chunk_rows": CHUNK_ROWS,
        "flops": 4 * ROWS * VOCABULARY * HIDDEN,
        "rounds_ms": times,
    }
    say(f"head and loss: ratio {recorder.figures['head_loss_ratio']:.3f}, peak {peak >> 20} MiB, {times}")


if __name__ == "__main__":
    main()
