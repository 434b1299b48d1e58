"""What block rows cost: head, cross entropy and KL in chunks of rows; and D-PACE's weights of positions.

The head is frozen, so its gradient is not formed, and the gradient of the hidden rows follows in the pass that computes
the logits: one chunk of logits is overwritten by its own gradient, multiplied with the head, and forgotten. Memory is
one chunk of logits and one array like the hidden rows, whatever the vocabulary.

Shapes: M blocks, P drafted positions of a block, R rows, T rows of the target's hidden states, E hidden size, V
vocabulary, C chunk rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl

from dflash.anchors import IGNORED
from kernelbake.errors import InputError

_VOCABULARY_TILE = 4096
_NUM_WARPS = 8


def acceptance_weights(label_logp: torch.Tensor, labels: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """Position weights by how likely a position is reached (D-PACE, arXiv 2605.18810, equations 7 and 8).

    With q the drafter's probability of a label and r = (1 - alpha)·q + alpha, position j weighs Σ_{m ≥ j} Π_{i ≤ m} r_i
    over the drafted positions of its block. A position without a label ends the block: it and those behind weigh 0.

    Args:
        label_logp: fp32 [M, P], log q of each row, blocks in rows; no gradient flows.
        labels: int64 [M, P].
        alpha: floor of r, in [0, 1].

    Returns:
        fp32 [M, P].
    """
    r = (1 - alpha) * label_logp.detach().float().exp() + alpha
    reached = torch.where(labels == IGNORED, 0.0, r).cumprod(dim=1)
    return reached.flip(1).cumsum(dim=1).flip(1)


# ---------------------------------------------------------------------------------------------- head and cross entropy


@dataclasses.dataclass(frozen=True)
class RowLosses:
    """What the head gives for each row.

    Args:
        loss: fp32 [R], differentiable in the hidden rows; 0 where the label is ``IGNORED``.
        label_logp: fp32 [R], the drafter's log probability of the label, without gradient; 0 where ignored.
        correct: bool [R], whether the label is the drafter's first choice (the lowest id on a tie).
    """

    loss: torch.Tensor
    label_logp: torch.Tensor
    correct: torch.Tensor


def block_loss(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    chunk_rows: int,
    target_hidden: torch.Tensor | None = None,
    target_rows: torch.Tensor | None = None,
    kl_share: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the rows' losses and which rows are right; arguments as in ``row_losses``.

    Args:
        weights: fp32 [R]; a row that is ignored weighs nothing, whatever stands here.

    Returns:
        The sum, fp32 scalar, differentiable in the hidden rows only; bool [R].
    """
    if weights.shape != labels.shape:
        raise InputError(f"block loss: weights of shape {tuple(weights.shape)}; wanted {tuple(labels.shape)}")
    rows = row_losses(
        hidden,
        head_weight,
        labels,
        chunk_rows=chunk_rows,
        target_hidden=target_hidden,
        target_rows=target_rows,
        kl_share=kl_share,
    )
    used = torch.where(labels == IGNORED, 0.0, weights.detach().float())
    return (rows.loss * used).sum(), rows.correct


def row_losses(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_rows: int,
    target_hidden: torch.Tensor | None = None,
    target_rows: torch.Tensor | None = None,
    kl_share: float = 0.0,
) -> RowLosses:
    """(1 - kl_share)·CE(label) + kl_share·KL(target ‖ drafter) of every row.

    Logits are rounded to the dtype of the rows, as a bf16 matrix product leaves them; the softmax is taken in fp32.

    Args:
        hidden: [R, E], bfloat16 or float32.
        head_weight: [V, E], same dtype, frozen.
        labels: int64 [R], ``IGNORED`` for none.
        chunk_rows: C, rows whose logits exist at a time (twice as many arrays with a target).
        target_hidden: [T, E], what the target's head reads at the positions that predict the rows; no gradient. Needed
            if kl_share > 0. Rows may lie apart, as in a slice of a wider tensor.
        target_rows: int64 [R], the row of ``target_hidden`` that predicts each row; None: they stand in the same order.
            They are gathered chunk by chunk.
        kl_share: share of the KL term, in [0, 1].

    Raises:
        InputError: shapes, dtypes or options that do not fit, all of them at once.
    """
    faults = _faults(hidden, head_weight, labels, chunk_rows, kl_share)
    faults += _target_faults(hidden, labels, target_hidden, target_rows, kl_share)
    if faults:
        raise InputError(f"block loss: {len(faults)} faults in the arguments", reasons=faults)
    target = target_hidden if kl_share > 0 else None
    options = (float(kl_share), chunk_rows)
    loss, label_logp, correct = _HeadLoss.apply(hidden, head_weight, labels, target, target_rows, *options)
    return RowLosses(loss, label_logp, correct)


