"""Whether two builds on one card choose alike, tried on recorded times with made-up noise.

The noise is what builds on an H200 showed: a whole build is faster or slower by a few percent, rounds drift, code and
data of each candidate lie better or worse in one build than in another, and a clock ticks every 32 ns.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping

import pytest
from recordedtimes import FIELDS

from kernelbake.choose import Race
from kernelbake.keys import Config
from kernelbake.manifest import MeasurePolicy
from kernelbake.tune import preference

POLICY = MeasurePolicy()
BUILDS = 60
TICK_MS = 32e-6
PLACEMENT = 0.005
"""Largest shift of one candidate against the others from build to build."""
FEWER = 30
"""Samples of a round are replaced by so many times fewer with less noise, so that the test takes seconds."""


class _Card:
    """One build's view of a key."""

    def __init__(self, field: Mapping[Config, tuple[float, float]], noise: random.Random) -> None:
        self._noise = noise
        common = noise.gauss(1.0, 0.02)
        self._level = {
            config.token: median * 1e-3 * common * (1 + noise.uniform(-PLACEMENT, PLACEMENT))
            for config, (median, _) in field.items()
        }
        self._sigma = {config.token: spread * 1e-3 / 1.349 for config, (_, spread) in field.items()}

    def round(self) -> float:
        """How much slower everyone is in a round."""
        return self._noise.gauss(1.0, 0.01)

    def samples(self, name: str, drift: float, *, brief: bool) -> list[float]:
        level = self._level[name] * drift
        count = POLICY.min_samples
        sigma = self._sigma[name]
        if not brief:
            whole = max(count, min(POLICY.max_samples, int(POLICY.samples_ms / level)))
            count = max(count, whole // FEWER)
            sigma *= (count / whole) ** 0.5
        times = (self._noise.gauss(level, sigma) for _ in range(count))
        return [max(round(time / TICK_MS), 1) * TICK_MS for time in times]


def _built(field: Mapping[Config, tuple[float, float]], noise: random.Random) -> str:
    """The winner of a build."""
    card, order = _Card(field, noise), {config.token: preference(config) for config in field}
    race = Race(POLICY, list(order), order.__getitem__)
    while names := race.next_round():
        drift = card.round()
        for name in names:
            race.add(name, card.samples(name, drift, brief=race.brief))
    return race.verdict().winner


def _built_by_threshold(field: Mapping[Config, tuple[float, float]], noise: random.Random) -> str:
    """The winner by the plain rule: medians of all samples, and the first by token within 1 % of the least."""
    card = _Card(field, noise)
    samples: dict[str, list[float]] = {config.token: [] for config in field}
    for _ in range(3):
        drift = card.round()
        for name, known in samples.items():
            known += card.samples(name, drift, brief=False)
    medians = {name: statistics.median(known) for name, known in samples.items()}
    return min(name for name, median in medians.items() if median <= 1.01 * min(medians.values()))


def _flips(winners: list[str]) -> float:
    """Share of pairs of builds that choose otherwise."""
    return 1 - sum((winners.count(name) / len(winners)) ** 2 for name in set(winners))


@pytest.fixture(scope="module")
def winners() -> dict[str, list[str]]:
    noise = random.Random(11)
    return {name: [_built(field, noise) for _ in range(BUILDS)] for name, field in FIELDS.items()}


def test_two_builds_choose_alike(winners: dict[str, list[str]]) -> None:
    flips = {name: _flips(found) for name, found in winners.items()}
    print(flips)
    assert max(flips.values()) < 0.25
    assert statistics.fmean(flips.values()) < 0.03


def test_the_plain_rule_does_not() -> None:
    noise = random.Random(11)
    flips = {name: _flips([_built_by_threshold(field, noise) for _ in range(BUILDS)]) for name, field in FIELDS.items()}
    print(flips)
    assert max(flips.values()) > 0.35
    assert statistics.fmean(flips.values()) > 0.03


def test_what_is_chosen_is_as_fast_as_the_fastest(winners: dict[str, list[str]]) -> None:
    regrets = []
    for name, found in winners.items():
        times = {config.token: median for config, (median, _) in FIELDS[name].items()}
        regrets += [times[winner] / min(times.values()) - 1 for winner in found]
    print(statistics.median(regrets), max(regrets))
    assert statistics.median(regrets) <= 0.01
    assert max(regrets) <= 0.05
