from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelbake.choose import Agreement, Difference, InvalidTimeError, Race, Times, Verdict, checked_samples
from kernelbake.errors import BuildError
from kernelbake.manifest import MeasurePolicy

POLICY = MeasurePolicy(rounds=3, max_extra_rounds=5, hopeless_ratio=1.5, tie_threshold=0.01)


def _run(race: Race, timer: Callable[[str], list[float]]) -> tuple[Verdict, dict[str, int]]:
    taken: dict[str, int] = {}
    while names := race.next_round():
        for name in names:
            taken[name] = taken.get(name, 0) + 1
            race.add(name, timer(name))
    return race.verdict(), taken


def _fixed(times: Mapping[str, float]) -> Callable[[str], list[float]]:
    return lambda name: [times[name]] * 5


@pytest.mark.parametrize(
    "samples",
    [[math.inf], [1.0, math.nan], [0.0], [-1.0], [[1.0, 2.0]], [], None, ["1"], [True], 1.0, [1.0, math.inf]],
)
def test_what_is_no_time_is_refused(samples: object) -> None:
    with pytest.raises(InvalidTimeError):
        checked_samples(samples)


def test_times_are_times() -> None:
    assert checked_samples([1, 0.25]) == [1.0, 0.25]


def test_the_fastest_wins() -> None:
    verdict, _ = _run(Race(POLICY, ["a", "b", "c"]), _fixed({"a": 3.0, "b": 1.0, "c": 1.2}))
    assert verdict == Verdict("b", ("b",), "c", pytest.approx(0.2), True)


def test_the_order_of_candidates_does_not_decide() -> None:
    times = {"a": 1.005, "b": 1.0, "c": 1.0, "d": 1.2, "e": 9.0}
    verdicts = {_run(Race(POLICY, order), _fixed(times))[0] for order in itertools.permutations(times)}
    assert verdicts == {Verdict("a", ("a", "b", "c"), "b", 1 / 1.005 - 1, False)}


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0.5, 2.0), min_size=1), st.randoms())
def test_shuffled_candidates_have_one_winner(times: dict[str, float], shuffler: random.Random) -> None:
    names = list(times)
    first, _ = _run(Race(POLICY, names), _fixed(times))
    shuffler.shuffle(names)
    second, _ = _run(Race(POLICY, names), _fixed(times))
    assert first == second
    assert times[first.winner] <= min(times.values()) * 1.01


def test_the_hopeless_are_sampled_once() -> None:
    _, taken = _run(Race(POLICY, ["a", "b", "c"]), _fixed({"a": 1.0, "b": 1.4, "c": 1.6}))
    assert taken == {"a": 3, "b": 3, "c": 1}


def test_a_single_candidate_is_sampled_once() -> None:
    verdict, taken = _run(Race(POLICY, ["a"]), _fixed({"a": 1.0}))
    assert (verdict, taken) == (Verdict("a", ("a",), None, None, True), {"a": 1})


def test_noise_is_sampled_until_told_apart() -> None:
    noise = random.Random(1)

    def timer(name: str) -> list[float]:
        return [{"a": 1.01, "b": 1.0, "c": 1.3}[name] * noise.gauss(1.0, 0.03) for _ in range(10)]

    _, taken = _run(Race(POLICY, ["a", "b", "c"]), timer)
    assert POLICY.rounds < taken["a"] <= POLICY.rounds + POLICY.max_extra_rounds
    assert taken["c"] == POLICY.rounds, "who is certainly slower waits for nobody"


def test_fast_on_the_first_call_only_does_not_win() -> None:
    calls: dict[str, int] = {}

    def timer(name: str) -> list[float]:
        calls[name] = calls.get(name, 0) + 1
        if name == "a":
            return [0.01, 2.0, 2.0, 2.0, 2.0] if calls[name] == 1 else [2.0] * 5
        return [1.0] * 5

    assert _run(Race(POLICY, ["a", "b"]), timer)[0].winner == "b"


@pytest.mark.parametrize("rounds", [2, 3, 5])
@pytest.mark.parametrize(("later", "winner"), [(2.0, "b"), (1.2, "b"), (0.7, "a"), (0.5, "a")])
def test_fast_in_the_whole_brief_look_only_does_not_win(rounds: int, later: float, winner: str) -> None:
    """Nobody else is hopeful then, and still the others get another look once it turns out to be slower."""
    calls: dict[str, int] = {}

    def timer(name: str) -> list[float]:
        calls[name] = calls.get(name, 0) + 1
        return [(0.5 if calls[name] == 1 else later) if name == "a" else {"b": 1.0, "c": 1.1, "d": 9.0}[name]] * 5

    policy = POLICY.model_copy(update={"rounds": rounds})
    verdict, taken = _run(Race(policy, ["a", "b", "c", "d"]), timer)
    assert verdict.winner == winner
    assert taken["d"] == 1
    assert taken["b"] == 1 or later > 0.5


def test_a_dropped_candidate_does_not_come_back() -> None:
    race = Race(POLICY, ["a", "b"])
    race.next_round()
    race.drop("a")
    race.add("b", [1.0])
    assert race.next_round() == []
    assert race.verdict().winner == "b"


@pytest.mark.parametrize("after", range(1, 6))
def test_a_race_of_which_everyone_was_dropped_is_over(after: int) -> None:
    race = Race(POLICY, ["a", "b"])
    noise = random.Random(2)
    for _ in range(after):
        for name in race.next_round():
            race.add(name, [noise.gauss(1.0, 0.05) for _ in range(5)])
    for name in race.next_round():
        race.drop(name)
    assert race.times == {}
    assert race.next_round() == []


def test_uncertainty_of_a_normal_sample() -> None:
    noise = random.Random(3)
    times = Times((tuple(noise.gauss(10.0, 1.0) for _ in range(4000)),))
    assert times.spread == pytest.approx(1.349, rel=0.06)
    assert times.within == pytest.approx(1.2533 / math.sqrt(4000), rel=0.06)
    for middle in (times.median, times.level):
        assert middle == pytest.approx(10.0, abs=4 * times.within)


def _apart(one: float, other: float) -> Difference:
    return Difference(abs(one - other), "apart" if abs(one - other) > 0.1 else "")


def _agreement(outputs: Mapping[str, float]) -> Agreement[float]:
    made = Agreement(_apart)
    for name in sorted(outputs):
        made.add(name, outputs[name])
    return made


def test_the_majority_is_believed() -> None:
    inside, outside = _agreement({"a": 5.0, "b": 1.0, "c": 1.05, "d": 1.0}).split()
    assert {name: found.error for name, found in inside.items()} == {"b": 0.0, "c": pytest.approx(0.05), "d": 0.0}
    assert outside == {"a": Difference(4.0, "apart")}


def test_only_the_first_output_of_a_group_is_kept() -> None:
    found = _agreement({"a": 1.0, "b": 1.05, "c": 7.0})
    assert (found.first("a"), found.first("b"), found.first("c")) == (1.0, 1.0, 7.0)
    assert found.against_first() == {"a": "as the first", "b": "as the first", "c": "apart"}


def test_one_candidate_agrees_with_itself() -> None:
    assert _agreement({"a": 5.0}).split() == ({"a": Difference(0.0)}, {})


@pytest.mark.parametrize(
    "outputs", [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0}, {"a": 1, "b": 2, "c": 3}]
)
def test_without_a_majority_nobody_is_believed(outputs: dict[str, float]) -> None:
    with pytest.raises(BuildError, match="of which none is most frequent"):
        _agreement(outputs).split()
