"""Choosing among candidates by their times and their outputs. Pure: no clock, no GPU, no order of arrival.

Candidates are named by their tokens, and wherever two are as good as each other the one whose token sorts first wins,
so that two builds on one card, or one build with its candidates shuffled, choose alike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from kernelbake.errors import BuildError


class Policy(Protocol):
    """What a race needs of ``manifest.MeasurePolicy``."""

    @property
    def rounds(self) -> int: ...
    @property
    def max_extra_rounds(self) -> int: ...
    @property
    def hopeless_ratio(self) -> float: ...
    @property
    def tie_threshold(self) -> float: ...


class InvalidTimeError(Exception):
    """A sample that is no time."""


def checked_samples(samples: Any) -> list[float]:
    """The samples in ms, if they are times.

    Raises:
        InvalidTimeError: there are none, or one is no finite number above zero.
    """
    if not isinstance(samples, list) or not samples:
        raise InvalidTimeError(f"its samples are `{samples!r:.60}`; wanted a list of times in ms")
    for sample in samples:
        if type(sample) not in (int, float) or not math.isfinite(sample) or sample <= 0:
            raise InvalidTimeError(f"it took `{sample!r:.60}` ms; wanted a finite time above 0")
    return [float(sample) for sample in samples]


@dataclasses.dataclass(frozen=True)
class Times:
    """The samples of one candidate.

    Args:
        rounds: samples in ms, one tuple for each round in which it took part.
    """

    rounds: tuple[tuple[float, ...], ...] = ()

    @property
    def samples(self) -> tuple[float, ...]:
        """All samples in ms, in the order in which they were taken."""
        return tuple(sample for samples in self.rounds for sample in samples)

    @property
    def median(self) -> float:
        """Median of all samples in ms."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles in ms; 0 for a single sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    @property
    def uncertainty(self) -> float:
        """Standard error of the median in ms.

        The larger of two estimates: from the samples as if they were independent, ``1.2533 σ / √n`` with ``σ`` from the
        quartiles (``spread / 1.349``, both exact for a normal distribution), and from the medians of the rounds, which
        also feels drift between them.
        """
        within = 1.2533 * self.spread / 1.349 / math.sqrt(len(self.samples))
        medians = [statistics.median(samples) for samples in self.rounds]
        between = statistics.stdev(medians) / math.sqrt(len(medians)) if len(medians) > 1 else 0.0
        return max(within, between)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a race ended.

    Args:
        winner: token of the winner.
        tied: tokens of all candidates within the tie threshold of the fastest, the winner among them, sorted.
        runner_up: token of the fastest of the others, tied or not; None if there is no other.
        margin: how much slower the runner-up is than the winner, relative; negative for a tie decided by order.
        told_apart: whether the runner-up is outside the tie threshold beyond the uncertainty.
    """

    winner: str
    tied: tuple[str, ...]
    runner_up: str | None
    margin: float | None
    told_apart: bool


class Race:
    """Samples candidates in rounds, drops the hopeless, and goes on until the leaders are told apart or tied.

    Args:
        policy: when to stop.
        names: tokens of the candidates, in any order.
    """

    def __init__(self, policy: Policy, names: Sequence[str]) -> None:
        self._policy = policy
        self._round = 0
        self.times: dict[str, Times] = {name: Times() for name in sorted(names)}
        self._running = list(self.times)

    def next_round(self) -> list[str]:
        """Who is to be sampled now, in order; nobody when the race is over."""
        self._running = [name for name in self._running if name in self.times]
        if not self._running:
            return []
        if self._round == 0:
            running = list(self._running)
        elif self._round < self._policy.rounds and len(self._running) > 1:
            running = self._hopeful()
            self._running = running
            running = running if len(running) > 1 else []
        elif self._round < self._policy.rounds + self._policy.max_extra_rounds:
            running = self._unclear()
        else:
            running = []
        self._round += 1
        return running

    def add(self, name: str, samples: Sequence[float]) -> None:
        """The samples in ms that a candidate made in this round."""
        self.times[name] = Times((*self.times[name].rounds, tuple(samples)))

    def drop(self, name: str) -> None:
        """Takes a candidate that was rejected out of the race."""
        del self.times[name]

    def _best(self) -> str:
        return min(self.times, key=lambda name: (self.times[name].median, name))

    def _hopeful(self) -> list[str]:
        limit = self.times[self._best()].median * self._policy.hopeless_ratio
        return [name for name in self._running if self.times[name].median <= limit]

    def _unclear(self) -> list[str]:
        """The fastest and everyone of whom it is not certain on which side of the tie threshold he is."""
        best = self._best()
        unclear = [name for name in self._running if name != best and not self._certain(name, best)]
        return sorted([best, *unclear]) if unclear else []

    def _certain(self, name: str, best: str) -> bool:
        times, fastest = self.times[name], self.times[best]
        doubt = 2 * math.hypot(times.uncertainty, fastest.uncertainty) / fastest.median
        return abs(times.median / fastest.median - 1 - self._policy.tie_threshold) >= doubt

    def verdict(self) -> Verdict:
        """The winner.

        Raises:
            ValueError: no candidate is left.
        """
        best = self._best()
        limit = self.times[best].median * (1 + self._policy.tie_threshold)
        tied = tuple(name for name in self.times if self.times[name].median <= limit)
        winner = tied[0]
        others = sorted((times.median, name) for name, times in self.times.items() if name != winner)
        if not others:
            return Verdict(winner, tied, None, None, True)
        median, runner_up = others[0]
        margin = median / self.times[winner].median - 1
        return Verdict(winner, tied, runner_up, margin, len(tied) == 1 and self._certain(runner_up, winner))


# ---------------------------------------------------------------------------------------------- agreement

Output = TypeVar("Output")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one output is from another.

    Args:
        error: ‖a − b‖ / ‖b‖ over the worst tensor; infinity where one is finite and the other not.
        detail: what differs, in words; empty if the two agree within the tolerance.
    """

    error: float
    detail: str = ""

    @property
    def agrees(self) -> bool:
        return not self.detail


