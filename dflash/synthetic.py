"""Seeded batches of a case's shape, for planning and measuring. Loads torch."""

from __future__ import annotations

import numpy as np

from dflash.anchors import Drafting
from dflash.buckets import Batch, Sample, Shape, assemble
from dflash.spec import Spec

_DOCUMENTS = (0.42, 0.27, 0.19, 0.07)
"""Shares of a packed row that its documents take; the rest is padding."""


def batch(shape: Shape, spec: Spec, seed: int) -> Batch:
    """A batch like those of a run: full rows when padded, a few documents of uneven length when packed."""
    rows = [
        [_sample(shape, spec, seed, row, number, length) for number, length in enumerate(_lengths(shape))]
        for row in range(shape.batch)
    ]
    drafting = Drafting(spec.drafter.block_size, spec.drafter.mask_token_id)
    return assemble(rows, shape, drafting, seed)


def _lengths(shape: Shape) -> list[int]:
    if not shape.packed:
        return [shape.bucket]
    return [max(int(share * shape.bucket), 1) for share in _DOCUMENTS]


def _sample(shape: Shape, spec: Spec, seed: int, row: int, number: int, length: int) -> Sample:
    random = np.random.default_rng((seed, shape.bucket, shape.anchors, row, number))
    tokens = random.integers(0, spec.target.vocab_size, length)
    return Sample(row, number, tokens, np.ones(length, np.bool_))
