"""Memory and speed of whole training steps: a 27B-shaped target of random weights and its drafter, on one GPU, frozen.

Peaks are what a step holds above weights, gradients and optimizer state, beside what the preflight predicts. Times are
medians of rounds in which everything that is compared takes turns: steps and target passes, eager and with graphs, and
the matrix product whose rate is the measure. Each figure is printed as it comes. Writes ``memory_h200.json``.

MFU counts the model's multiplications and additions once, none of what a backward pass computes again:

- target, a token, over the layers up to the last whose output is read: 2 for each weight of its linear layers; 4·H·D
  for each key that an attention layer's query sees; 6·K·V for each head of a Gated-DeltaNet layer (what the state holds
  of the key, the update, the query).
- drafter: 6 for each weight and each row it is applied to, 4 for the projection of the features, whose input takes no
  gradient; 12·H·D for each pair of a block row and a key that it sees (2 products forward, 4 backward).
- head: 4·E·V a row: its weight takes no gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from common import say
from trainers import bake

if TYPE_CHECKING:
    from dflash.buckets import Batch
    from dflash.spec import Spec
    from kernelbake.workload import Footprint

LENGTHS = (512, 2048, 4096)
ANCHORS = (128, 256, 512)
ROUNDS = 7
ROUND_S = 0.4
PROFILED_STEPS = 4
PRODUCT = 8192
"""Rows, columns and depth of the matrix product that is the measure."""


def main() -> None:
    """Measures and writes; without ``--bundle`` one for these shapes is built first."""
    parser = common.parser(__doc__)
    parser.add_argument("--bundle", type=Path, help="one that covers the shapes; none: it is built first")
    parser.add_argument("--manifest", default="sm90.yaml", help="of the bundle that is built")
    parser.add_argument("--name", default="memory_h200", help="of the results file")
    given = parser.parse_args()
    recorder = common.Recorder(given.name, __file__, given.commit, given.results)
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        measure(given.bundle or bake(Path(folder), given.manifest, LENGTHS, None), recorder)
    print(recorder.write())


def measure(bundle: Path, recorder: common.Recorder) -> None:
    """Everything, in one frozen process."""
    from kernelbake.freeze import freeze
    from kernelbake.preflight import preflight, workload_of

    spec = specification(workload_of(bundle).section)
    found = preflight(bundle, spec.to_json())
    say(f"preflight: {len(found.footprints)} cases, {found.seconds:.1f} s")
    recorder.raw["footprints"] = {
        footprint.case.id: {part.name: [part.begun_bytes, part.peak_bytes] for part in footprint.parts}
        for footprint in found.footprints
    }
    with freeze(bundle, [0]) as frozen:
        say(f"frozen: {frozen.counters.loads} kernels")
        bench = Bench(spec, found.footprints)
        say("target and drafter are made")
        record_peaks(bench, recorder)
        record_times(bench, recorder)
        recorder.raw["frozen"] = dataclasses.asdict(frozen.counters)
    for name, value in recorder.figures.items():
        print(f"{name:24} {value}")


def specification(section: Mapping[str, Any]) -> Spec:
    """The bundle's section with random weights and the shapes that are measured."""
    from dflash.spec import Spec

    axes = {**section["axes"], "buckets": list(LENGTHS), "anchors": list(ANCHORS), "anchor_slots": "every"}
    axes |= {"batch_sizes": [1], "layouts": ["padded"]}
    return Spec.parse({**section, "axes": axes, "target": {**section["target"], "model": "random"}})


class Bench:
    """One pair on one GPU, with its target eager or captured.

    Args:
        spec: the shapes.
        footprints: of their steps.
    """

    def __init__(self, spec: Spec, footprints: tuple[Footprint, ...]) -> None:
        import torch

        from dflash import devices, drafter, target
        from dflash.config import OptimizerConfig
        from dflash.optimizer import Optimizer
        from dflash.pairs import Pair

        self.spec, self.footprints = spec, footprints
        self.device = torch.device("cuda", 0)
        dtype = devices.DTYPES[spec.axes.dtype]
        layer_ids = spec.drafter.target_layer_ids
        model = target.load_target(spec.target, layer_ids, self.device, dtype, seed=0, whole=False)  # as a run does
        network = drafter.build(spec.drafter, spec.target.hidden_size, self.device, dtype)
        self.pair = Pair(0, model, network, Optimizer(network, OptimizerConfig()))
        self.targets: dict[str, Any] = {"eager": model}
        self.step(LENGTHS[0], ANCHORS[0])  # makes the optimizer's moments

    def capture(self) -> tuple[str, ...]:
        """Captures the target's pass for all lengths; what there is to say of it."""
        from dflash import graphs

        notes = graphs.install([self.pair], self.spec, wanted=True, interpreted=False)
        self.targets["graphs"] = self.pair.target
        return notes

    def batch(self, length: int, anchors: int | None = None) -> Batch:
        """A batch with so many anchors, or the most that the length has room for."""
        from dflash import synthetic
        from dflash.buckets import Shape

        slots = anchors or self.spec.axes.slots(length)
        assert slots is not None
        return synthetic.batch(Shape(length, slots, 1, "padded", self.spec.axes.dtype), self.spec, seed=0)

    def step(self, length: int, anchors: int | None = None, count: int = 1) -> float:
        """Steps of one batch; the loss of the last, for which it waits."""
        given = self.batch(length, anchors).pinned()
        for _ in range(count):
            loss = float(self.pair.step([given], lr=0.0).loss)
        if not math.isfinite(loss):
            sys.exit(f"memory: loss `{loss}` at {length} tokens; wanted a finite one")
        return loss


