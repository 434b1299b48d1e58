"""Losses beside the cross entropy with decaying weights: D-PACE and KL, against dense loops in fp64."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator

import dflashspec
import interpreted
import pytest
import stubpair
import torch
from stubpair import CPU, sample

from dflash import synthetic, target
from dflash.anchors import IGNORED, Drafting
from dflash.buckets import Batch, Sample, Shape, assemble
from dflash.objective import Objective
from dflash.pairs import Pair
from dflash.spec import Spec

EVEN = Drafting(4, 256, even=True)
DECAY = Drafting(4, 256)

Place = tuple[int, int, int]
"""Row, block, drafted position."""


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted.last_configs():
        yield


def batch(rows: list[list[Sample]], drafting: Drafting, slots: int = 4, layout: str = "padded") -> Batch:
    return assemble(rows, Shape(32, slots, len(rows), layout, "float32"), drafting, 0)


def pair(objective: Objective) -> Pair:
    made = stubpair.pair()
    made.train_with(objective)
    return made


def dense_rows(of: Pair, given: Batch) -> dict[Place, tuple[float, float]]:
    """Cross entropy and KL of every labelled row, from whole-vocabulary distributions of the whole sequence."""
    features, embeddings, there = of.prepare(given)
    drafted, last = of.objective.split(features, embeddings.shape[-1])
    if last is None:
        last = of.target.last(given)  # type: ignore[attr-defined]
    head = of.target.head_VE.double()
    theirs = (last.double() @ head.T).log_softmax(-1)
    with torch.no_grad():
        hidden = of.drafter(
            drafted,
            embeddings,
            there.positions_BS,
            there.block_positions_BQ,
            there.anchors_BN,
            there.num_valid_B,
            there.doc_ids_BS,
        )
    ours = (hidden.double() @ head.T).log_softmax(-1).unflatten(1, given.labels_BNK.shape[1:])
    rows = {}
    for row, block, i in torch.nonzero(given.labels_BNK != IGNORED).tolist():
        anchor = int(given.anchors_BN[row, block])
        p, q = theirs[row, anchor + i - 1], ours[row, block, i]
        label = int(given.labels_BNK[row, block, i])
        assert label == int(given.input_ids_BS[row, anchor + i])
        rows[row, block, i] = (-float(q[label]), float((p.exp() * (p - q)).sum()))
    return rows


def credits_of(rows: dict[Place, tuple[float, float]], alpha: float) -> dict[Place, float]:
    """D-PACE's weights by their definition: for each end at or behind a position, the product of confidences to it."""
    found = {}
    for row, block, i in rows:
        length = max(place for r, b, place in rows if (r, b) == (row, block))
        confidence = [(1 - alpha) * math.exp(-rows[row, block, place][0]) + alpha for place in range(1, length + 1)]
        found[row, block, i] = sum(math.prod(confidence[:end]) for end in range(i, length + 1))
    return found


SAMPLES = [sample(31, 1), sample(12, 2, supervised=3), sample(20, 3), sample(7, 4, supervised=2)]


@pytest.mark.parametrize(("kl_share", "alpha"), [(0.0, 0.3), (0.25, 0.5), (1.0, None)])
def test_the_loss_is_what_its_formula_says(kl_share: float, alpha: float | None) -> None:
    """Decaying weights over their sum, or credits over the number of blocks; rows of CE, KL or both."""
    of = pair(Objective(kl_share, alpha))
    given = batch([[item] for item in SAMPLES], DECAY if alpha is None else EVEN)
    rows = dense_rows(of, given)
    decay = {place: math.exp(-(place[2] - 1) / 1.75) for place in rows}
    weights = decay if alpha is None else credits_of(rows, alpha)
    divisor = sum(decay.values()) if alpha is None else len({place[:2] for place in rows})
    wanted = sum(weights[place] * ((1 - kl_share) * ce + kl_share * kl) for place, (ce, kl) in rows.items()) / divisor
    loss, _ = stubpair.gradients(of, [given])
    assert given.weight_sum == pytest.approx(divisor, rel=1e-6)
    assert loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("objective", [Objective(0.0, 0.5), Objective(0.5, 0.3)])
def test_any_split_and_any_padding_give_the_same_loss(objective: Objective) -> None:
    """D-PACE's credits are the drafter's own, and still no batch needs to know of another."""
    of = pair(objective)
    loss, grads = stubpair.gradients(of, [batch([[item] for item in SAMPLES], EVEN)])
    widened = stubpair.widened(batch([[item] for item in SAMPLES[:2]], EVEN), 132)
    other_loss, other_grads = stubpair.gradients(of, [widened, *(batch([[item]], EVEN) for item in SAMPLES[2:])])
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for grad, other in zip(grads, other_grads, strict=True):
        assert (grad - other).norm() <= 2e-6 * max(float(grad.norm()), 1e-3)


def test_gradients_are_those_of_constant_credits() -> None:
    """No gradient flows through D-PACE's weights: they are the same when the batch brings them along."""
    of, given = pair(Objective(0.0, 0.5)), batch([[item] for item in SAMPLES], EVEN)
    weights = torch.zeros_like(given.weights_BNK)
    for place, credit in credits_of(dense_rows(of, given), 0.5).items():
        weights[place] = credit
    _, grads = stubpair.gradients(of, [given])
    _, wanted = stubpair.gradients(pair(Objective()), [dataclasses.replace(given, weights_BNK=weights)])
    for grad, other in zip(grads, wanted, strict=True):
        assert (grad - other).norm() <= 1e-5 * max(float(other.norm()), 1e-3)


def test_a_packed_row_has_the_kl_of_its_documents() -> None:
    """Also where a document's first block is predicted right behind another document."""
    samples = [sample(9, 1), sample(4, 2), sample(7, 3)]
    of = pair(Objective(1.0))
    loss, grads = stubpair.gradients(of, [batch([[item]], DECAY, slots=16) for item in samples])
    other_loss, other_grads = stubpair.gradients(of, [batch([samples], DECAY, slots=16, layout="packed")])
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for grad, other in zip(grads, other_grads, strict=True):
        assert (grad - other).norm() <= 2e-6 * max(float(grad.norm()), 1e-3)


def test_a_drafter_that_says_what_the_target_says_has_no_kl() -> None:
    """The real target: its head at p − 1 over the drafter's own rows is the distribution of the token at p."""
    section = copy.deepcopy(dflashspec.TINY)
    section["drafter"]["num_layers"] = 1
    wanted = Spec.parse(section)
    model = target.random_target(wanted.target, wanted.drafter.target_layer_ids, CPU, torch.float32, seed=0)
    given = synthetic.batch(Shape(32, 4, 2, "padded", "float32"), wanted, 0)
    features = model.features(given)
    model.appends_last = True
    wide = model.features(given)
    last = wide[..., features.shape[-1] :]
    assert torch.equal(wide[..., : features.shape[-1]], features)
    logits = model.model(input_ids=given.input_ids_BS).logits
    assert torch.allclose(last @ model.head_VE.T, logits, atol=1e-5)
    rows = given.anchors_BN.long()[..., None] + torch.arange(3)
    same = torch.stack([last[row][rows[row].clamp(max=31)] for row in range(2)])
    loss, _ = Objective(1.0).loss(same, model.head_VE, given, last, chunk_rows=5)
    other, _ = Objective(1.0).loss(same.roll(1, dims=2), model.head_VE, given, last, chunk_rows=5)
    assert abs(float(loss)) < 1e-4 < float(other)
