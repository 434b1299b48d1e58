"""What the attention kernels need to know of the anchors, computed on the device by one small kernel.

With sorted anchors the mask is a staircase: a block sees one interval of the context, and a context position is seen
by one run of consecutive blocks. So two bounds a block and three counts every sixteen context positions describe the
whole mask; no array grows with rows × keys, and nothing is copied to the host.

Shapes: B batch, S context length, N anchors, U = ceil(S / 16) + 1 marks.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

MARK = tl.constexpr(16)
"""Distance in context positions between two marks; every key tile is a multiple of it."""

NO_WINDOW = 1 << 30
"""A window that bounds nothing: larger than any context length that is accepted."""

_ALIGNMENT = 16

_CHUNK = 64

_RUNTIME = ("num_blocks", "num_marks", "context_length", "window")


@dataclasses.dataclass(frozen=True)
class AnchorLayout:
    """Which context each block sees. Valid for every layer that shares anchors, documents and window.

    Args:
        bounds: int32 [B, 2, N]; first the start of the block's document (0 without documents), then the end of its
            context, which is its anchor. A padding slot has the end -1.
        counts: int32 [B, 3, U]; for mark u at position x = 16·u the number of blocks whose anchor is ≤ x, whose lower
            bound begins before x, and whose lower bound is ≤ x for all its rows.
        block_size: positions of a block.
        context_length: S.
        window: sliding window in tokens, or None.
        bounded: whether any lower bound exists (documents or a window).
    """

    bounds: torch.Tensor
    counts: torch.Tensor
    block_size: int
    context_length: int
    window: int | None
    bounded: bool

    @property
    def window_argument(self) -> int:
        """The window as kernels take it, in 32 bits whatever was asked for."""
        return window_argument(self.window)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernels read it: contiguous and aligned, so that no call needs a specialization of its own."""
    if not tensor.is_contiguous() or tensor.storage_offset() * tensor.element_size() % _ALIGNMENT:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def window_argument(window: int | None) -> int:
    """A window, or the lack of one, as a number to which positions can be added in 32 bits."""
    return NO_WINDOW if window is None else min(window, NO_WINDOW)


@triton.jit(do_not_specialize=_RUNTIME)
def anchor_layout_kernel(
    anchors_ptr,
    valid_ptr,
    docs_ptr,
    bounds_ptr,
    counts_ptr,
    num_blocks,
    num_marks,
    context_length,
    window,
    BLOCK_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fills bounds and counts. Grid: (chunks of blocks + chunks of marks, B)."""
    batch = tl.program_id(1).to(tl.int64)
    anchors_ptr += batch * num_blocks
    docs_ptr += batch * context_length
    bounds_ptr += batch * 2 * num_blocks
    counts_ptr += batch * 3 * num_marks
    num_valid = tl.minimum(tl.load(valid_ptr + batch), num_blocks)
    block_chunks = tl.cdiv(num_blocks, CHUNK)
    chunk = tl.program_id(0)
    if chunk < block_chunks:
        blocks = chunk * CHUNK + tl.arange(0, CHUNK)
        anchors = tl.load(anchors_ptr + blocks, mask=blocks < num_valid, other=0)
        start = tl.zeros([CHUNK], tl.int32)
        if PACKED:
            start = _document_start(docs_ptr, anchors, context_length, CHUNK)
        tl.store(bounds_ptr + blocks, start, mask=blocks < num_blocks)
        end = tl.where(blocks < num_valid, anchors, -1)
        tl.store(bounds_ptr + num_blocks + blocks, end, mask=blocks < num_blocks)
    else:
        marks = (chunk - block_chunks) * CHUNK + tl.arange(0, CHUNK)
        position = marks * MARK
        begins = position + window - 1  # anchors below have a first row whose lower bound is before the mark
        covers = position + window - BLOCK_SIZE + 1  # anchors below have a last row whose lower bound is at most it
        if PACKED:
            begins = tl.minimum(begins, _document_end(docs_ptr, position, context_length, CHUNK))
            covers = tl.minimum(covers, _document_end(docs_ptr, position + 1, context_length, CHUNK))
        begins = tl.where(position == 0, 0, begins)
        in_range = marks < num_marks
        seen = _count_below(anchors_ptr, position + 1, num_valid, CHUNK)
        tl.store(counts_ptr + marks, seen, mask=in_range)
        tl.store(counts_ptr + num_marks + marks, _count_below(anchors_ptr, begins, num_valid, CHUNK), mask=in_range)
        tl.store(counts_ptr + 2 * num_marks + marks, _count_below(anchors_ptr, covers, num_valid, CHUNK), mask=in_range)


@triton.jit
def _document_start(docs_ptr, anchors, context_length, CHUNK: tl.constexpr):
    """First position of each anchor's document: one past the last earlier position of another document."""
    own = tl.load(docs_ptr + anchors)
    start = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, context_length, CHUNK):
        positions = begin + tl.arange(0, CHUNK)
        docs = tl.load(docs_ptr + positions, mask=positions < context_length, other=0)
        other = (docs[None, :] != own[:, None]) & (positions[None, :] < anchors[:, None])
        start = tl.maximum(start, tl.max(tl.where(other, positions[None, :] + 1, 0), axis=1))
    return start


