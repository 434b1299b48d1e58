"""Inputs for tests of the attention kernels, a run that compares with the reference, and a fixed choice of config."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from dflash.attention.api import anchor_attention
from dflash.attention.reference import reference_attention


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One call: shapes, options and a seed for everything random in it."""

    batch: int = 1
    context_length: int = 48
    num_blocks: int = 3
    block_size: int = 16
    kv_heads: int = 1
    group: int = 4
    head_dim: int = 64
    causal: bool = False
    window: int | None = None
    packed: bool = False
    padding: bool = False
    scale: float | None = None
    seed: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self.block_size


RANDOM_SHAPES = 60
"""How many random calls are compared with float64 on a GPU, in each dtype."""

FORMS: list[dict[str, Any]] = [
    {"block_size": 16, "group": 4, "head_dim": 128},
    {"block_size": 7, "group": 1, "head_dim": 64, "window": 90},
    {"block_size": 16, "group": 4, "head_dim": 128, "window": 300},
    {"block_size": 10, "group": 3, "head_dim": 96, "causal": True, "packed": True},
    {"block_size": 16, "group": 4, "head_dim": 128, "packed": True},
    {"block_size": 32, "group": 8, "head_dim": 128, "causal": True, "scale": 0.2},
    {"block_size": 4, "group": 2, "head_dim": 256, "packed": True, "window": 64},
]
"""What a kernel is compiled for; few, since every one costs seconds. All else of a random call is random."""


def random_case(seed: int) -> AttentionCase:
    """A call of form ``seed % len(FORMS)`` with random sizes."""
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


def random_errors(seed: int, dtype: torch.dtype) -> dict[str, float]:
    """Errors on a GPU of the random call of a seed, with the candidates that its form has."""
    with fixed_config(lambda configs: configs[seed % len(FORMS) % len(configs)]):
        return errors(random_case(seed), dtype, "cuda")


def options(case: AttentionCase, device: str = "cpu") -> dict[str, Any]:
    """Anchors and all other arguments but q, k and v."""
    numbers = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.num_blocks)
    anchors = torch.randint(0, case.context_length, shape, generator=numbers).sort(dim=1).values.int()
    given: dict[str, Any] = {
        "anchors": anchors.to(device),
        "block_size": case.block_size,
        "context_length": case.context_length,
        "causal": case.causal,
        "window": case.window,
        "scale": case.scale,
    }
    if case.padding:
        given["num_valid"] = torch.randint(0, case.num_blocks + 1, (case.batch,), generator=numbers).int().to(device)
    if case.packed:
        ends = torch.randint(0, 5, (case.batch, case.context_length), generator=numbers) == 0
        given["doc_ids"] = (ends.cumsum(dim=1) * 3 % 1000).int().to(device)
    return given


def tensors(case: AttentionCase, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    numbers = torch.Generator().manual_seed(case.seed + 1)
    keys = case.context_length + case.num_rows
    queries = (case.batch, case.num_rows, case.kv_heads * case.group, case.head_dim)
    shapes = [queries, *[(case.batch, keys, case.kv_heads, case.head_dim)] * 2, queries]
    return [torch.randn(shape, generator=numbers).to(dtype).to(device) for shape in shapes]


def run(
    attention: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], given: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Output and gradients of one forward and backward."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in inputs[:3])
    arguments = dict(given)
    out = attention(q, k, v, arguments.pop("anchors"), **arguments)
    out.backward(inputs[3].to(out.dtype))
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖ in float64; NaN where anything is not finite."""
    found, wanted = found.double(), wanted.double()
    size = wanted.norm().item()
    distance = (found - wanted).norm().item()
    return distance / size if size > 0 else distance


def errors(case: AttentionCase, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Errors of output, dQ, dK and dV against the float64 reference on the same (rounded) inputs."""
    inputs, given = tensors(case, dtype, device), options(case, device)
    found = run(anchor_attention, inputs, given)
    wanted = run(reference_attention, [tensor.double() for tensor in inputs], given)
    return {name: error(found[name], wanted[name]) for name in found}


@contextlib.contextmanager
def fixed_config(choose: Callable[[list[triton.Config]], triton.Config]) -> Iterator[None]:
    """Every autotuner takes the config that ``choose`` picks from its own, without measuring anything."""

    def run_chosen(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **choose(self.configs).all_kwargs())

    with unittest.mock.patch.object(Autotuner, "run", run_chosen):
        yield
