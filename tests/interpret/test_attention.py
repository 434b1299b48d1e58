"""Anchor attention under the interpreter, fp32: right against float64 for any shape, blind to what it must not see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import attention_cases as cases
import pytest
import torch
import triton
from attention_cases import AttentionCase
from conftest import LONG
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dflash import losses
from dflash.attention import candidates
from dflash.attention.api import anchor_attention
from dflash.attention.metadata import anchor_layout
from dflash.attention.reference import reference_attention
from kernelbake.errors import InputError

TOLERANCE = 1e-5

NUM_SHAPES = 200


@pytest.fixture(autouse=True)
def _first_config() -> Iterator[None]:
    with cases.fixed_config(lambda configs: configs[0]):
        yield


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    group, head_dim = draw(st.sampled_from([(1, 64), (2, 96), (3, 64), (4, 128), (5, 64), (8, 64), (4, 256)]))
    block_size = draw(st.sampled_from([1, 4, 7, 8, 10, 16, 32]))
    return AttentionCase(
        batch=draw(st.integers(1, 2)),
        context_length=draw(st.integers(1, 90)),
        num_blocks=draw(st.integers(1, min(6, 64 // block_size))),
        block_size=block_size,
        kv_heads=draw(st.integers(1, 2)),
        group=group,
        head_dim=head_dim,
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 60)),
        packed=draw(st.booleans()),
        padding=draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.01, 0.3)),
        seed=draw(st.integers(0, 2**20)),
    )


@pytest.mark.long
@settings(max_examples=NUM_SHAPES if LONG else NUM_SHAPES // 10, deadline=None, derandomize=not LONG)
@given(attention_cases(), st.integers(0, 1))
def test_right_for_any_shape(case: AttentionCase, choice: int) -> None:
    with cases.fixed_config(lambda configs: configs[choice]):
        found = cases.errors(case, torch.float32)
    assert max(found.values()) <= TOLERANCE, found


def _tiles(name: str) -> list[triton.Config]:
    """One config of each kernel for every choice of tiles on any GPU; warps and stages mean nothing here."""
    capabilities = ((9, 0), (10, 0), (12, 0))
    configs = [c for gpu in capabilities for c in getattr(candidates, f"{name}_configs")(gpu)]
    return list({tuple(config.kwargs.items()): config for config in configs}.values())


FORWARD_TILES, BACKWARD_TILES = _tiles("forward"), _tiles("backward")


@pytest.mark.parametrize("index", range(max(len(FORWARD_TILES), len(BACKWARD_TILES))))
def test_every_candidate_of_every_gpu_is_right(index: int) -> None:
    """The tiles a GPU would use, run by the interpreter: one choice of each kernel at a time."""
    case = AttentionCase(
        context_length=140, num_blocks=7, block_size=10, kv_heads=1, group=5, head_dim=64, window=90, packed=True
    )

    def choose(configs: list[triton.Config]) -> triton.Config:
        tiles = FORWARD_TILES if set(configs[0].kwargs) == set(FORWARD_TILES[0].kwargs) else BACKWARD_TILES
        return tiles[index % len(tiles)]

    with cases.fixed_config(choose):
        found = cases.errors(case, torch.float32)
    assert max(found.values()) <= TOLERANCE, found


def _changed(case: AttentionCase, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, K, …] before and after a large change to one context key and value."""
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    given["anchors"] = torch.tensor([[10, 11, 12, 40]], dtype=torch.int32)
    before = cases.run(anchor_attention, inputs, given)["out"]
    for tensor in inputs[1:3]:
        tensor[:, key] += 100.0
    after = cases.run(anchor_attention, inputs, given)["out"]
    return (
        before.unflatten(1, (case.num_blocks, case.block_size))[0],
        after.unflatten(1, (case.num_blocks, case.block_size))[0],
    )


@pytest.mark.parametrize(("key", "blind"), [(9, 0), (10, 1), (11, 2), (12, 3), (39, 3), (40, 4), (47, 4)])
def test_a_block_sees_context_strictly_before_its_own_anchor(key: int, blind: int) -> None:
    """R089: however close anchors are, the first ``blind`` blocks keep every bit, and the others change."""
    before, after = _changed(AttentionCase(num_blocks=4, block_size=4), key)
    assert torch.equal(before[:blind], after[:blind])
    assert all(not torch.equal(before[block], after[block]) for block in range(blind, 4))


