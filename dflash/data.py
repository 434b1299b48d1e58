"""Samples: where they come from, in which order, and into which batches they go. Resumable at any batch.

A source numbers its samples; a visit is (epoch, number). The order of an epoch depends on the seed and the epoch alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dflash import anchors
from dflash.anchors import Drafting, Flags, Integers
from dflash.buckets import Batch, Sample, Shape, assemble, bucket_for
from dflash.errors import DataError

STDLIB = "python-stdlib"

_NO_SOURCE_TEXT = frozenset(("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"))

Encode = Callable[[str], list[int]]
Tokens = tuple[Integers, Flags]


class Source(Protocol):
    """Numbered samples.

    Attributes:
        name: for people.
        dropped: samples left out, by reason.
        share: of the tokens that are supervised.
    """

    name: str
    dropped: collections.Counter[str]

    @property
    def share(self) -> float: ...

    def __len__(self) -> int: ...

    def read(self, number: int) -> Tokens:
        """Token ids of a sample and which of them are supervised."""
        ...

    def length(self, number: int) -> int | None:
        """How many tokens ``read`` will give, where that is known without reading."""
        ...


def as_bytes(text: str) -> list[int]:
    """The byte-level tokenizer: the ids are the bytes of the text in UTF-8."""
    return list(text.encode())


class PythonSources:
    """The sources, docstrings included, of the running Python's standard library, cut into pieces.

    Every token but the first of a piece is supervised: there is no prompt in it. Pieces are a little shorter than the
    buckets in the padded layout, and much shorter in the packed one, so that several fit a row.

    Args:
        encode: text → token ids.
        buckets: padded lengths, ascending.
        packed: whether rows hold several pieces.
        folder: another folder of Python files, for tests.
    """

    def __init__(self, encode: Encode, buckets: tuple[int, ...], *, packed: bool, folder: Path | None = None) -> None:
        self.name = STDLIB
        self.dropped: collections.Counter[str] = collections.Counter()
        self._encode = encode
        self._per_token = 1 if encode is as_bytes else 3  # bytes of text for a token, at most; pieces are cut by bytes
        root = folder or Path(sysconfig.get_paths()["stdlib"])
        self._files = sorted(path for path in root.rglob("*.py") if not _NO_SOURCE_TEXT.intersection(path.parts))
        if not self._files:
            raise DataError(f"data: no Python file under `{root}`; wanted the standard library's sources")
        self._pieces = self._cut(buckets, (1, 4) if packed else (6, 8))
        self._text = functools.lru_cache(maxsize=64)(lambda file: self._files[file].read_bytes())

    def _cut(self, buckets: tuple[int, ...], eighths: tuple[int, int]) -> list[tuple[int, int, int]]:
        """(file, offset in bytes, tokens) of every piece: lengths go round the buckets, each shortened a little."""
        low, high = eighths
        pieces: list[tuple[int, int, int]] = []
        for file, path in enumerate(self._files):
            offset, size = 0, path.stat().st_size
            while True:
                bucket = buckets[len(pieces) % len(buckets)]
                steps = 8 * (high - low)  # a piece is a multiple of a 64th of the bucket
                length = bucket * (8 * low + (7 * len(pieces)) % (steps + 1)) // 64 - len(pieces) % 3
                if offset + length * self._per_token > size:
                    break
                pieces.append((file, offset, length))
                offset += length * self._per_token
        return pieces

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def share(self) -> float:
        tokens = sum(length for _, _, length in self._pieces)
        return 1 - len(self._pieces) / tokens if tokens else 0.0

    def read(self, number: int) -> Tokens:
        file, offset, length = self._pieces[number]
        text = self._text(file)[offset : offset + length * self._per_token]
        if self._encode is as_bytes:
            ids = np.frombuffer(text, np.uint8).astype(np.int64)
        else:
            ids = np.array(self._encode(text.decode(errors="replace"))[:length], np.int64)
        supervised = np.ones(len(ids), np.bool_)
        supervised[:1] = False
        return ids, supervised

    def length(self, number: int) -> int | None:
        return self._pieces[number][2] if self._encode is as_bytes else None


class Part:
    """Some of the samples of a source.

    Args:
        source: all of them.
        numbers: which, in their order.
        name: for people.
    """

    def __init__(self, source: Source, numbers: Sequence[int], name: str) -> None:
        self.name = name
        self.dropped = source.dropped
        self.share = source.share
        self._source = source
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> Tokens:
        return self._source.read(self._numbers[number])

    def length(self, number: int) -> int | None:
        return self._source.length(self._numbers[number])


def hold_out(source: Source, count: int) -> tuple[Source, Source]:
    """Samples to train on, and ``count`` others, which stand at even distances in the source.

    Raises:
        DataError: nothing would be left to train on.
    """
    total = len(source)
    if count >= total:
        raise DataError(f"data: `{count}` samples to hold out of `{total}`; wanted fewer, as the rest is trained on")
    kept_apart = [(2 * place + 1) * total // (2 * count) for place in range(count)]
    trained = sorted(set(range(total)).difference(kept_apart))
    return Part(source, trained, source.name), Part(source, kept_apart, f"{source.name}, held out")


@dataclasses.dataclass(frozen=True)
class Visit:
    """A sample in its place in the order, read or not.

    Args:
        epoch, index: which, and for which time.
        length: its tokens.
        sample: as it was read, where its length was not known without.
    """

    epoch: int
    index: int
    length: int
    sample: Sample | None


@dataclasses.dataclass(frozen=True)
class Planned:
    """The samples of a batch that has not been made yet.

    Args:
        shape: of the batch.
        rows: the samples of each row.
    """

    shape: Shape
    rows: list[list[Visit]]

    @property
    def num_tokens(self) -> int:
        """Tokens that will be no padding."""
        return sum(visit.length for row in self.rows for visit in row)

    @property
    def visits(self) -> tuple[tuple[int, int], ...]:
        """(epoch, index) of every sample."""
        return tuple((visit.epoch, visit.index) for row in self.rows for visit in row)


class Loader:
    """Batches without end, epoch after epoch; ``state`` goes back to the same place.

    In the padded layout samples wait in the queue of their bucket until a batch is full; in the packed one a row is
    filled with the next samples until one does not fit. What waits at the end of an epoch goes on into the next.

    ``plan`` goes on by one batch and ``make`` makes it, so that a rank follows the order of all batches, and reads and
    makes only its own.

    Args:
        source: the samples.
        shapes: for each bucket its only shape, ascending.
        drafting: what decides the blocks.
        seed: of order and anchors.
        state: what ``state`` gave; None starts anew.

    Raises:
        DataError: the source is empty.
    """

    def __init__(
        self,
        source: Source,
        shapes: Mapping[int, Shape],
        drafting: Drafting,
        seed: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source
        if not len(source):
            why = [f"{count} × {reason}" for reason, count in source.dropped.items()]
            raise DataError(f"data: `{source.name}` has no sample to train on", reasons=why)
        self._shapes = dict(shapes)
        self._drafting = drafting
        self._seed = seed
        self._epoch, self._next = 0, 0
        self._waiting: dict[int, list[Visit]] = {bucket: [] for bucket in shapes}
        if state is not None:
            self._epoch, self._next = state["epoch"], state["next"]
            waiting = {int(bucket): visits for bucket, visits in state["waiting"].items()}
            self._check_place(waiting)
            self._waiting.update(
                {bucket: [self._visited(*one) for one in visits] for bucket, visits in waiting.items()}
            )

    def _check_place(self, waiting: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Refuses a place that these samples and shapes do not have: the data changed, or the checkpoint is damaged."""
        total = len(self.source)
        numbers = [self._next - 1, *(number for visits in waiting.values() for _, number in visits)]
        if max(numbers) >= total or waiting.keys() != self._shapes.keys():
            raise DataError(
                f"resume: the checkpoint stands at sample `{max(numbers)}` of buckets {sorted(waiting)}; "
                f"wanted one of the `{total}` samples of `{self.source.name}` and buckets {sorted(self._shapes)}",
                hint="the data must be what the checkpoint was trained on",
            )

    def state(self) -> dict[str, Any]:
        """Where the loader stands, as plain data."""
        waiting = {str(bucket): [[one.epoch, one.index] for one in held] for bucket, held in self._waiting.items()}
        return {"epoch": self._epoch, "next": self._next, "waiting": waiting}

    @property
    def epoch(self) -> float:
        """How often the source has been read, as a fraction."""
        return self._epoch + self._next / len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.make(self.plan())

    def plan(self) -> Planned:
        """The samples of the next batch."""
        if next(iter(self._shapes.values())).packed:
            return self._plan_packed()
        while True:
            visit = self._visit()
            bucket = bucket_for(visit.length, tuple(self._shapes))
            queue = self._waiting[bucket]
            queue.append(visit)
            if len(queue) == self._shapes[bucket].batch:
                self._waiting[bucket] = []
                return Planned(self._shapes[bucket], [[held] for held in queue])

    def _plan_packed(self) -> Planned:
        bucket = max(self._shapes)
        row = self._waiting[bucket]
        while True:
            visit = self._visit()
            if row and sum(held.length for held in row) + visit.length > bucket:
                self._waiting[bucket] = [visit]
                return Planned(self._shapes[bucket], [row])
            row.append(visit)

    def make(self, planned: Planned) -> Batch:
        """The batch of these samples.

        Raises:
            DataError: one has not the length that it had.
        """
        rows = [[visit.sample or self._read(visit) for visit in row] for row in planned.rows]
        return assemble(rows, planned.shape, self._drafting, self._seed)

    def _visit(self) -> Visit:
        if self._next == len(self.source):
            self._epoch, self._next = self._epoch + 1, 0
        order = _order(self._seed, self._epoch, len(self.source))
        number = int(order[self._next])
        self._next += 1
        return self._visited(self._epoch, number)

    def _visited(self, epoch: int, number: int) -> Visit:
        length = self.source.length(number)
        if length is not None:
            return Visit(epoch, number, length, None)
        sample = Sample(epoch, number, *self.source.read(number))
        return Visit(epoch, number, len(sample.tokens), sample)

    def _read(self, visit: Visit) -> Sample:
        sample = Sample(visit.epoch, visit.index, *self.source.read(visit.index))
        if len(sample.tokens) != visit.length:
            raise DataError(
                f"data: `{self.source.name}` has changed while it was in use: sample `{visit.index}` has "
                f"`{len(sample.tokens)}` tokens; wanted `{visit.length}`, as when it was checked"
            )
        return sample


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Integers:
    return np.random.default_rng((seed, epoch)).permutation(count)


class ShuffledLabels:
    """A loader whose labels mean nothing: every batch's labels go through a new permutation of the vocabulary.

    It is the control of the demonstration. Shuffled over positions alone, labels would still have frequencies to learn.

    Args:
        loader: the true batches.
        vocab_size: ids permuted.
        seed: of the permutations.
    """

    def __init__(self, loader: Loader, vocab_size: int, seed: int) -> None:
        self._loader = loader
        self._vocab_size = vocab_size
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.make(self.plan())

    def plan(self) -> Planned:
        """As the loader's."""
        return self._loader.plan()

    def make(self, planned: Planned) -> Batch:
        """The batch of these samples, with labels that mean nothing."""
        batch = self._loader.make(planned)
        random = np.random.default_rng((self._seed, self._vocab_size, *batch.visits[0]))
        permutation = torch.from_numpy(random.permutation(self._vocab_size))
        labelled = batch.labels_BNK != anchors.IGNORED
        labels = torch.where(labelled, permutation[batch.labels_BNK.clamp(min=0)], batch.labels_BNK)
        return dataclasses.replace(batch, labels_BNK=labels)
