"""Anchors, labels and batches, against plain loops; order and position in the data."""

from __future__ import annotations

import collections
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash import anchors, data
from dflash.anchors import IGNORED, Drafting
from dflash.buckets import Batch, Sample, Shape, assemble, bucket_for
from dflash.errors import DataError
from kernelbake.errors import InputError

DRAFTING = Drafting(block_size=4, mask_token_id=999)


def sample(length: int, supervised: slice | None = None, *, index: int = 0, epoch: int = 0, first: int = 100) -> Sample:
    mask = np.zeros(length, np.bool_)
    mask[supervised if supervised is not None else slice(1, None)] = True
    return Sample(epoch, index, np.arange(first, first + length), mask)


# ---------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize(("length", "bucket"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024)])
def test_a_length_goes_up_to_its_bucket(length: int, bucket: int) -> None:
    assert bucket_for(length, (512, 1024)) == bucket


def test_a_length_above_the_top_is_refused_with_the_top() -> None:
    with pytest.raises(InputError, match="`1025` tokens; wanted at most `1024`"):
        bucket_for(1025, (512, 1024))


# ---------------------------------------------------------------------------------------------- anchors


@pytest.mark.parametrize(("valid", "count"), [(0, 0), (1, 1), (2, 2), (7, 7), (8, 8), (9, 8)])
def test_exactly_as_many_anchors_as_are_valid_up_to_the_cap(valid: int, count: int) -> None:
    cap = 8
    item = sample(32, slice(32 - valid, None) if valid else slice(0, 0))
    positions = anchors.valid_positions(item.supervised)
    drawn = anchors.draw(positions, cap, anchors.generator(0, 0, 0))
    assert len(positions) == valid
    assert len(drawn) == count
    assert len(set(drawn.tolist())) == count
    assert sorted(drawn.tolist()) == drawn.tolist()


def test_the_last_prompt_token_may_be_an_anchor_and_the_first_response_token_a_label() -> None:
    """Prompt of 5, response of 6, block of 4: anchors are 4 to 9, and every response token is some block's label."""
    item = sample(11, slice(5, None), first=0)
    positions = anchors.valid_positions(item.supervised)
    assert positions.tolist() == [4, 5, 6, 7, 8, 9]
    blocks = anchors.blocks(item.tokens, item.supervised, positions, DRAFTING)
    assert blocks.labels_NK.tolist() == [
        [IGNORED, 5, 6, 7],
        [IGNORED, 6, 7, 8],
        [IGNORED, 7, 8, 9],
        [IGNORED, 8, 9, 10],
        [IGNORED, 9, 10, IGNORED],
        [IGNORED, 10, IGNORED, IGNORED],
    ]


def test_a_token_with_nothing_before_it_is_no_anchor() -> None:
    assert anchors.valid_positions(np.ones(4, np.bool_)).tolist() == [1, 2]


def test_labels_end_where_supervision_ends_for_the_first_time() -> None:
    item = sample(12, slice(3, None), first=0)
    item.supervised[5] = False
    blocks = anchors.blocks(item.tokens, item.supervised, np.array([2, 3]), DRAFTING)
    assert blocks.labels_NK.tolist() == [[IGNORED, 3, 4, IGNORED], [IGNORED, 4, IGNORED, IGNORED]]


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(0, 12),
    st.integers(2, 6),
    st.integers(0, 2**32),
)
def test_blocks_agree_with_a_plain_loop(mask: list[bool], cap: int, block_size: int, seed: int) -> None:
    drafting = Drafting(block_size, 999, gamma=3.0)
    tokens = np.arange(500, 500 + len(mask))
    positions = anchors.valid_positions(np.array(mask))
    wanted = [p for p in range(len(mask)) if p >= 1 and p + 1 < len(mask) and mask[p + 1]]
    assert positions.tolist() == wanted
    drawn = anchors.draw(positions, cap, np.random.default_rng(seed))
    blocks = anchors.blocks(tokens, np.array(mask), drawn, drafting)
    for row, p in enumerate(drawn.tolist()):
        alive = True
        for i in range(block_size):
            alive = alive and (i == 0 or (p + i < len(mask) and mask[p + i]))
            trained = alive and i > 0
            assert blocks.labels_NK[row, i] == (tokens[p + i] if trained else IGNORED)
            assert blocks.weights_NK[row, i] == pytest.approx(math.exp(-(i - 1) / 3.0) if trained else 0.0)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_follows_the_paper(block_size: int, gamma: float) -> None:
    decay = Drafting(block_size, 0).decay_K
    assert decay[0] == 0
    assert decay[1] == 1
    assert decay[2] == pytest.approx(math.exp(-1 / gamma))


