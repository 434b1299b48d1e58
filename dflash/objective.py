"""The loss that a run trains with: what each row costs, what it weighs, and what the sum is divided by.

The divisor of a step is known before any device works, whatever the loss, so that the loss is the same for every split
over batches, pairs and ranks: with decaying weights it is their sum, with D-PACE the number of blocks. D-PACE's weights
are credits of an expected accepted length and follow from the drafter's own confidence; divided by their sum they would
lose their mass, and a batch's sum would need all other batches' results first. The number of blocks is what D-PACE's
author asks for (https://github.com/sgl-project/SpecForge/issues/828).

The target's last hidden state comes whole behind its features, S rows more: the rows that predict N·P drafted positions
would be more than that at 512 anchors, and most of them several times the same.

Legend of shape suffixes: B rows, S context length, N anchor slots, P = K − 1 drafted positions, E hidden size,
F = E times the number of target layers, V vocabulary, R = B·N·P rows.
"""

from __future__ import annotations

import dataclasses

import torch

from dflash.anchors import IGNORED
from dflash.buckets import Batch
from dflash.losses import acceptance_weights, row_losses
from dflash.recipe import LossConfig


@dataclasses.dataclass(frozen=True)
class Objective:
    """(1 − kl_share)·CE(label) + kl_share·KL(target ‖ drafter) of every row, weighted and added up.

    Args:
        kl_share: of the KL term, in [0, 1].
        alpha: D-PACE's smoothing, in [0, 1]; None takes the weights that come with a batch.
    """

    kl_share: float = 0.0
    alpha: float | None = None

    @classmethod
    def of(cls, config: LossConfig) -> Objective:
        """The objective of a run."""
        return cls(config.kl_share, config.alpha)

    @property
    def reads_target(self) -> bool:
        """Whether the target's last hidden state is needed beside its features."""
        return self.kl_share > 0

    def split(self, features_BSF: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafter's features, and the target's last hidden state [B, S, E] if it came behind them.

        Args:
            features_BSF: E wider than F where ``reads_target``.
            hidden_size: E.
        """
        if not self.reads_target:
            return features_BSF, None
        return features_BSF[..., :-hidden_size], features_BSF[..., -hidden_size:]

    def loss(
        self,
        hidden_BNPE: torch.Tensor,
        head_VE: torch.Tensor,
        batch: Batch,
        last_BSE: torch.Tensor | None,
        *,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum over a batch, to be divided by the step's divisor, and which rows are right.

        The target's distribution for the token at position p is what its head says at p − 1. Its hidden states are
        gathered and its logits made for one chunk of rows at a time, so that memory does not grow with the blocks.

        Args:
            hidden_BNPE: what the head reads, without the anchors' rows.
            head_VE: the target's head, frozen.
            batch: on the same device.
            last_BSE: the target's last hidden state; None without a KL term.
            chunk_rows: rows whose logits exist at a time.

        Returns:
            fp32 scalar, differentiable in the hidden rows; bool [B, N, P].
        """
        labels_BNP = batch.labels_BNK[..., 1:]
        found = row_losses(
            hidden_BNPE.flatten(0, 2),
            head_VE,
            labels_BNP.flatten(),
            chunk_rows=chunk_rows,
            target_hidden=None if last_BSE is None else last_BSE.flatten(0, 1),
            target_rows=None if last_BSE is None else _predicting_rows(batch),
            kl_share=self.kl_share,
        )
        weights_R = batch.weights_BNK[..., 1:].flatten()
        if self.alpha is not None:
            size = labels_BNP.shape[-1]
            credits_MP = acceptance_weights(
                found.label_logp.view(-1, size), labels_BNP.reshape(-1, size), alpha=self.alpha
            )
            weights_R = weights_R * credits_MP.flatten()
        used_R = torch.where(labels_BNP.flatten() == IGNORED, 0.0, weights_R)
        return (found.loss * used_R).sum(), found.correct.view(labels_BNP.shape)


def _predicting_rows(batch: Batch) -> torch.Tensor:
    """Where in [B·S] the target predicts each drafted position: one before it, in its own row; int64 [R]."""
    batch_size, length = batch.input_ids_BS.shape
    block_size = batch.labels_BNK.shape[-1]
    steps_P = torch.arange(block_size - 1, device=batch.anchors_BN.device)
    positions_BNP = (batch.anchors_BN.long()[..., None] + steps_P).clamp(max=length - 1)  # beyond it is no label
    rows_B = torch.arange(batch_size, device=batch.anchors_BN.device) * length
    return (positions_BNP + rows_B[:, None, None]).flatten()
