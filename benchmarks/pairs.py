"""Two pairs on two GPUs side by side, frozen and with graphs: against the same and against stock Triton in turn.

Target and drafter have the manifest's shapes (those of a 27B target, random weights); steps are whole ones, by the
trainer's own loop. A rate is batches per second. "In turn" is each pair training alone while the other one's GPU rests:
no exchange of gradients, no waiting, the best that a lock around steps could give.

The frozen process times blocks of threads, of pair 0 and of pair 1 in turn, round after round: ``speedup_<tokens>`` is
the median over the rounds of threads over in turn. ``over_seed_<tokens>`` is the median rate of those threads over that
of a stock process, eager and in turn, which has tuned everything before it is timed. One process cannot be both, as a
freeze replaces how Triton launches. If both sides fit the GPUs (16 layers), the two processes take turns in every
round; if not (64 layers), stock rounds come before and after the frozen ones, each time in a process of its own that
ends and gives its memory back; the second finds the first one's tuning in Triton's cache. ``raw.order`` says which.

``weights_bit_equal``: after 50 steps of threads at both lengths, every parameter, master and moment of both pairs has
the same SHA-256. ``failure_named``: an exception raised in pair 1's drafter stops the run within the step, by an error
that names the pair and its device and holds the traceback.

Writes ``pairs_h200x2.json``, and under another name what other machines, lengths or numbers of steps gave.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import trainers
from common import say
from trainers import Child

if TYPE_CHECKING:
    import torch

    from dflash.pairs import Pair
    from dflash.trainer import Trainer

NAME, OTHER_NAME = "pairs_h200x2", "pairs_tried"
LENGTHS = (512, 4096)
EQUAL_STEPS = 50
LONG_SHARE = 10
"""One in so many of the steps before the weights are compared has the greatest length; the others are short."""

STEP_BYTES = 12 * 2**30
"""Of one side beside weights, gradients and optimizer state: steps, graphs, scratch of the exchange, the context."""

INJECTED = "raised on purpose by the benchmark"
FAILING_STEP = 3


# ---------------------------------------------------------------------------------------------- in a process


class Side:
    """Two pairs in this process, and what is asked of them.

    Args:
        process: frozen or stock.
        block_s: about how long a block lasts.
    """

    def __init__(self, process: trainers.Process, block_s: float) -> None:
        self._process = process
        self._block_s = block_s
        self._counts: dict[int, int] = {}

    def open(self) -> dict[str, Any]:
        """Makes the pairs; a stock process tunes and compiles for all lengths."""
        begin = time.perf_counter()
        self._trainer = self._process.build()
        buckets = self._process.plan.spec.axes.buckets
        self._loaders = {bucket: trainers.loader_of(self._trainer, [bucket]) for bucket in buckets}
        if self._process.stock:
            for bucket in buckets:
                warm = [self._alone(pair, bucket, 3) for pair in range(len(self._trainer.pairs))]
                self._counts[bucket] = trainers.count_for(min(min(steps[1:]) for steps in warm), self._block_s)
        return {"seconds": time.perf_counter() - begin, "notes": self._trainer.notes, **self._process.counts()}

    def equal(self, steps: int) -> dict[str, Any]:
        """So many steps of threads from equal weights; then the digests of all that the pairs hold."""
        trainer, buckets = self._trainer, list(self._loaders)
        before = digest_of(next(iter(trainer.pair.drafter.parameters())))
        counts = {buckets[-1]: max(2, steps // LONG_SHARE)}
        counts = {buckets[0]: steps - counts[buckets[-1]], **counts}
        losses = []
        for bucket, count in counts.items():
            given = trainers.configured(trainer, self._loaders[bucket], count, lr=trainer.job.run.optimizer.lr)
            reports = trainers.block(given)
            losses += [report.loss for report in reports]
            typical = trainers.median([report.seconds for report in reports[1:]])
            self._counts[bucket] = trainers.count_for(typical, self._block_s)
        digests = [digests_of(pair) for pair in trainer.pairs]
        moved = digest_of(next(iter(trainer.pair.drafter.parameters()))) != before
        updates = [pair.updates for pair in trainer.pairs]
        return {"steps": counts, "updates": updates, "moved": moved, "losses": losses, "digests": digests}

    def round(self, bucket: int) -> dict[str, Any]:
        """Seconds of the steps of each block: of threads where the process is frozen, and of each pair alone."""
        count = self._counts[bucket]
        found: dict[str, Any] = {} if self._process.stock else {"threads": self._threads(bucket, count)}
        return {**found, "alone": [self._alone(pair, bucket, count) for pair in range(len(self._trainer.pairs))]}

    def profile(self, bucket: int) -> dict[str, Any]:
        """Where the time of a step of threads goes, part by part."""
        given = trainers.configured(self._trainer, self._loaders[bucket], max(self._counts[bucket], 4))
        return trainers.profiled(given).to_json()

    def fail(self) -> dict[str, Any]:
        """A run in which pair 1's drafter raises at step 3, and what came of it. No block can follow."""
        bucket = min(self._loaders)
        given = trainers.configured(self._trainer, self._loaders[bucket], 2 * FAILING_STEP)
        return failure(given, FAILING_STEP)

    def counts(self) -> dict[str, Any]:
        return self._process.counts()

    def _threads(self, bucket: int, count: int) -> list[float]:
        given = trainers.configured(self._trainer, self._loaders[bucket], count)
        return [report.seconds for report in trainers.block(given)]

    def _alone(self, pair: int, bucket: int, count: int) -> list[float]:
        given = trainers.configured(self._trainer.alone(pair), self._loaders[bucket], count)
        return [report.seconds for report in trainers.block(given)]