def _faults(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    chunk_rows: int,
    kl_share: float,
) -> list[str]:
    faults = []
    if hidden.dim() != 2 or head_weight.dim() != 2 or hidden.shape[-1] != head_weight.shape[-1]:
        found = f"{tuple(hidden.shape)} and {tuple(head_weight.shape)}"
        faults.append(f"hidden, head_weight: shapes {found}; wanted (rows, hidden size) and (vocabulary, hidden size)")
    if labels.shape != hidden.shape[:1]:
        faults.append(f"labels: shape {tuple(labels.shape)}; wanted ({hidden.shape[0]},)")
    if labels.dtype != torch.int64:
        faults.append(f"labels: dtype `{labels.dtype}`; wanted `torch.int64`")
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        faults.append(f"hidden: dtype `{hidden.dtype}`; wanted `torch.bfloat16` or `torch.float32`")
    if head_weight.dtype != hidden.dtype:
        faults.append(f"head_weight: dtype `{head_weight.dtype}`; wanted that of hidden, `{hidden.dtype}`")
    if head_weight.requires_grad:
        faults.append("head_weight: requires a gradient; wanted a frozen head")
    if chunk_rows < 1:
        faults.append(f"chunk_rows: {chunk_rows}; wanted at least 1")
    if not 0 <= kl_share <= 1:
        faults.append(f"kl_share: {kl_share}; wanted a number from 0 to 1")
    return faults


def _target_faults(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    target_hidden: torch.Tensor | None,
    target_rows: torch.Tensor | None,
    kl_share: float,
) -> list[str]:
    if target_hidden is None:
        return ["target_hidden: missing; wanted for a kl_share above 0"] if kl_share > 0 else []
    faults = []
    shape = tuple(hidden.shape) if target_rows is None else (target_hidden.shape[0], *hidden.shape[1:])
    if (tuple(target_hidden.shape), target_hidden.dtype) != (shape, hidden.dtype):
        found = f"shape {tuple(target_hidden.shape)}, `{target_hidden.dtype}`"
        faults.append(f"target_hidden: {found}; wanted those of hidden, {shape}, `{hidden.dtype}`")
    if target_rows is not None and (target_rows.shape, target_rows.dtype) != (labels.shape, torch.int64):
        found = f"shape {tuple(target_rows.shape)}, `{target_rows.dtype}`"
        faults.append(f"target_rows: {found}; wanted {tuple(labels.shape)}, `torch.int64`")
    return faults


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        labels: torch.Tensor,
        target_hidden: torch.Tensor | None,
        target_rows: torch.Tensor | None,
        kl_share: float,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows = hidden.shape[0]
        labels = labels.contiguous()
        loss, label_logp = (torch.empty(num_rows, dtype=torch.float32, device=hidden.device) for _ in range(2))
        correct = torch.empty(num_rows, dtype=torch.bool, device=hidden.device)
        wants_gradient = bool(ctx.needs_input_grad[0])
        gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wants_gradient else None
        shape = (min(chunk_rows, num_rows), head_weight.shape[0])
        logits = hidden.new_empty(shape)
        target_logits = None if target_hidden is None else hidden.new_empty(shape)
        for begin in range(0, num_rows, chunk_rows):
            rows = slice(begin, min(begin + chunk_rows, num_rows))
            chunk = logits[: rows.stop - begin]
            torch.mm(hidden[rows], head_weight.t(), out=chunk)
            target_chunk = None
            if target_hidden is not None and target_logits is not None:
                target_chunk = target_logits[: rows.stop - begin]
                theirs = target_hidden[rows if target_rows is None else target_rows[rows]]
                torch.mm(theirs, head_weight.t(), out=target_chunk)
            outputs = (loss, label_logp, correct)
            _softmax_loss(chunk, target_chunk, labels, outputs, begin, kl_share, wants_gradient)
            if gradient is not None:
                torch.mm(chunk, head_weight, out=gradient[rows])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(label_logp, correct)
        return loss, label_logp, correct

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError("block loss: differentiated twice; wanted one backward without `create_graph`")
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[:, None].to(gradient.dtype), None, None, None, None, None, None)


def _softmax_loss(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    first_row: int,
    kl_share: float,
    wants_gradient: bool,
) -> None:
    """Fills (loss, label_logp, correct) of a chunk's rows and, if wanted, turns the logits into the loss's gradient."""
    block_loss_kernel[(logits.shape[0],)](
        logits,
        logits if target_logits is None else target_logits,
        labels,
        *outputs,
        first_row,
        kl_share,
        logits.shape[1],
        TARGET=target_logits is not None,
        GRADIENT=wants_gradient,
        TILE=_VOCABULARY_TILE,
        num_warps=_NUM_WARPS,
    )


