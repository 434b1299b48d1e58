"""Triton kernels of anchor attention: forward, and backward for queries, context keys and block keys.

Shapes: B batch, S context length, N anchors, K block size, Q = N·K rows, H query heads, G kv heads, D head dim.
A *tile* of queries holds ``BLOCK_M // GROUP`` consecutive rows times the ``GROUP = H // G`` heads of one kv head, lane
``m`` being row ``m // GROUP`` and head ``m % GROUP``. So one load of a key tile serves the whole group, gradients of
keys and values sum over the group inside a product, and a tile spans few blocks: the staircase's edge stays narrow.

Each lane sees two intervals of keys: one of the context (``_context_interval``) and its own block (``_own_interval``).
A tile inside every lane's interval needs no mask. Heavy tiles get low program numbers, so that the light ones fill the
end of the launch. Logits are in base 2: ``scale_log2`` = softmax scale · log2(e), and ``lse`` is a base-2 logarithm.

64-bit arithmetic is used for everything that grows with the batch or a row number, 32-bit only inside a tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from dflash.attention.candidates import BACKWARD, FORWARD, KEY, scaled
from dflash.attention.metadata import MARK

DIAGONAL = tl.constexpr(32)
"""Keys of a row's own block are taken in steps of this many."""

LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum: finite, so that a row that sees nothing gives zeros and not NaN."""

_RUNTIME = ("num_rows", "context_length", "num_blocks", "num_marks", "window", "batch", "size_class")
"""Integers that no specialization depends on: one cubin serves every bucket and anchor count."""


# ---------------------------------------------------------------------------------------------- intervals and loads


@triton.jit
def _context_interval(bounds_ptr, rows, row_ok, num_blocks, window, BLOCK_SIZE: tl.constexpr, BOUNDED: tl.constexpr):
    """Context keys that each row sees, as ``begin <= key < end``; ``end`` is -1 for a padding slot."""
    block = rows // BLOCK_SIZE
    end = tl.load(bounds_ptr + num_blocks + block, mask=row_ok, other=-1)
    begin = tl.zeros_like(end)
    if BOUNDED:
        document = tl.load(bounds_ptr + block, mask=row_ok, other=0)
        begin = tl.maximum(document, end + (rows - block * BLOCK_SIZE) - window + 1)
    return begin, end


@triton.jit
def _inside(keys, begin, end, BOUNDED: tl.constexpr):
    """Which keys lie in the context interval; without lower bounds that comparison is left out."""
    inside = keys < end
    if BOUNDED:
        inside = inside & (keys >= begin)
    return inside


@triton.jit
def _own_interval(rows, valid, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr):
    """Block keys that each row sees, numbered like the rows; nothing for a padding slot."""
    begin = (rows // BLOCK_SIZE) * BLOCK_SIZE
    end = begin + BLOCK_SIZE
    if CAUSAL:
        end = rows + 1
    return begin, tl.where(valid, end, 0)


@triton.jit
def _load_keys(
    ptr, first, limit, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Key or value rows ``first …`` as [BLOCK_N, BLOCK_D]; zeros from ``limit`` on."""
    lanes = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    ok = (first + lanes < limit)[:, None]
    if HEAD_DIM != BLOCK_D:
        ok = ok & (dims < HEAD_DIM)[None, :]
    return tl.load(
        ptr + first * tl.full((), STRIDE, tl.int64) + lanes[:, None] * STRIDE + dims[None, :], mask=ok, other=0.0
    )


