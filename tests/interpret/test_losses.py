"""The block loss under the interpreter, fp32: right against float64, bounded by a chunk; D-PACE's weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import LONG
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dflash import losses
from dflash.losses import IGNORED
from kernelbake.errors import InputError

TOLERANCE = 1e-5


def _inputs(rows: int, size: int, vocabulary: int, seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    hidden, target = (torch.randn(rows, size, generator=random) for _ in range(2))
    head = torch.randn(vocabulary, size, generator=random)
    labels = torch.randint(0, vocabulary, (rows,), generator=random)
    labels[torch.rand(rows, generator=random) < 0.3] = IGNORED
    return hidden, head, labels, torch.rand(rows, generator=random), target


def _reference(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, target: torch.Tensor, kl_share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each row and log probabilities, float64, dense."""
    logp = (hidden.double() @ head.double().t()).log_softmax(dim=1)
    target_logp = (target.double() @ head.double().t()).log_softmax(dim=1)
    cross_entropy = torch.nn.functional.nll_loss(logp, labels, reduction="none", ignore_index=IGNORED)
    divergence = (target_logp.exp() * (target_logp - logp)).sum(dim=1)
    used = labels != IGNORED
    return torch.where(used, (1 - kl_share) * cross_entropy + kl_share * divergence, 0.0), logp


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    size = wanted.double().norm().item()
    distance = (found.double() - wanted.double()).norm().item()
    return distance / size if size else distance


