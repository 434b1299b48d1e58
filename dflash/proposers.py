"""What may come next: the drafter, or a copy of what came before. Loads torch.

Legend of shape suffixes: S context length, T new context tokens, K block size, P = K − 1 proposed tokens, E hidden
size, F = E times the number of target layers, H heads, G kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from dflash import devices
from dflash.drafter import Attention, Drafter, Remade, rotary, rotate
from dflash.target import Target

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Tokens that may follow the anchor.

    Args:
        tokens: one after the other.
        probs_PV: distributions from which they were drawn; None if each is certain, as when the likeliest is taken.
    """

    tokens: list[int]
    probs_PV: torch.Tensor | None = None


class Proposer(Protocol):
    """Proposes; it is told what is kept."""

    def start(self, capacity: int) -> None:
        """A new sequence of at most ``capacity`` tokens."""
        ...

    def keep(self, tokens: Sequence[int], features_TF: torch.Tensor) -> None:
        """Tokens that the sequence now holds, and what the target said of them; the anchor is not among them yet."""
        ...

    def propose(self, anchor: int, limit: int, temperature: float, generator: torch.Generator) -> Proposal:
        """At most ``limit`` tokens after the anchor, which follows what is kept."""
        ...


# ---------------------------------------------------------------------------------------------- the drafter


@dataclasses.dataclass(frozen=True)
class _Context:
    """Keys and values of the context in one layer, [1, G, capacity, D]; the first ``length`` are filled."""

    k: torch.Tensor
    v: torch.Tensor


class DrafterProposer:
    """The drafter on one sequence; keys and values of the context are computed once.

    A block is always whole, as in training, even where fewer of its tokens are asked for.

    Args:
        drafter: the drafter, on any device.
        target: for embedding and head.
    """

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self._drafter = drafter
        self._target = target
        self._contexts: list[_Context] = []
        self._length = 0

    @property
    def _weight(self) -> torch.Tensor:
        return self._drafter.fc.weight

    def start(self, capacity: int) -> None:
        spec = self._drafter.spec
        shape = (1, spec.num_kv_heads, capacity, spec.head_dim)
        empty = self._weight.new_empty
        self._contexts = [_Context(empty(shape), empty(shape)) for _ in self._drafter.layers]
        self._length = 0

    def keep(self, tokens: Sequence[int], features_TF: torch.Tensor) -> None:
        weight, here = self._weight, slice(self._length, self._length + len(tokens))
        with torch.no_grad(), devices.current(weight.device):
            features_1TF = features_TF[None].to(weight.device, weight.dtype)
            context_1TE = self._drafter.hidden_norm(self._drafter.fc(features_1TF))
            table = self._table(here.start, here.stop)
            for layer, context in zip(self._drafter.layers, self._contexts, strict=True):
                k_1GTD, v_1GTD = _keys_values(layer.self_attn, context_1TE, table)
                context.k[:, :, here], context.v[:, :, here] = k_1GTD, v_1GTD
        self._length = here.stop

    def propose(self, anchor: int, limit: int, temperature: float, generator: torch.Generator) -> Proposal:
        logits_PV = self.logits(anchor)[:limit]
        if temperature == 0:
            return Proposal(logits_PV.argmax(dim=-1).tolist())
        probs_PV = probabilities(logits_PV, temperature)
        return Proposal(pick(probs_PV, uniforms(limit, generator, probs_PV.device)).tolist(), probs_PV)

    def logits(self, anchor: int) -> torch.Tensor:
        """Logits [P, V] of the positions after the anchor, on the target's device."""
        spec, target = self._drafter.spec, self._target
        ids_1K = torch.tensor([[anchor] + [spec.mask_token_id] * (spec.block_size - 1)], device=target.device)
        with torch.no_grad(), devices.current(target.device):
            x_1KE = target.embed(ids_1K).to(self._weight.device, self._weight.dtype)
        with torch.no_grad(), devices.current(self._weight.device):
            table = self._table(self._length, self._length + spec.block_size)
            for layer, context in zip(self._drafter.layers, self._contexts, strict=True):
                x_1KE = x_1KE + self._attend(layer.self_attn, layer.input_layernorm(x_1KE), context, table)
                x_1KE = x_1KE + layer.mlp(Remade.by(layer.post_attention_layernorm, x_1KE))
            hidden_PE = self._drafter.norm(x_1KE)[0, 1:]
        with torch.no_grad(), devices.current(target.device):
            head_VE = target.head_VE
            return F.linear(hidden_PE.to(head_VE.device, head_VE.dtype), head_VE)

    def _attend(self, attention: Attention, x_1KE: torch.Tensor, context: _Context, table: Rotary) -> torch.Tensor:
        heads = (-1, attention.spec.head_dim)
        q_1HKD = rotate(attention.q_norm(attention.q_proj(x_1KE).unflatten(-1, heads)), table).transpose(1, 2)
        k_1GKD, v_1GKD = _keys_values(attention, x_1KE, table)
        out_1HKD = F.scaled_dot_product_attention(
            q_1HKD,
            torch.cat((context.k[:, :, : self._length], k_1GKD), dim=2),
            torch.cat((context.v[:, :, : self._length], v_1GKD), dim=2),
            attn_mask=self._mask(attention.window, q_1HKD.device),
            enable_gqa=True,
        )
        out_1KE: torch.Tensor = attention.o_proj(out_1HKD.transpose(1, 2).flatten(-2))
        return out_1KE

    def _mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which keys each row sees [K, S + K]: context within the window, and its block or what precedes there."""
        spec, length = self._drafter.spec, self._length
        if window is None and not spec.is_causal:
            return None
        rows_K1 = torch.arange(spec.block_size, device=device)[:, None]
        context_S = torch.arange(length, device=device)
        oldest_K1 = length + rows_K1 - (window if window is not None else length + spec.block_size)
        block_K = torch.arange(spec.block_size, device=device)
        in_block_KK = block_K <= rows_K1 if spec.is_causal else torch.ones_like(block_K <= rows_K1)
        return torch.cat((context_S > oldest_K1, in_block_KK), dim=1)

    def _table(self, start: int, stop: int) -> Rotary:
        positions_1T = torch.arange(start, stop, device=self._weight.device)[None]
        spec = self._drafter.spec
        return rotary(positions_1T, spec.head_dim, spec.rope_theta, self._weight.dtype)


def _keys_values(attention: Attention, x_1TE: torch.Tensor, table: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, G, T, D]."""
    heads = (-1, attention.spec.head_dim)
    k_1TGD = rotate(attention.k_norm(attention.k_proj(x_1TE).unflatten(-1, heads)), table)
    return k_1TGD.transpose(1, 2), attention.v_proj(x_1TE).unflatten(-1, heads).transpose(1, 2)


