"""The batches of every step, dealt out to ranks and pairs, one step ahead. Loads torch.

A step has G = ranks × pairs × accumulation batches, the next G of one order that depends on the seed and G alone, and
that puts equal lengths into a step (``order``). Batch i is that of pair i mod (ranks × pairs), counted over all ranks.
So the same batches make a step however they are divided, and the weights that the loss is divided by are known, and
added up exactly, before any device works.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from dflash import data
from dflash.buckets import Batch, Shape
from dflash.errors import DataError, TrainingStoppedError
from dflash.order import Planned
from dflash.ranks import Ranks
from dflash.stop import Stop
from kernelbake.errors import KernelbakeError

_GOOD, _BAD = 0.0, 1.0


@dataclasses.dataclass(frozen=True)
class Dealt:
    """The batches of one step.

    Args:
        mine: of each pair of this rank, in their order.
        weight_sum: of all batches of the step.
        shapes, visits, num_tokens: of all batches of the step, in their order.
        before, after: position in the data.
        epoch: position in the data, as a fraction.
        failure: why there are none.
    """

    mine: list[list[Batch]]
    weight_sum: float
    shapes: tuple[Shape, ...]
    visits: tuple[tuple[int, int], ...]
    num_tokens: int
    before: dict[str, Any]
    after: dict[str, Any]
    epoch: float
    failure: KernelbakeError | None = None


class Feed:
    """Takes batches from the loader and deals them out.

    Args:
        loader: all batches, in their order.
        source: what makes them: the loader, or what shuffles its labels.
        ranks: this rank among the others.
        pairs: of each rank.
        accumulate: batches of each pair in a step.
        pinned: whether batches go into pinned memory, from where copies to a GPU overlap with work.

    Attributes:
        signal: the number of a signal that any rank had got when the newest batches were dealt.
    """

    def __init__(
        self,
        loader: data.Loader,
        source: data.Loader | data.ShuffledLabels,
        ranks: Ranks,
        pairs: int,
        accumulate: int,
        *,
        pinned: bool,
    ) -> None:
        self._loader = loader
        self._source = source
        self._ranks = ranks
        self._pairs = pairs
        self._accumulate = accumulate
        self._pinned = pinned
        self.signal: int | None = None

    def deals(self, stop: Stop, count: int) -> Iterator[Dealt]:
        """The batches of this many steps. With each, ranks agree on whether a signal came: ``signal``."""
        for _ in range(count):
            yield self._deal(stop)
        self.signal = self.hear(stop)

    def hear(self, stop: Stop) -> int | None:
        """The number of a signal that any rank got up to now."""
        return _signal(self._ranks.numbers([_GOOD, float(stop.number or 0)]))

    def _deal(self, stop: Stop) -> Dealt:
        before = self._loader.state()
        planned: list[Planned] = []
        made: list[Batch] = []
        failure: KernelbakeError | None = None
        try:
            planned = [self._source.plan() for _ in range(self._ranks.world * self._pairs * self._accumulate)]
            made = [self._source.make(planned[place]) for place in self._places()]
        except DataError as error:
            failure = error
        weights = [0.0] * (self._pairs * self._accumulate) if failure else [batch.weight_sum for batch in made]
        said = self._ranks.numbers([_BAD if failure else _GOOD, float(stop.number or 0), *weights])
        self.signal = _signal(said)
        bad = [rank for rank, (state, *_) in enumerate(said) if state != _GOOD]
        if bad and failure is None:
            failure = TrainingStoppedError(f"rank {bad[0]}: its data cannot be read; it says why")
        if self._pinned:
            made = [batch.pinned() for batch in made]
        return Dealt(
            mine=[made[pair :: self._pairs] for pair in range(self._pairs)],
            weight_sum=math.fsum(weight for _, _, *given in said for weight in given),
            shapes=tuple(one.shape for one in planned),
            visits=tuple(visit for one in planned for visit in one.visits),
            num_tokens=sum(one.num_tokens for one in planned),
            before=before,
            after=self._loader.state(),
            epoch=self._loader.epoch,
            failure=failure,
        )

    def _places(self) -> list[int]:
        """Which batches of a step are this rank's, in their order."""
        everyone = self._ranks.world * self._pairs
        first = self._ranks.rank * self._pairs
        return [turn * everyone + first + pair for turn in range(self._accumulate) for pair in range(self._pairs)]


def _signal(said: Sequence[Sequence[float]]) -> int | None:
    return max(int(number) for _, number, *_ in said) or None
