"""Where draft blocks start, and what they are trained to say. Pure; every sample has a random generator of its own.

Legend of shape suffixes: T tokens of a document, N anchors, K block size.

A position p of a document may be an anchor if a token precedes it (a block must see context) and if the token after it
is supervised. So the last token of a prompt may be one, and the first token of a response is a label of that block. A
block never leaves its document, and its labels end where the supervised text ends for the first time.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""The label of a position that is not trained."""

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What decides the blocks of a document.

    Args:
        block_size: positions of a block, the anchor included.
        mask_token_id: the id that fills the rest of a block.
        gamma: scale of the decay of the loss over a block's positions; None takes ``default_gamma``.
        even: whether all positions weigh the same here, as the loss weighs them by the drafter's confidence (D-PACE).
    """

    block_size: int
    mask_token_id: int
    gamma: float | None = None
    even: bool = False

    @functools.cached_property
    def decay_K(self) -> Floats:
        """Weight of each position: 0 for the anchor, then exp(−(i − 1) / γ), as in the DFlash paper's equation 4."""
        if self.even:
            return (np.arange(self.block_size) > 0).astype(np.float32)
        gamma = self.gamma if self.gamma is not None else default_gamma(self.block_size)
        weights = [0.0, *(math.exp(-(index - 1) / gamma) for index in range(1, self.block_size))]
        return np.array(weights, np.float32)

    def divisor(self, weights_NK: Floats) -> float:
        """What a loss over these blocks is divided by: the sum of decaying weights, or the number of blocks.

        It is added up over a whole optimizer step; ``objective`` says why there are two.
        """
        return float(np.count_nonzero(weights_NK.any(axis=1)) if self.even else weights_NK.sum(dtype=np.float64))


def default_gamma(block_size: int) -> float:
    """The paper's γ for its block sizes (16, 10 and 8), and 7/16 of the block size for others."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size * 7 / 16)


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random generator of one visit to one sample.

    It depends on nothing else, so neither the batch, the pair nor the order of work changes what a sample draws, and a
    resumed run needs no stored state to draw the same again.
    """
    return np.random.default_rng((seed, epoch, index))


def valid_positions(supervised_T: Flags) -> Integers:
    """The positions of one document that may be anchors, ascending."""
    valid = np.zeros(len(supervised_T), np.bool_)
    valid[1:-1] = supervised_T[2:]
    return np.flatnonzero(valid)


def draw(valid: Integers, cap: int, random: np.random.Generator) -> Integers:
    """Exactly ``min(cap, len(valid))`` different anchors, ascending."""
    count = min(cap, len(valid))
    return np.sort(random.choice(valid, count, replace=False, shuffle=False)) if count else valid[:0]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one document, positions counted within it.

    Args:
        anchors_N: where they start, ascending.
        labels_NK: the token at anchor + i (the same position, not shifted); ``IGNORED`` at the anchor, beyond the
            document and from the first unsupervised position on.
        weights_NK: weight of each label in the loss; 0 where there is none.
    """

    anchors_N: Integers
    labels_NK: Integers
    weights_NK: Floats


def blocks(tokens_T: Integers, supervised_T: Flags, anchors_N: Integers, drafting: Drafting) -> Blocks:
    """What the blocks at these anchors are trained to say."""
    positions_NK = anchors_N[:, None] + np.arange(drafting.block_size)
    inside_NK = positions_NK < len(tokens_T)
    clipped_NK = np.minimum(positions_NK, len(tokens_T) - 1)
    trained_NK = inside_NK & supervised_T[clipped_NK]
    trained_NK[:, 0] = True  # the anchor is given: it ends no run of supervised positions
    trained_NK = np.logical_and.accumulate(trained_NK, axis=1)
    trained_NK[:, 0] = False
    labels_NK = np.where(trained_NK, tokens_T[clipped_NK], IGNORED)
    return Blocks(anchors_N, labels_NK, np.where(trained_NK, drafting.decay_K, np.float32(0)))


def shares(counts: Integers, cap: int) -> Integers:
    """How many of a row's ``cap`` slots each of its documents gets.

    All get what they can use if that fits; otherwise slots are shared in proportion, by largest remainder.

    Args:
        counts: valid positions of each document.
        cap: slots of the row.
    """
    total = int(counts.sum())
    if total <= cap:
        return counts
    exact = counts * (cap / total)
    given: Integers = np.floor(exact).astype(np.int64)
    order = np.argsort(given - exact, kind="stable")
    given[order[: cap - int(given.sum())]] += 1
    return given
