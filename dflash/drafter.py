"""The drafter network: a few decoder layers whose keys and values are joined by the target's features.

Legend of shape suffixes: B rows, S context length, N anchors, K block size, Q = N·K block rows, E hidden size,
F = E times the number of target layers, H heads, G kv heads, D head dim. Parameters have the served checkpoint's names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflash import devices
from dflash.attention.api import anchor_attention
from dflash.attention.metadata import AnchorLayout, anchor_layout
from dflash.spec import DrafterSpec
from kernelbake.errors import InputError

INITIAL_STD = 0.02


@dataclasses.dataclass(frozen=True)
class BlockContext:
    """What all layers share in one pass.

    Args:
        context_BSE: the target's features, projected and normed; given unchanged to every layer.
        rotary_context, rotary_blocks: cosine and sine [B, S, D] and [B, Q, D].
        anchors_BN: as in ``buckets.Batch``.
        doc_ids_BS: document of each context token, or None.
        layouts: which context each block sees, by window (None: no window).
    """

    context_BSE: torch.Tensor
    rotary_context: tuple[torch.Tensor, torch.Tensor]
    rotary_blocks: tuple[torch.Tensor, torch.Tensor]
    anchors_BN: torch.Tensor
    doc_ids_BS: torch.Tensor | None
    layouts: dict[int | None, AnchorLayout]


class RMSNorm(nn.Module):
    """x / rms(x) · weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Any, Any]:
    """Cosine and sine of the full rotary embedding, [..., D]. Angles are computed in fp32, whatever the dtype."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BTHD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Applies the rotary embedding to heads, first half against second half as Qwen does."""
    cos, sin = (part[:, :, None, :] for part in table)
    first, second = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos + torch.cat((-second, first), dim=-1) * sin


@dataclasses.dataclass(frozen=True)
class Remade:
    """A tensor that is cheap to make: whoever needs it for a backward pass keeps its sources and makes it again.

    Args:
        value: ``make(*sources)``, with its own place in autograd's graph.
        make: elementwise work or a norm; the same sources give the same bits.
        sources: tensors that are kept for the backward pass anyway.
    """

    value: torch.Tensor
    make: Callable[..., torch.Tensor]
    sources: tuple[torch.Tensor, ...]

    @classmethod
    def by(cls, make: Callable[..., torch.Tensor], *sources: torch.Tensor) -> Remade:
        return cls(make(*sources), make, sources)


def project(x: Remade, linear: nn.Linear) -> torch.Tensor:
    """The linear layer of x. Of the two factors of its weight's gradient, x is not kept but made again."""
    out: torch.Tensor = _Projection.apply(x.value, linear.weight, x.make, *x.sources)
    return out


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, make: Any, *sources: torch.Tensor) -> torch.Tensor:
        ctx.make = make
        ctx.save_for_backward(weight, *sources)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_twice()
        weight, *sources = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_weight = grad.t() @ ctx.make(*sources).flatten(0, -2)
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        return grad_x, grad_weight, None, *(None for _ in sources)


def _refuse_twice() -> None:
    if torch.is_grad_enabled():
        raise InputError("drafter: differentiated twice; wanted one backward without `create_graph`")