def test_a_block_sees_no_other_block() -> None:
    case = AttentionCase(num_blocks=4, block_size=7)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    before = cases.run(anchor_attention, inputs, given)
    for tensor in inputs[1:3]:
        tensor[:, case.context_length + 7 : case.context_length + 14] += 100.0
    after = cases.run(anchor_attention, inputs, given)
    same = [torch.equal(a, b) for a, b in zip(before["out"].split(7, 1), after["out"].split(7, 1), strict=True)]
    assert same == [True, False, True, True]


@pytest.mark.parametrize("block_size", [7, 16])
def test_padding_slots_give_zeros_and_leave_the_rest_alone(block_size: int) -> None:
    """R093: rows of padding slots may hold anything, NaN included; the others equal a run without the slots."""
    case = AttentionCase(batch=2, num_blocks=5, block_size=block_size, causal=True, window=30)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    used = 2 * block_size
    given["num_valid"] = torch.tensor([2, 0], dtype=torch.int32)
    for row, valid in ((0, used), (1, 0)):
        for tensor in (inputs[0], inputs[3]):
            tensor[row, valid:] = float("nan")
        for tensor in inputs[1:3]:
            tensor[row, case.context_length + valid :] = float("nan")
    found = cases.run(anchor_attention, inputs, given)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert not found["out"][0, used:].any()
    assert not found["out"][1].any()
    assert not found["dq"][0, used:].any()
    assert not any(found[name][1].any() for name in ("dq", "dk", "dv"))
    assert not any(found[name][0, case.context_length + used :].any() for name in ("dk", "dv"))

    keys = case.context_length + used
    alone_inputs = [tensor[:1, : keys if tensor.shape[1] > case.num_rows else used] for tensor in inputs]
    alone_given = {**given, "anchors": given["anchors"][:1, :2].contiguous(), "num_valid": None}
    alone = cases.run(anchor_attention, alone_inputs, alone_given)
    for name in ("out", "dq"):
        assert cases.error(found[name][:1, :used], alone[name]) <= TOLERANCE
    for name in ("dk", "dv"):
        assert cases.error(found[name][:1, :keys], alone[name]) <= TOLERANCE


def test_every_batch_entry_is_as_if_it_were_alone() -> None:
    case = AttentionCase(batch=2, num_blocks=3, block_size=8, packed=True, padding=True, window=25)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    together = cases.run(anchor_attention, inputs, given)
    for entry in range(case.batch):
        own = {
            name: value[entry : entry + 1] if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }
        alone = cases.run(anchor_attention, [tensor[entry : entry + 1] for tensor in inputs], own)
        assert all(torch.equal(together[name][entry : entry + 1], alone[name]) for name in alone)


