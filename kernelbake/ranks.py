"""Several builders at one bundle, one for each GPU, and what they exchange. A builder that is alone exchanges nothing.

Launches are divided among the ranks. Each rank runs every step, tunes its own launches in it, and takes for the others
the first candidate that passes its checks; rank 0 gathers all decisions and packs. Every exchange is one that all ranks
take part in, and a rank that fails says so in the next one, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kernelbake.errors import BuildError, KernelbakeError

T = TypeVar("T")

_WAIT = datetime.timedelta(hours=12)
"""The longest that one rank measures while another has finished."""


class Ranks:
    """One rank among others; by itself, the only one.

    Args:
        rank, world: which one of how many.
        local_rank, local_world: the same on this host.
    """

    def __init__(self, rank: int = 0, world: int = 1, local_rank: int = 0, local_world: int = 1) -> None:
        self.rank, self.world, self.local_rank, self.local_world = rank, world, local_rank, local_world

    @property
    def leads(self) -> bool:
        """Whether this rank packs and tells."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks.

        Raises:
            BuildError: another rank has ended without a word.
        """
        if self.world == 1:
            return [value]
        import torch.distributed

        found: list[Any] = [None] * self.world
        try:
            torch.distributed.all_gather_object(found, value)
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            raise BuildError(
                f"torchrun: rank {self.rank} has lost another rank; wanted all {self.world}",
                reasons=lines[:1],
                hint="that rank says why; build again: each goes on from its journal",
            ) from error
        return found

    def together(self, action: Callable[[], T]) -> T:
        """Does something on every rank; if it fails on one, it fails on all, each naming the first that failed.

        Raises:
            KernelbakeError: what this rank failed with.
            BuildError: what another one failed with.
        """
        failure: KernelbakeError | None = None
        try:
            result = action()
        except KernelbakeError as error:
            failure = error
        messages = self.gather(None if failure is None else failure.message)
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise BuildError(f"rank {rank}: {message}")
        return result

    def from_leader(self, action: Callable[[], T]) -> T:
        """What the action gives on rank 0, on every rank."""
        values = self.gather(self.together(lambda: action() if self.leads else None))
        found: Any = values[0]
        result: T = found
        return result

    def check_distinct(self, value: str, what: str) -> None:
        """Refuses ranks that have the same of something.

        Raises:
            BuildError: naming the ranks.
        """
        values = self.gather(value)
        shared = [str(rank) for rank, other in enumerate(values) if values.count(other) > 1]
        if shared:
            raise BuildError(f"torchrun: ranks {', '.join(shared)} share a {what}; wanted one each")

    def check_same(self, facts: Mapping[str, Any], what: str) -> None:
        """Refuses ranks that differ.

        Raises:
            BuildError: with every fact that differs from rank 0's, and the rank.
        """
        first, *others = self.gather(dict(facts))
        reasons = [
            f"{name}: rank 0 `{first.get(name)}`; rank {rank} `{other.get(name)}`"
            for rank, other in enumerate(others, 1)
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if reasons:
            raise BuildError(f"torchrun: the ranks differ in their {what}; wanted equal machines", reasons=reasons)

    def mine(self, weights: Sequence[int]) -> list[int]:
        """Which of some pieces of work are this rank's: the heaviest first, each to the rank that has least so far."""
        loads = [0] * self.world
        owned: list[list[int]] = [[] for _ in loads]
        for piece in sorted(range(len(weights)), key=lambda piece: (-weights[piece], piece)):
            rank = loads.index(min(loads))
            loads[rank] += weights[piece]
            owned[rank].append(piece)
        return sorted(owned[self.rank])

    def device_variables(self) -> dict[str, str]:
        """The variable that shows this rank one GPU of its host only; nothing where it is alone."""
        if self.world == 1:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(index) for index in range(self.local_world)]
        device = devices[self.local_rank] if self.local_rank < len(devices) else ""
        return {"CUDA_VISIBLE_DEVICES": device}


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, connected for the time of the block; this process alone without it.

    Raises:
        BuildError: they cannot be connected.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        yield Ranks()
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    told = {name: os.environ.get(name, "") for name in names}
    wrong = [f"{name}: `{value}`; wanted a number" for name, value in told.items() if not value.isdecimal()]
    if wrong:
        hint = "start the ranks with torchrun, or unset RANK for a builder that is alone"
        raise BuildError("torchrun: its variables do not say which rank this is", reasons=wrong, hint=hint)
    import torch.distributed

    try:
        torch.distributed.init_process_group("gloo", timeout=_WAIT)
    except (RuntimeError, ValueError) as error:
        wanted = told["WORLD_SIZE"]
        raise BuildError(f"torchrun: the ranks cannot be connected ({error}); wanted all {wanted}") from error
    try:
        yield Ranks(*map(int, told.values()))
    finally:
        torch.distributed.destroy_process_group()
