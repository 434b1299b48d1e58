"""What a launch wrote, in a few numbers: a digest of the bits, and a sketch from which a distance can be told.

A bundle cannot hold the tensors themselves. The digest says whether another run gave the same bits; where it did not,
the *sketch* says how far apart the two were: ``SKETCH`` sums of all elements under signs that look random and depend on
the element's place alone. For signs that are independent, the mean of the squared differences of two sketches is
‖a − b‖² (Johnson and Lindenstrauss; Achlioptas 2003 for signs), with a standard deviation of √(2 / SKETCH) of it.

Of integers and truth values the sketch sums signs that depend on place and value: then half that mean is the number of
elements that differ, whatever they differ by.

Everything is computed where the tensor lies, since outputs are large and a host's digest is slow.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from kernelbake import digest
from kernelbake.numerics import Arguments, Result, bits, poison_of

SKETCH = 16
"""Signed sums; a distance is known to about a sixth of itself."""

_CHUNK = 1 << 21
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The odd constants of splitmix64 as signed integers."""
_LANES = (-7046029254386353131, -3335678366873096957)
"""Of the digest: what places are multiplied with, for each of its two sums."""
_VALUES = -4265267296055464877
"""What integers are multiplied with before they are mixed with their places."""


def written(
    arguments: Arguments, result: Result, also: Iterable[int], kept: Mapping[int, torch.Tensor]
) -> list[dict[str, Any]]:
    """Describes the tensors that a launch wrote, sorted by their positions among the tensors of the call.

    Elements that the launch left alone count as 0: they hold what the allocator left there. Of floating tensors they
    are those that kept their poison in the poisoned run and their first contents in the other.

    Args:
        arguments: of the call.
        result: what the launch left behind.
        also: positions of further tensors to describe, which may look unchanged by chance.
        kept: which elements were left alone of tensors that cannot be poisoned.
    """
    known: dict[Any, dict[str, Any]] = {}
    found = []
    for position in sorted({*result.plain, *result.poisoned, *also}):
        if position >= len(arguments.live):
            continue
        live = arguments.live[position]
        window = (live.data_ptr(), live.dtype, live.shape, live.stride())
        if window not in known:  # a tensor may be passed twice
            known[window] = described(_contents(arguments, result, position, kept))
        found.append({"argument": arguments.names[position], "at": position, **known[window]})
    return found


def _contents(arguments: Arguments, result: Result, position: int, kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
    live = arguments.live[position]
    contents = result.plain.get(position, live)
    poisoned, alone = result.poisoned.get(position), kept.get(position)
    if poisoned is not None:
        alone = bits(poisoned) == poison_of(poisoned.dtype, position)
        alone &= bits(contents) == bits(live)
    return contents if alone is None else torch.where(alone, torch.zeros_like(contents), contents)


def inputs(arguments: Arguments, positions: Iterable[int], values: Mapping[str, Any]) -> str:
    """Digest of what a launch reads.

    Args:
        arguments: of the call.
        positions: of the tensors that it reads.
        values: all parameters; numbers and texts among them count.
    """
    known: dict[Any, str] = {}
    tensors = []
    for position in sorted(positions):
        live = arguments.live[position]
        window = (live.data_ptr(), live.dtype, live.shape, live.stride())
        if window not in known:
            known[window] = _digest(live)
        tensors.append([arguments.names[position], position, str(live.dtype), list(live.shape), known[window]])
    plain = {name: repr(value) for name, value in values.items() if isinstance(value, int | float | str | None)}
    return digest.of_bytes(digest.canonical_json([tensors, plain]))


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """``dtype``, ``shape``, ``digest`` and ``sketch`` of a tensor; of floating-point ones ``norm``, ``sum`` and
    ``not_finite`` too. Numbers are left out if they are beyond the range of a double.

    The digest covers the bits of all elements in row-major order. The numbers are made in float64, not finite elements
    left out but counted, and rounded to nine digits.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    facts: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "digest": _digest(flat),
    }
    if tensor.dtype.is_complex:
        return facts
    if not tensor.dtype.is_floating_point:
        return {**facts, "sketch": [float(number) for number in _discrete(flat)]}
    odd, total, squares, sketch = _sums(flat)
    numbers = [math.sqrt(squares), total, *sketch]
    if all(map(math.isfinite, numbers)):
        norm, total, *sketch = (float(f"{number:.9g}") for number in numbers)
        facts |= {"norm": norm, "sum": total, "not_finite": odd, "sketch": sketch}
    return facts


def _digest(tensor: torch.Tensor) -> str:
    """Digest of the bits of all elements in row-major order: SHA-256 over their size in bytes and two sums.

    Each sum is over the words of eight bytes, the last one filled up with zeros, xored with a multiple of their place
    (from 1) and mixed: every single word changes it, and two changes cancel only by chance.
    """
    data = bits(tensor.detach().contiguous().reshape(-1)).view(torch.uint8)
    size = data.numel()
    sums = [torch.zeros((), dtype=torch.int64, device=data.device) for _ in _LANES]
    for place, words in _words(data):
        places = torch.arange(place + 1, place + 1 + words.numel(), dtype=torch.int64, device=data.device)
        for lane, factor in enumerate(_LANES):
            sums[lane] += _mixed(words ^ (places * factor)).sum()
    return digest.of_bytes(struct.pack("<3q", size, *torch.stack(sums).tolist()))


def _words(data: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Chunks of bytes as words, each with the place of its first word."""
    step = 8 * _CHUNK
    for start in range(0, data.numel(), step):
        chunk = data[start : start + step]
        rest = -chunk.numel() % 8
        if rest or chunk.storage_offset() % 8:
            chunk = torch.cat([chunk, chunk.new_zeros(rest)])
        yield start // 8, chunk.view(torch.int64)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Two rounds of splitmix64 without its last shift; the right shifts keep the sign."""
    for factor in _MIX[1:]:
        numbers = (numbers ^ (numbers >> 30)) * factor
    return numbers


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
        totals[3:] += chunk @ _signs(_mixed(_places(start, chunk)))
    odd, total, squares, *sketch = totals.tolist()
    return int(odd), total, squares, sketch


def _discrete(flat: torch.Tensor) -> list[int]:
    """The sketch of integers or truth values."""
    totals = torch.zeros(SKETCH, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        values = bits(chunk).to(torch.int64) * _VALUES
        totals += _signs(_mixed(_places(start, chunk) ^ values)).sum(dim=0)
    return [int(total) for total in totals.tolist()]


def _places(start: int, chunk: torch.Tensor) -> torch.Tensor:
    places = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=chunk.device)
    return places * _MIX[0]


def _signs(mixed: torch.Tensor) -> torch.Tensor:
    """Signs out of mixed numbers: float64 [count, SKETCH], the same on every device.

    From every other bit of their upper half, which depends on all bits of the places.
    """
    upper = (mixed >> 28).to(torch.int32).view(torch.uint8).reshape(-1, 4, 1)  # four signs in each byte
    negative = (upper >> _shifts(mixed.device)) & 1
    return 1.0 - 2.0 * negative.reshape(-1, SKETCH).to(torch.float64)


@functools.cache
def _shifts(device: torch.device) -> torch.Tensor:
    return torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=device)
