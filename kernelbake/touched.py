"""What a launch leaves alone of the tensors that it writes, and which of them it reads first.

Triton does not say; it is found out by running. Floating tensors are poisoned (``numerics``). Integers are not, since a
kernel may take them for addresses: of those that a kernel writes, the lowest bit is turned over instead, and only where
an element looks as before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch

from kernelbake.numerics import Arguments, Result, bits, bits_differ, poison_of, wait

Run = Callable[[], None]
"""Launches on the working copies as they are, and waits for the end."""


@dataclasses.dataclass(frozen=True)
class LeftAlone:
    """What a launch leaves alone of integers.

    Args:
        kept: by position, which elements.
        read: positions on whose first contents its results depend, as far as can be told.
    """

    kept: Mapping[int, torch.Tensor]
    read: frozenset[int]


def left_alone(arguments: Arguments, result: Result, positions: Iterable[int], run: Run) -> LeftAlone:
    """Which elements a launch leaves alone of tensors that cannot be poisoned, integers and truth values.

    They hold what the allocator left there, and whether an element that looks as before was written cannot be seen.

    Args:
        arguments: of the call.
        result: what the launch left behind.
        positions: of the tensors; those of floating dtypes, and those of which elements share memory, are skipped.
        run: the launch.
    """
    arguments.restore()
    turned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for position in positions:
        live = arguments.live[position]
        if live.dtype.is_floating_point or live.dtype.is_complex or _shares_memory(live):
            continue
        before = bits(live)
        same = bits(result.plain.get(position, live)) == before
        turned[position] = (same, torch.where(same, before ^ 1, before))
        bits(arguments.work[position]).copy_(turned[position][1])
    if not turned:
        return LeftAlone({}, frozenset())
    run()
    kept, flags = {}, []
    for position, (same, was) in turned.items():
        now, live = bits(arguments.work[position]), arguments.live[position]
        kept[position] = same & (now == was)
        flags.append(((now != bits(result.plain.get(position, live))) & ~kept[position]).any())
    others = (position for position in result.plain if position not in turned)
    flags += [bits_differ(result.plain[position], arguments.work[position]) for position in others]
    read = any(wait(flags))
    arguments.unpoison(turned)
    arguments.restore()
    return LeftAlone(kept, frozenset(turned) if read else frozenset())


def reads(arguments: Arguments, result: Result, position: int, run: Run) -> bool:
    """Whether what a launch leaves behind depends on what a floating tensor held that it writes.

    Args:
        arguments: of the call.
        result: what the launch left behind.
        position: of the tensor.
        run: the launch.
    """
    arguments.restore()
    if not arguments.poison([position]):
        return False
    run()
    others = (other for other in result.plain if other != position)
    flags = [bits_differ(result.plain[other], arguments.work[other]) for other in others]
    live, mine = arguments.live[position], bits(arguments.work[position])
    wanted = bits(result.plain.get(position, live))
    flags.append(((mine != wanted) & (mine != poison_of(live.dtype, position))).any())
    found = any(wait(flags))
    arguments.unpoison([position])
    arguments.restore()
    return found


def _shares_memory(tensor: torch.Tensor) -> bool:
    """Whether two of its elements share memory, as those of an expanded tensor do."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
