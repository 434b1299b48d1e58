"""How pairs add up their gradients: within a process by copies between GPUs, between processes by torch.distributed.

Each pair's gradients are one flat fp32 buffer. It is exchanged in pieces, from the end to the beginning, as the
backward pass completes them: gradients of the last layers travel while those of the first are computed. Of a piece each
pair adds up one share, always in the order of the pairs, and the others copy the sum from it. So all pairs end with the
same bits, whichever of them was faster, and no more is sent than needed.

Nothing here waits for a GPU. Work on different GPUs is ordered by events. Loads torch.

Legend of shape suffixes: F elements of the flat buffer, P pairs, C elements of a pair's share of a piece.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from dflash.alarm import Alarm
from dflash.optimizer import Optimizer
from dflash.ranks import Ranks

PIECE = 64 * 2**20
"""Elements of a piece: 256 MiB. Small enough for the last one to end soon after the backward pass, large enough for the
host's part, which is the same for every piece, not to count."""


def pieces(length: int, shares: int, size: int = PIECE) -> list[slice]:
    """Cuts a flat buffer into pieces of about this size, each a multiple of ``shares``; the first takes the rest.

    The first holds the loss and is exchanged last: it is the one that should be small.
    """
    size = max(size // shares, 1) * shares
    ends = list(range(length, 0, -size))
    return [slice(max(end - size, 0), end) for end in reversed(ends)]


def scratch_bytes(length: int, shares: int, size: int = PIECE) -> int:
    """Memory that an exchange holds for what others send, on each of their devices."""
    return min(length, size) // shares * shares * 4


class Exchange(Protocol):
    """Adds up the flat buffers of all pairs, piece by piece.

    Attributes:
        pieces: of a flat buffer.
    """

    pieces: list[slice]

    def offer(self, pair: int, piece: int) -> None:
        """Says that a pair's piece is complete on the current stream; pieces come from the last to the first."""
        ...

    def finish(self, pair: int) -> None:
        """Returns when everything was launched; what is launched on the pair's current stream comes after it.

        Raises:
            Rung: another pair failed.
        """
        ...


class Outbox:
    """Watches the gradients of one pair become complete, and offers the pieces in order.

    Args:
        optimizer: of the pair.
        exchange: takes the pieces.
        pair: number of the pair within the exchange.
    """

    def __init__(self, optimizer: Optimizer, exchange: Exchange, pair: int) -> None:
        self._exchange = exchange
        self._pair = pair
        self._reach = [  # of each gradient: the pieces that it has a part in
            [number for number, piece in enumerate(exchange.pieces) if begin < piece.stop and end > piece.start]
            for begin, end in optimizer.places
        ]
        self._missing: list[int] = []
        self._next = -1
        optimizer.on_added = self._added

    def arm(self) -> None:
        """Says that the next gradients are the last of this step."""
        self._missing = [0] * len(self._exchange.pieces)
        for numbers in self._reach:
            for number in numbers:
                self._missing[number] += 1
        self._next = len(self._missing) - 1

    def _added(self, gradient: int) -> None:
        if self._next < 0:
            return
        for number in self._reach[gradient]:
            self._missing[number] -= 1
        while self._next >= 0 and self._missing[self._next] <= 0:
            self._exchange.offer(self._pair, self._next)
            self._next -= 1

    def finish(self) -> None:
        """Offers what is left: nothing will be added any more. Then as ``Exchange.finish``."""
        while self._next >= 0:
            self._exchange.offer(self._pair, self._next)
            self._next -= 1
        self._exchange.finish(self._pair)


def add_in_order(shares: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    """Writes the sum of all shares, added from the first to the last, into one of them; the others are scratch."""
    total = shares[0]
    for number, share in enumerate(shares[1:], 1):
        is_last = number == len(shares) - 1
        out = own if is_last else total if total is not own else share
        torch.add(total, share, out=out)
        total = out


# ---------------------------------------------------------------------------------------------- within a process


class PeerExchange:
    """Pairs that are threads of one process. The thread that completes a piece launches its exchange for all of them.

    On each GPU sums run on a stream of their own, and copies to each other GPU on another, so that both directions of a
    link are in use at the same time. On the CPU there are no streams, and the same copies and sums run one by one.

    Args:
        flats: the flat buffer of each pair, each on its own device, of equal length.
        alarm: of the run.
        size: elements of a piece.
    """

    def __init__(self, flats: Sequence[torch.Tensor], alarm: Alarm, size: int = PIECE) -> None:
        self.pieces = pieces(len(flats[0]), len(flats), size)
        self._flats = flats
        self._alarm = alarm
        self._lock = threading.Lock()
        self._offered = [0] * len(self.pieces)
        self._launched = 0
        self._finished = [0] * len(flats)
        largest = max(piece.stop - piece.start for piece in self.pieces) // len(flats)
        self._scratch_PPC = [
            [torch.empty(largest if here != there else 0, device=flat.device) for there in range(len(flats))]
            for here, flat in enumerate(flats)
        ]
        self._links = [(h, t) for h in range(len(flats)) for t in range(len(flats)) if h != t]
        self._streams = _Streams([flat.device for flat in flats]) if flats[0].device.type == "cuda" else None

    def offer(self, pair: int, piece: int) -> None:
        self._alarm.check()
        with self._lock:
            if self._streams is not None:
                self._streams.follow(pair)
            self._offered[piece] += 1
            if self._offered[piece] == len(self._flats):
                self._offered[piece] = 0
                self._launch(self.pieces[piece])
                self._launched += 1
                if self._launched % len(self.pieces) == 0:
                    self._alarm.tell()

    def finish(self, pair: int) -> None:
        self._finished[pair] += 1
        wanted = self._finished[pair] * len(self.pieces)
        self._alarm.wait_until(lambda: self._launched >= wanted)
        if self._streams is not None:
            self._streams.lead(pair)

    def _launch(self, piece: slice) -> None:
        shares_PPC = [flat[piece].chunk(len(self._flats)) for flat in self._flats]
        scratch_PPC = [[scratch[: len(shares_PPC[0][0])] for scratch in row] for row in self._scratch_PPC]
        self._copy([(h, t, shares_PPC[t][h], scratch_PPC[h][t]) for h, t in self._links])
        for here, shares in enumerate(shares_PPC):
            scratch_PPC[here][here] = own = shares[here]
            with torch.cuda.stream(self._streams.sums[here]) if self._streams else contextlib.nullcontext():
                add_in_order(scratch_PPC[here], own)
        self._copy([(h, t, shares_PPC[t][t], shares_PPC[h][t]) for h, t in self._links])

    def _copy(self, copies: list[tuple[int, int, torch.Tensor, torch.Tensor]]) -> None:
        """Copies (to which pair, from which, source, destination), after all that was launched before for either."""
        if self._streams is not None:
            self._streams.mark()
        for here, there, source, destination in copies:
            with self._streams.copying(here, there) if self._streams else contextlib.nullcontext():
                destination.copy_(source, non_blocking=True)


class _Streams:
    """Per pair a stream for sums, and one for copies to each other pair.

    torch runs a copy between GPUs on the current stream of its source, and makes the current stream of its destination
    wait for it. Both are set here, or the copy would stand in line behind the backward pass of the source.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self.sums = [torch.cuda.Stream(device) for device in devices]
        self._copies = [  # [destination][source], on the source's device
            [torch.cuda.Stream(there) if here != there else None for there in devices] for here in devices
        ]
        self._marks: list[torch.cuda.Event] = []

    def follow(self, pair: int) -> None:
        """What is launched for this pair from now on comes after its current stream."""
        self.sums[pair].wait_stream(torch.cuda.current_stream(self._devices[pair]))

    def mark(self) -> None:
        """The next copies need what their sources have done up to now; not that other copies arrive there."""
        self._marks = [stream.record_event() for stream in self.sums]

    @contextlib.contextmanager
    def copying(self, here: int, there: int) -> Iterator[None]:
        copies = self._copies[here][there]
        assert copies is not None
        copies.wait_event(self._marks[there])
        with torch.cuda.stream(copies), torch.cuda.stream(self.sums[here]):
            yield

    def lead(self, pair: int) -> None:
        """The pair's current stream comes after what was launched for it: its sums, and others' reading from it."""
        current = torch.cuda.current_stream(self._devices[pair])
        for stream in (self.sums[pair], *(row[pair] for row in self._copies)):
            if stream is not None:
                current.wait_stream(stream)


# ---------------------------------------------------------------------------------------------- between processes


class RankExchange:
    """Pairs that are processes: shares are sent with all-to-all and added here, so that the order is that of the ranks.

    An all-reduce would send as much, and add up in an order of its own.

    Args:
        flat: the flat buffer of this rank's pair.
        ranks: this one among the others.
        group: of all ranks, used for nothing else; its collectives are launched in the same order everywhere.
        alarm: of the run.
        size: elements of a piece.
    """

    def __init__(self, flat: torch.Tensor, ranks: Ranks, group: Any, alarm: Alarm, size: int = PIECE) -> None:
        self.pieces = pieces(len(flat), ranks.world, size)
        self._flat = flat
        self._ranks = ranks
        self._group = group
        self._alarm = alarm
        largest = max(piece.stop - piece.start for piece in self.pieces)
        self._received = torch.empty(largest, device=flat.device)
        self._stream = torch.cuda.Stream(flat.device) if flat.device.type == "cuda" else None

    def offer(self, pair: int, piece: int) -> None:
        import torch.distributed as dist

        self._alarm.check()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # named so before torch 2.13
        part = self._flat[self.pieces[piece]]
        received = self._received[: len(part)]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        on_stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with self._ranks.telling_who_left(), on_stream:
            dist.all_to_all_single(received, part, group=self._group)
            shares = list(received.chunk(self._ranks.world))
            own = shares[self._ranks.rank]
            add_in_order(shares, own)
            gather(part, own, group=self._group)

    def finish(self, pair: int) -> None:
        self._alarm.check()
        if self._stream is not None:
            torch.cuda.current_stream(self._flat.device).wait_stream(self._stream)
