"""One pair: a target and a drafter, on one device or two, that work on one batch.

On two devices the target's pass of the next batch runs while the drafter works on this one: it is launched first, and
its results travel on a stream of their own. Everything is launched by one thread, and nothing waits for a device.

Legend of shape suffixes: A batches of a step, B rows, S context length, N anchor slots, K block size, P = K − 1,
Q = N·K, E hidden size, R = B·N·P rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from dflash import devices, metrics
from dflash.buckets import Batch, Shape
from dflash.drafter import Drafter
from dflash.exchange import Outbox
from dflash.objective import Objective
from dflash.optimizer import Optimizer
from dflash.target import Target

CHUNK_ROWS = 1024
"""Block rows whose logits exist at the same time: 0.5 GiB in bf16 at a vocabulary of 248,320."""

STARTING, TARGET, WAITING, IDLE = "start of its thread", "target", "exchange of gradients", "pause between steps"


class Clock(Protocol):
    """Is told when a step and each part of it begins."""

    def starts(self) -> None: ...

    def begins(self, part: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """What a step leaves on the drafter's device; reading it waits for the step.

    Args:
        losses_A: what each batch adds to the weighted mean over the whole step, fp32, in their order.
        norm: the gradient's norm before clipping, fp32 scalar, of all pairs together.
        counts: sum of the batches' tallies.
    """

    losses_A: torch.Tensor
    norm: torch.Tensor
    counts: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """These batches' part of the weighted mean, fp32 scalar; all of it where one pair has all batches."""
        return self.losses_A.sum()


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """What the target gave for a batch, on its way to the drafter's device.

    Args:
        batch: as it was given.
        there: the batch on the device of the tensors.
        arrived: comes after the copies; None where there is nothing to wait for.
    """

    batch: Batch
    there: Batch | None
    features_BSF: torch.Tensor
    embeddings_BQE: torch.Tensor
    arrived: torch.cuda.Event | None


