"""Gradients of several pairs: added up in the order of the pairs, to the same bits everywhere, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dflash.alarm import Alarm, Rung
from dflash.config import OptimizerConfig
from dflash.exchange import Outbox, PeerExchange, add_in_order, pieces
from dflash.optimizer import Optimizer
from kernelbake.errors import InputError


class Network(nn.Module):
    """Parameters of odd sizes, used in their order."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        sizes = ((7, 5), (13,), (3, 3, 3), (1,))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size, generator=random)) for size in sizes)

    def forward(self, scale: float) -> torch.Tensor:
        return torch.stack([(weight * scale).sin().sum() for weight in self.weights]).sum()


def flats(count: int, length: int) -> list[torch.Tensor]:
    """Buffers whose sum depends on the order of adding."""
    random = torch.Generator().manual_seed(length)
    return [torch.randn(length, generator=random) * 10.0 ** (4 * (pair % 3)) for pair in range(count)]


def in_order(given: list[torch.Tensor]) -> torch.Tensor:
    total = given[0].clone()
    for flat in given[1:]:
        total += flat
    return total


def side_by_side(count: int, work: Callable[[int], None]) -> list[BaseException | None]:
    """Runs the work of each pair in a thread; what each raised."""
    raised: list[BaseException | None] = [None] * count

    def run(pair: int) -> None:
        try:
            work(pair)
        except BaseException as error:
            raised[pair] = error

    threads = [threading.Thread(target=run, args=(pair,)) for pair in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    return raised


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("length", "size"), [(12, 1000), (240, 24), (252, 60), (120, 1)])
def test_all_pairs_end_with_the_sum_in_the_order_of_the_pairs(count: int, length: int, size: int) -> None:
    given = flats(count, length)
    wanted = in_order(given)
    exchange = PeerExchange(given, Alarm(), size)

    def work(pair: int) -> None:
        for step in range(3):
            for piece in reversed(range(len(exchange.pieces))):
                time.sleep(0.001 * ((pair + step) % count))  # another one is last each time
                exchange.offer(pair, piece)
            exchange.finish(pair)
            assert torch.equal(given[pair], wanted)
            given[pair].copy_(flats(count, length)[pair])

    assert side_by_side(count, work) == [None] * count


def test_the_order_of_adding_decides_bits() -> None:
    """What the tests above compare would notice another order."""
    given = flats(3, 240)
    assert not torch.equal(in_order(given), in_order(given[::-1]))
    for own in range(3):
        shares = [flat.clone() for flat in given]
        add_in_order(shares, shares[own])
        assert torch.equal(shares[own], in_order(given))


@pytest.mark.parametrize(
    ("length", "shares", "size"), [(12, 3, 5), (12, 4, 100), (1000, 4, 64), (7, 7, 1), (64, 1, 64)]
)
def test_pieces_cover_the_buffer_and_divide_evenly(length: int, shares: int, size: int) -> None:
    found = pieces(length, shares, size)
    assert [place for piece in found for place in range(piece.start, piece.stop)] == list(range(length))
    assert all((piece.stop - piece.start) % shares == 0 for piece in found)
    assert all(piece.stop - piece.start <= max(size, shares) for piece in found)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_travel_while_the_backward_pass_runs(count: int) -> None:
    """Two batches a pair: nothing leaves in the first one's backward pass, everything in the second one's."""
    networks = [Network() for _ in range(count)]
    optimizers = [Optimizer(network, OptimizerConfig(), count) for network in networks]
    exchange = PeerExchange([optimizer.flat for optimizer in optimizers], Alarm(), 16 * count)
    outboxes = [Outbox(optimizer, exchange, pair) for pair, optimizer in enumerate(optimizers)]
    alone = Network()
    for pair in range(count):
        for batch in range(2):
            alone(1.0 + pair + 0.5 * batch).backward()

    def work(pair: int) -> None:
        networks[pair](1.0 + pair).backward()
        assert exchange._launched == 0
        barrier.wait()
        outboxes[pair].arm()
        networks[pair](1.5 + pair).backward()
        barrier.wait()
        assert exchange._launched == len(exchange.pieces)
        outboxes[pair].finish()

    barrier = threading.Barrier(count, timeout=20)
    assert side_by_side(count, work) == [None] * count
    for optimizer in optimizers:
        assert torch.equal(optimizer.flat, optimizers[0].flat)
        for found, wanted in zip(optimizer.grads, alone.parameters(), strict=True):
            assert torch.allclose(found, wanted.grad, atol=1e-6)  # type: ignore[arg-type]


def test_the_loss_of_one_pair_reaches_all_and_stops_their_updates() -> None:
    networks = [Network() for _ in range(2)]
    optimizers = [Optimizer(network, OptimizerConfig(lr=1.0), 2) for network in networks]
    exchange = PeerExchange([optimizer.flat for optimizer in optimizers], Alarm(), 64)
    before = [master.detach().clone() for master in optimizers[0].masters]

    def work(pair: int) -> None:
        outbox = Outbox(optimizers[pair], exchange, pair)
        outbox.arm()
        optimizers[pair].loss.add_(torch.tensor([1.0, float("inf")][pair]))
        networks[pair](1.0).backward()
        outbox.finish()
        optimizers[pair].step(1.0)

    assert side_by_side(2, work) == [None, None]
    for optimizer in optimizers:
        assert all(torch.equal(old, new) for old, new in zip(before, optimizer.masters, strict=True))


@pytest.mark.parametrize("place", ["before", "within", "after"])
def test_a_pair_that_fails_releases_the_others(place: str) -> None:
    alarm = Alarm()
    exchange = PeerExchange(flats(3, 24), alarm, 6)

    def work(pair: int) -> None:
        for number in reversed(range(len(exchange.pieces))):
            if pair == 1 and number == {"before": 3, "within": 1}.get(place):
                alarm.ring(InputError("pair 1 failed"))
                raise RuntimeError
            exchange.offer(pair, number)
        if pair == 1:
            alarm.ring(InputError("pair 1 failed"))
            raise RuntimeError
        exchange.finish(pair)
        exchange.offer(pair, 0)

    begin = time.monotonic()
    raised = side_by_side(3, work)
    assert time.monotonic() - begin < 5
    assert [type(error) for error in raised] == [Rung, RuntimeError, Rung]
    assert alarm.failure is not None
    assert alarm.failure.message == "pair 1 failed"


def test_gradients_are_views_of_the_flat_buffer_whatever_their_sizes() -> None:
    optimizer = Optimizer(Network(), OptimizerConfig(), 3)
    assert len(optimizer.flat) % 3 == 0
    optimizer.flat[1:].fill_(2.0)
    assert all((grad == 2.0).all() for grad in optimizer.grads)
    assert [end - begin for begin, end in optimizer.places] == [master.numel() for master in optimizer.masters]
    assert all(begin % 32 == 0 for begin, _ in optimizer.places)
    optimizer.step(0.0)
    assert not optimizer.flat.any()