def test_a_sample_draws_the_same_in_every_company_and_anew_on_every_visit() -> None:
    shape = Shape(32, 4, 1, "padded", "float32")
    alone = assemble([[sample(30, index=5)]], shape, DRAFTING, seed=1)
    both = assemble([[sample(20, index=4)], [sample(30, index=5)]], shape, DRAFTING, seed=1)
    assert torch.equal(alone.anchors_BN[0], both.anchors_BN[1])
    visits = [assemble([[sample(30, index=5, epoch=epoch)]], shape, DRAFTING, 1).anchors_BN[0] for epoch in range(20)]
    assert len({tuple(visit.tolist()) for visit in visits}) > 15


# ---------------------------------------------------------------------------------------------- batches


def check(batch: Batch, rows: list[list[Sample]]) -> None:
    """A batch against what its rows say."""
    shape = batch.shape
    for b, row in enumerate(rows):
        tokens = [token for item in row for token in item.tokens.tolist()]
        assert batch.input_ids_BS[b].tolist() == tokens + [0] * (shape.bucket - len(tokens))
        bounds = np.cumsum([0, *(len(item.tokens) for item in row)]).tolist()
        valid = int(batch.num_valid_B[b])
        chosen = batch.anchors_BN[b].tolist()
        assert chosen == sorted(chosen)
        assert max(chosen) < shape.bucket
        block_ids = batch.block_ids_BQ[b].view(shape.anchors, -1)
        positions = batch.block_positions_BQ[b].view(shape.anchors, -1)
        for slot in range(valid):
            document = next(d for d in range(len(row)) if bounds[d] <= chosen[slot] < bounds[d + 1])
            start, end = bounds[document], bounds[document + 1]
            assert chosen[slot] > start
            assert block_ids[slot].tolist() == [tokens[chosen[slot]], 999, 999, 999]
            assert positions[slot].tolist() == [chosen[slot] - start + i for i in range(4)]
            for i in range(1, 4):
                label = int(batch.labels_BNK[b, slot, i])
                inside = chosen[slot] + i < end
                assert label == (tokens[chosen[slot] + i] if inside else IGNORED)
        assert (batch.labels_BNK[b, valid:] == IGNORED).all()
        assert (batch.weights_BNK[b, valid:] == 0).all()
    assert batch.weight_sum == pytest.approx(float(batch.weights_BNK.sum()), rel=1e-6)


def test_a_padded_batch_holds_its_samples() -> None:
    shape = Shape(32, 8, 2, "padded", "float32")
    rows = [[sample(20, index=1)], [sample(4, index=2, first=300)]]
    batch = assemble(rows, shape, DRAFTING, seed=0)
    check(batch, rows)
    assert batch.num_valid_B.tolist() == [8, 2]
    assert batch.num_tokens == 24
    assert batch.doc_ids_BS is None


