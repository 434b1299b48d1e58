"""``anchor_attention``: block rows attend to the context before their anchor and to their own block.

Shapes: B batch, S context length, N anchors, K block size, Q = N·K rows, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dflash.attention import kernels
from dflash.attention.candidates import scaled
from dflash.attention.metadata import AnchorLayout, anchor_layout, dense
from kernelbake.errors import InputError

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)
MAX_GROUP = 16
MAX_LENGTH = 1 << 29
"""Keys of one batch entry and lanes (B·Q·H) of a call stay below, so that 32-bit row numbers cannot wrap."""

_DELTA_LANES = 32


def anchor_attention(
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
    layout: AnchorLayout | None = None,
) -> torch.Tensor:
    """Attention of block rows, with gradients to q, k and v; deterministic, and no array grows with rows × keys.

    Row i of block n sees context key j iff ``j < anchors[b, n]``, of the same document if there are documents, and
    ``j > anchors[b, n] + i - window`` if there is a window; and every key of its own block, up to itself if causal.
    Rows of padding slots give 0, and neither give nor take gradients.

    Args:
        q: [B, Q, H, D], bfloat16 or float32.
        k, v: [B, S + Q, G, D], first the context, then the blocks; same dtype. H is a multiple of G.
        anchors: int32 [B, N], ascending over the valid slots, each in [0, S). The order is not checked, as that would
            wait for the device.
        block_size: K; context_length: S.
        num_valid: int32 [B], how many slots are in use; the rest, at the end, are padding. None: all.
        doc_ids: int32 [B, S]; a document is one contiguous run of equal ids. None: one document.
        window: tokens, or None.
        causal: whether a row sees only earlier rows of its block and itself.
        scale: of the logits, positive; None: 1/√D.
        layout: result of ``anchor_layout`` for these anchors, num_valid, doc_ids and window, when several layers share
            it; None: computed here.

    Returns:
        [B, Q, H, D] in the dtype of q.

    Raises:
        InputError: shapes, dtypes or options that do not fit, all of them at once.
    """
    faults = _faults(q, k, v, anchors, block_size, context_length, num_valid, doc_ids, window, causal, scale, layout)
    if faults:
        raise InputError(f"anchor attention: {len(faults)} faults in the arguments", reasons=faults)
    if layout is None:
        layout = anchor_layout(
            anchors,
            block_size=block_size,
            context_length=context_length,
            num_valid=num_valid,
            doc_ids=doc_ids,
            window=window,
        )
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    out: torch.Tensor = _AnchorAttention.apply(q, k, v, layout, causal, factor)
    return out


def _faults(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    anchors: torch.Tensor,
    block_size: int,
    context_length: int,
    num_valid: torch.Tensor | None,
    doc_ids: torch.Tensor | None,
    window: int | None,
    causal: bool,
    scale: float | None,
    layout: AnchorLayout | None,
) -> list[str]:
    """Everything that is wrong with a call, found without looking at any tensor's values."""
    faults = [
        f"{name}: {tensor.dim()} dimensions; wanted {wanted}"
        for name, tensor, wanted in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("anchors", anchors, 2))
        if tensor.dim() != wanted
    ]
    faults += _option_faults(block_size, context_length, window, causal, scale)
    if faults:
        return faults
    return [
        *_shape_faults(q, k, v, anchors, block_size, context_length),
        *_kind_faults(q, k, v, anchors, num_valid, doc_ids),
        *_companion_faults(anchors, block_size, context_length, num_valid, doc_ids, window, layout),
    ]


