"""What a run holds on each device for as long as it lasts: known from shapes, and refused before anything is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from dflash import devices, drafter, target
from dflash.spec import Spec
from kernelbake.errors import InputError

_MASTER_BYTES = 4 * 4
"""Of a parameter in the optimizer: master, gradient and two moments, all fp32."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory of one part.

    Args:
        device: where it lies.
        what: the part, for messages.
        num_bytes: its size.
    """

    device: torch.device
    what: str
    num_bytes: int


def needs(spec: Spec, target_device: torch.device, drafter_device: torch.device) -> list[Need]:
    """Weights, and what belongs to them; not what a step needs beside."""
    dtype = devices.DTYPES[spec.axes.dtype]
    with torch.device("meta"), devices.default_dtype(dtype):
        network = drafter.Drafter(spec.drafter, spec.target.hidden_size)
    count = sum(parameter.numel() for parameter in network.parameters())
    found = [
        Need(target_device, "the target's weights", target.parameter_bytes(spec.target, dtype)),
        Need(drafter_device, "the drafter's weights", count * dtype.itemsize),
        Need(drafter_device, "masters, gradients and moments of the optimizer", count * _MASTER_BYTES),
    ]
    if target_device != drafter_device:
        head = spec.target.vocab_size * spec.target.hidden_size * dtype.itemsize
        found.append(Need(drafter_device, "a copy of the target's head", head))
    return found


def check(wanted: Sequence[Need]) -> None:
    """Refuses what does not fit into the memory that is free now.

    Raises:
        InputError: with the sizes of all parts and what is free, for every device that is too small.
    """
    reasons: list[str] = []
    for device in dict.fromkeys(need.device for need in wanted):
        parts = [need for need in wanted if need.device == device]
        total, free = sum(need.num_bytes for need in parts), devices.free_bytes(device)
        if free is not None and total > free:
            reasons.append(f"{device}: {devices.gib(total)} needed, {devices.gib(free)} free")
            reasons += [f"{device}: {need.what}: {devices.gib(need.num_bytes)}" for need in parts]
    if reasons:
        raise InputError(
            "memory: the models do not fit; wanted room for all their weights before a step",
            hint="--devices 0:1 puts target and drafter on two GPUs; or choose a smaller target",
            reasons=reasons,
        )