def test_packed_documents_equal_separate_ones() -> None:
    """Documents of 20, 1, 33 and 10 tokens in one row, two blocks in each."""
    lengths = (20, 1, 33, 10)
    case = AttentionCase(context_length=sum(lengths), num_blocks=8, block_size=4)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    given["anchors"] = torch.tensor(
        [[p for s, n in zip(starts, lengths, strict=True) for p in (s + n // 2, s + n - 1)]]
    ).int()
    given["doc_ids"] = torch.repeat_interleave(torch.tensor([7, 3, 9, 3]), torch.tensor(lengths)).int()[None]
    packed = cases.run(anchor_attention, inputs, given)
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = slice(8 * index, 8 * index + 8)
        keys = [
            *range(start, start + length),
            *range(case.context_length + rows.start, case.context_length + rows.stop),
        ]
        own = [tensor[:, keys if tensor.shape[1] > case.num_rows else rows] for tensor in inputs]
        anchors = given["anchors"][:, 2 * index : 2 * index + 2] - start
        alone = cases.run(
            anchor_attention, own, {**given, "anchors": anchors, "doc_ids": None, "context_length": length}
        )
        assert cases.error(packed["out"][:, rows], alone["out"]) <= TOLERANCE
        assert cases.error(packed["dq"][:, rows], alone["dq"]) <= TOLERANCE
        assert cases.error(packed["dk"][:, keys], alone["dk"]) <= TOLERANCE
        assert cases.error(packed["dv"][:, keys], alone["dv"]) <= TOLERANCE


def test_views_are_read_as_what_they_show() -> None:
    """A transposed q, a k that starts in the middle of its storage, and a gradient that is one number spread out."""
    case = AttentionCase(batch=2, num_blocks=2)
    q, k, v, _ = cases.tensors(case, torch.float32)
    given = cases.options(case)
    grad = torch.ones(1).expand_as(q)
    wanted = cases.run(anchor_attention, [q, k, v, grad.contiguous()], given)
    base = torch.randn(k.numel() + 1)
    base[1:] = k.flatten()
    q_view = q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    k_view = base[1:].view_as(k).requires_grad_()
    v_leaf = v.clone().requires_grad_()
    arguments = dict(given)
    out = anchor_attention(q_view, k_view, v_leaf, arguments.pop("anchors"), **arguments)
    out.backward(grad)
    found = {"out": out.detach(), "dq": q_view.grad, "dk": k_view.grad, "dv": v_leaf.grad}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["anchors", "num_valid", "doc_ids"])
def test_strided_integers_are_read_as_what_they_show(name: str) -> None:
    """Every second one of a larger array, which starts off alignment, with other numbers in between."""
    case = AttentionCase(batch=2, num_blocks=4, packed=True, padding=True)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    wanted = cases.run(anchor_attention, inputs, given)
    spread = torch.stack([torch.full_like(given[name], 1), given[name]], dim=-1)
    found = cases.run(anchor_attention, inputs, {**given, name: spread[..., 1]})
    assert all(torch.equal(found[part], wanted[part]) for part in wanted)


@pytest.mark.parametrize("window", [1 << 30, (1 << 31) - 1, 1 << 31, 1 << 40])
def test_a_window_wider_than_any_context_bounds_nothing(window: int) -> None:
    """However wide it is, positions are added to it in 32 bits."""
    found = cases.errors(AttentionCase(window=window, causal=True), torch.float32)
    assert max(found.values()) <= TOLERANCE, found


def test_a_shared_layout_changes_nothing() -> None:
    case = AttentionCase(batch=2, num_blocks=4, packed=True, padding=True, window=20)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    names = ("anchors", "block_size", "context_length", "num_valid", "doc_ids", "window")
    layout = anchor_layout(given["anchors"], **{name: given[name] for name in names[1:]})
    first = cases.run(anchor_attention, inputs, given)
    second = cases.run(anchor_attention, inputs, {**given, "layout": layout})
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "case", [AttentionCase(batch=2, context_length=100, num_blocks=70, packed=True, padding=True, window=9)]
)
def test_layout_counts_what_it_says(case: AttentionCase) -> None:
    given = cases.options(case)
    names = ("block_size", "context_length", "num_valid", "doc_ids", "window")
    layout = anchor_layout(given["anchors"], **{name: given[name] for name in names})
    for entry in range(case.batch):
        valid = int(given["num_valid"][entry])
        anchors, docs = given["anchors"][entry, :valid], given["doc_ids"][entry]
        starts = torch.stack([(docs == docs[p]).nonzero()[0, 0] for p in anchors]) if valid else anchors
        assert torch.equal(layout.bounds[entry, 0, :valid], starts.int())
        assert layout.bounds[entry, 1].tolist() == anchors.tolist() + [-1] * (case.num_blocks - valid)
        low = torch.maximum(starts, anchors - 9 + 1)
        high = torch.maximum(starts, anchors + case.block_size - 1 - 9 + 1)
        for mark in range(layout.counts.shape[2]):
            position = 16 * mark
            wanted = [int((anchors <= position).sum()), int((low < position).sum()), int((high <= position).sum())]
            assert layout.counts[entry, :, mark].tolist() == wanted, position


class _Sizes(TorchDispatchMode):
    """Records the bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return out


class _Integers(TorchDispatchMode):
    """Counts the elements of all integer tensors that are made on purpose, not by a conversion of a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.full.default) and out.dtype == torch.int32:
            self.elements += out.numel()
        return out


