"""Validation sees each sample exactly once, and says the same on any number of pairs."""

from __future__ import annotations

import collections
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dflash.anchors import Drafting
from dflash.buckets import Batch, Shape
from dflash.errors import DataError, TrainingStoppedError
from dflash.memory import Meter
from dflash.ranks import Ranks
from dflash.stop import Stop
from dflash.validation import Validation, batches, validate

BLOCK = 4
DRAFTING = Drafting(BLOCK, 99)


class Samples:
    """Samples of these lengths; the first token of each is its number."""

    name = "samples"
    share = 1.0
    digest = ""

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths
        self.dropped: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, number: int) -> Any:
        ids = np.arange(self._lengths[number], dtype=np.int64) % 7 + 10
        ids[0] = number
        return ids, np.arange(len(ids)) > 2


class FakePair:
    """Stands for a pair: its loss depends on the batch alone, and it remembers which samples it saw."""

    def __init__(self, number: int, *, fails_at: int | None = None, seconds: float = 0.0) -> None:
        self.number = number
        self.device = torch.device("cpu")
        self.places, self.part, self.shape = "`cpu`", "target", None
        self.seen: list[int] = []
        self._fails_at = fails_at
        self._seconds = seconds

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        time.sleep(self._seconds)
        if self._fails_at is not None and len(self.seen) >= self._fails_at:
            raise RuntimeError("lost its device")
        self.seen += [index for _, index in batch.visits]
        return torch.zeros(1), torch.zeros(1), batch

    def loss(self, features: Any, embeddings: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        assert torch.is_grad_enabled()  # the bundle holds the loss's kernel with its gradient only
        labels_BNP = batch.labels_BNK[..., 1:]
        loss = (batch.weights_BNK[..., 1:] * (labels_BNP.float() * 0.37).sin().abs()).sum()
        return loss, labels_BNP % 2 == 0


def shapes(size: int = 1, layout: str = "padded") -> dict[int, Shape]:
    return {bucket: Shape(bucket, 4, size, layout, "float32") for bucket in (16, 32)}


def validated(
    pairs: Sequence[FakePair], source: Samples, made: dict[int, Shape] | None = None, stop: Stop | None = None
) -> Validation | None:
    work = batches(source, made or shapes(), DRAFTING, 0)
    return validate(pairs, work, DRAFTING, Meter().exhausted, stop or Stop(), Ranks())  # type: ignore[arg-type]


def run(source: Samples, count: int, made: dict[int, Shape] | None = None) -> tuple[Validation, list[FakePair]]:
    pairs = [FakePair(number) for number in range(count)]
    found = validated(pairs, source, made)
    assert found is not None
    return found, pairs


@pytest.mark.parametrize(("lengths", "count"), [((9, 20, 31), 4), ((9,) * 5, 2), ((9, 30) * 4, 3), ((12,), 2)])
@pytest.mark.parametrize("made", [shapes(), shapes(2), shapes(1, "packed")], ids=["padded", "pairs of rows", "packed"])
def test_each_sample_once_and_the_same_on_any_number_of_pairs(
    lengths: tuple[int, ...], count: int, made: dict[int, Shape]
) -> None:
    alone, _ = run(Samples(*lengths), 1, made)
    found, pairs = run(Samples(*lengths), count, made)
    assert found == alone
    assert sorted(number for pair in pairs for number in pair.seen) == list(range(len(lengths)))
    assert found.num_samples == len(lengths)
    assert found.loss > 0
    assert 0 < found.scores.accuracy < 1


def test_no_sample_at_all() -> None:
    found, _ = run(Samples(), 3)
    assert (found.loss, found.num_samples, found.scores.num_labels) == (0.0, 0, 0)


def test_the_loss_is_weighted_over_all_samples_not_over_batches() -> None:
    parts = [run(Samples(length), 1)[0] for length in (6, 30)]
    whole, _ = run(Samples(6, 30), 2)
    made = [next(batches(Samples(length), shapes(), DRAFTING, 0)) for length in (6, 30)]
    # the second sample has another number among two than alone, hence other anchors: its batch is taken from the whole
    second = list(batches(Samples(6, 30), shapes(), DRAFTING, 0))[1]
    loss, _ = FakePair(0).loss(None, None, second)
    first = parts[0].loss * made[0].weight_sum
    assert whole.loss == pytest.approx((first + float(loss)) / (made[0].weight_sum + second.weight_sum), rel=1e-6)


def test_batches_have_the_planned_shapes_and_empty_rows_no_weight() -> None:
    found = list(batches(Samples(9, 9, 9, 20), shapes(2), DRAFTING, 0))
    assert [(batch.shape.bucket, len(batch.visits)) for batch in found] == [(16, 2), (16, 1), (32, 1)]
    for batch in found:
        assert batch.input_ids_BS.shape == (2, batch.shape.bucket)
        assert batch.weight_sum > 0
    assert found[1].num_valid_B.tolist()[1] == 0
    assert float(found[1].weights_BNK[1].sum()) == 0
    packed = list(batches(Samples(9, 9, 9, 20, 30), shapes(1, "packed"), DRAFTING, 0))
    assert [[index for _, index in batch.visits] for batch in packed] == [[0, 1, 2], [3], [4]]


def test_a_pair_that_fails_is_named_and_stops_the_others() -> None:
    pairs = [FakePair(0, seconds=0.01), FakePair(1, fails_at=1)]
    with pytest.raises(TrainingStoppedError, match=r"validation: pair 1 .* RuntimeError: lost its device") as caught:
        validated(pairs, Samples(*[9] * 400))
    assert any("in prepare" in line for line in caught.value.reasons)
    assert len(pairs[0].seen) < 100
    assert run(Samples(9), 1)[0].num_samples == 1


def test_samples_that_changed_are_no_fault_of_a_pair() -> None:
    class Changed(Samples):
        def read(self, number: int) -> Any:
            raise DataError("data: changed")

    with pytest.raises(DataError, match="^data: changed$"):
        validated([FakePair(0), FakePair(1)], Changed(9, 9))


def test_a_signal_ends_it_after_the_batches_at_work() -> None:
    stop = Stop()

    class Interrupted(FakePair):
        def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Batch]:
            if len(self.seen) == 2:
                stop.number = signal.SIGTERM
            return super().prepare(batch)

    pair = Interrupted(0)
    assert validated([pair], Samples(*[9] * 400), stop=stop) is None
    assert len(pair.seen) == 3


def test_pairs_compute_in_the_callers_context() -> None:
    class Overflowing(FakePair):
        def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Batch]:
            np.exp2(np.float32([1000.0]))  # a lane that a kernel masks afterwards; a warning is an error in tests
            return super().prepare(batch)

    pair: Any = Overflowing(0)
    with np.errstate(over="ignore"):
        found = validated([pair], Samples(9))
    assert found is not None
    assert found.line().startswith("validation: 1 held-out sample, loss ")
