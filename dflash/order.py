"""Which samples are worked on side by side: they wait by length until they fill the batches of a step.

The batches of a step run side by side on pairs, and the step lasts as long as the longest of them. So all of its
batches come from one bucket, wherever the samples allow it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dflash.buckets import Sample, Shape, bucket_for


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


class Queues:
    """Samples that wait for others to fill batches with.

    In the padded layout a sample waits in the queue of its bucket until all batches of a step are full. What waits at
    the end of an epoch makes mixed steps, of several buckets; the last of them may need batches of the next epoch, and
    is its first. So no length waits longer for being rare, and an epoch has at most as many mixed steps as there are
    buckets. In the packed layout all batches have one shape: a row is filled with the next samples until one does not
    fit.

    Args:
        shapes: for each bucket its only shape, ascending.
        step_batches: batches of a step, over all ranks and pairs.

    Attributes:
        waiting: for each bucket the samples that wait, in their order.
    """

    def __init__(self, shapes: Mapping[int, Shape], step_batches: int) -> None:
        self.waiting: dict[int, list[Visit]] = {bucket: [] for bucket in shapes}
        self._shapes = dict(shapes)
        self._step_batches = step_batches
        self._is_packed = next(iter(shapes.values())).packed

    def add(self, visit: Visit) -> list[Planned]:
        """The batches that this sample completes: those of a step, or in the packed layout one; else none."""
        if self._is_packed:
            return self._pack(visit)
        bucket = bucket_for(visit.length, tuple(self._shapes))
        self.waiting[bucket].append(visit)
        if len(self.waiting[bucket]) == self._step_batches * self._shapes[bucket].batch:
            return [self._take(bucket) for _ in range(self._step_batches)]
        return self.mixed() if self._holds_before(visit.epoch) else []

    def mixed(self) -> list[Planned]:
        """For the end of an epoch: the longest batches that wait, as many as a step has; none if too few are full."""
        full: list[int] = []  # the bucket of every full batch, the longest first
        for bucket, queue in reversed(self.waiting.items()):
            full += [bucket] * (len(queue) // self._shapes[bucket].batch)
        if self._is_packed or len(full) < self._step_batches:
            return []
        return [self._take(bucket) for bucket in full[: self._step_batches]]

    def _holds_before(self, epoch: int) -> bool:
        """Whether a batch waits that was full before this epoch."""
        lasts = ((queue, self._shapes[bucket].batch - 1) for bucket, queue in self.waiting.items())
        return any(len(queue) > last and queue[last].epoch < epoch for queue, last in lasts)

    @property
    def are_too_full(self) -> bool:
        """Whether more samples wait than ever do."""
        return not self._is_packed and any(
            len(queue) >= self._step_batches * self._shapes[bucket].batch for bucket, queue in self.waiting.items()
        )

    def _take(self, bucket: int) -> Planned:
        """The first batch of a queue."""
        shape, queue = self._shapes[bucket], self.waiting[bucket]
        self.waiting[bucket] = queue[shape.batch :]
        return Planned(shape, [[visit] for visit in queue[: shape.batch]])

    def _pack(self, visit: Visit) -> list[Planned]:
        bucket = max(self._shapes)
        row = self.waiting[bucket]
        if row and sum(held.length for held in row) + visit.length > bucket:
            self.waiting[bucket] = [visit]
            return [Planned(self._shapes[bucket], [row])]
        row.append(visit)
        return []
