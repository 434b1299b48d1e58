"""Anchor attention in plain PyTorch and float64: the mask is built from its definition, one entry per row and key.

Slow and large on purpose; tests and the bake's oracle compare the kernels with it. Shapes as in ``api``.
"""

from __future__ import annotations

import torch


def visible_keys(
    anchors: torch.Tensor,
    *,
    block_size: int,
    context_length: int,
    num_valid: torch.Tensor | None = None,
    doc_ids: torch.Tensor | None = None,
    window: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The mask [B, Q, S + Q]: which key each row sees."""
    batch, num_blocks = anchors.shape
    device = anchors.device
    row = torch.arange(num_blocks * block_size, device=device)
    block, slot = row // block_size, row % block_size
    anchor = anchors.long()[:, block]
    position = torch.arange(context_length, device=device)
    context = position < anchor[:, :, None]
    if window is not None:
        context = context & (position > (anchor + slot)[:, :, None] - window)
    if doc_ids is not None:
        own_doc = doc_ids.gather(1, anchor.clamp(0, context_length - 1))
        context = context & (doc_ids[:, None, :] == own_doc[:, :, None])
    own = block[:, None] == block[None, :]
    if causal:
        own = own & (slot[None, :] <= slot[:, None])
    mask = torch.cat([context, own.expand(batch, -1, -1)], dim=2)
    if num_valid is not None:
        mask = mask & (block < num_valid[:, None])[:, :, None]
    return mask


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    anchors: torch.Tensor,
    *,
    block_size: int,
    context_length: int,
    num_valid: torch.Tensor | None = None,
    doc_ids: torch.Tensor | None = None,
    window: int | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Same arguments and result as ``anchor_attention``, in float64, differentiable by autograd."""
    mask = visible_keys(
        anchors,
        block_size=block_size,
        context_length=context_length,
        num_valid=num_valid,
        doc_ids=doc_ids,
        window=window,
        causal=causal,
    )
    group = q.shape[2] // k.shape[2]
    keys = k.double().repeat_interleave(group, dim=2)
    values = v.double().repeat_interleave(group, dim=2)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * factor
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    sees_any = mask.any(dim=2)[:, None, :, None]
    weights = torch.softmax(logits.masked_fill(~sees_any, 0.0), dim=3).masked_fill(~sees_any, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values)
