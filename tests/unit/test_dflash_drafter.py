"""The drafter's layers: gradients against plain torch, and how little is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dflash.drafter import MLP, Remade, RMSNorm, project
from kernelbake.errors import InputError


@pytest.fixture(params=[torch.float64, torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def made(module: nn.Module, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Gives the module random weights, norms included, and a random input."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


class _Block(nn.Module):
    """A norm before an MLP, with what is kept left to torch or not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(16, 1e-6)
        self.mlp = MLP(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(Remade.by(self.norm, x))

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        mlp, normed = self.mlp, F.rms_norm(x, (16,), self.norm.weight, 1e-6)
        return F.linear(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed), mlp.down_proj.weight)


def kept(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, set[int]]:
    """What a function gives, and the storages that autograd keeps for it, by address."""
    found: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        return function(x), found


def test_gradients_are_those_of_plain_torch(dtype: torch.dtype) -> None:
    block = _Block()
    x = made(block, dtype, 2, 5, 16)
    weights = [x, *block.parameters()]
    upstream = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, wanted = block(x), block.plain(x)
    assert torch.equal(out, wanted)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    found, plain = (torch.autograd.grad(result, weights, upstream) for result in (out, wanted))
    for gradient, expected in zip(found, plain, strict=True):
        assert (gradient - expected).norm() <= tolerance * expected.norm()


def test_gradients_are_those_of_finite_differences() -> None:
    block = _Block()
    x = made(block, torch.float64, 1, 3, 16)
    assert torch.autograd.gradcheck(lambda x, *_: block(x), (x, *block.parameters()), eps=1e-6, atol=1e-5)


def test_neither_the_norm_nor_the_product_of_gate_and_up_is_kept() -> None:
    """Beside weights and the input: gate and up, and what torch keeps for the norm itself."""
    block, inner = _Block(), MLP(16, 24).double()
    x = made(block, torch.float64, 1, 4096, 16)
    _, of_block = kept(block, x)
    _, of_plain = kept(block.plain, x)
    assert len(of_plain) - len(of_block) == 3  # the norm's result, silu of gate, its product with up
    _, of_mlp = kept(lambda x: inner(Remade(x, torch.clone, (x,))), x)
    assert len(of_mlp) == 3 + 1 + 2  # weights, the source, gate and up


def test_an_input_without_gradient_costs_none() -> None:
    linear = nn.Linear(4, 3, bias=False)
    x = torch.ones(2, 5, 4)
    out = project(Remade.by(torch.clone, x), linear)
    out.sum().backward()
    assert linear.weight.grad is not None
    assert torch.equal(linear.weight.grad, torch.full((3, 4), 10.0))
    assert x.grad is None


def test_a_second_derivative_is_refused() -> None:
    block = _Block()
    x = made(block, torch.float64, 1, 2, 16)
    with pytest.raises(InputError, match="differentiated twice"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)
