"""What the drafter says while decoding is what it says in training, through the kernels that train it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attention_cases
import pytest
import tinytarget
import torch

from dflash.proposers import DrafterProposer
from dflash.target import Target

CONTEXT = 23


@pytest.fixture(autouse=True)
def _first_config() -> Iterator[None]:
    with attention_cases.fixed_config(lambda configs: configs[0]):
        yield


def _trained(fields: dict[str, Any], features_SF: torch.Tensor, anchors: list[int], target: Target) -> torch.Tensor:
    """Logits [N, P, V] of blocks at these anchors of one sequence; the anchor's token is its position."""
    made = tinytarget.spec(**fields)
    network = tinytarget.build_drafter(made, dtype=torch.float32)
    block = made.drafter.block_size
    anchors_1N = torch.tensor([anchors], dtype=torch.int32)
    ids_NK = torch.full((len(anchors), block), made.drafter.mask_token_id)
    ids_NK[:, 0] = anchors_1N[0]
    positions_NK = anchors_1N[0, :, None] + torch.arange(block)
    with torch.no_grad():
        hidden_1QE = network(
            features_SF[None],
            target.embed(ids_NK.reshape(1, -1)),
            torch.arange(CONTEXT)[None],
            positions_NK.reshape(1, -1),
            anchors_1N,
            torch.tensor([len(anchors)], dtype=torch.int32),
        )
        hidden_NPE = hidden_1QE[0].unflatten(0, ids_NK.shape)[:, 1:]
        return torch.nn.functional.linear(hidden_NPE, target.head_VE)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_causal": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "is_causal": True},
    ],
)
def test_decoding_and_training_agree_on_a_block(fields: dict[str, Any]) -> None:
    made = tinytarget.spec(**fields)
    target = tinytarget.build(made, dtype=torch.float32)
    features_SF = torch.randn(CONTEXT, 96, generator=torch.Generator().manual_seed(4))
    anchors = [1, 4, 5, 11, CONTEXT - 1]
    wanted_NPV = _trained(fields, features_SF, anchors, target)
    proposer = DrafterProposer(tinytarget.build_drafter(made, dtype=torch.float32), target)
    proposer.start(CONTEXT + made.drafter.block_size)
    kept = 0
    for anchor, wanted_PV in zip(anchors, wanted_NPV, strict=True):
        proposer.keep(list(range(kept, anchor)), features_SF[kept:anchor])
        kept = anchor
        torch.testing.assert_close(proposer.logits(anchor), wanted_PV, rtol=1e-4, atol=1e-4)
        assert wanted_PV.std() > 0.5