# ---------------------------------------------------------------------------------------------- memory


def record_peaks(bench: Bench, recorder: common.Recorder) -> None:
    """Peaks at the greatest length, eager and with graphs; those with graphs are the figures, as a run has them."""
    from dflash import graphs, memory

    def peaks(*, graphed: bool) -> dict[int, memory.Peak]:
        found = {}
        for anchors in ANCHORS:
            bench.step(LENGTHS[-1], anchors, 2)
            wanted = needs_of(bench, anchors, graphed=graphed)
            meter = memory.Meter(wanted)
            meter.start()
            loss = bench.step(LENGTHS[-1], anchors, 3)
            (found[anchors],) = meter.peaks(lambda device: graphs.pool_bytes([bench.pair], device))
            say(f"{anchors} anchors{', graphs' if graphed else ''}: {found[anchors].line()}; loss {loss:.3f}")
        return found

    eager = peaks(graphed=False)
    for note in bench.capture():
        say(note)
    captured = peaks(graphed=True)
    for anchors, peak in captured.items():
        assert peak.measured_bytes is not None
        recorder.add(f"peak_{anchors}_bytes", peak.measured_bytes)
    predicted = captured[ANCHORS[-1]].predicted_bytes
    assert predicted is not None
    recorder.add("predicted_512_bytes", predicted)
    for name, found in (("eager", eager), ("graphs", captured)):
        sizes = [found[anchors].measured_bytes or 0 for anchors in ANCHORS]
        expected = [found[anchors].predicted_bytes or 0 for anchors in ANCHORS]
        growth = (sizes[2] - sizes[1]) / (2 * (sizes[1] - sizes[0]))
        shares = [measured / size for measured, size in zip(sizes, expected, strict=True)]
        recorder.raw[f"peaks_{name}"] = {
            "measured_bytes": sizes,
            "predicted_bytes": expected,
            "measured_over_predicted": shares,
            "growth_ratio": growth,
        }
        say(f"{name}: (512 − 256) over 2·(256 − 128) anchors {growth:.3f}; measured over predicted {shares}")


def needs_of(bench: Bench, anchors: int, *, graphed: bool) -> list[Any]:
    """What a run of this one case at the greatest length would predict."""
    from dflash import memory
    from dflash.buckets import Shape

    own = [
        footprint
        for footprint in bench.footprints
        if (Shape.of(footprint.case).bucket, Shape.of(footprint.case).anchors) == (LENGTHS[-1], anchors)
    ]
    (one, other) = (bench.device, bench.device)
    return memory.needs(bench.spec, one, other) + memory.step_needs(own, bench.spec, one, other, graphed=graphed)


# ---------------------------------------------------------------------------------------------- speed


def record_times(bench: Bench, recorder: common.Recorder) -> None:
    """Steps and target passes at every length, each beside the matrix product."""
    rates: list[float] = []
    times = {length: timed(bench, length, rates) for length in LENGTHS}
    rate = statistics.median(rates)
    recorder.raw["product"] = {"rows, columns, depth": PRODUCT, "dtype": "bfloat16", "flops_per_s": rate}
    say(f"matrix product of {PRODUCT}³ in bf16: {rate / 1e12:.0f} TFLOP/s")
    recorder.raw["times_ms"] = {str(length): found for length, found in times.items()}
    recorder.raw["flops"] = {}
    for length, found in times.items():
        flops = model_flops(bench.spec, bench.pair.target, bench.batch(length))
        recorder.raw["flops"][str(length)] = flops
        shares = {how: sum(flops.values()) / (found[f"step {how}"] / 1e3) / rate for how in bench.targets}
        recorder.add(f"mfu_{length}", shares["graphs"])
        say(
            f"{length} tokens: MFU {shares}, target alone {flops['target'] / (found['target graphs'] / 1e3) / rate:.3f}"
        )
    recorder.add("tokens_per_s_4096", LENGTHS[-1] / (times[LENGTHS[-1]]["step graphs"] / 1e3))
    short = times[LENGTHS[0]]
    recorder.add("target_graph_ratio_512", short["target graphs"] / short["target eager"])
    recorder.add("step_graph_ratio_512", short["step graphs"] / short["step eager"])
    recorder.raw["parts_ms"] = {
        f"{length} {how}": profiled(bench, length, how) for length in LENGTHS for how in bench.targets
    }


