"""Samples: where they come from, in which order, and into which batches they go. Resumable at any batch.

A source numbers its samples; a visit is (epoch, number). The order of an epoch depends on the seed and the epoch alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dflash import anchors
from dflash.anchors import Drafting, Flags, Integers
from dflash.buckets import Batch, Sample, Shape, assemble
from dflash.errors import DataError
from dflash.hub import as_bytes as as_bytes
from dflash.order import Planned, Queues, Visit
from dflash.saved import BEGUN as BEGUN
from dflash.spec import STDLIB

_NO_SOURCE_TEXT = frozenset(("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"))

Encode = Callable[[str], list[int]]
Tokens = tuple[Integers, Flags]


class Source(Protocol):
    """Numbered samples.

    Attributes:
        name: for people.
        dropped: samples left out, by reason.
        share: of the tokens that are supervised.
        digest: of all that decides the samples and their order: other data under the same name have another one.
    """

    name: str
    dropped: collections.Counter[str]
    digest: str

    @property
    def share(self) -> float: ...

    def __len__(self) -> int: ...

    def read(self, number: int) -> Tokens:
        """Token ids of a sample and which of them are supervised."""
        ...

    def length(self, number: int) -> int | None:
        """How many tokens ``read`` will give, where that is known without reading."""
        ...


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
        names = [path.relative_to(root).as_posix() for path in self._files]
        self.digest = hashlib.sha256(json.dumps([names, self._pieces]).encode()).hexdigest()
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
        try:
            text = self._text(file)[offset : offset + length * self._per_token]
        except OSError as error:
            raise DataError(f"data: `{self._files[file]}` cannot be read ({error.strerror})") from error
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
        self.digest = source.digest
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


class Loader:
    """Batches without end, epoch after epoch; ``state`` goes back to the same place.

    Samples wait in ``order.Queues`` until they fill batches. What waits at the end of an epoch and makes no step goes
    on into the next.

    ``plan`` goes on by one batch and ``make`` makes it, so that a rank follows the order of all batches, and reads and
    makes only its own.

    Args:
        source: the samples.
        shapes: for each bucket its only shape, ascending.
        drafting: what decides the blocks.
        seed: of order and anchors.
        state: what ``state`` gave; None starts anew.
        step_batches: batches of a step, over all ranks and pairs.

    Raises:
        DataError: the source is empty, or has no such place as the state says.
    """

    def __init__(
        self,
        source: Source,
        shapes: Mapping[int, Shape],
        drafting: Drafting,
        seed: int,
        state: Mapping[str, Any] | None = None,
        *,
        step_batches: int,
    ) -> None:
        self.source = source
        if not len(source):
            why = [f"{count} × {reason}" for reason, count in source.dropped.items()]
            raise DataError(f"data: `{source.name}` has no sample to train on", reasons=why)
        self._shapes = dict(shapes)
        self._drafting = drafting
        self._seed = seed
        self._step_batches = step_batches
        self._epoch, self._next = 0, 0
        self._queues = Queues(self._shapes, step_batches)
        self._begun: collections.deque[Planned] = collections.deque()
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a place.

        Raises:
            DataError: these samples and shapes do not have it: the data changed, or the checkpoint is damaged.
        """
        self._epoch, self._next = state["epoch"], state["next"]
        waiting = {int(bucket): visits for bucket, visits in state["waiting"].items()}
        begun = state.get(BEGUN, [])
        total, held = len(self.source), [*waiting.values(), *(visits for _, visits in begun)]
        last = max(self._next - 1, *(number for visits in held for _, number in visits), 0)
        if last >= total or not waiting.keys() == self._shapes.keys() >= {bucket for bucket, _ in begun}:
            raise DataError(
                f"resume: the checkpoint stands at sample `{last}` of buckets {sorted(waiting)}; "
                f"wanted one of the `{total}` samples of `{self.source.name}` and buckets {sorted(self._shapes)}",
                hint="the data must be what the checkpoint was trained on",
            )
        for bucket, visits in waiting.items():
            self._queues.waiting[bucket] = [self._visited(*one) for one in visits]
        for bucket, visits in begun:
            self._begun.append(Planned(self._shapes[bucket], [[self._visited(*one)] for one in visits]))
        is_cut = any(len(planned.rows) != planned.shape.batch for planned in self._begun)
        if self._queues.are_too_full or is_cut or len(begun) >= self._step_batches:
            raise DataError(
                f"resume: the checkpoint has `{[len(visits) for visits in held]}` samples in unfinished batches; "
                f"wanted fewer of a bucket than a step of `{self._step_batches}` batches has, then whole batches"
            )

    def state(self) -> dict[str, Any]:
        """Where the loader stands, as plain data."""
        queues = self._queues.waiting
        waiting = {str(bucket): [[one.epoch, one.index] for one in held] for bucket, held in queues.items()}
        begun = [[planned.shape.bucket, [list(visit) for visit in planned.visits]] for planned in self._begun]
        return {"epoch": self._epoch, "next": self._next, "waiting": waiting, BEGUN: begun}

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
        while not self._begun:
            if self._next == len(self.source):
                self._begun.extend(self._queues.mixed())
            if not self._begun:
                self._begun.extend(self._queues.add(self._visit()))
        return self._begun.popleft()

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
