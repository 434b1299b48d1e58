"""Choosing among candidates by their times and their outputs. Pure: no clock, no GPU, no order of arrival.

Candidates are named by their tokens. Wherever two are as good as each other, the one that is first in an order of
preference wins, which is by token unless told otherwise; so that two builds on one card, or one build with its
candidates shuffled, choose alike.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
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
    @property
    def tie_floor_us(self) -> float: ...


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

    @functools.cached_property
    def samples(self) -> tuple[float, ...]:
        """All samples in ms, in the order in which they were taken."""
        return tuple(sample for samples in self.rounds for sample in samples)

    @functools.cached_property
    def median(self) -> float:
        """Median of all samples in ms."""
        return statistics.median(self.samples)

    @functools.cached_property
    def level(self) -> float:
        """Mean of the middle half of all samples in ms: as deaf to outliers as the median, but it falls between the
        ticks of a clock."""
        return _middle(self.samples)

    @functools.cached_property
    def spread(self) -> float:
        """Distance between the quartiles in ms; 0 for a single sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    @functools.cached_property
    def within(self) -> float:
        """Standard error of the median in ms, as if the samples were independent: ``1.2533 σ / √n`` with ``σ`` from the
        quartiles (``spread / 1.349``); both are exact for a normal distribution."""
        return 1.2533 * self.spread / 1.349 / math.sqrt(len(self.samples))


def _middle(samples: Sequence[float]) -> float:
    """Mean of the middle half."""
    ordered = sorted(samples)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a race ended.

    Args:
        winner: token of the winner.
        tied: tokens of all candidates that are tied with the fastest, the winner among them, by preference.
        runner_up: token of the fastest of the others, tied or not; None if there is no other.
        margin: how much slower the runner-up is than the winner, relative; negative for a tie decided by order.
        told_apart: whether the winner is alone ahead, and the uncertainty of no candidate could change that.
    """

    winner: str
    tied: tuple[str, ...]
    runner_up: str | None
    margin: float | None
    told_apart: bool


def tie_band(policy: Policy, fastest_ms: float) -> float:
    """How much slower than the fastest a candidate may be to be tied at all, relative.

    A part of the time, and an absolute part below which clocks and the placement of code and data decide.
    """
    return policy.tie_threshold + policy.tie_floor_us * 1e-3 / fastest_ms


def _least(ratios: Mapping[str, float]) -> str:
    return min(ratios, key=lambda name: ratios[name])


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where the tied end.

    Args:
        winner: the first by preference of those that are tied.
        limit: largest time relative to the fastest that is still tied.
    """

    winner: str
    limit: float


def cut(ratios: Mapping[str, float], band: float) -> Cut:
    """Decides among candidates by their times relative to the fastest.

    The first by preference that is tied wins, so only *steps* count: candidates that are faster than all that are
    preferred to them. The cut is made in the middle of the widest gap between steps inside the band: there, the
    smallest change of times that would change the winner is as large as it can be.

    Args:
        ratios: times relative to the fastest, in the order of preference.
        band: as ``tie_band`` gives it.

    Raises:
        ValueError: no candidate is left.
    """
    steps: list[tuple[float, str]] = []
    for name, ratio in ratios.items():
        if not steps or ratio < steps[-1][0]:
            steps.append((ratio, name))
    steps.reverse()
    if not steps:
        raise ValueError("no candidate is left")
    end = steps[0][0] + band
    inside = [step for step in steps if step[0] <= end]
    gaps = [following - here for (here, _), (following, _) in itertools.pairwise([*inside, (end, "")])]
    widest = max(range(len(gaps)), key=lambda place: (gaps[place], -place))
    ratio, winner = inside[widest]
    limit = end if widest == len(gaps) - 1 else ratio + gaps[widest] / 2
    return Cut(winner, limit)


