"""One process for each pair, under ``torchrun``: what the ranks tell each other. A process that is alone tells nobody.

Numbers and refusals travel through gloo between hosts' memories and cost a GPU nothing; gradients have a group of their
own (NCCL between GPUs), so that the two cannot get in each other's way. A rank that fails leaves word in the store, and
all others end with it: torchrun would end them too, but they could not say why. Loads torch only where there are ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dflash.errors import RankLostError
from kernelbake.errors import InputError, KernelbakeError, MisfitError

T = TypeVar("T")

_WAIT = datetime.timedelta(hours=12)
"""The longest that ranks wait for each other, as for one that loads a target slowly. Who fails is heard of at once, and
who hangs is the watchdog's."""

_FAILED = "dflash/failed"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Ranks:
    """This process among others; by itself, the only one.

    Args:
        rank, world: which one of how many.
        local_rank, local_world: the same on this host.
    """

    def __init__(self, rank: int = 0, world: int = 1, local_rank: int = 0, local_world: int = 1) -> None:
        self.rank, self.world, self.local_rank, self.local_world = rank, world, local_rank, local_world
        self._store: Any = None

    @property
    def leads(self) -> bool:
        """Whether this rank writes and tells."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks.

        Raises:
            RankLostError: another rank has left.
        """
        if self.world == 1:
            return [value]
        import torch.distributed

        found: list[Any] = [None] * self.world
        with self.telling_who_left():
            torch.distributed.all_gather_object(found, value)
        return found

    def numbers(self, values: Sequence[float]) -> list[list[float]]:
        """As ``gather``, for as many numbers on every rank: cheap enough for every step.

        Raises:
            RankLostError: another rank has left.
        """
        if self.world == 1:
            return [list(values)]
        import torch
        import torch.distributed

        mine = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        with self.telling_who_left():
            torch.distributed.all_gather(found, mine)
        return [tensor.tolist() for tensor in found]

    def together(self, action: Callable[[], T]) -> T:
        """Does something on every rank; if it fails on one, it fails on all.

        Raises:
            KernelbakeError: what this rank failed with, or what the first of the others did, naming it.
        """
        failure: KernelbakeError | None = None
        try:
            result = action()
        except KernelbakeError as error:
            failure = error
        for rank, other in enumerate(self.gather(_plain(failure))):
            if other is not None and failure is None:
                raise RankLostError(f"rank {rank}: {other[0]}", exit_code=other[1])
        if failure is not None:
            raise failure
        return result

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Refuses ranks that differ.

        Raises:
            MisfitError: with every fact that differs from rank 0's, and the rank.
        """
        first, *others = self.gather(dict(facts))
        reasons = [
            f"{name}: rank 0 `{first.get(name)}`; rank {rank} `{other.get(name)}`"
            for rank, other in enumerate(others, 1)
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if reasons:
            raise MisfitError("torchrun: the ranks do not train the same; wanted no difference", reasons=reasons)

    def mine(self, numbers: Sequence[T]) -> list[T]:
        """Of things that are dealt out one by one, those of this rank."""
        return list(numbers[self.rank :: self.world])

    def left_word(self) -> tuple[int, str] | None:
        """Another rank that failed first and what it failed with, if one did. Waits for nothing."""
        with contextlib.suppress(Exception):  # the store went with its process; torchrun ends this one then
            if self._store is not None and self._store.check([_FAILED]):
                rank, _, message = self._store.get(_FAILED).decode().partition(" ")
                return (int(rank), message) if int(rank) != self.rank else None
        return None

    def leave_word(self, error: BaseException) -> None:
        """Says why this rank ends."""
        message = error.message if isinstance(error, KernelbakeError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            if self._store is not None and self.left_word() is None:
                self._store.set(_FAILED, f"{self.rank} {message}")

    @contextlib.contextmanager
    def telling_who_left(self) -> Iterator[None]:
        """Turns what torch says of a broken connection into the error of the rank that broke it."""
        try:
            yield
        except RuntimeError as error:
            raise self.lost(error) from error

    def elsewhere(self, rank: int, message: str) -> KernelbakeError:
        """What to say when another rank failed."""
        return RankLostError(f"rank {rank}: {message}")

    def lost(self, error: BaseException) -> KernelbakeError:
        """What to say when another rank no longer answers."""
        word = self.left_word()
        if word is not None:
            return self.elsewhere(*word)
        return RankLostError(
            f"rank {self.rank}: another rank has left; wanted all {self.world}",
            reasons=str(error).splitlines()[:3],
            hint="the rank that ended first says why",
        )


def _plain(failure: KernelbakeError | None) -> tuple[str, int] | None:
    return None if failure is None else (failure.message, int(failure.exit_code))


def is_one_of_several() -> bool:
    """Whether ``torchrun`` started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in os.environ


def from_environment() -> Ranks:
    """This process among those that ``torchrun`` started, not yet connected; alone without it.

    Raises:
        InputError: the environment says half of it.
    """
    if not is_one_of_several():
        return Ranks()
    lacking = [name for name in _NAMES if not os.environ.get(name, "").isdecimal()]
    if lacking:
        raise InputError(f"torchrun: no `{'`, `'.join(lacking)}` in the environment; wanted what torchrun sets")
    return Ranks(*(int(os.environ[name]) for name in _NAMES))


@contextlib.contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Connects the ranks for the time of the block; nothing where there is one.

    Raises:
        InputError: they cannot be connected.
    """
    if ranks.world == 1:
        yield
        return
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=_WAIT)
    except (RuntimeError, ValueError) as error:
        reasons = str(error).splitlines()[:3]
        raise InputError(
            f"torchrun: rank {ranks.rank} cannot reach the others; wanted all {ranks.world}", reasons=reasons
        ) from error
    ranks._store = dist.distributed_c10d._get_default_store()
    try:
        yield
    except BaseException as error:
        ranks.leave_word(error)
        raise
    else:
        dist.destroy_process_group()


def gradient_group(cuda: bool) -> Any:
    """A group of all ranks for gradients alone: NCCL between GPUs, gloo between CPUs."""
    import torch.distributed as dist

    return dist.new_group(backend="nccl" if cuda else "gloo", timeout=_WAIT)