@pytest.mark.long
@settings(max_examples=60 if LONG else 12, deadline=None, derandomize=not LONG)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 24),
    vocabulary=st.integers(2, 9000),
    chunk_rows=st.integers(1, 48),
    kl_share=st.sampled_from([0.0, 0.0, 0.25, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_right_for_any_shape(
    rows: int, size: int, vocabulary: int, chunk_rows: int, kl_share: float, seed: int
) -> None:
    hidden, head, labels, weights, target = _inputs(rows, size, vocabulary, seed)
    hidden.requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    loss, correct = losses.block_loss(
        hidden, head, labels, weights, chunk_rows=chunk_rows, target_hidden=target, kl_share=kl_share
    )
    (3.0 * loss).backward()
    wanted_rows, logp = _reference(exact, head, labels, target, kl_share)
    wanted = (wanted_rows * weights.double()).sum()
    (3.0 * wanted).backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    assert _error(loss.detach(), wanted.detach()) <= TOLERANCE
    assert _error(hidden.grad, exact.grad) <= TOLERANCE
    assert torch.equal(correct, (logp.argmax(dim=1) == labels) & (labels != IGNORED))


def test_label_log_probabilities_carry_no_gradient() -> None:
    hidden, head, labels, _, target = _inputs(20, 8, 300, 1)
    hidden.requires_grad_()
    rows = losses.row_losses(hidden, head, labels, chunk_rows=7)
    _, logp = _reference(hidden.detach(), head, labels, target, 0.0)
    wanted = torch.where(labels == IGNORED, 0.0, logp.gather(1, labels.clamp(min=0)[:, None])[:, 0])
    assert _error(rows.label_logp, wanted) <= TOLERANCE
    assert rows.loss.requires_grad
    assert not rows.label_logp.requires_grad


def test_ignored_rows_may_hold_anything() -> None:
    """NaN in the hidden row, in the weight and in the target's row: no trace in loss and gradient."""
    hidden, head, labels, weights, target = _inputs(16, 8, 100, 2)
    labels[3] = labels[9] = IGNORED
    clean = hidden.clone().requires_grad_()
    wanted, _ = losses.block_loss(clean, head, labels, weights, chunk_rows=5, target_hidden=target, kl_share=0.5)
    wanted.backward()
    for tensor in (hidden, target):
        tensor[3], tensor[9] = float("nan"), float("inf")
    weights[3] = float("nan")
    hidden.requires_grad_()
    found, correct = losses.block_loss(hidden, head, labels, weights, chunk_rows=5, target_hidden=target, kl_share=0.5)
    found.backward()
    assert hidden.grad is not None
    assert clean.grad is not None
    assert torch.equal(found, wanted)
    assert torch.equal(hidden.grad, clean.grad)
    assert not hidden.grad[3].any()
    assert not correct[[3, 9]].any()


def test_the_first_of_equal_choices_counts() -> None:
    """Ids 1 and 3 share the largest logit: the label 1 is right, 3 is not."""
    head = torch.tensor([[0.0], [2.0], [1.0], [2.0]])
    rows = losses.row_losses(torch.ones(2, 1), head, torch.tensor([1, 3]), chunk_rows=2)
    assert rows.correct.tolist() == [True, False]


def test_large_logits_stay_finite() -> None:
    head = torch.tensor([[3.0e4], [-3.0e4], [2.9e4]])
    hidden = torch.ones(1, 1, requires_grad=True)
    loss, correct = losses.block_loss(hidden, head, torch.tensor([2]), torch.ones(1), chunk_rows=1)
    loss.backward()
    assert loss.item() == pytest.approx(1000.0, rel=1e-4)
    assert not correct.any()
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(1000.0, rel=1e-4)


class _Sizes(TorchDispatchMode):
    """Records the largest number of elements in a tensor that PyTorch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        if func is torch.ops.aten.new_empty.default or func is torch.ops.aten.mm.default:
            self.largest = max(self.largest, *(tensor.numel() for tensor in made))
        if func is torch.ops.aten.index.Tensor:
            self.gathered = max(self.gathered, *(tensor.numel() for tensor in made))
        return out


@pytest.mark.parametrize("kl_share", [0.0, 0.5])
@pytest.mark.parametrize("chunk_rows", [4, 8])
def test_logits_exist_for_one_chunk_at_a_time(chunk_rows: int, kl_share: float) -> None:
    """The target's too, and what its rows are gathered from."""
    hidden, head, labels, weights, target = _inputs(32, 4, 500, 3)
    hidden.requires_grad_()
    options = {"target_hidden": target, "target_rows": torch.arange(32).flip(0), "kl_share": kl_share}
    with _Sizes() as sizes:
        loss, _ = losses.block_loss(hidden, head, labels, weights, chunk_rows=chunk_rows, **options)
        loss.backward()
    assert sizes.largest == chunk_rows * 500
    assert sizes.gathered == (chunk_rows * 4 if kl_share else 0)


def test_without_a_gradient_none_is_made() -> None:
    hidden, head, labels, weights, _ = _inputs(32, 64, 50, 3)
    with_gradient = hidden.clone().requires_grad_()
    wanted, _ = losses.block_loss(with_gradient, head, labels, weights, chunk_rows=8)
    with torch.no_grad():
        found, _ = losses.block_loss(with_gradient, head, labels, weights, chunk_rows=8)
    assert torch.equal(found, wanted)
    assert not found.requires_grad


def test_second_derivatives_are_refused() -> None:
    hidden, head, labels, weights, _ = _inputs(4, 4, 10, 0)
    loss, _ = losses.block_loss(hidden.requires_grad_(), head, labels, weights, chunk_rows=4)
    with pytest.raises(InputError, match="differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_all_faults_come_at_once() -> None:
    hidden, head, labels, _, target = _inputs(4, 4, 10, 0)
    with pytest.raises(InputError) as caught:
        losses.row_losses(
            hidden.half(), head.requires_grad_(), labels[:3].int(), chunk_rows=0, target_hidden=target, kl_share=2.0
        )
    starts = sorted(reason.split(":")[0] for reason in caught.value.reasons)
    assert starts == [
        "chunk_rows", "head_weight", "head_weight", "hidden", "kl_share", "labels", "labels", "target_hidden",
    ]  # fmt: skip
    with pytest.raises(InputError, match="target_hidden: missing"):
        losses.row_losses(hidden, head.detach(), labels, chunk_rows=4, kl_share=0.5)
    with pytest.raises(InputError, match="shapes"):
        losses.row_losses(hidden[:, :3], head.detach(), labels, chunk_rows=4)
    with pytest.raises(InputError, match="weights of shape"):
        losses.block_loss(hidden, head.detach(), labels, torch.ones(3), chunk_rows=4)


def test_acceptance_weights_follow_their_formula() -> None:
    """Σ over the ends that reach a position of the product of all confidences up to the end, written out."""
    random = torch.Generator().manual_seed(0)
    q = torch.rand(6, 4, generator=random)
    labels = torch.zeros(6, 4, dtype=torch.int64)
    labels[2, 2] = labels[4, 0] = IGNORED
    found = losses.acceptance_weights(q.log(), labels, alpha=0.4)
    for block in range(6):
        end = next((place for place in range(4) if labels[block, place] == IGNORED), 4)
        r = [0.6 * q[block, place].item() + 0.4 for place in range(4)]
        for place in range(4):
            wanted = sum(math.prod(r[: last + 1]) for last in range(place, end))
            assert found[block, place].item() == pytest.approx(wanted, rel=1e-5)


def test_the_targets_rows_are_gathered_as_they_are_named() -> None:
    """Rows of a slice of a wider tensor, in any order and more than once: as if they had been copied out first."""
    hidden, head, labels, _, wide = _inputs(24, 5, 90, 2)
    rows = torch.randint(0, 10, (24,), generator=torch.Generator().manual_seed(1))
    theirs = torch.cat((torch.full((10, 3), math.nan), wide[:10]), dim=1)[:, 3:]
    options = {"chunk_rows": 7, "kl_share": 0.5}
    found, wanted = (
        losses.row_losses(hidden, head, labels, target_hidden=theirs, target_rows=rows, **options),
        losses.row_losses(hidden, head, labels, target_hidden=wide[:10][rows], **options),
    )
    assert torch.equal(found.loss, wanted.loss)
    with pytest.raises(InputError, match="target_rows: shape"):
        losses.row_losses(hidden, head, labels, target_hidden=theirs, target_rows=rows[:3].int(), **options)