def test_a_packed_row_keeps_documents_apart() -> None:
    """Documents of 9, 4 and 7 tokens with blocks of 4; a document of exactly a block's length has two anchors."""
    shape = Shape(32, 16, 1, "packed", "float32")
    rows = [[sample(9, index=1), sample(4, index=2, first=300), sample(7, index=3, first=500)]]
    batch = assemble(rows, shape, DRAFTING, seed=0)
    check(batch, rows)
    assert batch.num_valid_B.tolist() == [7 + 2 + 5]
    assert batch.doc_ids_BS is not None
    assert batch.cu_seqlens_D is not None
    assert batch.chunk_indices is not None
    assert batch.doc_ids_BS[0].tolist() == [0] * 9 + [1] * 4 + [2] * 7 + [3] * 12
    assert batch.cu_seqlens_D.tolist() == [0, 9, 13, 20, 32]
    assert batch.chunk_indices.tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert batch.positions_BS[0].tolist() == [*range(9), *range(4), *range(7), *range(12)]
    labels = {int(label) for label in batch.labels_BNK.flatten() if label != IGNORED}
    assert labels == {*range(102, 109), 302, 303, *range(502, 507)}


def test_a_full_packed_row_has_no_padding_document() -> None:
    batch = assemble([[sample(20), sample(12)]], Shape(32, 4, 1, "packed", "float32"), DRAFTING, 0)
    assert batch.cu_seqlens_D is not None
    assert batch.cu_seqlens_D.tolist() == [0, 20, 32]


def test_chunks_count_from_each_document() -> None:
    batch = assemble([[sample(130), sample(64), sample(1)]], Shape(256, 4, 1, "packed", "float32"), DRAFTING, 0)
    assert batch.chunk_indices is not None
    assert batch.chunk_indices.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [3, 0]]


def test_a_row_that_is_too_long_is_refused() -> None:
    with pytest.raises(InputError, match="`33` tokens"):
        assemble([[sample(33)]], Shape(32, 4, 1, "padded", "float32"), DRAFTING, 0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 64))
def test_slots_are_shared_fairly(counts: list[int], cap: int) -> None:
    given_ = anchors.shares(np.array(counts), cap)
    assert int(given_.sum()) == min(sum(counts), cap)
    assert all(0 <= got <= count for got, count in zip(given_.tolist(), counts, strict=True))
    if sum(counts) > cap:
        exact = [count * cap / sum(counts) for count in counts]
        assert all(abs(got - wanted) < 1 for got, wanted in zip(given_.tolist(), exact, strict=True))


# ---------------------------------------------------------------------------------------------- data


class Numbered:
    """Samples whose length is their number plus three."""

    name = "numbered"

    def __init__(self, count: int) -> None:
        self.dropped: collections.Counter[str] = collections.Counter()
        self._count = count
        self.read_numbers: list[int] = []

    def __len__(self) -> int:
        return self._count

    def read(self, number: int) -> tuple[anchors.Integers, anchors.Flags]:
        self.read_numbers.append(number)
        return np.full(number + 3, number), np.ones(number + 3, np.bool_)

    def length(self, number: int) -> int | None:
        return number + 3 if number % 2 else None  # some are known, some have to be read


def loader(count: int, batch: int = 2, layout: str = "padded", state: dict[str, object] | None = None) -> data.Loader:
    shapes = {bucket: Shape(bucket, 4, batch, layout, "float32") for bucket in (16, 32)}
    return data.Loader(Numbered(count), shapes, DRAFTING, seed=3, state=state, step_batches=1)


def test_every_sample_is_visited_once_an_epoch_whatever_its_bucket() -> None:
    batches = loader(24)
    visits: collections.Counter[tuple[int, int]] = collections.Counter()
    while batches.epoch < 3:
        visits.update(next(batches).visits)
    for epoch in range(2):
        assert sorted(index for seen, index in visits if seen == epoch) == list(range(24))
    assert set(visits.values()) == {1}


def test_batches_are_full_and_of_their_bucket() -> None:
    batches = loader(24)
    for _ in range(40):
        batch = next(batches)
        assert batch.input_ids_BS.shape == (2, batch.shape.bucket)
        assert all((16 if index + 3 <= 16 else 32) == batch.shape.bucket for _, index in batch.visits)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("steps", [0, 1, 7, 30])
