"""A pair whose target is a table instead of a model, for tests of what the drafter, the loss and the optimizer do."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import dflashspec
import numpy as np
import torch

from dflash import drafter
from dflash.buckets import Batch, Sample
from dflash.config import OptimizerConfig
from dflash.optimizer import Optimizer
from dflash.pairs import Pair
from dflash.spec import Spec

CPU = torch.device("cpu")


class TableTarget:
    """Features of a token are a row of a table plus a wave of its position: causal, and the same in any company."""

    source = "a table"
    num_parameters = 0
    appends_last = False

    def __init__(self, spec: Spec, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size, vocabulary = spec.target.hidden_size, spec.target.vocab_size
        self.width = size * len(spec.drafter.target_layer_ids)
        self.table = torch.randn(vocabulary, self.width, generator=generator)
        self.embedding = torch.randn(vocabulary, size, generator=generator)
        self.head_VE = torch.randn(vocabulary, size, generator=generator) / math.sqrt(size)
        self.device = CPU
        self.states = torch.randn(vocabulary, size, generator=generator)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[ids]

    def features(self, batch: Batch) -> torch.Tensor:
        waves = batch.positions_BS[..., None] * torch.linspace(0.01, 1.0, self.width)
        features = self.table[batch.input_ids_BS] + waves.sin()
        return torch.cat((features, self.last(batch)), dim=-1) if self.appends_last else features

    def last(self, batch: Batch) -> torch.Tensor:
        """The last hidden state: of a token and, a little, of its position."""
        return self.states[batch.input_ids_BS] + 0.1 * batch.positions_BS[..., None].sin()


def spec(**drafter_fields: Any) -> Spec:
    section = dflashspec.changed("drafter.num_layers", 1)
    section["drafter"] |= drafter_fields
    return Spec.parse(section)


def pair(wanted: Spec | None = None, *, seed: int = 0, **settings: Any) -> Pair:
    """A new pair; the same seed gives the same weights."""
    wanted = spec() if wanted is None else wanted
    torch.manual_seed(seed)
    network = drafter.build(wanted.drafter, wanted.target.hidden_size, CPU, torch.float32)
    settings = {"lr": 1e-3, "clip": 1e9, **settings}
    return Pair(0, TableTarget(wanted), network, Optimizer(network, OptimizerConfig(**settings)))  # type: ignore[arg-type]


def verses(folder: Path) -> Path:
    """Writes forty samples that do not change with Python, lines of numbers of several lengths, as JSONL."""
    path = folder / "verses.jsonl"
    rows = [" ".join(str(n * k) for n in range(1, 4 + k % 5))[:31] for k in range(1, 41)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def sample(length: int, index: int, *, supervised: int | None = None, epoch: int = 0) -> Sample:
    """Random tokens, of which the last ``supervised`` are supervised; all but the first where it is None."""
    tokens = np.random.default_rng(index).integers(0, 256, length)
    mask = np.zeros(length, np.bool_)
    mask[-(length - 1 if supervised is None else supervised) :] = True
    return Sample(epoch, index, tokens, mask)


def gradients(of: Pair, batches: list[Batch]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one step over these batches, without making it."""
    weight_sum = sum(batch.weight_sum for batch in batches)
    for master in of.optimizer.grads:
        master.zero_()
    loss = sum(float(of.accumulate(batch, weight_sum)[0]) for batch in batches)
    return loss, [grad.clone() for grad in of.optimizer.grads]


def widened(batch: Batch, bucket: int) -> Batch:
    """The same batch in a larger bucket, with the same anchors."""
    more = bucket - batch.shape.bucket
    pad = torch.nn.functional.pad
    return dataclasses.replace(
        batch,
        shape=dataclasses.replace(batch.shape, bucket=bucket),
        input_ids_BS=pad(batch.input_ids_BS, (0, more)),
        positions_BS=torch.arange(bucket).expand(batch.positions_BS.shape[0], -1).contiguous(),
    )


def cheap_loss(
    of: Pair, features: torch.Tensor, embeddings: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of ``Pair.loss``: no kernel, every weight and the batch; for what does not depend on the loss."""
    of._begin("drafter")
    scale = 1 + batch.input_ids_BS.double().mean().float() / 256
    waves = [(weight * scale).sin().sum() for weight in of.drafter.parameters()]
    return torch.stack(waves).sum() * batch.weights_BNK.sum(), batch.labels_BNK[..., 1:] % 2 == 0