@triton.jit
def _document_end(docs_ptr, position, context_length, CHUNK: tl.constexpr):
    """First document boundary at or after a position: the document that holds ``position - 1`` ends there."""
    before = tl.minimum(tl.maximum(position - 1, 0), context_length - 1)
    own = tl.load(docs_ptr + before)
    end = tl.zeros([CHUNK], tl.int32) + context_length
    for begin in range(0, context_length, CHUNK):
        positions = begin + tl.arange(0, CHUNK)
        in_range = positions < context_length
        docs = tl.load(docs_ptr + positions, mask=in_range, other=0)
        other = (docs[None, :] != own[:, None]) & (positions[None, :] >= position[:, None]) & in_range[None, :]
        end = tl.minimum(end, tl.min(tl.where(other, positions[None, :], context_length), axis=1))
    return end


@triton.jit
def _count_below(anchors_ptr, limit, num_valid, CHUNK: tl.constexpr):
    """How many valid anchors lie below each limit."""
    count = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, num_valid, CHUNK):
        blocks = begin + tl.arange(0, CHUNK)
        anchors = tl.load(anchors_ptr + blocks, mask=blocks < num_valid, other=2147483647)
        count += tl.sum((anchors[None, :] < limit[:, None]).to(tl.int32), axis=1)
    return count


def anchor_layout(
    anchors: torch.Tensor,
    *,
    block_size: int,
    context_length: int,
    num_valid: torch.Tensor | None = None,
    doc_ids: torch.Tensor | None = None,
    window: int | None = None,
) -> AnchorLayout:
    """Computes the layout in one launch, without waiting for the device.

    Args:
        anchors: int32 [B, N], ascending over the valid ones, each in [0, S).
        block_size: positions of a block.
        context_length: S.
        num_valid: int32 [B], how many anchors count; the slots behind them are padding. None: all.
        doc_ids: int32 [B, S]; equal ids are one document, and a document is one contiguous run. None: one document.
        window: a row at position x sees context positions above ``x - window`` only. None: no limit.
    """
    batch, num_blocks = anchors.shape
    num_marks = -(-context_length // MARK.value) + 1
    bounds = torch.empty((batch, 2, num_blocks), dtype=torch.int32, device=anchors.device)
    counts = torch.empty((batch, 3, num_marks), dtype=torch.int32, device=anchors.device)
    if num_valid is None:
        num_valid = torch.full((batch,), num_blocks, dtype=torch.int32, device=anchors.device)
    anchors, num_valid = dense(anchors), dense(num_valid)
    documents = anchors if doc_ids is None else dense(doc_ids)
    grid = (-(-num_blocks // _CHUNK) + -(-num_marks // _CHUNK), batch)
    anchor_layout_kernel[grid](
        anchors,
        num_valid,
        documents,
        bounds,
        counts,
        num_blocks,
        num_marks,
        context_length,
        window_argument(window),
        BLOCK_SIZE=block_size,
        PACKED=doc_ids is not None,
        CHUNK=_CHUNK,
    )
    bounded = window is not None or doc_ids is not None
    return AnchorLayout(bounds, counts, block_size, context_length, window, bounded)