def test_a_loader_goes_on_where_it_stood(layout: str, steps: int) -> None:
    first = loader(24, 1, layout)
    for _ in range(steps):
        next(first)
    state = json.loads(json.dumps(first.state()))
    second = loader(24, 1, layout, state)
    for _ in range(20):
        one, other = next(first), next(second)
        assert one.visits == other.visits
        assert torch.equal(one.anchors_BN, other.anchors_BN)
        assert torch.equal(one.input_ids_BS, other.input_ids_BS)


def test_an_epoch_has_another_order_than_the_one_before() -> None:
    batches = loader(24, 1)
    orders = [[next(batches).visits[0][1] for _ in range(24)] for _ in range(2)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_packed_rows_are_filled_until_a_sample_does_not_fit() -> None:
    batches = loader(24, 1, "packed")
    for _ in range(30):
        batch = next(batches)
        assert batch.num_tokens <= 32
        assert batch.shape.bucket == 32
        assert len(batch.visits) >= 1


def test_an_empty_source_is_refused_with_the_reasons() -> None:
    source = Numbered(0)
    source.dropped["too long"] = 3
    with pytest.raises(DataError, match="3 × too long"):
        data.Loader(source, {16: Shape(16, 4, 1, "padded", "float32")}, DRAFTING, 0, step_batches=1)


def test_shuffled_labels_keep_everything_but_their_meaning() -> None:
    plain, shuffled = loader(24), data.ShuffledLabels(loader(24), 1000, seed=0)
    maps = []
    for _ in range(3):
        one, other = next(plain), next(shuffled)
        assert torch.equal(one.anchors_BN, other.anchors_BN)
        assert torch.equal(one.labels_BNK == IGNORED, other.labels_BNK == IGNORED)
        labelled = one.labels_BNK != IGNORED
        maps.append(dict(zip(one.labels_BNK[labelled].tolist(), other.labels_BNK[labelled].tolist(), strict=True)))
        assert any(label != changed for label, changed in maps[-1].items())
    assert maps[0] != maps[1]


def test_the_standard_library_gives_pieces_of_every_bucket(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1  # \xc3\xa4\n" * 40)
    (tmp_path / "b.py").write_bytes(b"y = 2\n" * 40)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_bytes(b"z = 3\n" * 100)
    source = data.PythonSources(data.as_bytes, (32, 64), packed=False, folder=tmp_path)
    lengths = [len(source.read(number)[0]) for number in range(len(source))]
    assert {bucket_for(length, (32, 64)) for length in lengths} == {32, 64}
    ids, supervised = source.read(0)
    assert bytes(ids.tolist()) == (b"x = 1  # \xc3\xa4\n" * 40)[: len(ids)]
    assert supervised.tolist() == [False] + [True] * (len(ids) - 1)
    again = data.PythonSources(data.as_bytes, (32, 64), packed=False, folder=tmp_path)
    assert all((source.read(n)[0] == again.read(n)[0]).all() for n in range(len(source)))
    with pytest.raises(DataError, match="no Python file"):
        data.PythonSources(data.as_bytes, (32,), packed=False, folder=tmp_path / "test")


def test_a_batch_that_is_not_made_is_not_read_where_lengths_are_known() -> None:
    """What a rank does with the batches of others; each sample of its own is read once."""
    given, plain = loader(12), loader(12)
    for turn in range(6):
        planned = given.plan()
        wanted = next(plain)
        if turn % 2:
            assert given.make(planned).input_ids_BS.equal(wanted.input_ids_BS)
        assert planned.visits == wanted.visits
        assert planned.num_tokens == wanted.num_tokens
    assert len(given.source.read_numbers) < len(plain.source.read_numbers)  # type: ignore[attr-defined]
    assert len(set(plain.source.read_numbers)) == len(plain.source.read_numbers)  # type: ignore[attr-defined]


def test_a_sample_that_lost_tokens_after_it_was_checked_is_named() -> None:
    given = loader(12)
    given.source.read = lambda number: (np.zeros(2, np.int64), np.ones(2, np.bool_))  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"`numbered` has changed while it was in use: sample `\d+` has `2` tokens"):
        list(itertools.islice(given, 6))