def test_nothing_grows_with_rows_times_keys() -> None:
    """R092: neither an array of the kernels nor the layout, which does not know of heads at all."""
    case = AttentionCase(context_length=320, num_blocks=3, kv_heads=1, group=8)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    with _Sizes() as sizes:
        cases.run(anchor_attention, inputs, given)
    assert sizes.largest <= max(tensor.numel() * tensor.element_size() for tensor in inputs)
    assert sizes.largest < case.num_rows * (case.context_length + case.num_rows) * case.group
    layout = anchor_layout(given["anchors"], block_size=case.block_size, context_length=case.context_length)
    assert layout.bounds.numel() + layout.counts.numel() == 2 * case.num_blocks + 3 * (320 // 16 + 1)


@pytest.mark.parametrize("heads", [4, 32])
def test_the_mask_takes_the_same_memory_for_any_number_of_heads(heads: int) -> None:
    """R092: all integers that a call and its gradient allocate."""
    case = AttentionCase(context_length=16, num_blocks=1, block_size=4, kv_heads=2, group=heads // 2)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    with _Integers() as made:
        cases.run(anchor_attention, inputs, given)
    assert made.elements == 2 * case.num_blocks + 3 * (case.context_length // 16 + 1) + case.batch


@pytest.mark.parametrize("attention", [anchor_attention, reference_attention])
def test_a_full_and_a_nearly_empty_entry_train_as_they_would_alone(attention: Callable[..., torch.Tensor]) -> None:
    """R093: a batch of two, 20 anchors and 1: loss and all gradients are finite and those of each entry by itself."""
    case = AttentionCase(batch=2, num_blocks=20, block_size=4, group=2)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    head = torch.randn(11, 2 * case.head_dim, generator=torch.Generator().manual_seed(5))
    labels = torch.arange(2 * case.num_rows).view(2, -1) % 11
    labels[1, case.block_size :] = losses.IGNORED

    def train(entries: slice, num_valid: list[int], blocks: int) -> list[torch.Tensor]:
        rows = blocks * case.block_size
        lengths = (rows, *[case.context_length + rows] * 2)
        leaves = [t[entries, :n].clone().requires_grad_() for t, n in zip(inputs[:3], lengths, strict=True)]
        arguments = {**given, "num_valid": torch.tensor(num_valid, dtype=torch.int32)}
        anchors = arguments.pop("anchors")[entries, :blocks].contiguous()
        hidden = attention(*leaves, anchors, **arguments).float().flatten(2).flatten(0, 1)
        wanted = labels[entries, :rows].flatten()
        loss, _ = losses.block_loss(hidden, head, wanted, torch.ones(wanted.shape), chunk_rows=64)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    together = train(slice(0, 2), [20, 1], 20)
    full, single = train(slice(0, 1), [20], 20), train(slice(1, 2), [1], 1)
    assert all(torch.isfinite(tensor).all() for tensor in together)
    assert cases.error(together[0], full[0] + single[0]) <= TOLERANCE
    for both, first, second in zip(together[1:], full[1:], single[1:], strict=True):
        assert cases.error(both[:1], first) <= TOLERANCE
        assert cases.error(both[1:, : second.shape[1]], second) <= TOLERANCE
        assert not both[1:, second.shape[1] :].any()


def test_second_derivatives_are_refused() -> None:
    case = AttentionCase(num_blocks=1)
    q, k, v, _ = cases.tensors(case, torch.float32)
    given = cases.options(case)
    q.requires_grad_()
    out = anchor_attention(q, k, v, given.pop("anchors"), **given)
    with pytest.raises(InputError, match="differentiated twice"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_equal_calls_give_equal_bits() -> None:
    case = dataclasses.replace(AttentionCase(), num_blocks=4, window=20)
    inputs, given = cases.tensors(case, torch.float32), cases.options(case)
    first, second = (cases.run(anchor_attention, inputs, given) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