class Pair:
    """A target, a drafter and its optimizer.

    Args:
        number: counted from 0; messages name it.
        target: the frozen target: ``features``, ``embed``, ``device`` and ``head_VE`` are what is used of it.
        drafter: the drafter, on its own device.
        optimizer: of the drafter's weights.
        objective: the loss.

    Attributes:
        outbox: takes gradients to the other pairs; None where there are none.
        overlaps: whether the target's pass of the next batch is launched before the drafter's of this one. No result
            depends on it.
        shape: of the batch at work, for messages.
        updates: optimizer steps launched.
        since: when the part at work began, by ``time.monotonic``.
        clock: times the parts; None where nobody asks.
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
        self.part = STARTING
        """What the pair is at work on, for messages: ``target``, ``drafter``, ``head and loss``, ``optimizer`` …"""
        self.shape: Shape | None = None
        self.outbox: Outbox | None = None
        self.updates = 0
        self.clock: Clock | None = None
        self.overlaps = self.device != target.device and self.device.type == target.device.type == "cuda"
        self._head_VE = target.head_VE.detach().to(self.device)
        self._ahead: _Prepared | None = None
        self._arrivals = torch.cuda.Stream(self.device) if self.overlaps else None
        self._computed: torch.cuda.Event | None = None
        self.since = time.monotonic()
        self.train_with(objective)

    def train_with(self, objective: Objective) -> None:
        """Takes another loss, with what the target then has to give."""
        self.objective = objective
        self.target.appends_last = objective.reads_target

    @property
    def places(self) -> str:
        """Its devices, for messages."""
        if self.device == self.target.device:
            return f"`{self.device}`"
        return f"target `{self.target.device}`, drafter `{self.device}`"

    def enter(self) -> None:
        """Makes the drafter's device the current one of this thread, before it does anything else.

        Every launch is on the default streams of the two devices, which no other pair uses, so that whatever ran before
        the thread began, comes before.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._begin(IDLE)

    def _begin(self, part: str) -> None:
        self.part = part
        self.since = time.monotonic()
        if self.clock is not None:
            self.clock.begins(part)

    def stuck(self) -> str | None:
        """What the pair hangs in, for messages; None where it waits for other pairs or for work."""
        if self.part not in (WAITING, IDLE):
            return f"the {self.part}, for {time.monotonic() - self.since:.0f} s, at {self.shape}"
        if self.awaits_devices:
            return f"the devices have not finished what was launched, at {self.shape}"
        return None

    @property
    def awaits_devices(self) -> bool:
        """Whether the devices have not done yet what was launched last before an exchange."""
        return self._computed is not None and not self._computed.query()

    def step(
        self, batches: Sequence[Batch], lr: float, *, weight_sum: float | None = None, upcoming: Batch | None = None
    ) -> StepTensors:
        """One optimizer step over these batches, with the gradients of all pairs.

        Args:
            batches: this pair's part of the step.
            lr: learning rate.
            weight_sum: what the loss is divided by: the weights of the whole step; None: of these batches.
            upcoming: the first batch of the next step, for a target pass ahead of its time.
        """
        if weight_sum is None:
            weight_sum = sum(batch.weight_sum for batch in batches)
        if self.clock is not None:
            self.clock.starts()
        following = [*batches[1:], upcoming]
        parts = [
            self.accumulate(batch, weight_sum or 1.0, after, is_last=place == len(batches))
            for place, (batch, after) in enumerate(zip(batches, following, strict=True), 1)
        ]
        if self.outbox is not None:
            self._begin(WAITING)
            if self.device.type == "cuda":
                self._computed = torch.cuda.current_stream(self.device).record_event()
            self.outbox.finish()
        self._begin("optimizer")
        with devices.current(self.device):
            norm = self.optimizer.step(lr)
            losses_A = torch.stack([loss for loss, _ in parts])
            counts = torch.stack([counts for _, counts in parts]).sum(dim=0)
        self.updates += 1
        self._begin(IDLE)
        return StepTensors(losses_A, norm, counts)

    def accumulate(
        self, batch: Batch, weight_sum: float, upcoming: Batch | None = None, *, is_last: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of one batch; gradients are added to the optimizer's.

        Args:
            batch: on the CPU.
            weight_sum: what the loss is divided by: the sum of the label weights of the whole step.
            upcoming: the batch after it, whose target pass may be launched now.
            is_last: whether gradients are complete with this batch, and leave for the other pairs.

        Returns:
            this batch's share of the loss, and its tally.
        """
        prepared, self._ahead = self._ahead, None
        if prepared is None or prepared.batch is not batch:
            prepared = self._launch_target(batch)
        if upcoming is not None and self.overlaps:
            self._ahead = self._launch_target(upcoming)
        features_BSF, embeddings_BQE, batch = self._taken(prepared)
        del prepared
        with devices.current(self.device):
            loss, correct_BNP = self.loss(features_BSF, embeddings_BQE, batch)
            share = loss / weight_sum
            self._begin("backward pass")
            with torch.no_grad():
                self.optimizer.loss.add_(share)
            if is_last and self.outbox is not None:
                self.outbox.arm()
            share.backward()
            return share.detach(), metrics.tally(correct_BNP, batch.labels_BNK[..., 1:])

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """The target's part: features and the blocks' embeddings, brought to the drafter's device with the batch."""
        return self._taken(self._launch_target(batch))

    def _launch_target(self, batch: Batch) -> _Prepared:
        """Launches the target's pass, and the copies of what came of it.

        Copies run on the target's stream, so that the next pass cannot overwrite what is copied. torch makes the
        destination's current stream wait for them: that must not be the drafter's, whose work on the batch before is
        launched later.
        """
        self._begin(TARGET)
        self.shape = batch.shape
        with devices.current(self.target.device):
            there = batch.on(self.target.device)
            features_BSF = self.target.features(there)
            embeddings_BQE = self.target.embed(there.block_ids_BQ)
        if self.device == self.target.device:
            return _Prepared(batch, there, features_BSF, embeddings_BQE, None)
        if self._arrivals is None:
            features_BSF, embeddings_BQE = features_BSF.to(self.device), embeddings_BQE.to(self.device)
            return _Prepared(batch, None, features_BSF, embeddings_BQE, None)
        with torch.cuda.stream(self._arrivals):
            features_BSF = features_BSF.to(self.device, non_blocking=True)
            embeddings_BQE = embeddings_BQE.to(self.device, non_blocking=True)
            return _Prepared(batch, None, features_BSF, embeddings_BQE, self._arrivals.record_event())

    def _taken(self, prepared: _Prepared) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """What was prepared, for use on the drafter's stream from now on."""
        self.shape = prepared.batch.shape
        if prepared.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(prepared.arrived)
            for tensor in (prepared.features_BSF, prepared.embeddings_BQE):
                tensor.record_stream(current)  # made on another stream, which must not reuse it too early
        there = prepared.batch.on(self.device) if prepared.there is None else prepared.there
        return prepared.features_BSF, prepared.embeddings_BQE, there

    def loss(
        self, features_BSF: torch.Tensor, embeddings_BQE: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum of the rows' losses, and which drafted positions were right [B, N, P].

        The anchor's own row is left out: its token is given.
        """
        self._begin("drafter")
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
        self._begin("head and loss")
        hidden_BNPE = hidden_BQE.unflatten(1, batch.labels_BNK.shape[1:])[:, :, 1:]
        return self.objective.loss(hidden_BNPE, self._head_VE, batch, last_BSE, chunk_rows=CHUNK_ROWS)