def failure(trainer: Trainer, step: int) -> dict[str, Any]:
    """Makes the last pair's drafter raise at that step of a run.

    Returns:
        what the run ended with, the steps that it had launched, and how long after the exception it ended.
    """
    pair = trainer.pairs[-1]
    network, forward, last = pair.drafter, pair.drafter.forward, pair.updates + step - 1
    raised: list[float] = []

    def failing_forward(*given: Any, **more: Any) -> torch.Tensor:
        if pair.updates == last:
            raised.append(time.perf_counter())
            raise RuntimeError(INJECTED)
        found: torch.Tensor = forward(*given, **more)
        return found

    network.forward = failing_forward  # type: ignore[method-assign]
    try:
        trainers.block(trainer)
    except Exception as error:
        after = time.perf_counter() - raised[0] if raised else None
        return {
            "error": type(error).__name__,
            "message": getattr(error, "message", str(error)),
            "reasons": list(getattr(error, "reasons", ())),
            "pair": pair.number,
            "device": str(pair.device),
            "steps": trainer.done,
            "seconds": after,
        }
    finally:
        network.forward = forward  # type: ignore[method-assign]
    return {"error": None, "steps": trainer.done}


def digests_of(pair: Pair) -> dict[str, str]:
    """SHA-256 over the bits of the pair's weights, masters and each kind of moments: of the digests of the tensors."""
    tensors = {f"weight.{name}": tensor for name, tensor in pair.drafter.state_dict().items()}
    tensors |= pair.optimizer.state()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = dict(zip(tensors, pool.map(digest_of, tensors.values()), strict=True))
    kinds: dict[str, Any] = {}
    for name, digest in found.items():
        kinds.setdefault(name.partition(".")[0], hashlib.sha256()).update(f"{name} {digest}\n".encode())
    return {kind: total.hexdigest() for kind, total in kinds.items()}


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 over a tensor's bits."""
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(memoryview(data)).hexdigest()


def child(given: Mapping[str, Any]) -> None:
    """One side, until there is nothing more to do."""
    bundle, output = Path(given["bundle"]), Path(given["output"])
    buckets, layers = given["buckets"], given["layers"]
    stock = given["side"] == "stock"
    with trainers.opened(bundle, output, given["devices"], stock=stock, buckets=buckets, layers=layers) as process:
        side = Side(process, given["block_s"])
        kinds = (side.open, side.equal, side.round, side.profile, side.fail, side.counts)
        answers: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in kinds}
        trainers.serve({**answers, "facts": process.facts})


# ---------------------------------------------------------------------------------------------- what comes of it


def over_seed(frozen: Sequence[Mapping[str, Any]], stock: Sequence[Mapping[str, Any]]) -> float:
    """Frozen threads over stock in turn: the ratio of their median rates."""
    return trainers.median(trainers.rates(frozen, "threads")) / trainers.median(trainers.rates(stock, "alone"))