@triton.jit
def _query_offsets(
    STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    return (lanes // GROUP)[:, None] * STRIDE + (lanes % GROUP)[:, None] * HEAD_DIM + dims[None, :]


@triton.jit
def _query_mask(lane_ok, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    ok = lane_ok[:, None]
    if HEAD_DIM != BLOCK_D:
        ok = ok & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    return ok


@triton.jit
def _load_queries(ptrs, lane_ok, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """A query tile; EVEN states that every lane is in range."""
    if EVEN and HEAD_DIM == BLOCK_D:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=_query_mask(lane_ok, HEAD_DIM, BLOCK_D), other=0.0)
    return tile


@triton.jit
def _load_lanes(ptrs, lane_ok, other, EVEN: tl.constexpr):
    """A number for each lane; EVEN states that every lane is in range."""
    if EVEN:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=lane_ok, other=other)
    return tile


@triton.jit
def _dot(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")


# ---------------------------------------------------------------------------------------------- forward


@triton.autotune(configs=FORWARD, key=KEY)
@triton.jit(do_not_specialize=_RUNTIME)
def anchor_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    bounds_ptr,
    scale_log2,
    batch,
    num_rows,
    context_length,
    num_blocks,
    window,
    size_class,
    HEAD_DIM: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Output [B, Q, H, D] and lse fp32 [B, G, Q, GROUP]. Grid: (query tiles · B · G,), last rows first."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    BLOCK_M: tl.constexpr = scaled(TILE_M, HEAD_DIM, ITEM_BYTES)
    BLOCK_N: tl.constexpr = scaled(TILE_N, HEAD_DIM, ITEM_BYTES)
    ROWS: tl.constexpr = BLOCK_M // GROUP
    pid = tl.program_id(0)
    pairs = batch * KV_HEADS
    row0 = (tl.cdiv(num_rows, ROWS) - 1 - pid // pairs) * ROWS
    b = (pid % pairs) // KV_HEADS
    g = pid % KV_HEADS
    KEY_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    QUERY_STRIDE: tl.constexpr = KEY_STRIDE * GROUP

    first_row = b.to(tl.int64) * num_rows + row0
    first_key = b.to(tl.int64) * (context_length + num_rows)
    bounds_ptr += b.to(tl.int64) * 2 * num_blocks
    k_ptr += first_key * KEY_STRIDE + g * HEAD_DIM
    v_ptr += first_key * KEY_STRIDE + g * HEAD_DIM
    lanes = tl.arange(0, BLOCK_M)
    rows = row0 + lanes // GROUP
    lane_ok = (lanes < ROWS * GROUP) & (rows < num_rows)
    begin, end = _context_interval(bounds_ptr, rows, lane_ok, num_blocks, window, BLOCK_SIZE, BOUNDED)
    valid = end >= 0
    offsets = _query_offsets(QUERY_STRIDE, HEAD_DIM, BLOCK_D, GROUP, BLOCK_M)
    offsets = offsets + g * (GROUP * HEAD_DIM)
    stored = _query_mask(lane_ok, HEAD_DIM, BLOCK_D)
    loaded = _query_mask(valid, HEAD_DIM, BLOCK_D)
    q = tl.load(q_ptr + first_row * QUERY_STRIDE + offsets, mask=loaded, other=0.0)

    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    own_begin, own_end = _own_interval(rows, valid, BLOCK_SIZE, CAUSAL)
    last = tl.max(own_end, axis=0)
    block_k_ptr = k_ptr + context_length.to(tl.int64) * KEY_STRIDE
    block_v_ptr = v_ptr + context_length.to(tl.int64) * KEY_STRIDE
    for key in tl.range((row0 // BLOCK_SIZE) * BLOCK_SIZE, last, DIAGONAL, num_stages=1):
        k = _load_keys(block_k_ptr, key, last, KEY_STRIDE, HEAD_DIM, BLOCK_D, DIAGONAL)
        v = _load_keys(block_v_ptr, key, last, KEY_STRIDE, HEAD_DIM, BLOCK_D, DIAGONAL)
        keys = (key + tl.arange(0, DIAGONAL))[None, :]
        dots = _dot(q, tl.trans(k))
        dots = tl.where((keys >= own_begin[:, None]) & (keys < own_end[:, None]), dots, float("-inf"))
        top, total, acc = _accumulate(dots, scale_log2, v, top, total, acc)

    first, inner_begin, inner_end, last = _span(begin, end, valid, context_length, BLOCK_N, BOUNDED)
    for key in tl.range(first, last, BLOCK_N, num_stages=2 if HEAD_DIM > 128 else None):  # 3 of 256 do not fit
        k = _load_keys(k_ptr, key, context_length, KEY_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N)
        v = _load_keys(v_ptr, key, context_length, KEY_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N)
        dots = _dot(q, tl.trans(k))
        if (key < inner_begin) | (key + BLOCK_N > inner_end):
            keys = (key + tl.arange(0, BLOCK_N))[None, :]
            dots = tl.where(_inside(keys, begin[:, None], end[:, None], BOUNDED), dots, float("-inf"))
        top, total, acc = _accumulate(dots, scale_log2, v, top, total, acc)

    total = tl.where(valid, total, 1.0)
    out = tl.where(valid[:, None], acc / total[:, None], 0.0)
    tl.store(out_ptr + first_row * QUERY_STRIDE + offsets, out.to(out_ptr.dtype.element_ty), mask=stored)
    lse = tl.where(valid, top + tl.log2(total), float("inf"))
    lse_ptr += ((b * KV_HEADS + g).to(tl.int64) * num_rows + row0) * GROUP
    tl.store(lse_ptr + lanes, lse, mask=lane_ok)


@triton.jit
def _accumulate(dots, scale_log2, v, top, total, acc):
    """One step of the running softmax: ``dots`` are the unscaled products, -inf where nothing is seen."""
    new_top = tl.maximum(top, tl.max(dots, axis=1) * scale_log2)
    p = tl.exp2(dots * scale_log2 - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, axis=1)
    acc = _dot(p.to(v.dtype), v, acc * shrink[:, None])
    return new_top, total, acc


@triton.jit
def _span(begin, end, valid, context_length, BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr):
    """Of a query tile: first key tile, the interval that every valid lane sees, and the end of the last key tile."""
    last = tl.max(end, axis=0)
    inner_end = tl.min(tl.where(valid, end, context_length), axis=0)
    first = last * 0
    inner_begin = first
    if BOUNDED:
        inner_begin = tl.max(tl.where(valid, begin, 0), axis=0)
        first = tl.min(tl.where(valid, begin, context_length), axis=0) // BLOCK_N * BLOCK_N
    return first, inner_begin, inner_end, last


# ---------------------------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=("num_rows", "num_lanes"))
def anchor_delta_kernel(
    out_ptr,
    grad_ptr,
    delta_ptr,
    num_rows,
    num_lanes,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """delta = Σ_D grad ∘ out, fp32 [B, G, Q, GROUP], from [B, Q, H, D]. Grid: (ceil(B·Q·H / LANES),)."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    lane_ok = lane < num_lanes
    offsets = lane.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    mask = _query_mask(lane_ok, HEAD_DIM, BLOCK_D)
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    heads = KV_HEADS * GROUP
    head = lane % heads
    row = lane // heads
    pair = (row // num_rows) * KV_HEADS + head // GROUP
    target = (pair.to(tl.int64) * num_rows + row % num_rows) * GROUP + head % GROUP
    tl.store(delta_ptr + target, tl.sum(out * grad, axis=1), mask=lane_ok)


@triton.autotune(configs=BACKWARD, key=KEY)
@triton.jit(do_not_specialize=_RUNTIME)
def anchor_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    bounds_ptr,
    counts_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    scale_log2,
    batch,
    num_rows,
    context_length,
    num_blocks,
    num_marks,
    window,
    size_class,
    HEAD_DIM: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KEY_TILE_M: tl.constexpr,
    KEY_TILE_N: tl.constexpr,
):
    """dQ, dK and dV in one launch. Grid: ((context tiles + query tiles + block key tiles) · B · G,).

    Context tiles come first, since they are the heaviest: tile 0 is read by nearly every query. Then the query tiles,
    last rows first, then the block keys. ``TILE_M``, ``TILE_N`` are the tiles of dQ, ``KEY_TILE_…`` those of dK and dV.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    BLOCK_M: tl.constexpr = scaled(TILE_M, HEAD_DIM, ITEM_BYTES)
    BLOCK_N: tl.constexpr = scaled(TILE_N, HEAD_DIM, ITEM_BYTES)
    KEY_BLOCK_M: tl.constexpr = scaled(KEY_TILE_M, HEAD_DIM, ITEM_BYTES)
    KEY_BLOCK_N: tl.constexpr = scaled(KEY_TILE_N, HEAD_DIM, ITEM_BYTES)
    pairs = batch * KV_HEADS
    pid = tl.program_id(0)
    tile = pid // pairs
    b = (pid % pairs) // KV_HEADS
    g = pid % KV_HEADS
    context_tiles = tl.cdiv(context_length, KEY_BLOCK_N)
    query_tiles = tl.cdiv(num_rows, BLOCK_M // GROUP)

    KEY_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    QUERY_STRIDE: tl.constexpr = KEY_STRIDE * GROUP
    query_base = b.to(tl.int64) * num_rows * QUERY_STRIDE + g * (GROUP * HEAD_DIM)
    key_base = b.to(tl.int64) * (context_length + num_rows) * KEY_STRIDE + g * HEAD_DIM
    lane_base = (b * KV_HEADS + g).to(tl.int64) * num_rows * GROUP
    q_ptr += query_base
    grad_ptr += query_base
    dq_ptr += query_base
    k_ptr += key_base
    v_ptr += key_base
    dk_ptr += key_base
    dv_ptr += key_base
    lse_ptr += lane_base
    delta_ptr += lane_base
    bounds_ptr += b.to(tl.int64) * 2 * num_blocks
    counts_ptr += b.to(tl.int64) * 3 * num_marks
    if (tile >= context_tiles) & (tile < context_tiles + query_tiles):
        row0 = (query_tiles - 1 - (tile - context_tiles)) * (BLOCK_M // GROUP)
        _query_gradient(
            q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, bounds_ptr, dq_ptr, scale, scale_log2,
            row0, num_rows, context_length, num_blocks, window,
            QUERY_STRIDE, KEY_STRIDE, HEAD_DIM, BLOCK_D, GROUP, BLOCK_SIZE, CAUSAL, BOUNDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        _key_gradient(
            q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, bounds_ptr, counts_ptr, dk_ptr, dv_ptr,
            scale, scale_log2, tile, context_tiles, query_tiles,
            num_rows, context_length, num_blocks, num_marks, window,
            QUERY_STRIDE, KEY_STRIDE, HEAD_DIM, BLOCK_D, GROUP, BLOCK_SIZE, CAUSAL, BOUNDED, KEY_BLOCK_M, KEY_BLOCK_N,
        )  # fmt: skip


@triton.jit
def _query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, bounds_ptr, dq_ptr, scale, scale_log2,
    row0, num_rows, context_length, num_blocks, window,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile; the pointers stand at its batch entry and kv head."""
    lanes = tl.arange(0, BLOCK_M)
    rows = row0 + lanes // GROUP
    lane_ok = (lanes < BLOCK_M // GROUP * GROUP) & (rows < num_rows)
    begin, end = _context_interval(bounds_ptr, rows, lane_ok, num_blocks, window, BLOCK_SIZE, BOUNDED)
    valid = end >= 0
    offsets = _query_offsets(QUERY_STRIDE, HEAD_DIM, BLOCK_D, GROUP, BLOCK_M)
    base = row0.to(tl.int64) * QUERY_STRIDE
    loaded = _query_mask(valid, HEAD_DIM, BLOCK_D)
    q = tl.load(q_ptr + base + offsets, mask=loaded, other=0.0)
    grad = tl.load(grad_ptr + base + offsets, mask=loaded, other=0.0)
    lse = tl.load(lse_ptr + row0.to(tl.int64) * GROUP + lanes, mask=valid, other=float("inf"))
    delta = tl.load(delta_ptr + row0.to(tl.int64) * GROUP + lanes, mask=valid, other=0.0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    own_begin, own_end = _own_interval(rows, valid, BLOCK_SIZE, CAUSAL)
    last = tl.max(own_end, axis=0)
    block_k_ptr = k_ptr + context_length.to(tl.int64) * KEY_STRIDE
    block_v_ptr = v_ptr + context_length.to(tl.int64) * KEY_STRIDE
    for key in tl.range((row0 // BLOCK_SIZE) * BLOCK_SIZE, last, DIAGONAL, num_stages=1):
        k = _load_keys(block_k_ptr, key, last, KEY_STRIDE, HEAD_DIM, BLOCK_D, DIAGONAL)
        v = _load_keys(block_v_ptr, key, last, KEY_STRIDE, HEAD_DIM, BLOCK_D, DIAGONAL)
        keys = (key + tl.arange(0, DIAGONAL))[None, :]
        logits = _dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where((keys >= own_begin[:, None]) & (keys < own_end[:, None]), logits, float("-inf")))
        ds = p * (_dot(grad, tl.trans(v)) - delta[:, None])
        dq = _dot(ds.to(k.dtype), k, dq)

    first, inner_begin, inner_end, last = _span(begin, end, valid, context_length, BLOCK_N, BOUNDED)
    for key in tl.range(first, last, BLOCK_N):
        k = _load_keys(k_ptr, key, context_length, KEY_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N)
        v = _load_keys(v_ptr, key, context_length, KEY_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N)
        logits = _dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        if (key < inner_begin) | (key + BLOCK_N > inner_end):
            keys = (key + tl.arange(0, BLOCK_N))[None, :]
            logits = tl.where(_inside(keys, begin[:, None], end[:, None], BOUNDED), logits, float("-inf"))
        p = tl.exp2(logits)
        ds = p * (_dot(grad, tl.trans(v)) - delta[:, None])
        dq = _dot(ds.to(k.dtype), k, dq)
    stored = _query_mask(lane_ok, HEAD_DIM, BLOCK_D)
    tl.store(dq_ptr + base + offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, bounds_ptr, counts_ptr, dk_ptr, dv_ptr,
    scale, scale_log2, tile, context_tiles, query_tiles, num_rows, context_length, num_blocks, num_marks, window,
    QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of context keys or block keys, over all rows that see it.

    Rows are taken from the last to the first: all programs that run at a time then read the same rows, in the cache.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    EVEN: tl.constexpr = BLOCK_SIZE % ROWS == 0 and BLOCK_M % GROUP == 0  # then tiles cover whole blocks exactly
    own = tile >= context_tiles
    valid_rows = tl.load(counts_ptr + num_marks - 1) * BLOCK_SIZE
    key0, limit, seen_begin, full_begin, full_end, seen_end = _seen_by(
        counts_ptr, tile, own, context_tiles + query_tiles, num_rows, context_length, num_marks, valid_rows,
        BLOCK_SIZE, BOUNDED, BLOCK_N,
    )  # fmt: skip
    if own:
        shift = context_length.to(tl.int64) * KEY_STRIDE
    else:
        shift = context_length.to(tl.int64) * 0
    key_ok = key0 + tl.arange(0, BLOCK_N) < limit
    k = _load_keys(k_ptr + shift, key0, tl.where(own, valid_rows, limit), KEY_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N)
    v = _load_keys(v_ptr + shift, key0, tl.where(own, valid_rows, limit), KEY_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N)
    keys = (key0 + tl.arange(0, BLOCK_N))[:, None]
    lanes = tl.arange(0, BLOCK_M)
    offsets = _query_offsets(QUERY_STRIDE, HEAD_DIM, BLOCK_D, GROUP, BLOCK_M)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for step in tl.range(0, tl.cdiv(seen_end - seen_begin, ROWS)):
        row0 = seen_end - (step + 1) * ROWS
        rows = row0 + lanes // GROUP
        lane_ok = (rows >= seen_begin) & (lanes < ROWS * GROUP)
        base = row0.to(tl.int64) * QUERY_STRIDE
        q = _load_queries(q_ptr + base + offsets, lane_ok, HEAD_DIM, BLOCK_D, EVEN)
        grad = _load_queries(grad_ptr + base + offsets, lane_ok, HEAD_DIM, BLOCK_D, EVEN)
        lse = _load_lanes(lse_ptr + row0.to(tl.int64) * GROUP + lanes, lane_ok, float("inf"), EVEN)
        delta = _load_lanes(delta_ptr + row0.to(tl.int64) * GROUP + lanes, lane_ok, 0.0, EVEN)
        logits = _dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        if (row0 < full_begin) | (row0 + ROWS > full_end):
            begin, end = _context_interval(bounds_ptr, rows, lane_ok, num_blocks, window, BLOCK_SIZE, BOUNDED)
            if own:
                begin, end = _own_interval(rows, lane_ok, BLOCK_SIZE, CAUSAL)
            logits = tl.where((keys >= begin[None, :]) & (keys < end[None, :]), logits, float("-inf"))
        p = tl.exp2(logits)
        dv = _dot(p.to(grad.dtype), grad, dv)
        ds = p * (_dot(v, tl.trans(grad)) - delta[None, :])
        dk = _dot(ds.to(q.dtype), q, dk)
    targets = shift + key0.to(tl.int64) * KEY_STRIDE
    targets = targets + tl.arange(0, BLOCK_N)[:, None] * KEY_STRIDE + tl.arange(0, BLOCK_D)[None, :]
    stored = _query_mask(key_ok, HEAD_DIM, BLOCK_D)
    tl.store(dk_ptr + targets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=stored)
    tl.store(dv_ptr + targets, dv.to(dv_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _seen_by(
    counts_ptr, tile, own, block_tile0, num_rows, context_length, num_marks, valid_rows,
    BLOCK_SIZE: tl.constexpr, BOUNDED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of a key tile: first key and end of keys; of the rows that may see it: first, first to last that see all, end."""
    if own:
        key0 = (tile - block_tile0) * BLOCK_N
        limit = num_rows
        seen_begin = key0 // BLOCK_SIZE * BLOCK_SIZE
        seen_end = tl.minimum(tl.cdiv(key0 + BLOCK_N, BLOCK_SIZE) * BLOCK_SIZE, valid_rows)
        full_begin = seen_end
        full_end = seen_end
    else:
        key0 = tile * BLOCK_N
        limit = context_length
        mark = key0 // MARK
        next_mark = tl.minimum(mark + BLOCK_N // MARK, num_marks - 1)
        seen_begin = tl.load(counts_ptr + mark) * BLOCK_SIZE
        full_begin = tl.load(counts_ptr + next_mark) * BLOCK_SIZE
        seen_end = valid_rows
        full_end = valid_rows
        if BOUNDED:
            seen_end = tl.load(counts_ptr + num_marks + next_mark) * BLOCK_SIZE
            full_end = tl.load(counts_ptr + 2 * num_marks + mark) * BLOCK_SIZE
    return key0, limit, seen_begin, full_begin, full_end, seen_end
