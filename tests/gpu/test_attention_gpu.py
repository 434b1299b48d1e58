"""Anchor attention and the block loss on a GPU: right in bf16 and fp32, repeatable, for every config."""

from __future__ import annotations

import random
from typing import Any

import attention_cases as cases
import pytest
import torch
from attention_cases import AttentionCase

from dflash import losses
from dflash.attention import kernels
from dflash.attention.api import anchor_attention

pytestmark = pytest.mark.gpu

NUM_SHAPES = 60
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


FORMS: list[dict[str, Any]] = [
    {"block_size": 16, "group": 4, "head_dim": 128},
    {"block_size": 7, "group": 1, "head_dim": 64, "window": 90},
    {"block_size": 16, "group": 4, "head_dim": 128, "window": 300},
    {"block_size": 10, "group": 3, "head_dim": 96, "causal": True, "packed": True},
    {"block_size": 16, "group": 4, "head_dim": 128, "packed": True},
    {"block_size": 32, "group": 8, "head_dim": 128, "causal": True, "scale": 0.2},
    {"block_size": 4, "group": 2, "head_dim": 256, "packed": True, "window": 64},
]
"""What a kernel is compiled for; few, since every one costs seconds. All else is random."""


def _case(seed: int) -> AttentionCase:
    draw = random.Random(seed)
    return AttentionCase(
        batch=draw.randint(1, 3),
        context_length=draw.randint(1, 900),
        num_blocks=draw.randint(1, 70),
        kv_heads=2,
        padding=draw.random() < 0.5,
        seed=seed,
        **FORMS[seed % len(FORMS)],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("seed", range(NUM_SHAPES))
def test_right_for_random_shapes(seed: int, dtype: torch.dtype) -> None:
    case = _case(seed)
    with cases.fixed_config(lambda configs: configs[seed % len(FORMS) % len(configs)]):
        found = cases.errors(case, dtype, "cuda")
    assert max(found.values()) <= TOLERANCE[dtype], (case, found)


PAIRS = max(len(kernels.anchor_forward_kernel.configs), len(kernels.anchor_backward_kernel.configs))


@pytest.mark.parametrize("index", range(PAIRS))
def test_every_candidate_is_right_and_repeatable(index: int) -> None:
    case = AttentionCase(batch=2, context_length=1500, num_blocks=64, kv_heads=2, head_dim=128, padding=True)
    inputs, given = cases.tensors(case, torch.bfloat16, "cuda"), cases.options(case, "cuda")
    with cases.fixed_config(lambda configs: configs[index % len(configs)]):
        found = cases.errors(case, torch.bfloat16, "cuda")
        runs = [cases.run(anchor_attention, inputs, given) for _ in range(3)]
    assert max(found.values()) <= TOLERANCE[torch.bfloat16], found
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in other)


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