@dataclasses.dataclass
class _Group(Generic[Output]):
    output: Output
    members: dict[str, Difference]


class Agreement(Generic[Output]):
    """Groups of candidates whose outputs agree. Only the first output of each group is kept, since outputs are large.

    Candidates have to be added in the order of their tokens, so that the groups do not depend on anything else.

    Args:
        difference: how far its first argument is from its second.
    """

    def __init__(self, difference: Callable[[Output, Output], Difference]) -> None:
        self._difference = difference
        self._groups: list[_Group[Output]] = []

    def add(self, name: str, output: Output) -> None:
        """Puts a candidate into the first group that it agrees with, or into a new one."""
        for group in self._groups:
            found = self._difference(output, group.output)
            if found.agrees:
                group.members[name] = found
                return
        self._groups.append(_Group(output, {name: Difference(0.0)}))

    def first(self, name: str) -> Output:
        """The output of the first candidate of a candidate's group."""
        return next(group.output for group in self._groups if name in group.members)

    def against_first(self) -> dict[str, str]:
        """For each candidate, how it differs from the very first one, in words."""
        found = {}
        for group in self._groups:
            text = self._difference(group.output, self._groups[0].output).detail or "as the first"
            found.update(dict.fromkeys(group.members, text))
        return found

    def split(self) -> tuple[dict[str, Difference], dict[str, Difference]]:
        """Those of the largest group, and the others; each with its difference from the largest group's first member.

        Of a member of another group, the difference of that group's first member is given.

        Raises:
            BuildError: there is more than one candidate and no group is larger than all others, or none has two.
        """
        sizes = sorted((len(group.members) for group in self._groups), reverse=True)
        if sum(sizes) > 1 and (sizes[0] < 2 or sizes[:2] == [sizes[0]] * 2):
            raise BuildError(
                f"{sum(sizes)} candidates give {len(sizes)} different results, of which none is most frequent"
            )
        largest = max(self._groups, key=lambda group: len(group.members))
        outside = {}
        for group in self._groups:
            if group is not largest:
                outside.update(dict.fromkeys(group.members, self._difference(group.output, largest.output)))
        return dict(largest.members), dict(sorted(outside.items()))