_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2.0))
_LOWEST = tl.constexpr(-3.0e38)
"""Below any logit: start of a running maximum."""
_ABSENT = tl.constexpr(-1.0e30)
"""Logit of ids behind the vocabulary: finite, so that differences stay numbers, and its probability is 0."""


@triton.jit(do_not_specialize=("first_row",))
def block_loss_kernel(
    logits_ptr,
    target_ptr,
    labels_ptr,
    loss_ptr,
    label_logp_ptr,
    correct_ptr,
    first_row,
    kl_share,
    vocabulary,
    TARGET: tl.constexpr,
    GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loss of one row a program; with GRADIENT the logits [C, V] are replaced by the loss's gradient. Grid: (C,).

    Pass 1 keeps a running maximum, sum and first choice for each lane; pass 2 reads the row again for the gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    target_ptr += row * vocabulary
    row += first_row
    label = tl.load(labels_ptr + row)
    loss = 0.0
    logp = 0.0
    correct = False
    if label >= 0:
        lse, target_lse, kl, choice = _statistics(logits_ptr, target_ptr, vocabulary, TARGET, TILE)
        logp = (tl.load(logits_ptr + label).to(tl.float32) * _LOG2E - lse) * _LN2
        loss = kl_share * kl - (1.0 - kl_share) * logp
        correct = choice == label
        if GRADIENT:
            for begin in range(0, vocabulary, TILE):
                ids = begin + tl.arange(0, TILE)
                mask = ids < vocabulary
                x = tl.load(logits_ptr + ids, mask=mask, other=_ABSENT).to(tl.float32) * _LOG2E
                gradient = tl.exp2(x - lse) - tl.where(ids == label, 1.0 - kl_share, 0.0)
                if TARGET:
                    t = tl.load(target_ptr + ids, mask=mask, other=_ABSENT).to(tl.float32) * _LOG2E
                    gradient -= kl_share * tl.exp2(t - target_lse)
                tl.store(logits_ptr + ids, gradient.to(logits_ptr.dtype.element_ty), mask=mask)
    elif GRADIENT:
        for begin in range(0, vocabulary, TILE):
            ids = begin + tl.arange(0, TILE)
            tl.store(logits_ptr + ids, tl.zeros([TILE], logits_ptr.dtype.element_ty), mask=ids < vocabulary)
    tl.store(loss_ptr + row, loss)
    tl.store(label_logp_ptr + row, logp)
    tl.store(correct_ptr + row, correct)


@triton.jit
def _statistics(logits_ptr, target_ptr, vocabulary, TARGET: tl.constexpr, TILE: tl.constexpr):
    """Of one row: base-2 lse of the logits and of the target's, KL(target ‖ drafter), and the first choice."""
    top = tl.full([TILE], _LOWEST, tl.float32)
    first = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float32)
    target_top = tl.full([TILE], _LOWEST, tl.float32)
    target_total = tl.zeros([TILE], tl.float32)
    cross = tl.zeros([TILE], tl.float32)
    for begin in range(0, vocabulary, TILE):
        ids = begin + tl.arange(0, TILE)
        x = tl.load(logits_ptr + ids, mask=ids < vocabulary, other=_ABSENT).to(tl.float32) * _LOG2E
        above = x > top
        decay = tl.exp2(-tl.abs(x - top))  # one of the old and the new top is the new one, so one power serves both
        total = tl.where(above, total * decay + 1.0, total + decay)
        first = tl.where(above, ids, first)
        top = tl.maximum(top, x)
        if TARGET:
            t = tl.load(target_ptr + ids, mask=ids < vocabulary, other=_ABSENT).to(tl.float32) * _LOG2E
            above = t > target_top
            decay = tl.exp2(-tl.abs(t - target_top))
            shrink = tl.where(above, decay, 1.0)
            p = tl.where(above, 1.0, decay)
            target_total = target_total * shrink + p
            cross = cross * shrink + p * (t - x)
            target_top = tl.maximum(target_top, t)
    row_top = tl.max(top, axis=0)
    choice = tl.min(tl.where(top == row_top, first, 2147483647), axis=0)
    lse = row_top + tl.log2(tl.sum(total * tl.exp2(top - row_top), axis=0))
    target_lse = lse
    kl = lse * 0.0
    if TARGET:
        target_row_top = tl.max(target_top, axis=0)
        shrink = tl.exp2(target_top - target_row_top)
        target_sum = tl.sum(target_total * shrink, axis=0)
        target_lse = target_row_top + tl.log2(target_sum)
        kl = (tl.sum(cross * shrink, axis=0) / target_sum - target_lse + lse) * _LN2
    return lse, target_lse, kl, choice