def _option_faults(block_size: Any, context_length: Any, window: Any, causal: Any, scale: Any) -> list[str]:
    """Types are exact: another one would be a key of its own, or one more specialization."""
    faults = []
    for name, number in (("block_size", block_size), ("context_length", context_length), ("window", window)):
        optional = name == "window"
        if not (number is None and optional) and not (type(number) is int and number >= 1):
            faults.append(f"{name}: {number}; wanted a whole number of at least 1{' or none' if optional else ''}")
    if type(causal) is not bool:
        faults.append(f"causal: {causal}; wanted True or False")
    if scale is not None and not (type(scale) in (int, float) and scale > 0 and math.isfinite(scale)):
        faults.append(f"scale: {scale}; wanted a positive finite number")
    return faults


def _shape_faults(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, anchors: torch.Tensor, block_size: int, context_length: int
) -> list[str]:
    faults = []
    batch, num_blocks = anchors.shape
    num_rows, (heads, head_dim), kv_heads = num_blocks * block_size, q.shape[2:], k.shape[2]
    if batch < 1 or num_blocks < 1:
        faults.append(f"anchors: shape {tuple(anchors.shape)}; wanted at least one batch entry and one slot")
    if q.shape[:2] != (batch, num_rows):
        faults.append(f"q: shape {tuple(q.shape)}; wanted ({batch}, {num_rows}, heads, head dim) for these anchors")
    if k.shape != (batch, context_length + num_rows, kv_heads, head_dim):
        faults.append(
            f"k: shape {tuple(k.shape)}; wanted ({batch}, {context_length + num_rows}, kv heads, {head_dim}): the "
            f"context, then the block rows"
        )
    if v.shape != k.shape:
        faults.append(f"v: shape {tuple(v.shape)}; wanted that of k, {tuple(k.shape)}")
    if head_dim not in HEAD_DIMS:
        faults.append(f"q: head dim {head_dim}; wanted one of {', '.join(map(str, HEAD_DIMS))}")
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= MAX_GROUP:
        faults.append(f"q: {heads} heads for {kv_heads} kv heads; wanted a multiple of them, at most {MAX_GROUP} times")
    if context_length + num_rows >= MAX_LENGTH or batch * num_rows * heads >= MAX_LENGTH:
        faults.append(
            f"q, k: {batch} × {num_rows} rows × {heads} heads and {context_length + num_rows} keys; wanted below "
            f"{MAX_LENGTH} each"
        )
    if heads * head_dim * 128 >= 1 << 31:
        faults.append(f"q: {heads} heads of {head_dim}; wanted below {(1 << 31) // 128} numbers a row")
    return faults


def _kind_faults(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    anchors: torch.Tensor,
    num_valid: torch.Tensor | None,
    doc_ids: torch.Tensor | None,
) -> list[str]:
    faults = []
    if q.dtype not in DTYPES:
        faults.append(f"q: dtype `{q.dtype}`; wanted `torch.bfloat16` or `torch.float32`")
    faults += [
        f"{name}: dtype `{tensor.dtype}`; wanted that of q, `{q.dtype}`"
        for name, tensor in (("k", k), ("v", v))
        if tensor.dtype != q.dtype
    ]
    integers = (("anchors", anchors), ("num_valid", num_valid), ("doc_ids", doc_ids))
    faults += [
        f"{name}: dtype `{tensor.dtype}`; wanted `torch.int32`"
        for name, tensor in integers
        if tensor is not None and tensor.dtype != torch.int32
    ]
    faults += [
        f"{name}: on `{tensor.device}`; wanted the device of q, `{q.device}`"
        for name, tensor in (("k", k), ("v", v), *integers)
        if tensor is not None and tensor.device != q.device
    ]
    return faults