def timed(bench: Bench, length: int, rates: list[float]) -> dict[str, float]:
    """Medians in ms of steps and target passes of this length, in turn; adds the product's rates, in FLOP/s."""
    import torch

    given = bench.batch(length).pinned()
    there = given.on(bench.device)
    left, right, out = (torch.ones(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=bench.device) for _ in range(3))
    left.normal_()
    right.normal_()

    def step(how: str) -> Callable[[], Any]:
        def once() -> Any:
            bench.pair.target = bench.targets[how]
            return bench.pair.step([given], lr=0.0)

        return once

    runs: dict[str, Callable[[], Any]] = {f"step {how}": step(how) for how in bench.targets}
    runs |= {f"target {how}": functools.partial(target.features, there) for how, target in bench.targets.items()}
    runs["product"] = lambda: torch.mm(left, right, out=out)
    counts = {name: max(1, min(200, round(ROUND_S / seconds(run, 2)))) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            found[name].append(seconds(run, counts[name]) * 1e3)
    rates += [2 * PRODUCT**3 / (ms / 1e3) for ms in found.pop("product")]
    medians = {name: statistics.median(values) for name, values in found.items()}
    say(f"{length} tokens, ms: { ({name: round(ms, 2) for name, ms in medians.items()}) }")
    return medians


def seconds(run: Callable[[], Any], count: int) -> float:
    """Mean time of so many calls, from an idle device to an idle device."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def profiled(bench: Bench, length: int, how: str) -> dict[str, dict[str, float]]:
    """Where the time of a step goes, in ms."""
    from dflash.profiling import Clock

    bench.pair.target = bench.targets[how]
    bench.pair.clock = clock = Clock(bench.device, bench.device)
    bench.step(length, count=PROFILED_STEPS)
    bench.pair.clock = None
    clock.finish()
    scale = 1e3 / clock.num_steps
    parts = {
        part: {"device_ms": times.device * scale, "host_ms": times.host * scale} for part, times in clock.parts.items()
    }
    say(f"{length} tokens, {how}: { ({part: round(times['device_ms'], 2) for part, times in parts.items()}) }")
    return parts


# ---------------------------------------------------------------------------------------------- arithmetic


def model_flops(spec: Spec, target: Any, batch: Batch) -> dict[str, int]:
    """FLOPs of a step by part, after the formulas above; anchors, and so what blocks see, are those of the batch."""
    import torch

    rows, length = batch.input_ids_BS.shape
    counts = batch.num_valid_B.tolist()
    anchors = [at for row, count in zip(batch.anchors_BN.tolist(), counts, strict=True) for at in row[:count]]
    linears = [module for module in target.model.model.modules() if isinstance(module, torch.nn.Linear)]
    weights: int = sum(linear.weight.numel() for linear in linears)
    labelled = len(anchors) * (spec.drafter.block_size - 1)
    return {
        "target": rows * (2 * weights * length + attention_flops(spec, length, len(target.model.model.layers))),
        "drafter": _drafter_flops(spec, rows * length, len(anchors)) + block_flops(spec, anchors),
        "head and loss": 4 * spec.target.hidden_size * spec.target.vocab_size * labelled,
    }


def attention_flops(spec: Spec, length: int, num_layers: int) -> int:
    """Of the attention and recurrence of so many of the target's layers over one row."""
    shape = spec.target
    kinds = shape.layer_types[:num_layers]
    attention = sum(kind == "full_attention" for kind in kinds)
    seen = length * (length + 1) // 2
    state = shape.linear_num_value_heads * shape.linear_key_head_dim * shape.linear_value_head_dim
    recurrent = (len(kinds) - attention) * 6 * state * length
    return attention * 4 * shape.num_heads * shape.head_dim * seen + recurrent


def _drafter_flops(spec: Spec, tokens: int, num_blocks: int) -> int:
    """Of the drafter's linear layers."""
    drafter, hidden = spec.drafter, spec.target.hidden_size
    rows = num_blocks * drafter.block_size
    queries = 2 * hidden * drafter.num_heads * drafter.head_dim  # in and out
    keys = 2 * hidden * drafter.num_kv_heads * drafter.head_dim  # keys and values
    layer = rows * (queries + keys + 3 * hidden * drafter.intermediate_size) + tokens * keys
    projection = tokens * hidden * hidden * len(drafter.target_layer_ids)
    return 6 * drafter.num_layers * layer + 4 * projection


def block_flops(spec: Spec, anchors: list[int]) -> int:
    """Of the drafter's attention: every pair of a block row and a key that it sees, over all layers."""
    drafter, seen = spec.drafter, 0
    own = drafter.block_size * (drafter.block_size + 1) // 2 if drafter.is_causal else drafter.block_size**2
    for layer in range(drafter.num_layers):
        window = drafter.window(layer)
        for anchor in anchors:
            if window is None:
                seen += drafter.block_size * anchor + own
            else:
                seen += sum(min(anchor, max(window - 1 - i, 0)) for i in range(drafter.block_size)) + own
    return 12 * drafter.num_heads * drafter.head_dim * seen


if __name__ == "__main__":
    main()
