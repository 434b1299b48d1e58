"""Loss and accuracy over samples that are not trained on: each exactly once, on any number of pairs. Loads torch.

Batches are made before they are given out, and their results are added up in their order, so neither the number of
pairs nor which of them took a batch changes a bit of the result.
"""

from __future__ import annotations

import contextvars
import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from dflash import data, devices, metrics
from dflash.anchors import Drafting
from dflash.buckets import Batch, Sample, Shape, assemble, bucket_for
from dflash.crew import Exhausted, failure_of
from dflash.errors import DataError
from dflash.metrics import Scores
from dflash.pairs import Pair
from dflash.ranks import Ranks
from dflash.stop import Stop
from kernelbake.errors import KernelbakeError

_VISIT = 0
"""The epoch of every visit: each validation draws the same anchors, so that losses can be compared over time."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """What a validation came to.

    Args:
        loss: mean over all labels, weighted as in training; 0 where there is none.
        scores: accuracy and acceptance length.
        num_samples: samples seen, each once.
    """

    loss: float
    scores: Scores
    num_samples: int

    def line(self) -> str:
        """For people."""
        scores, plural = self.scores, "s" if self.num_samples != 1 else ""
        return (
            f"validation: {self.num_samples} held-out sample{plural}, loss {self.loss:.4f}, "
            f"accuracy {scores.accuracy:.1%}, acceptance length {scores.acceptance_length:.2f} (estimated)"
        )


def batches(source: data.Source, shapes: Mapping[int, Shape], drafting: Drafting, seed: int) -> Iterator[Batch]:
    """Every sample once, in their order; rows that stay empty are padding.

    Args:
        source: the samples.
        shapes: for each bucket its only shape, ascending.
        drafting: what decides the blocks.
        seed: of anchors.
    """
    packed = next(iter(shapes.values())).packed
    waiting: dict[int, list[list[Sample]]] = {bucket: [] for bucket in shapes}
    for number in range(len(source)):
        sample = Sample(_VISIT, number, *source.read(number))
        bucket = max(shapes) if packed else bucket_for(len(sample.tokens), tuple(shapes))
        rows, shape = waiting[bucket], shapes[bucket]
        if packed and rows and sum(len(held.tokens) for held in rows[-1]) + len(sample.tokens) <= bucket:
            rows[-1].append(sample)
            continue
        if len(rows) == shape.batch:
            yield assemble(rows, shape, drafting, seed)
            rows = waiting[bucket] = []
        rows.append([sample])
    for bucket, rows in waiting.items():
        if rows:
            empty: list[list[Sample]] = [[] for _ in range(shapes[bucket].batch - len(rows))]
            yield assemble([*rows, *empty], shapes[bucket], drafting, seed)


def validate(
    pairs: Sequence[Pair],
    made: Iterator[Batch],
    drafting: Drafting,
    exhausted: Exhausted,
    stop: Stop,
    ranks: Ranks,
) -> Validation | None:
    """Runs all batches, on each pair in a thread of its own; no weight and no gradient changes.

    Ranks make all batches and run each its part of them.

    Args:
        pairs: of this process.
        made: the batches, the same on all ranks.
        drafting: what decided the blocks.
        exhausted: makes the error of a pair without memory.
        stop: a signal to any rank ends it after the batches at work, and is known to all of them then.
        ranks: this one among the others.

    Returns:
        what it came to; None if a signal ended it.

    Raises:
        TrainingStoppedError: a pair failed; the others stop after their batch.
        DataError: the data changed while it was in use.
    """
    numbered = enumerate(made)
    mine = ((number, batch) for number, batch in numbered if number % ranks.world == ranks.rank)
    work = _Work(mine, exhausted, stop)
    threads = [
        threading.Thread(  # in the caller's context: what NumPy does about overflows belongs to it
            target=contextvars.copy_context().run, args=(work.run, pair), name=f"validation of pair {pair.number}"
        )
        for pair in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if work.failure is not None:
        raise work.failure
    parts = ranks.gather((stop.number, work.results))
    stop.number = max((number for number, _ in parts if number is not None), default=None)
    if stop.number is not None:
        return None
    everything = {number: result for _, part in parts for number, result in part.items()}
    results = [everything[number] for number in sorted(everything)]
    size = 2 * (drafting.block_size - 1) + 2
    counts = [math.fsum(result.tally[place] for result in results) for place in range(size)]
    weight = math.fsum(result.weight for result in results)
    return Validation(
        loss=math.fsum(result.loss for result in results) / (weight or 1.0),
        scores=Scores.of(counts),
        num_samples=sum(result.num_samples for result in results),
    )


@dataclasses.dataclass(frozen=True)
class _Result:
    """What came of one batch: the weighted sum of cross entropies, the tally, the sum of weights."""

    loss: float
    tally: list[float]
    weight: float
    num_samples: int


class _Work:
    """Batches that threads take one by one, and what came of them."""

    def __init__(self, numbered: Iterator[tuple[int, Batch]], exhausted: Exhausted, stop: Stop) -> None:
        self._batches = numbered
        self._exhausted = exhausted
        self._stop = stop
        self._lock = threading.Lock()
        self.results: dict[int, _Result] = {}
        self.failure: KernelbakeError | None = None

    def run(self, pair: Pair) -> None:
        """Takes batches until there is none, a signal came, or some pair has failed."""
        try:
            while self.failure is None and self._stop.number is None:
                with self._lock:
                    taken = next(self._batches, None)
                if taken is None:
                    return
                number, batch = taken
                self.results[number] = _step(pair, batch)
        except DataError as error:
            self._fail(error)
        except Exception as error:  # of any kind: the thread's last words must reach the caller
            failure = failure_of(pair, error, self._exhausted)
            failure.message = f"validation: {failure.message}"
            self._fail(failure)

    def _fail(self, failure: KernelbakeError) -> None:
        with self._lock:
            self.failure = self.failure or failure


def _step(pair: Pair, batch: Batch) -> _Result:
    """The forward pass of a training step, launch for launch.

    Gradients stay on: the loss's kernel makes its gradient in the same launch, and a bundle holds no other variant.
    """
    features_BSF, embeddings_BQE, there = pair.prepare(batch)
    with torch.enable_grad(), devices.current(pair.device):
        loss, correct_BNP = pair.loss(features_BSF, embeddings_BQE, there)
        tally = metrics.tally(correct_BNP, there.labels_BNK[..., 1:])
        return _Result(float(loss.detach()), tally.tolist(), batch.weight_sum, len(batch.visits))