def is_named(found: Mapping[str, Any], step: int) -> bool:
    """Whether a failure of a pair stopped the run within its step, and is told as it should be."""
    if found["error"] != "PairError":
        return False
    told = "\n".join(found["reasons"])
    in_message = (f"pair {found['pair']} ", f"`{found['device']}`", INJECTED)
    in_traceback = ("Traceback (most recent call last)", "failing_forward", f"RuntimeError: {INJECTED}")
    return (
        all(text in found["message"] for text in in_message)
        and all(text in told for text in in_traceback)
        and found["steps"] == step - 1
    )


def is_equal(found: Mapping[str, Any], steps: int) -> bool:
    """Whether all pairs hold the same bits after so many steps, which changed them."""
    first, *others = found["digests"]
    same = bool(others) and all(other == first for other in others)
    return same and found["moved"] and found["updates"] == [steps] * len(found["updates"])


def name_of(facts: Mapping[str, Any], given: argparse.Namespace) -> str:
    """The name of the results: that of the recorded figures only for what they are about."""
    as_agreed = (
        not facts["interpreted"]
        and "H200" in str(facts["gpu"])
        and len(set(given.devices.split(","))) == 2
        and tuple(facts["buckets"]) == LENGTHS
        and given.equal_steps == EQUAL_STEPS
        and given.rounds >= 5
    )
    return NAME if as_agreed else OTHER_NAME


