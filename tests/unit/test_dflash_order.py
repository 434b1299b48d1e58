"""Which batches run side by side: equal lengths in a step, every sample once, from any place and for any split."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash import checkpoint, data
from dflash.anchors import Drafting, Flags, Integers
from dflash.buckets import Shape, bucket_for
from dflash.errors import DataError, ResumeError
from dflash.feed import Feed
from dflash.order import Planned
from dflash.ranks import Ranks
from dflash.spec import Spec
from dflash.stop import Stop

BUCKETS = (512, 1024, 2048, 4096)

Visits = tuple[tuple[int, int], ...]


class Lengths:
    """Samples of these lengths; which of them have to be read to know it, is said by ``known``."""

    name = "lengths"
    share = 1.0
    digest = ""

    def __init__(self, lengths: list[int], *, known: bool = True) -> None:
        self.dropped: collections.Counter[str] = collections.Counter()
        self.lengths = lengths
        self._known = known

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, number: int) -> tuple[Integers, Flags]:
        return np.full(self.lengths[number], number), np.ones(self.lengths[number], np.bool_)

    def length(self, number: int) -> int | None:
        return self.lengths[number] if self._known or number % 2 else None


def log_normal(count: int, seed: int = 0) -> list[int]:
    """Lengths as of conversations: half of them below 700 tokens, a few as long as the largest bucket."""
    drawn = np.random.default_rng(seed).lognormal(math.log(700), 0.9, count)
    return [int(length) for length in drawn.clip(8, BUCKETS[-1])]


def loader(
    lengths: list[int],
    step_batches: int,
    *,
    rows: int = 1,
    buckets: tuple[int, ...] = BUCKETS,
    layout: str = "padded",
    seed: int = 0,
    known: bool = True,
    state: dict[str, Any] | None = None,
) -> data.Loader:
    shapes = {bucket: Shape(bucket, 4, rows, layout, "float32") for bucket in buckets}
    source = Lengths(lengths, known=known)
    return data.Loader(source, shapes, Drafting(4, 999), seed, state, step_batches=step_batches)


def steps(of: data.Loader, step_batches: int) -> Iterator[list[Planned]]:
    """The batches of every step, without end."""
    while True:
        yield [of.plan() for _ in range(step_batches)]


def an_epoch(of: data.Loader, step_batches: int) -> list[list[Planned]]:
    """The steps that begin before the second epoch does."""
    found = []
    for step in steps(of, step_batches):
        if of.state()["epoch"]:
            return found
        found.append(step)
    raise AssertionError


def buckets_of(step: list[Planned]) -> list[int]:
    return [planned.shape.bucket for planned in step]


# ---------------------------------------------------------------------------------------------- equal lengths


def waiting_share(planned: list[list[Planned]]) -> float:
    """Share of the time in which pairs with a batch each wait for the longest of their step; time goes with tokens."""
    taken = sum(len(step) * max(buckets_of(step)) for step in planned)
    return 1 - sum(sum(buckets_of(step)) for step in planned) / taken


@pytest.mark.parametrize(("pairs", "before"), [(2, 0.25), (4, 0.4), (8, 0.5)])
def test_pairs_hardly_wait_for_the_longest_batch_of_a_step(pairs: int, before: float) -> None:
    """Against the order without regard to steps: there two pairs lose a quarter of their time, and eight over half."""
    lengths = log_normal(4000)
    plain = loader(lengths, 1)
    assert waiting_share(an_epoch(plain, pairs)) > before
    mine = an_epoch(loader(lengths, pairs), pairs)
    assert waiting_share(mine) < 0.002
    assert sum(len(step) for step in mine) > 4000 - pairs


@pytest.mark.parametrize(("rows", "count"), [(1, 2000), (3, 2010)])
def test_all_but_a_few_steps_have_one_bucket_and_those_are_sorted(rows: int, count: int) -> None:
    lengths = log_normal(count)
    found = an_epoch(loader(lengths, 6, rows=rows), 6)
    mixed = [buckets_of(step) for step in found if len(set(buckets_of(step))) > 1]
    assert 0 < len(mixed) < len(BUCKETS)
    assert [buckets_of(step) for step in found[-len(mixed) :]] == mixed, "at the end of the epoch"
    in_time = list(itertools.chain(*mixed))
    assert in_time == sorted(in_time, reverse=True)
    *_, following = itertools.islice(steps(loader(lengths, 6, rows=rows), 6), len(found) + 1)
    late = [planned.shape.bucket for planned in following if planned.rows[-1][0].epoch == 0]
    assert late
    assert max(late) <= in_time[-1], "the shortest stay for the next epoch's first step"


def test_buckets_take_turns_and_orders_differ() -> None:
    """Steps come as they fill, so that no bucket is far ahead of its share at any time."""
    lengths = [400, 800, 1600, 3200] * 400
    orders = []
    for seed in (0, 0, 1):
        batches = loader(lengths, 4, seed=seed)
        found = [buckets_of(step)[0] for step in an_epoch(batches, 4)]
        orders += [found, [buckets_of(step)[0] for step in itertools.islice(steps(batches, 4), len(found))]]
        assert max(len(list(run)) for _, run in itertools.groupby(found)) <= 6
        for at in range(40, len(found), 40):
            counts = collections.Counter(found[:at])
            assert all(at / 8 < counts[bucket] < 3 * at / 8 for bucket in BUCKETS)
    assert orders[0] == orders[2]
    assert len({tuple(order) for order in orders}) == 4, "another one in every epoch and for every seed"


# ---------------------------------------------------------------------------------------------- every sample once


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_every_sample_is_visited_once_an_epoch_and_few_wait_for_the_next(
    lengths: list[int], step_batches: int, rows: int, known: bool, seed: int
) -> None:
    """Of each bucket a batch that is not full, and up to G − 1 full ones, which are in the next epoch's first step."""
    buckets = (8, 24, 64)
    batches = loader(lengths, step_batches, rows=rows, buckets=buckets, known=known, seed=seed)
    visits: collections.Counter[tuple[int, int]] = collections.Counter()
    for step in itertools.islice(steps(batches, step_batches), 60):
        assert batches.state()[data.BEGUN] == []
        for planned in step:
            assert len(planned.rows) == rows
            assert all(bucket_for(row[0].length, buckets) == planned.shape.bucket for row in planned.rows)
            visits.update(planned.visits)
    epoch = batches.state()["epoch"]
    assert set(visits.values()) == {1}
    waiting = {tuple(visit) for held in batches.state()["waiting"].values() for visit in held}
    assert not waiting.intersection(visits)
    everything = {(before, number) for before in range(epoch) for number in range(len(lengths))}
    assert everything <= waiting | visits.keys()
    late = everything & waiting
    is_first = all(visited < epoch for visited, _ in visits)
    assert len(late) <= len(buckets) * (rows - 1) + is_first * (step_batches - 1) * rows


