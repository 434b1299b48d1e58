"""One forward of Gated DeltaNet, the part of a hybrid target that launches most: chunked, bf16, 32 heads of 128."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEADS, HEAD_DIM = 32, 128


def inputs(tokens: int, device: Any = "cuda") -> dict[str, Any]:
    """Seeded inputs of one sequence."""
    import torch

    generator = torch.Generator(device).manual_seed(tokens)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    return {
        "q": random(1, tokens, HEADS, HEAD_DIM),
        "k": random(1, tokens, HEADS, HEAD_DIM),
        "v": random(1, tokens, HEADS, HEAD_DIM),
        "g": -torch.nn.functional.softplus(random(1, tokens, HEADS).float()),
        "beta": random(1, tokens, HEADS).sigmoid(),
    }


def forward(given: dict[str, Any]) -> Callable[[], Any]:
    """A function that runs the forward on these inputs and returns its output."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def run() -> Any:
        with torch.no_grad():
            return chunk_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True)[0]

    return run
