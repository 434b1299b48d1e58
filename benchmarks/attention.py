"""Anchor attention against compiled flex attention, and the block loss against its two matrix products.

Both sides run in one process, each captured as a CUDA graph, and are timed in turn; a figure is the median of rounds.
Flex gets its block mask for free. FLOPs count unmasked pairs of row and key only: 2 products forward, 5 backward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash import losses
from dflash.attention.api import anchor_attention
from dflash.attention.reference import reference_attention

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
CONTEXTS, ANCHORS = (2048, 4096, 8192), (128, 256, 512)
MAIN = (4096, 512)
ROUNDS = 7
ROUND_MS = 25.0
VOCABULARY, ROWS, HIDDEN, CHUNK_ROWS = 248_320, 8192, 5120, 1024
ERROR_SHAPES = 10


def main() -> None:
    """Runs everything and writes ``attention_<gpu>.json``."""
    parser = common.parser(__doc__)
    parser.add_argument("--name", default="attention_h200", help="name of the results file")
    parser.add_argument("--warm", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm:
        context, num = options.warm
        Flex(context, num, inputs(context, num)).step()
        return
    recorder = common.Recorder(options.name, __file__, options.commit, options.results)
    warm_flex()
    ceilings = measure_ceilings()
    attention(recorder, ceilings)
    errors(recorder)
    head_loss(recorder)
    path = recorder.write()
    json.dump(recorder.figures, sys.stdout, indent=1)
    print(f"\n{path}")


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
    """Forward and backward of anchor attention, tuned by Triton's own autotuner at the first call."""

    def __init__(self, context_length: int, made: dict[str, torch.Tensor]) -> None:
        self.context_length, self.made = context_length, made
        self.leaves = [made[name].clone().requires_grad_() for name in ("q", "k", "v")]

    def forward(self) -> torch.Tensor:
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
        torch._dynamo.reset()
        anchors, rows = made["anchors"][0], num_blocks * BLOCK_SIZE

        def visible(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            block = row // BLOCK_SIZE
            own = (key >= context_length) & ((key - context_length) // BLOCK_SIZE == block)
            return own | ((key < context_length) & (key < anchors[block]))

        self.mask = torch.compile(create_block_mask)(visible, None, None, rows, context_length + rows, device="cuda")
        self.attention = torch.compile(flex_attention)
        self.leaves = [made[name].transpose(1, 2).contiguous().requires_grad_() for name in ("q", "k", "v")]
        self.grad = made["grad"].transpose(1, 2).contiguous()

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.attention(*self.leaves, block_mask=self.mask, enable_gqa=True)
        return out

    def step(self) -> tuple[torch.Tensor, ...]:
        out = self.forward()
        return (out, *torch.autograd.grad(out, self.leaves, self.grad))


def warm_flex() -> None:
    """Compiles flex for all shapes at once, in processes of their own, into the compiler's disk cache."""
    shapes = [(context, num) for context in CONTEXTS for num in ANCHORS]
    children = [
        subprocess.Popen([sys.executable, __file__, "--warm", str(context), str(num)]) for context, num in shapes
    ]
    failed = [shape for shape, child in zip(shapes, children, strict=True) if child.wait()]
    if failed:
        sys.exit(f"benchmark: flex attention failed to compile for {failed}")


def attention(recorder: common.Recorder, ceilings: dict[str, float]) -> None:
    """All shapes on both sides."""
    shapes: dict[tuple[int, int], dict[str, Any]] = {}
    for context in CONTEXTS:
        for num in ANCHORS:
            shapes[context, num] = compare(context, num, ceilings)
            print(f"attention {context} {num}: {shapes[context, num]}", file=sys.stderr, flush=True)
    ratios = {shape: found["ratio"] for shape, found in shapes.items()}
    halvings = {
        f"{context} {many} -> {few}": shapes[context, few]["ours_ms"] / shapes[context, many]["ours_ms"]
        for context in CONTEXTS
        for few, many in itertools.pairwise(ANCHORS)
    }
    recorder.add("ratio_to_flex_4096_512", ratios[MAIN])
    recorder.add("worst_ratio_to_flex", max(ratios.values()))
    recorder.add("halving_ratio", halvings["4096 512 -> 256"])
    recorder.add("peak_ratio_to_flex", max(found["peak_bytes"] / found["flex_peak_bytes"] for found in shapes.values()))
    recorder.add("roofline_share", shapes[MAIN]["roofline_share"])
    recorder.raw["ceilings"] = ceilings
    recorder.raw["halvings"] = halvings
    recorder.raw["shapes"] = {f"{context} {num}": found for (context, num), found in shapes.items()}


def compare(context: int, num: int, ceilings: dict[str, float]) -> dict[str, Any]:
    """Times, memory and roofline of one shape."""
    made = inputs(context, num)
    ours, flex = Ours(context, made), Flex(context, num, made)
    agreement = [
        ((mine.transpose(1, 2) - theirs).norm() / theirs.norm()).item()
        for mine, theirs in zip(ours.step(), flex.step(), strict=True)
    ]
    peak, flex_peak = peak_bytes(ours.step), peak_bytes(flex.step)
    graphs = [graph(run) for run in (ours.step, flex.step, ours.forward, flex.forward)]
    times = in_turn([captured.replay for captured in graphs])
    both, flex_both, forward, flex_forward = (statistics.median(found) for found in times)
    pairs = made["anchors"].long().sum().item() * BLOCK_SIZE + num * BLOCK_SIZE**2
    flops = 7 * 2 * HEAD_DIM * HEADS * pairs
    moved = sum(
        made[name].numel() * 2 * count for name, count in (("q", 5), ("k", 3), ("v", 3), ("grad", 2))
    )  # q, out and grad read, out and dq written; k and v read twice, dk and dv written; grad read twice
    floor = max(flops / ceilings["bf16_tflops"] / 1e9, moved / ceilings["copy_tb_per_s"] / 1e9)
    return {
        "ours_ms": both,
        "flex_ms": flex_both,
        "ratio": statistics.median(mine / theirs for mine, theirs in zip(times[0], times[1], strict=True)),
        "ours_forward_ms": forward,
        "flex_forward_ms": flex_forward,
        "flops": flops,
        "bytes": moved,
        "tflops": flops / both / 1e9,
        "roofline_share": floor / both,
        "peak_bytes": peak,
        "flex_peak_bytes": flex_peak,
        "agreement_with_flex": agreement,
        "rounds_ms": times[:2],
    }


def errors(recorder: common.Recorder) -> None:
    """Largest relative error of output and gradients against float64, winners of Triton's autotuner."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        worst = 0.0
        for seed in range(ERROR_SHAPES):
            worst = max(worst, *error(seed, dtype))
        recorder.add(f"max_rel_err_{name}", worst)
        print(f"errors {name}: {worst:.2e}", file=sys.stderr, flush=True)


def error(seed: int, dtype: torch.dtype) -> list[float]:
    """Errors of output, dQ, dK and dV for random numbers, anchors and padding of one seed."""
    random = torch.Generator(device="cuda").manual_seed(seed)
    context, num, batch = 200 + 53 * seed, 11 + 3 * seed, 1 + seed % 2
    rows = num * BLOCK_SIZE
    queries, keys = (batch, rows, HEADS, HEAD_DIM), (batch, context + rows, KV_HEADS, HEAD_DIM)
    q, k, v, grad = (
        torch.randn(shape, device="cuda", generator=random).to(dtype) for shape in (queries, keys, keys, queries)
    )
    anchors = torch.randint(0, context, (batch, num), device="cuda", generator=random).sort().values.int()
    num_valid = torch.full((batch,), num - seed % 3, dtype=torch.int32, device="cuda")
    found = []
    for function in (anchor_attention, reference_attention):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        out = function(
            leaves[0], leaves[1], leaves[2], anchors,
            block_size=BLOCK_SIZE, context_length=context, num_valid=num_valid,
        )  # fmt: skip
        found.append((out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))))
    return [((mine.double() - exact).norm() / exact.norm()).item() for mine, exact in zip(*found, strict=True)]


# ---------------------------------------------------------------------------------------------- head and loss


def head_loss(recorder: common.Recorder) -> None:
    """Forward and backward of head and cross entropy against the two matrix products that it cannot do without."""
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
    print(f"head and loss: {times}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
