"""Anchor attention and the block loss on a GPU: right in bf16 and fp32, repeatable, for every config."""

from __future__ import annotations

from typing import Any

import attention_cases as cases
import pytest
import torch
from attention_cases import AttentionCase

from dflash import losses
from dflash.attention import kernels
from dflash.attention.api import anchor_attention

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
CANDIDATES = max(len(kernels.anchor_forward_kernel.configs), len(kernels.anchor_backward_kernel.configs))

both_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["bf16", "fp32"])


@both_dtypes
@pytest.mark.parametrize("seed", range(cases.RANDOM_SHAPES))
def test_right_for_random_shapes(seed: int, dtype: torch.dtype) -> None:
    found = cases.random_errors(seed, dtype)
    assert max(found.values()) <= TOLERANCE[dtype], (cases.random_case(seed), found)


@both_dtypes
@pytest.mark.parametrize("index", range(CANDIDATES))
def test_every_candidate_is_right_and_repeatable(index: int, dtype: torch.dtype) -> None:
    case = AttentionCase(batch=2, context_length=1500, num_blocks=64, kv_heads=2, head_dim=128, padding=True)
    inputs, given = cases.tensors(case, dtype, "cuda"), cases.options(case, "cuda")
    with cases.fixed_config(lambda configs: configs[index % len(configs)]):
        found = cases.errors(case, dtype, "cuda")
        runs = [cases.run(anchor_attention, inputs, given) for _ in range(3)]
    assert max(found.values()) <= TOLERANCE[dtype], found
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in other)


def test_more_numbers_than_31_bits_can_count() -> None:
    """R056: queries and keys of 2.2e9 elements; the last blocks are as they would be in a small call of their own."""
    blocks, block_size, context, heads, dim, tail = 34_000, 16, 64, 32, 128, 40
    if torch.cuda.mem_get_info()[0] < 50 << 30:
        pytest.skip("needs 50 GiB of free GPU memory")
    torch.cuda.empty_cache()
    numbers = torch.Generator(device="cuda").manual_seed(0)
    rows, kept = blocks * block_size, tail * block_size
    q, k, v, grad = (
        torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16, generator=numbers)
        for length in (rows, context + rows, context + rows, rows)
    )
    assert q.numel() > 1 << 31
    anchors = torch.arange(blocks, device="cuda", dtype=torch.int32)[None] * context // blocks
    given = {"block_size": block_size, "context_length": context}
    small = [q[:, -kept:], *(torch.cat([t[:, :context], t[:, -kept:]], dim=1) for t in (k, v)), grad[:, -kept:]]
    with cases.fixed_config(lambda configs: configs[0]):
        wanted = cases.run(anchor_attention, small, {**given, "anchors": anchors[:, -tail:].contiguous()})
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = anchor_attention(*leaves, anchors, **given)
        found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, grad), strict=True))
    found["out"] = out.detach()
    errors = {name: cases.error(found[name][:, -kept:], wanted[name][:, -kept:]) for name in wanted}
    assert max(errors.values()) <= TOLERANCE[torch.bfloat16], errors


def test_every_element_is_written() -> None:
    """Memory that held NaN before the call shows what a kernel left out."""
    case = AttentionCase(
        context_length=300, num_blocks=33, block_size=7, kv_heads=2, head_dim=96, padding=True, window=40
    )
    inputs, given = cases.tensors(case, torch.bfloat16, "cuda"), cases.options(case, "cuda")
    torch.cuda.empty_cache()
    poison = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(4)]
    del poison
    with cases.fixed_config(lambda configs: configs[0]):
        found = cases.run(anchor_attention, inputs, given)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


@pytest.mark.parametrize("kl_share", [0.0, 0.4])
def test_block_loss_is_right(kl_share: float) -> None:
    """bf16 rows and head, 5 chunks, the last one short; against float64 on the same numbers."""
    random_numbers = torch.Generator(device="cuda").manual_seed(0)
    made: dict[str, Any] = {
        name: torch.randn(shape, device="cuda", generator=random_numbers).bfloat16()
        for name, shape in (("hidden", (1100, 256)), ("target", (1100, 256)), ("head", (50_000, 256)))
    }
    made["head"] *= 0.2
    labels = torch.randint(0, 50_000, (1100,), device="cuda", generator=random_numbers)
    labels[::16] = losses.IGNORED
    weights = torch.rand(1100, device="cuda", generator=random_numbers)
    hidden = made["hidden"].clone().requires_grad_()
    loss, correct = losses.block_loss(
        hidden, made["head"], labels, weights, chunk_rows=256, target_hidden=made["target"], kl_share=kl_share
    )
    loss.backward()

    exact = made["hidden"].double().requires_grad_()
    logp = (exact @ made["head"].double().t()).log_softmax(dim=1)
    target_logp = (made["target"].double() @ made["head"].double().t()).log_softmax(dim=1)
    rows = (1 - kl_share) * torch.nn.functional.nll_loss(logp, labels, reduction="none", ignore_index=losses.IGNORED)
    rows = rows + kl_share * (target_logp.exp() * (target_logp - logp)).sum(dim=1)
    wanted = (torch.where(labels == losses.IGNORED, 0.0, rows) * weights).sum()
    wanted.backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    assert cases.error(loss.detach(), wanted.detach()) <= 1e-3
    assert cases.error(hidden.grad, exact.grad) <= 2e-2
    assert not correct[::16].any()
    agree = (correct == ((logp.argmax(dim=1) == labels) & (labels != losses.IGNORED))).float().mean().item()
    assert agree >= 0.995