class Race:
    """Samples candidates in rounds, drops the hopeless, and goes on while more samples may change the winner.

    The first of several rounds is a brief look at everyone. Afterwards times are compared within rounds, as ratios, so
    that clocks that drift from round to round change nothing.

    Args:
        policy: when to stop.
        names: tokens of the candidates, in any order.
        preference: of two tied candidates, the one for which this is smaller wins; by token if None.
    """

    def __init__(self, policy: Policy, names: Sequence[str], preference: Callable[[str], Any] | None = None) -> None:
        self._policy = policy
        self._round = 0
        self.times: dict[str, Times] = {name: Times() for name in sorted(names, key=preference)}
        self._levels: dict[str, dict[int, float]] = {name: {} for name in self.times}
        self._first = 2 if policy.rounds > 1 and len(names) > 1 else 1  # round of which times count

    @property
    def brief(self) -> bool:
        """Whether the round that runs is the brief one."""
        return self._round < self._first

    def next_round(self) -> list[str]:
        """Who is to be sampled now, by preference; nobody when the race is over."""
        if self._round == 0 or not self.times:
            running = list(self.times)
        elif self._round < self._policy.rounds:
            running = self._hopeful()
            running = running if len(running) > 1 or self._round < self._first else []
        elif self._round < self._policy.rounds + self._policy.max_extra_rounds:
            running = self._deciding()
        else:
            running = []
        if len(self.times) == 1 and self._round:
            running = []
        self._round += 1
        return running

    def add(self, name: str, samples: Sequence[float]) -> None:
        """The samples in ms that a candidate made in this round."""
        self._levels[name][self._round] = _middle(samples)
        known = self.times[name].rounds if self._round != self._first else ()  # a brief look has done its work
        self.times[name] = Times((*known, tuple(samples)))

    def drop(self, name: str) -> None:
        """Takes a candidate that was rejected out of the race."""
        del self.times[name], self._levels[name]

    def _hopeful(self) -> list[str]:
        ratios = self.ratios()
        overlooked = self._overlooked(ratios)
        return [name for name, ratio in ratios.items() if ratio <= self._policy.hopeless_ratio or name in overlooked]

    def _overlooked(self, ratios: Mapping[str, float]) -> set[str]:
        """Those that the brief look alone took for hopeless, against a fastest that has since shown itself slower."""
        found = self._levels[_least(ratios)]
        limit = self._policy.hopeless_ratio * found[max(found)]
        levels = {name: self._levels[name] for name in ratios}
        return {name for name, own in levels.items() if max(own) < self._first and own[max(own)] <= limit}

    def _deciding(self) -> list[str]:
        """Those of whom it is not certain that they change nothing, with winner and fastest; by preference."""
        ratios = self.ratios()
        doubtful = self._doubtful(ratios) | self._overlooked(ratios)
        if not doubtful:
            return []
        wanted = {_least(ratios), cut(ratios, self.band(ratios)).winner, *doubtful}
        return [name for name in ratios if name in wanted]

    def _doubtful(self, ratios: Mapping[str, float]) -> set[str]:
        """Candidates that would change the winner by being as much faster or slower as is uncertain."""
        band = self.band(ratios)
        winner = cut(ratios, band).winner
        found = set()
        for name, ratio in ratios.items():
            doubt = self.doubt(name, ratios)
            for moved in (ratio - doubt, ratio + doubt):
                if cut({**ratios, name: moved}, band).winner != winner:
                    found.add(name)
        return found

    def doubt(self, name: str, ratios: Mapping[str, float]) -> float:
        """Twice the standard error of one of ``ratios()``; of the fastest's own time for the fastest."""
        return ratios[name] * self._doubt(name, _least(ratios))

    def _doubt(self, name: str, fastest: str) -> float:
        mine, best = self.times[name], self.times[fastest]
        if name == fastest:
            return 2 * best.within / best.level
        within = math.hypot(mine.within / mine.level, best.within / best.level)
        ratios = self._paired(name, fastest)
        between = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        return 2 * max(within, between)

    def band(self, ratios: Mapping[str, float]) -> float:
        """How much slower than the fastest of ``ratios()`` a candidate may be to be tied at all, relative."""
        return tie_band(self._policy, self.times[_least(ratios)].level)

    def ratios(self) -> dict[str, float]:
        """Times of all candidates relative to the fastest, by preference.

        Two candidates are compared in the rounds in which both took part, the brief one only where there is no other:
        by the median of their ratios.
        """
        if not self.times:
            return {}
        most = max(len(levels) for levels in self._levels.values())
        steady = next(name for name, levels in self._levels.items() if len(levels) == most)
        first = {name: self._ratio(name, steady) for name in self.times}
        often = [name for name in first if len(self._levels[name]) == most]
        fastest = _least({name: first[name] for name in often})
        ratios = {name: self._ratio(name, fastest) for name in self.times}
        least = min(ratios.values())
        return {name: ratio / least for name, ratio in ratios.items()}

    def _ratio(self, name: str, other: str) -> float:
        paired = self._paired(name, other)
        return statistics.median(paired) if paired else self.times[name].level / self.times[other].level

    def _paired(self, name: str, other: str) -> list[float]:
        mine, theirs = self._levels[name], self._levels[other]
        rounds = [number for number in mine if number in theirs]
        rounds = [number for number in rounds if number >= self._first] or rounds
        return [mine[number] / theirs[number] for number in rounds]

    def verdict(self) -> Verdict:
        """The winner.

        Raises:
            ValueError: no candidate is left.
        """
        ratios = self.ratios()
        found = cut(ratios, self.band(ratios) if ratios else 0.0)
        tied = tuple(name for name, ratio in ratios.items() if ratio <= found.limit)
        others = [name for name in ratios if name != found.winner]
        if not others:
            return Verdict(found.winner, tied, None, None, True)
        runner_up = _least({name: ratios[name] for name in others})
        margin = ratios[runner_up] / ratios[found.winner] - 1
        return Verdict(found.winner, tied, runner_up, margin, len(tied) == 1 and not self._doubtful(ratios))


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
