"""Reads an exported drafter strictly: every tensor that it must have and no other, and a configuration that agrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash import served
from dflash.drafter import Drafter, build
from dflash.served import CONFIG, WEIGHTS, Described, served_shapes

__all__ = ["CONFIG", "WEIGHTS", "Served", "load", "served_shapes"]


@dataclasses.dataclass(frozen=True)
class Served(Described):
    """An exported drafter.

    Args:
        spec, hidden_size, vocab_size, num_target_layers: as of ``Described``.
        tensors: its weights by name.
    """

    tensors: Mapping[str, torch.Tensor]

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens that a block proposes: one fewer than its positions, as the first is the anchor."""
        return self.spec.block_size - 1

    def build(self, device: torch.device, dtype: torch.dtype) -> Drafter:
        """The network with these weights."""
        network = build(self.spec, self.hidden_size, device, dtype)
        network.load_state_dict(dict(self.tensors), strict=True)
        network.requires_grad_(False)
        return network


def load(folder: Path) -> Served:
    """Reads ``config.json`` and ``model.safetensors``.

    Raises:
        InputError: a file is missing or broken, or anything in them is; all faults are listed.
    """
    config, reasons = served.examine(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise served.unreadable(folder, error) from error
    lost = [name for name, tensor in sorted(tensors.items()) if not bool(tensor.isfinite().all())]
    served.refuse(folder, [*reasons, *(f"`{WEIGHTS}`: `{name}` holds numbers that are not finite" for name in lost)])
    found = config.described()
    return Served(found.spec, found.hidden_size, found.vocab_size, found.num_target_layers, tensors)
