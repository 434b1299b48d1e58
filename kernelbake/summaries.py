"""What a launch wrote, in a few numbers: a digest of the bits, and a sketch from which a distance can be told.

A bundle cannot hold the tensors themselves. The digest says whether another run gave the same bits; where it did not,
the *sketch* says how far apart the two were: ``SKETCH`` sums of all elements under signs that look random and depend on
the element's place alone. For signs that are independent, the mean of the squared differences of two sketches is
‖a − b‖² (Johnson and Lindenstrauss; Achlioptas 2003 for signs), with a standard deviation of √(2 / SKETCH) of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from kernelbake import digest
from kernelbake.numerics import Arguments, Result, bits, poison_of

SKETCH = 16
"""Signed sums; a distance is known to about a sixth of itself."""

_CHUNK = 1 << 19
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The odd constants of splitmix64 as signed integers."""


def written(arguments: Arguments, result: Result, also: Mapping[int, str]) -> list[dict[str, Any]]:
    """Describes the tensors that a launch wrote, sorted by their positions among the tensors of the call.

    Elements that the launch left alone count as 0: they hold what the allocator left there. They are those that kept
    their poison in the poisoned run and their first contents in the other.

    Args:
        arguments: of the call.
        result: what the launch left behind.
        also: positions and names of further tensors to describe, which may look unchanged by chance.
    """
    found = []
    for position in sorted({*result.plain, *result.poisoned, *also}):
        if position >= len(arguments.live):
            continue
        contents = result.plain.get(position, arguments.live[position])
        poisoned = result.poisoned.get(position)
        if poisoned is not None:
            kept = bits(poisoned) == poison_of(poisoned.dtype, position)
            kept &= bits(contents) == bits(arguments.live[position])
            contents = torch.where(kept, torch.zeros_like(contents), contents)
        found.append({"argument": arguments.names[position], "at": position, **described(contents)})
    return found


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """``dtype``, ``shape`` and ``digest`` of a tensor, and for floating-point ones also ``norm``, ``sum``,
    ``not_finite`` and ``sketch``, unless they are beyond the range of a double.

    The digest covers the bits of all elements in row-major order. The numbers are made in float64, not finite elements
    left out but counted, and rounded to nine digits.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    data = bits(flat).cpu().numpy()
    facts: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "digest": digest.of_bytes(memoryview(data).cast("B") if data.size else b""),
    }
    if not tensor.dtype.is_floating_point:
        return facts
    odd, total, squares, sketch = _sums(flat)
    numbers = [math.sqrt(squares), total, *sketch]
    if all(map(math.isfinite, numbers)):
        norm, total, *sketch = (float(f"{number:.9g}") for number in numbers)
        facts |= {"norm": norm, "sum": total, "not_finite": odd, "sketch": sketch}
    return facts


def _sums(flat: torch.Tensor) -> tuple[int, float, float, list[float]]:
    """How many elements are not finite, and of the others the sum, the sum of squares, and the sketch."""
    totals = torch.zeros(3 + SKETCH, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].to(torch.float64)
        finite = torch.isfinite(chunk)
        chunk = torch.where(finite, chunk, 0.0)
        totals[0] += (~finite).sum()
        totals[1] += chunk.sum()
        totals[2] += chunk.square().sum()
        totals[3:] += chunk @ _signs(start, chunk.numel(), flat.device)
    odd, total, squares, *sketch = totals.tolist()
    return int(odd), total, squares, sketch


def _signs(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Signs of ``count`` elements from ``start`` on: float64 [count, SKETCH], the same on every device."""
    mixed = torch.arange(start, start + count, dtype=torch.int64, device=device) * _MIX[0]
    for factor in _MIX[1:]:
        mixed = (mixed ^ (mixed >> 30)) * factor
    places = _places(device)
    return 1.0 - 2.0 * ((mixed[:, None] >> places) & 1).to(torch.float64)


@functools.cache
def _places(device: torch.device) -> torch.Tensor:
    """The bits of a mixed number that give signs: from its upper half, which depends on all of its bits."""
    return torch.arange(28, 28 + 2 * SKETCH, 2, dtype=torch.int64, device=device)
