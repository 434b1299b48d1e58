"""One pair: a target and a drafter, on one device or two, that work on one batch.

Legend of shape suffixes: B rows, S context length, N anchor slots, K block size, P = K − 1, Q = N·K, E hidden size,
R = B·N·P rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from dflash import devices, metrics
from dflash.buckets import Batch
from dflash.drafter import Drafter
from dflash.objective import Objective
from dflash.optimizer import Optimizer
from dflash.target import Target

CHUNK_ROWS = 1024
"""Block rows whose logits exist at the same time: 0.5 GiB in bf16 at a vocabulary of 248,320."""


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """What a step leaves on the drafter's device; reading it waits for the step.

    Args:
        loss: weighted mean over the whole step, fp32 scalar.
        norm: the gradient's norm before clipping, fp32 scalar.
        counts: sum of the batches' tallies.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    counts: torch.Tensor


class Pair:
    """A target, a drafter and its optimizer.

    Args:
        number: counted from 0; messages name it.
        target: the frozen target.
        drafter: the drafter, on its own device.
        optimizer: of the drafter's weights.
        objective: the loss.
    """

    def __init__(
        self,
        number: int,
        target: Target,
        drafter: Drafter,
        optimizer: Optimizer,
        objective: Objective = Objective(),  # noqa: B008 (frozen)
    ) -> None:
        self.number = number
        self.target = target
        self.drafter = drafter
        self.optimizer = optimizer
        self.device = drafter.fc.weight.device
        self.part = "target"
        """What the pair is at work on, for messages: ``target``, ``drafter``, ``head and loss``, ``optimizer`` …"""
        self._head_VE = target.head_VE.detach().to(self.device)
        self.train_with(objective)

    def train_with(self, objective: Objective) -> None:
        """Takes another loss, with what the target then has to give."""
        self.objective = objective
        self.target.appends_last = objective.reads_target

    def step(self, batches: Sequence[Batch], lr: float) -> StepTensors:
        """One optimizer step over these batches; the loss is normalised by the weights of all of them together."""
        weight_sum = sum(batch.weight_sum for batch in batches) or 1.0
        parts = [self.accumulate(batch, weight_sum) for batch in batches]
        self.part = "optimizer"
        with devices.current(self.device):
            norm = self.optimizer.step(lr)
            loss = torch.stack([loss for loss, _ in parts]).sum()
            counts = torch.stack([counts for _, counts in parts]).sum(dim=0)
        return StepTensors(loss, norm, counts)

    def accumulate(self, batch: Batch, weight_sum: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of one batch; gradients are added to the optimizer's.

        Args:
            batch: on the CPU.
            weight_sum: what the loss is divided by: the sum of the label weights of the whole step.

        Returns:
            this batch's share of the loss, and its tally.
        """
        features_BSF, embeddings_BQE, batch = self.prepare(batch)
        with devices.current(self.device):
            loss, correct_BNP = self.loss(features_BSF, embeddings_BQE, batch)
            share = loss / weight_sum
            self.part = "backward pass"
            share.backward()
            return share.detach(), metrics.tally(correct_BNP, batch.labels_BNK[..., 1:])

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """The target's part: features and the blocks' embeddings, brought to the drafter's device with the batch."""
        self.part = "target"
        with devices.current(self.target.device):
            there = batch.on(self.target.device)
            features_BSF = self.target.features(there)
            embeddings_BQE = self.target.embed(there.block_ids_BQ)
        if self.device == self.target.device:
            return features_BSF, embeddings_BQE, there
        moved = features_BSF.to(self.device, non_blocking=True), embeddings_BQE.to(self.device, non_blocking=True)
        return *moved, batch.on(self.device)

    def loss(
        self, features_BSF: torch.Tensor, embeddings_BQE: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum of the rows' losses, and which drafted positions were right [B, N, P].

        The anchor's own row is left out: its token is given.
        """
        self.part = "drafter"
        features_BSF, last_BSE = self.objective.split(features_BSF, embeddings_BQE.shape[-1])
        hidden_BQE = self.drafter(
            features_BSF,
            embeddings_BQE,
            batch.positions_BS,
            batch.block_positions_BQ,
            batch.anchors_BN,
            batch.num_valid_B,
            batch.doc_ids_BS,
        )
        self.part = "head and loss"
        hidden_BNPE = hidden_BQE.unflatten(1, batch.labels_BNK.shape[1:])[:, :, 1:]
        return self.objective.loss(hidden_BNPE, self._head_VE, batch, last_BSE, chunk_rows=CHUNK_ROWS)
