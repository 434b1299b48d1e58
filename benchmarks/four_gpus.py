"""Two pairs on four GPUs, targets on 0 and 1, drafters on 2 and 3: frozen, and stock Triton as it once crashed there.

1. Stock Triton: one pass of 32 tokens through each target, then all pairs in threads at mixed lengths, cold.
   ``stock_crashed`` says whether that ended in a failure, ``raw.stock`` in which.
2. The command: ``dflash train --frozen-cache bundle.tar --dp-pairs 2 --devices 0:2,1:3``, 200 steps of mixed lengths.
   It must end well, without a compilation or benchmark at run time.
3. Rounds in one frozen process: blocks of all pairs in threads, of pair 0 alone and of pair 1 alone, over the same
   batches. Rates are batches per second. ``speedup_2_pairs`` is the median over the rounds of threads over pair 0
   alone, with batches as the trainer deals them; ``speedup_2_pairs_alike`` is the same where the pairs of a step have
   equal lengths, as a pair waits for the longest batch of a step. ``raw.speedups`` has both against all pairs in turn.
4. One more block, with events between the parts of each step: who worked when, as a picture. ``overlap_share`` is how
   much of the shorter of target and drafter work is hidden behind the longer, ``exchange_share`` how much of a step the
   drafter's device waits for the exchange of gradients. Both with equal lengths in a step; ``raw.exchange`` has more.

With other devices (``--devices 0:1``, or ``0,1``) and in Triton's interpreter the same runs, under another name.
Writes ``four_gpus_h200x4.json`` and the picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import main_job
import timeline
import trainers
from common import say
from timeline import Span
from trainers import Child

if TYPE_CHECKING:
    import torch

    from dflash.pairs import Pair
    from dflash.trainer import Trainer

NAME, OTHER_NAME = "four_gpus_h200x4", "four_gpus_tried"
DEVICES = "0:2,1:3"
STEPS = 200
WARM_TOKENS, WARM_ANCHORS = 32, 4
DEALT_STEPS = 6
"""Of all pairs in a block with batches as they are dealt: enough to meet several lengths."""

DRAWN_ROUNDS = 2
"""How often the block that is drawn goes round all lengths."""

STOCK_LIMIT_S = 200.0
PICTURES = common.ROOT / "benchmarks" / "pictures"


# ---------------------------------------------------------------------------------------------- in a process


class Side:
    """The pairs of this process, and what is asked of them."""

    def __init__(self, process: trainers.Process) -> None:
        self._process = process

    def open(self) -> dict[str, Any]:
        """Makes the pairs; a first block of all lengths warms up."""
        begin = time.perf_counter()
        self._trainer = self._process.build()
        self._buckets = self._process.plan.spec.axes.buckets
        self._loaders = {bucket: trainers.loader_of(self._trainer, [bucket]) for bucket in self._buckets}
        self._dealt: dict[str, Any] | None = None
        self.alike()
        return {"seconds": time.perf_counter() - begin, "notes": self._trainer.notes}

    def alike(self) -> dict[str, Any]:
        """A round in which the pairs of a step have equal lengths: seconds of the steps of each block."""
        count = len(self._buckets)
        return self._round(lambda: trainers.Alike(self._loaders, len(self._trainer.pairs)), count)

    def dealt(self) -> dict[str, Any]:
        """A round with the batches that a run would have, as it deals them; the next round has the next ones."""
        before = self._dealt
        found = self._round(lambda: trainers.loader_of(self._trainer, self._buckets, before), DEALT_STEPS)
        after = trainers.loader_of(self._trainer, self._buckets, before)
        for _ in range(DEALT_STEPS * len(self._trainer.pairs)):
            after.plan()
        self._dealt = after.state()
        return found

    def profile(self, alike: bool) -> dict[str, Any]:
        """Where the time of a step goes, part by part."""
        loader: Any = trainers.loader_of(self._trainer, self._buckets)
        if alike:
            loader = trainers.Alike(self._loaders, len(self._trainer.pairs))
        return trainers.profiled(trainers.configured(self._trainer, loader, 2 * len(self._buckets))).to_json()

    def spans(self) -> list[list[Any]]:
        """A block in which the lengths rise, twice: who worked when."""
        loader = trainers.Alike(self._loaders, len(self._trainer.pairs))
        count = max(4, DRAWN_ROUNDS * len(self._buckets))
        found = taped(trainers.configured(self._trainer, loader, count))
        return [list(dataclasses.astuple(span)) for span in found]

    def warm_up(self) -> dict[str, Any]:
        """Makes stock pairs, and a short pass through each target in this thread."""
        from dflash import devices, synthetic
        from dflash.buckets import Shape

        spec = self._process.plan.spec
        self._trainer = trainer = self._process.build()
        batch = synthetic.batch(Shape(WARM_TOKENS, WARM_ANCHORS, 1, "padded", spec.axes.dtype), spec, 0)
        for pair in trainer.pairs:
            with devices.current(pair.target.device):
                pair.target.features(batch.on(pair.target.device))
        trainers.synchronize(trainer)
        return self._process.counts()

    def threads(self, steps: int) -> dict[str, Any]:
        """All pairs in threads, at lengths that Triton has not met, and what came of it."""
        given = trainers.configured(self._trainer, self._trainer.loader, steps)
        begin = time.perf_counter()
        found: dict[str, Any] = {"crashed": False, "message": "no crash"}
        try:
            trainers.block(given)
        except Exception as error:
            message = getattr(error, "message", str(error))
            reasons = list(getattr(error, "reasons", ()))[-60:]
            found = {"crashed": True, "error": type(error).__name__, "message": message, "reasons": reasons}
        return {**found, "steps": given.done, "seconds": time.perf_counter() - begin, **self._process.counts()}

    def counts(self) -> dict[str, Any]:
        return self._process.counts()

    def _round(self, make: Any, count: int) -> dict[str, Any]:
        """So many steps of all pairs, then of each pair alone, over as many batches, from a loader that make gives."""
        trainer = self._trainer
        batches = count * len(trainer.pairs)
        runs = [trainers.configured(trainer, make(), count)]
        runs += [trainers.configured(trainer.alone(pair), make(), batches) for pair in range(len(trainer.pairs))]
        threads, *alone = [[report.seconds for report in trainers.block(run)] for run in runs]
        return {"threads": threads, "alone": alone}


class Tape:
    """Implements ``dflash.pairs.Clock``: a mark at each end of every part, on the stream that does its work.

    Args:
        pair: whose.
        zeros: of each device, a mark at the same moment.
    """

    def __init__(self, pair: Pair, zeros: Mapping[torch.device, Any]) -> None:
        self._pair = pair
        self._zeros = zeros
        self._open: tuple[str, torch.device, Any] | None = None
        self._marked: list[tuple[str, torch.device, Any, Any]] = []

    def starts(self) -> None:
        self._open = None

    def begins(self, part: str) -> None:
        from dflash.pairs import IDLE, TARGET

        if self._open is not None:
            self._marked.append((*self._open, mark(self._open[1])))
            self._open = None
        if part != IDLE:
            device = self._pair.target.device if part == TARGET else self._pair.device
            self._open = (part, device, mark(device))

    def spans(self) -> list[Span]:
        """What was marked; all devices must be idle."""
        return [
            Span(self._pair.number, str(device), part, *(since(self._zeros[device], one) for one in (begin, end)))
            for part, device, begin, end in self._marked
        ]


def mark(device: torch.device) -> Any:
    """An event on the device's current stream; on the CPU the host's clock, in seconds."""
    import torch

    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def since(zero: Any, one: Any) -> float:
    """From one mark to another of the same device, in ms."""
    return (one - zero) * 1e3 if isinstance(zero, float) else float(zero.elapsed_time(one))


def taped(trainer: Trainer) -> list[Span]:
    """A block of a configured run, and the spans of its parts.

    Each device has a clock of its own. Their zeros are marked while all are idle, one right after the other, so that
    they differ by the few microseconds that a mark takes.
    """
    trainers.synchronize(trainer)
    found = {device for pair in trainer.pairs for device in (pair.target.device, pair.device)}
    for device in found:
        mark(device)  # a device's first one takes longer
    trainers.synchronize(trainer)
    zeros = {device: mark(device) for device in found}
    tapes = [Tape(pair, zeros) for pair in trainer.pairs]
    for pair, tape in zip(trainer.pairs, tapes, strict=True):
        pair.clock = tape
    try:
        trainers.block(trainer)
    finally:
        for pair in trainer.pairs:
            pair.clock = None
    return [span for tape in tapes for span in tape.spans()]


def child(given: Mapping[str, Any]) -> None:
    """One side, until there is nothing more to do."""
    bundle, output, stock = Path(given["bundle"]), Path(given["output"]), given["side"] == "stock"
    with trainers.opened(bundle, output, given["devices"], stock=stock, buckets=None, layers=None) as process:
        side = Side(process)
        kinds = (side.open, side.alike, side.dealt, side.profile, side.spans, side.warm_up, side.threads, side.counts)
        answers: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in kinds}
        answers["facts"] = process.facts
        trainers.serve(answers)


# ---------------------------------------------------------------------------------------------- measuring


def name_of(facts: Mapping[str, Any], given: argparse.Namespace) -> str:
    """The name of the results: that of the recorded figures only for what they are about."""
    as_agreed = not facts["interpreted"] and "H200" in str(facts["gpu"]) and given.devices == DEVICES
    return NAME if as_agreed and given.steps >= STEPS and given.rounds >= 5 else OTHER_NAME


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = common.parser(__doc__)
    parser.add_argument("--bundle", type=Path, help="names target and lengths; none: it is built first")
    parser.add_argument("--manifest", default="sm90.yaml", help="of the bundle that is built")
    parser.add_argument("--layers", type=int, help="of the target of the bundle that is built")
    parser.add_argument("--devices", default=DEVICES)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the command's run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder for the picture")
    given = parser.parse_args()
    recorder = common.Recorder(NAME, __file__, given.commit, given.results)
    with tempfile.TemporaryDirectory(prefix="four-gpus-", ignore_cleanup_errors=True) as folder:
        measure(given, recorder, Path(folder))
    import torch

    torch.cuda.is_available()  # the recorder names the machine by it
    say(str(recorder.write()))


def measure(given: argparse.Namespace, recorder: common.Recorder, folder: Path) -> None:
    """Stock, the command, and the rounds, one after the other."""
    bundle = given.bundle or trainers.bake(folder, given.manifest, None, given.layers)
    bundle = bundle.resolve()
    empty = {"TRITON_CACHE_DIR": str(folder / "empty-cache"), "FLA_CACHE_RESULTS": "0"}
    stock = Child(__file__, _asked(given, "stock", bundle, folder), **empty)
    frozen = Child(__file__, _asked(given, "frozen", bundle, folder))
    facts = frozen.ask("facts")
    recorder.name = name_of(facts, given)
    recorder.raw |= {**facts, "devices": given.devices}
    say(f"{recorder.name}: {facts['layers']} layers, {facts['shapes']}, devices {given.devices}")
    run_stock(stock, given.steps, recorder)
    run_command(bundle, given, recorder, folder)
    opened = frozen.ask("open")
    recorder.raw["notes"] = opened["notes"]
    say(f"pairs are made, {opened['seconds']:.1f} s")
    take_turns(frozen, given, recorder)
    look_inside(frozen, given.pictures, recorder)
    recorder.raw["counts"] = frozen.ask("counts")
    frozen.end()


def _asked(given: argparse.Namespace, side: str, bundle: Path, folder: Path) -> dict[str, Any]:
    return {"side": side, "bundle": str(bundle), "devices": given.devices, "output": str(folder / side)}


def add(recorder: common.Recorder, name: str, value: bool | int | float) -> None:
    """Adds a figure and shows it."""
    recorder.add(name, value)
    say(f"{name:24} {format(value, '.4f') if isinstance(value, float) else value}")


def run_stock(stock: Child, steps: int, recorder: common.Recorder) -> None:
    """Stock Triton where the pairs once crashed: any end but a good one is a crash, our time limit is none."""
    warmed = stock.ask("warm_up")
    say(f"stock: warmed up with {WARM_TOKENS} tokens; {warmed['proof']}")
    found = stock.try_asking("threads", STOCK_LIMIT_S, steps=steps)
    code = stock.end()
    if found is None:
        message = "our time limit" if code == -9 else f"the process ended with code {code}"
        found = {**warmed, "crashed": code != -9, "message": message}
    recorder.raw["stock"] = {**found, "warm_up": warmed}
    say(f"stock: {found['message']}")
    add(recorder, "stock_crashed", found["crashed"])
    for name, count in main_job.proof(found).items():
        add(recorder, f"{name}_stock", count)


def run_command(bundle: Path, given: argparse.Namespace, recorder: common.Recorder, folder: Path) -> None:
    """The command's run; one that does not end well, or works at run time, ends the benchmark."""
    num_pairs = len(given.devices.split(","))
    line = main_job.command("dflash", "train", "--frozen-cache", str(bundle), "--target", "random")
    line += ["--dp-pairs", str(num_pairs), "--devices", given.devices, "--steps", str(given.steps)]
    seconds, said = main_job.must(folder, [*line, "--profile", "--output", "run"])
    summary = main_job.summary(folder, "run")
    times = [json.loads(text)["seconds"] for text in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    recorder.raw["command"] = {
        "line": line[line.index("train") :],
        "seconds": seconds,
        "said": said.splitlines()[-40:],
        "step_seconds": times,
        "losses": summary["losses"],
        "profile": summary["profile"],
        "frozen": summary["frozen"],
    }
    say(f"{summary['steps']} steps, {1 / trainers.median(times):.2f} steps/s; {summary['proof']}")
    add(recorder, "steps", summary["steps"])
    for name, count in main_job.proof(summary).items():
        add(recorder, f"{name}_at_runtime", count)
    if any(summary["proof"].values()) or summary["frozen"]["misses"] or summary["steps"] != given.steps:
        sys.exit(f"the command's run did what it must not: {summary['proof']}, {summary['frozen']}")


def take_turns(frozen: Child, given: argparse.Namespace, recorder: common.Recorder) -> None:
    """Rounds of both kinds, and the speed-ups that follow."""
    rounds: dict[str, list[dict[str, Any]]] = {"dealt": [], "alike": []}
    for number in range(1, given.rounds + 1):
        for kind, found in rounds.items():
            found.append(frozen.ask(kind))
            say(f"round {number}, {kind}: {speedups(found[-1:])}")
    recorder.raw["rounds"] = rounds
    recorder.raw["speedups"] = {kind: speedups(found) for kind, found in rounds.items()}
    if len(given.devices.split(",")) == 2:
        add(recorder, "speedup_2_pairs", recorder.raw["speedups"]["dealt"]["over_pair_0"])
        add(recorder, "speedup_2_pairs_alike", recorder.raw["speedups"]["alike"]["over_pair_0"])


def speedups(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Batches per second of threads over those of pair 0 alone, and of all pairs in turn: medians over the rounds."""
    found: dict[str, list[float]] = {"over_pair_0": [], "over_in_turn": []}
    for one in rounds:
        (threads,), (in_turn,) = (trainers.rates([one], side) for side in ("threads", "alone"))
        (alone,) = trainers.rates([{"alone": one["alone"][:1]}], "alone")
        found["over_pair_0"].append(threads / alone)
        found["over_in_turn"].append(threads / in_turn)
    return {name: trainers.median(values) for name, values in found.items()}


def look_inside(frozen: Child, pictures: Path, recorder: common.Recorder) -> None:
    """Share of the exchange, overlap of target and drafter, and the picture."""
    raw = recorder.raw
    profiles = {kind: frozen.ask("profile", alike=kind == "alike") for kind in ("alike", "dealt")}
    profiles["command"] = raw["command"]["profile"]
    raw["profiles"] = profiles
    raw["exchange"] = {kind: trainers.exchange_shares(found) for kind, found in profiles.items()}
    say(f"share of the exchange in a step, of each pair: {raw['exchange']}")
    add(recorder, "exchange_share", max(raw["exchange"]["alike"]))
    raw["spans"] = frozen.ask("spans")
    spans = [Span(*fields) for fields in raw["spans"]]
    share = timeline.overlap_share(spans)
    add(recorder, "overlap_share", share)
    pictures.mkdir(parents=True, exist_ok=True)
    path = pictures / f"{recorder.name}.svg"
    layers, gpu = raw["layers"], raw["gpu"] or "interpreter"
    title = f"{recorder.name}: {gpu}, devices {raw['devices']}, target of {layers} layers, overlap {share:.0%}"
    path.write_text(timeline.svg(spans, title))
    say(f"picture: {path}")


if __name__ == "__main__":
    main()