# ---------------------------------------------------------------------------------------------- copying


class CopyProposer:
    """Copies what followed the last occurrence of the longest n-gram that ends in the anchor.

    A copy that reaches the anchor goes on with itself, so that a loop is proposed for as long as asked for.

    Args:
        count: tokens proposed at most.
        longest: of the n-grams looked for.
    """

    def __init__(self, count: int, longest: int = 3) -> None:
        self._count = count
        self._longest = longest
        self._tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}

    def start(self, capacity: int) -> None:
        self._tokens, self._following = [], {}

    def keep(self, tokens: Sequence[int], features_TF: torch.Tensor) -> None:
        for token in tokens:
            self._index()
            self._tokens.append(token)

    def propose(self, anchor: int, limit: int, temperature: float, generator: torch.Generator) -> Proposal:
        known = self._tokens
        tail = (*known[-self._longest :], anchor)[-self._longest :]
        self._index()
        for start in range(len(tail)):
            found = self._following.get(tail[start:])
            if found is not None:
                period = [*known[found : found + self._count], anchor]
                return Proposal([period[place % len(period)] for place in range(min(limit, self._count))])
        return Proposal([])

    def _index(self) -> None:
        """Every n-gram that ends with the last kept token is now followed by a token, at the end."""
        end = len(self._tokens)
        for size in range(1, min(self._longest, end) + 1):
            self._following[tuple(self._tokens[end - size :])] = end


# ---------------------------------------------------------------------------------------------- chance


def probabilities(logits_PV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Distributions at a temperature above 0."""
    return torch.softmax(logits_PV.float() / temperature, dim=-1)


def uniforms(count: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Numbers in [0, 1), drawn on the CPU so that they are the same on every device."""
    return torch.rand(count, generator=generator, dtype=torch.float64).to(device)


def pick(weights_PV: torch.Tensor, uniforms_P: torch.Tensor) -> torch.Tensor:
    """An index of each row, with probability in proportion to its weight; never one of weight 0."""
    sums_PV = weights_PV.double().cumsum(dim=-1)
    total_P = sums_PV[:, -1]
    at_P = torch.minimum(uniforms_P * total_P, torch.nextafter(total_P, torch.zeros_like(total_P)))
    return torch.searchsorted(sums_PV, at_P[:, None], right=True)[:, 0]
