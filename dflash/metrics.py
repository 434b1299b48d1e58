"""What a step says about the drafter: accuracy by position, and an estimate of the acceptance length.

Legend of shape suffixes: B rows, N anchor slots, P = K − 1 drafted positions of a block.
"""

from __future__ import annotations

import dataclasses

import torch

from dflash.anchors import IGNORED


def tally(correct_BNP: torch.Tensor, labels_BNP: torch.Tensor) -> torch.Tensor:
    """Counts of a batch, on its device: [2·P + 2] in fp64.

    Right predictions and labels by position, then the sum of acceptance lengths and the number of blocks. A block's
    acceptance length is its leading run of right predictions plus one, the bonus token; a block whose labels end early
    cannot reach more than they allow, so the mean is a lower bound. Tallies of batches and pairs are added first.
    """
    labelled = labels_BNP != IGNORED
    right = correct_BNP & labelled
    runs_BN = right.int().cumprod(dim=-1).sum(dim=-1)
    used_BN = labelled[..., 0]
    lengths = torch.where(used_BN, runs_BN + 1, 0).sum()
    parts = (right.sum(dim=(0, 1)), labelled.sum(dim=(0, 1)), lengths[None], used_BN.sum()[None])
    return torch.cat([part.double() for part in parts])


@dataclasses.dataclass(frozen=True)
class Scores:
    """Counts as figures.

    Args:
        accuracy: share of right predictions over all labels.
        accuracy_by_position: the same for each drafted position, from the first after the anchor.
        acceptance_length: estimate by teacher forcing, bonus token included; 0 without a block.
        num_blocks, num_labels: what was counted.
    """

    accuracy: float
    accuracy_by_position: tuple[float, ...]
    acceptance_length: float
    num_blocks: int
    num_labels: int

    @classmethod
    def of(cls, counts: list[float]) -> Scores:
        """The figures of one tally, or of a sum of tallies."""
        size = (len(counts) - 2) // 2
        right, labelled = counts[:size], counts[size : 2 * size]
        total, blocks = counts[-2:]
        return cls(
            accuracy=sum(right) / max(sum(labelled), 1.0),
            accuracy_by_position=tuple(r / max(n, 1.0) for r, n in zip(right, labelled, strict=True)),
            acceptance_length=total / blocks if blocks else 0.0,
            num_blocks=int(blocks),
            num_labels=int(sum(labelled)),
        )