@pytest.mark.parametrize("short", [500, 503])
def test_a_rare_length_does_not_wait_for_others_of_its_kind(short: int) -> None:
    """One of 4,000 tokens, eight batches to a step: it comes at the end of its epoch or with the next one's first."""
    batches = loader([100] * short + [4000], 8)
    before = (short + 1) // 8
    seen = [planned.visits[0] for step in itertools.islice(steps(batches, 8), before + 1) for planned in step]
    assert (0, short) in seen
    assert len(set(seen)) == len(seen)
    assert sum(epoch == 0 for epoch, _ in seen) == short + 1
    assert (0, short) in seen[: before * 8] or (short + 1) % 8


def old_order(lengths: list[int], rows: int, buckets: tuple[int, ...], seed: int) -> Iterator[Visits]:
    """Batches as soon as they are full, without regard to steps."""
    waiting: dict[int, list[tuple[int, int]]] = {bucket: [] for bucket in buckets}
    for epoch in itertools.count():
        for number in np.random.default_rng((seed, epoch)).permutation(len(lengths)).tolist():
            queue = waiting[bucket_for(lengths[number], buckets)]
            queue.append((epoch, number))
            if len(queue) == rows:
                yield tuple(queue)
                queue.clear()


@pytest.mark.parametrize(("step_batches", "buckets"), [(1, BUCKETS), (5, BUCKETS[-1:])])
def test_steps_of_one_batch_and_batches_of_one_bucket_keep_their_old_order(
    step_batches: int, buckets: tuple[int, ...]
) -> None:
    lengths = log_normal(100)
    mine, old = loader(lengths, step_batches, rows=2, buckets=buckets), old_order(lengths, 2, buckets, 0)
    assert [mine.plan().visits for _ in range(300)] == list(itertools.islice(old, 300))


