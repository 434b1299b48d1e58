"""R010: threads that ask flash-linear-attention for what follows from their own boundaries get that, and no error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dflash import memos, target

THREADS, ROUNDS = 8, 400


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def offsets() -> Callable[..., torch.Tensor]:
    """The function that a packed step asks in every Gated-DeltaNet layer."""
    target.modeling("qwen3_5")
    from fla.ops.utils import prepare_chunk_offsets

    return prepare_chunk_offsets  # type: ignore[no-any-return]


def in_threads(function: Callable[..., torch.Tensor]) -> list[str]:
    """What went wrong in threads that ask again and again, each about boundaries of its own, new ones every time."""
    wrong: list[str] = []

    def work(index: int) -> None:
        try:
            for number in range(ROUNDS):
                boundaries = torch.tensor([0, 1 + index, 70 + index, 300 + 64 * (number % 3)])
                counts = -(-boundaries.diff() // 64)
                wanted = [0, *counts.cumsum(0).tolist()]
                for _ in range(3):
                    if function(boundaries, 64).tolist() != wanted:
                        wrong.append(f"thread {index} got what belongs to another")
        except RuntimeError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_each_thread_remembers_its_own(offsets: Callable[..., torch.Tensor]) -> None:
    assert in_threads(offsets) == []


def test_a_shared_memo_breaks_under_the_same_threads(offsets: Callable[..., torch.Tensor]) -> None:
    from fla.utils import tensor_cache

    shared = tensor_cache(offsets.__wrapped__)  # type: ignore[attr-defined]
    assert "deque mutated during iteration" in in_threads(shared)


def test_a_result_is_remembered_and_a_thread_holds_a_few(offsets: Callable[..., torch.Tensor]) -> None:
    boundaries = torch.tensor([0, 5, 9])
    first = offsets(boundaries, 64)
    assert offsets(boundaries, 64) is first
    others = [torch.tensor([0, length]) for length in range(1, 9)]
    for other in others:
        offsets(other, 64)
    assert offsets(boundaries, 64) is not first


def test_no_memo_of_the_library_is_shared_any_more(offsets: Callable[..., torch.Tensor]) -> None:
    assert memos.keep_apart() == 0
    names: list[Any] = [cell.cell_contents for cell in offsets.__closure__ or ()]
    assert any(isinstance(item, memos.OwnQueue) for item in names)