class Attention(nn.Module):
    """Queries are the blocks' rows; keys and values are context and block rows, through the same projections."""

    def __init__(self, spec: DrafterSpec, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.window = spec.window(layer)
        self.q_proj = nn.Linear(hidden_size, spec.num_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, spec.num_kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, spec.num_kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def forward(self, x_BQE: Remade, context: BlockContext) -> torch.Tensor:
        heads = (-1, self.spec.head_dim)
        q_BQHD = rotate(self.q_norm(project(x_BQE, self.q_proj).unflatten(-1, heads)), context.rotary_blocks)
        k_BQGD = rotate(self.k_norm(project(x_BQE, self.k_proj).unflatten(-1, heads)), context.rotary_blocks)
        k_BSGD = rotate(self.k_norm(self.k_proj(context.context_BSE).unflatten(-1, heads)), context.rotary_context)
        v_BQGD = project(x_BQE, self.v_proj).unflatten(-1, heads)
        v_BSGD = self.v_proj(context.context_BSE).unflatten(-1, heads)
        out_BQHD = anchor_attention(
            q_BQHD,
            torch.cat((k_BSGD, k_BQGD), dim=1),
            torch.cat((v_BSGD, v_BQGD), dim=1),
            context.anchors_BN,
            block_size=self.spec.block_size,
            context_length=k_BSGD.shape[1],
            doc_ids=context.doc_ids_BS,
            window=self.window,
            causal=self.spec.is_causal,
            layout=context.layouts[self.window],
        )
        out_BQE: torch.Tensor = self.o_proj(out_BQHD.flatten(-2))
        return out_BQE


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up; keeps its two inputs only and computes the rest again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _refuse_twice()
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grads[0])
        grad_gate = grads[0] * up
        return torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate), grad_up


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Remade) -> torch.Tensor:
        gate, up = project(x, self.gate_proj), project(x, self.up_proj)
        return project(Remade.by(_SwiGLU.apply, gate, up), self.down_proj)


class Layer(nn.Module):
    """One decoder layer, pre-norm. The context is not normed again."""

    def __init__(self, spec: DrafterSpec, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec, hidden_size, layer)
        self.post_attention_layernorm = RMSNorm(hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(hidden_size, spec.intermediate_size)

    def forward(self, x_BQE: torch.Tensor, context: BlockContext) -> torch.Tensor:
        x_BQE = x_BQE + self.self_attn(Remade.by(self.input_layernorm, x_BQE), context)
        out: torch.Tensor = x_BQE + self.mlp(Remade.by(self.post_attention_layernorm, x_BQE))
        return out


class Drafter(nn.Module):
    """The drafter; embedding and head are the target's and no part of it.

    Args:
        spec: its dimensions.
        hidden_size: the target's hidden size E.
    """

    def __init__(self, spec: DrafterSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(hidden_size * len(spec.target_layer_ids), hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec, hidden_size, layer) for layer in range(spec.num_layers))
        self.norm = RMSNorm(hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        features_BSF: torch.Tensor,
        embeddings_BQE: torch.Tensor,
        positions_BS: torch.Tensor,
        block_positions_BQ: torch.Tensor,
        anchors_BN: torch.Tensor,
        num_valid_B: torch.Tensor,
        doc_ids_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The hidden states [B, Q, E] that the target's head turns into logits."""
        dtype, theta, head_dim = features_BSF.dtype, self.spec.rope_theta, self.spec.head_dim
        context = BlockContext(
            self.hidden_norm(self.fc(features_BSF)),
            rotary(positions_BS, head_dim, theta, dtype),
            rotary(block_positions_BQ, head_dim, theta, dtype),
            anchors_BN,
            doc_ids_BS,
            self._layouts(features_BSF.shape[1], anchors_BN, num_valid_B, doc_ids_BS),
        )
        x_BQE = embeddings_BQE
        for layer in self.layers:
            x_BQE = layer(x_BQE, context)
        out: torch.Tensor = self.norm(x_BQE)
        return out

    def _layouts(
        self, length: int, anchors_BN: torch.Tensor, num_valid_B: torch.Tensor, doc_ids_BS: torch.Tensor | None
    ) -> dict[int | None, AnchorLayout]:
        return {
            window: anchor_layout(
                anchors_BN,
                block_size=self.spec.block_size,
                context_length=length,
                num_valid=num_valid_B,
                doc_ids=doc_ids_BS,
                window=window,
            )
            for window in {self.spec.window(layer) for layer in range(self.spec.num_layers)}
        }


def build(spec: DrafterSpec, hidden_size: int, device: torch.device, dtype: torch.dtype) -> Drafter:
    """A new drafter with random weights, drawn on the device from torch's current generator.

    Linear layers are normal with a standard deviation of 0.02, norms are one.
    """
    with devices.current(device), torch.device(device), devices.default_dtype(dtype):
        drafter = Drafter(spec, hidden_size)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=INITIAL_STD)
    return drafter