# ---------------------------------------------------------------------------------------------- measuring


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = common.parser(__doc__)
    parser.add_argument("--bundle", type=Path, help="one that covers the lengths; none: it is built first")
    parser.add_argument("--manifest", default="sm90.yaml", help="of the bundle that is built")
    parser.add_argument("--devices", default="0,1", help="a GPU for each pair")
    parser.add_argument("--layers", type=int, default=64, help="of the target; 0: the manifest's")
    parser.add_argument("--buckets", type=lambda text: [int(part) for part in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-seconds", type=float, default=1.5, help="about how long a block of steps lasts")
    parser.add_argument("--equal-steps", type=int, default=EQUAL_STEPS, help="before the weights are compared")
    parser.add_argument("--cache", type=Path, help="Triton's, for the stock side, to be kept; none: a new one")
    given = parser.parse_args()
    recorder = common.Recorder(NAME, __file__, given.commit, given.results)
    with tempfile.TemporaryDirectory(prefix="pairs-", ignore_cleanup_errors=True) as folder:
        Measurement(given, recorder, Path(folder)).run()
    import torch

    torch.cuda.is_available()  # the recorder names the machine by it
    say(str(recorder.write()))


class Measurement:
    """All of it, from the asking process.

    Args:
        given: the options.
        recorder: takes the figures.
        folder: for bundle, logs and Triton's cache.
    """

    def __init__(self, given: argparse.Namespace, recorder: common.Recorder, folder: Path) -> None:
        self._given = given
        self._recorder = recorder
        self._folder = folder
        self._rounds: dict[str, dict[int, list[dict[str, Any]]]] = {
            side: {bucket: [] for bucket in given.buckets} for side in ("frozen", "stock")
        }

    def run(self) -> None:
        """Asks frozen and stock processes in turn."""
        given, raw = self._given, self._recorder.raw
        bundle = given.bundle or trainers.bake(self._folder, given.manifest, given.buckets, None)
        frozen, stock = (self._child(side, bundle) for side in ("frozen", "stock"))
        facts = frozen.ask("facts")
        self._recorder.name = name_of(facts, given)
        raw |= {**facts, "devices": given.devices, "block_s": given.block_seconds}
        together = facts["interpreted"] or 2 * (facts["needed_bytes"] + STEP_BYTES) <= facts["free_bytes"]
        raw["order"] = "in every round: frozen, stock" if together else "stock rounds, frozen rounds, stock rounds"
        say(f"{self._recorder.name}: {facts['layers']} layers, {facts['shapes']}; {raw['order']}")
        if together:
            self._open(stock)
            self._open(frozen)
            self._equal(frozen)
            self._take_turns([frozen, stock], given.rounds)
            self._finish_stock(stock)
        else:
            again, half = self._child("stock", bundle), -(-given.rounds // 2)
            self._open(stock)
            self._take_turns([stock], half)
            self._finish_stock(stock)
            self._open(frozen)
            self._equal(frozen)
            self._take_turns([frozen], given.rounds)
        for bucket in reversed(given.buckets):
            self._figure(f"speedup_{bucket}", trainers.speedup(self._rounds["frozen"][bucket]))
        self._profile(frozen)
        raw["counts"] = frozen.ask("counts")
        self._fail(frozen)
        frozen.end()
        if not together:
            self._open(again)
            self._take_turns([again], given.rounds - half)
            again.end()
        for bucket in given.buckets:
            sides = (self._rounds[side][bucket] for side in ("frozen", "stock"))
            self._figure(f"over_seed_{bucket}", over_seed(*sides))
        self._summarise()

    def _child(self, side: str, bundle: Path) -> Child:
        given = self._given
        asked = {"side": side, "bundle": str(bundle.resolve()), "devices": given.devices, "buckets": given.buckets}
        asked |= {"layers": given.layers or None, "block_s": given.block_seconds, "output": str(self._folder / side)}
        cache = {
            "TRITON_CACHE_DIR": str((given.cache or self._folder / "cache").resolve()),
            "TRITON_CACHE_AUTOTUNING": "1",
        }
        return Child(__file__, asked, **(cache if side == "stock" else {}))

    def _figure(self, name: str, value: bool | float) -> None:
        self._recorder.add(name, value)
        say(f"{name:20} {value if isinstance(value, bool) else format(value, '.3f')}")

    def _open(self, side: Child) -> None:
        found = side.ask("open")
        self._recorder.raw.setdefault("opened", []).append({"side": side.name, **found})
        did = "made and tuned for" if side.name == "stock" else "made"
        say(f"{side.name}: pairs are {did}, {found['seconds']:.1f} s; {found['proof']}")

    def _equal(self, frozen: Child) -> None:
        found = frozen.ask("equal", steps=self._given.equal_steps)
        self._recorder.raw["equal"] = found
        self._figure("weights_bit_equal", is_equal(found, self._given.equal_steps))

    def _take_turns(self, sides: Sequence[Child], rounds: int) -> None:
        for number in range(1, rounds + 1):
            for bucket in self._given.buckets:
                for side in sides:
                    found = side.ask("round", bucket=bucket)
                    self._rounds[side.name][bucket].append(found)
                    shown = {how: f"{trainers.rates([found], how)[0]:.2f}" for how in found}
                    say(f"round {number}, {bucket} tokens, {side.name}: batches/s {shown}")

    def _finish_stock(self, stock: Child) -> None:
        self._recorder.raw["counts_stock"] = stock.ask("counts")
        stock.end()

    def _profile(self, frozen: Child) -> None:
        raw = self._recorder.raw
        raw["profile"], raw["exchange_share"] = {}, {}
        for bucket in self._given.buckets:
            raw["profile"][str(bucket)] = found = frozen.ask("profile", bucket=bucket)
            raw["exchange_share"][str(bucket)] = shares = trainers.exchange_shares(found)
            say(f"{bucket} tokens: step {found['step_ms']:.1f} ms, share of the exchange in it {shares}")

    def _fail(self, frozen: Child) -> None:
        found = frozen.try_asking("fail") or {"error": None, "message": "the process ended, or was ended as it hung"}
        self._recorder.raw["failure"] = found
        say(f"failure: {found.get('message')}; {found.get('seconds')} s later the run had ended")
        self._figure("failure_named", is_named(found, FAILING_STEP))

    def _summarise(self) -> None:
        raw = self._recorder.raw
        raw["rounds"] = {
            side: {str(bucket): rounds for bucket, rounds in found.items()} for side, found in self._rounds.items()
        }
        raw["batches_per_s"] = {
            f"{side} {how} {bucket}": trainers.rates(rounds, how)
            for side, found in self._rounds.items()
            for bucket, rounds in found.items()
            for how in rounds[0]
        }
        raw["step_ms"] = {
            str(bucket): 1e3 * trainers.median([second for one in rounds for second in one["threads"]])
            for bucket, rounds in self._rounds["frozen"].items()
        }


if __name__ == "__main__":
    main()
