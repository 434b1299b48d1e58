"""Sequence lengths → buckets; samples → batches of static shape.

Legend of shape suffixes: B rows, S bucket (context length), N anchor slots, K block size, Q = N·K, D documents + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dflash import anchors
from dflash.anchors import Blocks, Drafting, Flags, Integers
from kernelbake.errors import InputError
from kernelbake.keys import Case

CHUNK = 64
"""Tokens of a chunk of FLA's Gated-DeltaNet and convolution kernels."""


def bucket_for(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds so many tokens.

    Raises:
        InputError: the length is above the largest bucket.
    """
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise InputError(f"buckets: a sample has `{length}` tokens; wanted at most `{buckets[-1]}`, the largest bucket")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static shape of a batch: a case of the workload, as numbers."""

    bucket: int
    anchors: int
    batch: int
    layout: str
    dtype: str

    @classmethod
    def of(cls, case: Case) -> Shape:
        """The shape that a case names."""
        return cls(**dict(case.axes))  # type: ignore[arg-type]

    @property
    def packed(self) -> bool:
        return self.layout == "packed"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One visit to one sample.

    Args:
        epoch, index: the visit; they seed its random generator.
        tokens: token ids.
        supervised: whether the token may be a label.
    """

    epoch: int
    index: int
    tokens: Integers
    supervised: Flags


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch, ready for a step; every tensor has the shape that the case says.

    Args:
        shape: the case.
        input_ids_BS: token ids; padding is 0.
        positions_BS: position of each token in its document.
        doc_ids_BS: document of each token, padding included as one; None in the padded layout.
        cu_seqlens_D: boundaries of the documents; None in the padded layout.
        chunk_indices: (document, chunk in it) of every chunk of 64 tokens, [C, 2]; made here, as FLA would have to wait
            for the device to make it. None in the padded layout.
        block_ids_BQ: the blocks as the drafter reads them: the anchor's token, then mask tokens.
        block_positions_BQ: positions of the blocks' rows in their documents.
        anchors_BN: slots in the row, ascending; unused slots stand at the end.
        num_valid_B: slots in use.
        labels_BNK, weights_BNK: as in ``anchors.Blocks``.
        weight_sum: the batch's part of what the loss is divided by, known before any device works: the sum of the
            weights, or with D-PACE the number of blocks.
        num_tokens: tokens that are no padding.
        visits: (epoch, index) of every sample in it.
    """

    shape: Shape
    input_ids_BS: torch.Tensor
    positions_BS: torch.Tensor
    doc_ids_BS: torch.Tensor | None
    cu_seqlens_D: torch.Tensor | None
    chunk_indices: torch.Tensor | None
    block_ids_BQ: torch.Tensor
    block_positions_BQ: torch.Tensor
    anchors_BN: torch.Tensor
    num_valid_B: torch.Tensor
    labels_BNK: torch.Tensor
    weights_BNK: torch.Tensor
    weight_sum: float
    num_tokens: int
    visits: tuple[tuple[int, int], ...]

    def pinned(self) -> Batch:
        """The same with its tensors in pinned memory, so that copies to a GPU overlap with work."""
        return self._map(lambda tensor: tensor.pin_memory())

    def on(self, device: torch.device) -> Batch:
        """The same with its tensors on the device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, change: Any) -> Batch:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: change(value) for name, value in fields.items() if isinstance(value, torch.Tensor)}
        return dataclasses.replace(self, **moved)


def assemble(rows: Sequence[Sequence[Sample]], shape: Shape, drafting: Drafting, seed: int) -> Batch:
    """Makes the batch of these rows: one sample each in the padded layout, any number in the packed one.

    Raises:
        InputError: a row's samples have more tokens than the bucket.
    """
    parts = [_Row(row, shape, drafting, seed) for row in rows]
    stacked: dict[str, Any] = {
        name: torch.from_numpy(np.stack([getattr(part, name.rpartition("_")[0]) for part in parts]))
        for name in (
            "input_ids_BS",
            "positions_BS",
            "block_ids_BQ",
            "block_positions_BQ",
            "anchors_BN",
            "labels_BNK",
            "weights_BNK",
        )
    }
    return Batch(
        shape=shape,
        **stacked,
        doc_ids_BS=torch.from_numpy(np.stack([part.doc_ids for part in parts])) if shape.packed else None,
        cu_seqlens_D=torch.from_numpy(parts[0].cu_seqlens) if shape.packed else None,
        chunk_indices=torch.from_numpy(_chunk_indices(parts[0].cu_seqlens)) if shape.packed else None,
        num_valid_B=torch.tensor([part.num_valid for part in parts], dtype=torch.int32),
        weight_sum=float(sum(drafting.divisor(part.weights) for part in parts)),
        num_tokens=sum(len(sample.tokens) for row in rows for sample in row),
        visits=tuple((sample.epoch, sample.index) for row in rows for sample in row),
    )


def _chunk_indices(cu_seqlens_D: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    counts = -(-np.diff(cu_seqlens_D) // CHUNK)
    chunks = [(document, chunk) for document, count in enumerate(counts) for chunk in range(count)]
    return np.array(chunks, np.int32)


class _Row:
    """The arrays of one row, filled document by document."""

    def __init__(self, samples: Sequence[Sample], shape: Shape, drafting: Drafting, seed: int) -> None:
        length = sum(len(sample.tokens) for sample in samples)
        bucket_for(length, (shape.bucket,))
        slots, block = shape.anchors, drafting.block_size
        self.input_ids = np.zeros(shape.bucket, np.int64)
        self.positions = np.arange(shape.bucket, dtype=np.int64)
        self.doc_ids = np.full(shape.bucket, len(samples), np.int32)
        self.anchors = np.full(slots, shape.bucket - 1, np.int32)
        self.labels = np.full((slots, block), anchors.IGNORED, np.int64)
        self.weights = np.zeros((slots, block), np.float32)
        self.num_valid = 0
        block_ids = np.full((slots, block), drafting.mask_token_id, np.int64)
        block_positions = np.broadcast_to(np.arange(block), (slots, block)).copy()
        boundaries = [0]
        valid = [anchors.valid_positions(sample.supervised) for sample in samples]
        quotas = anchors.shares(np.array([len(positions) for positions in valid], np.int64), slots)
        for number, (sample, positions, quota) in enumerate(zip(samples, valid, quotas, strict=True)):
            start, end = boundaries[-1], boundaries[-1] + len(sample.tokens)
            random = anchors.generator(seed, sample.epoch, sample.index)
            drawn = anchors.draw(positions, int(quota), random)
            self._fill(number, start, end, sample, anchors.blocks(sample.tokens, sample.supervised, drawn, drafting))
            here = slice(self.num_valid, self.num_valid + len(drawn))
            block_ids[here, 0] = sample.tokens[drawn]
            block_positions[here] += drawn[:, None]
            self.num_valid += len(drawn)
            boundaries.append(end)
        if boundaries[-1] < shape.bucket:  # the padding is a document of its own
            self.positions[boundaries[-1] :] -= boundaries[-1] if shape.packed else 0
            boundaries.append(shape.bucket)
        self.block_ids, self.block_positions = block_ids.reshape(-1), block_positions.reshape(-1)
        self.cu_seqlens = np.array(boundaries, np.int32)

    def _fill(self, number: int, start: int, end: int, sample: Sample, blocks: Blocks) -> None:
        self.input_ids[start:end] = sample.tokens
        self.positions[start:end] = np.arange(end - start)
        self.doc_ids[start:end] = number
        here = slice(self.num_valid, self.num_valid + len(blocks.anchors_N))
        self.anchors[here] = blocks.anchors_N + start
        self.labels[here] = blocks.labels_NK
        self.weights[here] = blocks.weights_NK