@pytest.mark.parametrize("step_batches", [1, 4])
def test_packed_rows_keep_their_old_order(step_batches: int) -> None:
    lengths = [3 + 7 * number % 61 for number in range(50)]
    mine = loader(lengths, step_batches, buckets=(32, 128), layout="packed")
    rows: list[list[tuple[int, int]]] = [[]]
    for epoch in range(3):
        for number in np.random.default_rng((0, epoch)).permutation(50).tolist():
            if sum(lengths[held] for _, held in rows[-1]) + lengths[number] > 128:
                rows.append([])
            rows[-1].append((epoch, number))
    assert [mine.plan().visits for _ in rows[:-1]] == [tuple(row) for row in rows[:-1]]


# ---------------------------------------------------------------------------------------------- any split, any place


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_has_the_same_batches_however_pairs_and_turns_share_them(rows: int) -> None:
    """1 × 4, 2 × 2 and 4 × 1, pairs × accumulation. Batches at the same turn of all pairs have one bucket."""
    found = {}
    for pairs in (1, 2, 4):
        batches = loader([3 + number % 30 for number in range(60)], 4, rows=rows, buckets=(8, 16, 32))
        feed = Feed(batches, batches, Ranks(), pairs, 4 // pairs, pinned=False)
        dealt = list(feed.deals(Stop(), 12 // rows))
        found[pairs] = [(one.visits, one.shapes, one.weight_sum, one.after) for one in dealt]
        unequal = 0
        for one in dealt:
            assert [len(mine) for mine in one.mine] == [4 // pairs] * pairs
            turns = [{batch.shape for batch in turn} for turn in zip(*one.mine, strict=True)]
            unequal += any(len(shapes) > 1 for shapes in turns)
        assert unequal < 3
    assert found[1] == found[2] == found[4]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_loader_goes_on_from_any_batch_of_a_step_and_from_the_mixed_ones(layout: str, known: bool) -> None:
    lengths = [3 + 7 * number % 61 for number in range(50)]
    options: dict[str, Any] = {"buckets": (16, 32, 64), "layout": layout, "known": known}
    whole = loader(lengths, 4, **options)
    states, plans = [], []
    for _ in range(110):
        states.append(json.dumps(whole.state()))
        plans.append(whole.plan())
    assert layout == "packed" or any(json.loads(state)[data.BEGUN] for state in states)
    for at in range(75):
        resumed = loader(lengths, 4, state=json.loads(states[at]), **options)
        assert [resumed.plan().visits for _ in range(30)] == [planned.visits for planned in plans[at : at + 30]]
        assert json.dumps(resumed.state()) == states[at + 30]


# ---------------------------------------------------------------------------------------------- places that are none


@pytest.mark.parametrize(
    "change",
    [
        {"waiting": {"512": [[0, 1], [0, 2]], "4096": []}},
        {"begun": [[512, [[0, 1]]], [512, [[0, 2]]]]},
        {"begun": [[512, [[0, 1], [0, 2]]]]},
        {"begun": [[512, [[0, 10]]]]},
        {"begun": [[1024, [[0, 1]]]]},
    ],
)
def test_a_place_that_no_loader_has_is_refused(change: dict[str, Any]) -> None:
    state = {"epoch": 0, "next": 3, "waiting": {"512": [], "4096": []}, "begun": [], **change}
    with pytest.raises(DataError, match="resume: the checkpoint"):
        loader([100] * 10, 2, buckets=(512, 4096), state=state)


def check_same_run(spec: Spec, step_batches: int, place: dict[str, Any]) -> None:
    state = checkpoint.State(1, 0, place, spec.to_json(), {}, None, step_batches)
    checkpoint.check_same_run(state, spec, 0, None, step_batches, "", other_bundle=False)


def test_a_place_in_the_older_order_is_refused_where_the_order_is_another(planned: Spec) -> None:
    old = {"epoch": 0, "next": 0, "waiting": {}}
    one_bucket = dataclasses.replace(planned, axes=dataclasses.replace(planned.axes, buckets=planned.axes.buckets[:1]))
    packed = dataclasses.replace(planned, axes=dataclasses.replace(planned.axes, layouts=("packed",)))
    check_same_run(planned, 1, old)
    check_same_run(one_bucket, 2, old)
    check_same_run(packed, 2, old)
    check_same_run(planned, 2, {**old, data.BEGUN: []})
    with pytest.raises(ResumeError) as caught:
        check_same_run(planned, 2, old)
    [reason] = caught.value.reasons
    assert reason.startswith("order of the data: ")


@pytest.fixture
def planned() -> Spec:
    import dflashspec

    section = dflashspec.changed("axes.buckets", [16, 32])
    section["axes"]["layouts"] = ["padded"]
    return Spec.parse(section)