def _companion_faults(
    anchors: torch.Tensor,
    block_size: int,
    context_length: int,
    num_valid: torch.Tensor | None,
    doc_ids: torch.Tensor | None,
    window: int | None,
    layout: AnchorLayout | None,
) -> list[str]:
    faults = []
    batch, num_blocks = anchors.shape
    if num_valid is not None and num_valid.shape != (batch,):
        faults.append(f"num_valid: shape {tuple(num_valid.shape)}; wanted ({batch},)")
    if doc_ids is not None and doc_ids.shape != (batch, context_length):
        faults.append(f"doc_ids: shape {tuple(doc_ids.shape)}; wanted ({batch}, {context_length})")
    if layout is not None:
        found = (tuple(layout.bounds.shape), layout.block_size, layout.context_length, layout.window, layout.bounded)
        bounded = window is not None or doc_ids is not None
        wanted = ((batch, 2, num_blocks), block_size, context_length, window, bounded)
        if found != wanted:
            faults.append(
                f"layout: made for {found}; wanted {wanted} (bounds, block size, context length, window, bounded)"
            )
    return faults


class _AnchorAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AnchorLayout, causal: bool, scale: float
    ) -> torch.Tensor:
        q, k, v = dense(q), dense(k), dense(v)
        out, lse = _forward(q, k, v, layout, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.causal, ctx.scale = layout, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError("anchor attention: differentiated twice; wanted one backward without `create_graph`")
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward(q, k, v, out, lse, dense(grad), ctx.layout, ctx.causal, ctx.scale)
        return dq, dk, dv, None, None, None


def _size_class(num_rows: int) -> int:
    """Coarse size that the autotune key holds: long calls fill a GPU with large tiles, short ones do not."""
    return int(num_rows >= 4096)


def _constants(q: torch.Tensor, k: torch.Tensor, layout: AnchorLayout, causal: bool) -> dict[str, Any]:
    return {
        "HEAD_DIM": q.shape[3],
        "ITEM_BYTES": q.element_size(),
        "KV_HEADS": k.shape[2],
        "GROUP": q.shape[2] // k.shape[2],
        "BLOCK_SIZE": layout.block_size,
        "CAUSAL": causal,
        "BOUNDED": layout.bounded,
    }


def _tiles(meta: dict[str, Any], tile: str, length: int, group: int = 1) -> int:
    """How many tiles cover ``length`` rows or keys."""
    tile_length: int = scaled(meta[tile], meta["HEAD_DIM"], meta["ITEM_BYTES"]) // group
    return -(-length // tile_length)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AnchorLayout, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_rows, heads, _ = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    out = torch.empty_like(q)
    lse = torch.empty((batch, kv_heads, num_rows, group), dtype=torch.float32, device=q.device)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (_tiles(meta, "TILE_M", num_rows, group) * batch * kv_heads,)

    kernels.anchor_forward_kernel[grid](
        q,
        k,
        v,
        out,
        lse,
        layout.bounds,
        scale * math.log2(math.e),
        batch,
        num_rows,
        layout.context_length,
        layout.bounds.shape[2],
        layout.window_argument,
        _size_class(num_rows),
        **_constants(q, k, layout, causal),
    )
    return out, lse


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    layout: AnchorLayout,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, num_rows, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    delta = torch.empty_like(lse)
    lanes = batch * num_rows * heads
    kernels.anchor_delta_kernel[(-(-lanes // _DELTA_LANES),)](
        out, grad, delta, num_rows, lanes, HEAD_DIM=head_dim, KV_HEADS=kv_heads, GROUP=group, LANES=_DELTA_LANES
    )
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        key_tiles = _tiles(meta, "KEY_TILE_N", layout.context_length) + _tiles(meta, "KEY_TILE_N", num_rows)
        return ((key_tiles + _tiles(meta, "TILE_M", num_rows, group)) * batch * kv_heads,)

    kernels.anchor_backward_kernel[grid](
        q,
        k,
        v,
        grad,
        lse,
        delta,
        layout.bounds,
        layout.counts,
        dq,
        dk,
        dv,
        scale,
        scale * math.log2(math.e),
        batch,
        num_rows,
        layout.context_length,
        layout.bounds.shape[2],
        layout.counts.shape[2],
        layout.window_argument,
        _size_class(num_rows),
        **_constants(q, k, layout, causal),
    )
    return dq, dk, dv
