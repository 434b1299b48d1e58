"""What a block may see, as a plain loop over its definition says it: of reference, kernel and flex attention.

The loop knows tokens, blocks and documents, and no tensor operation, so that it shares no slip with what it judges.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import attention_cases as cases
import pytest
import torch
from attention_cases import AttentionCase
from torch.nn.attention import flex_attention

from dflash.attention.api import anchor_attention
from dflash.attention.reference import reference_attention, visible_keys

KEYS = 64
"""Keys of every case here: as many as a head has dimensions, so that a value can be the name of its key."""

CASES = [
    AttentionCase(context_length=40, num_blocks=6, block_size=4),
    AttentionCase(context_length=40, num_blocks=6, block_size=4, packed=True, padding=True, seed=1),
    AttentionCase(context_length=40, num_blocks=6, block_size=4, causal=True, window=9, padding=True, seed=2),
    AttentionCase(context_length=16, num_blocks=3, block_size=16, packed=True, window=20, seed=3),
    AttentionCase(context_length=43, num_blocks=3, block_size=7, causal=True, packed=True, seed=4),
]


@pytest.fixture(autouse=True)
def _first_config() -> Iterator[None]:
    with cases.fixed_config(lambda configs: configs[0]):
        yield


def seen(case: AttentionCase, entry: int, given: dict[str, Any]) -> list[list[bool]]:
    """[Q][S + Q]: whether a row of a batch entry sees a key."""
    anchors: Sequence[int] = given["anchors"][entry].tolist()
    used = int(given["num_valid"][entry]) if "num_valid" in given else len(anchors)
    documents = given["doc_ids"][entry].tolist() if "doc_ids" in given else [0] * case.context_length
    table = []
    for block, anchor in enumerate(anchors):
        for slot in range(case.block_size):
            row = []
            for token in range(case.context_length):
                far = case.window is not None and anchor + slot - token >= case.window
                row.append(token < anchor and documents[token] == documents[anchor] and not far)
            for other, place in itertools.product(range(len(anchors)), range(case.block_size)):
                row.append(other == block and not (case.causal and place > slot))
            table.append([sees and block < used for sees in row])
    return table


@pytest.mark.parametrize("case", CASES)
def test_the_references_mask_is_that_of_the_loop(case: AttentionCase) -> None:
    given = cases.options(case)
    names = ("anchors", "block_size", "context_length", "num_valid", "doc_ids", "window", "causal")
    mask = visible_keys(**{name: given[name] for name in names if name in given})
    assert mask[0].tolist() == seen(case, 0, given)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_weight_to_exactly_the_keys_of_the_loop(case: AttentionCase) -> None:
    """Value n is the n-th unit vector, so that a row's output is its weights; without blocks in use there are none."""
    given = cases.options(case)
    q, k, _, _ = cases.tensors(case, torch.float32)
    assert k.shape[1] == case.head_dim == KEYS
    names = torch.eye(KEYS)[None, :, None]
    weights = anchor_attention(q, k, names, **given)[0]
    table = torch.tensor(seen(case, 0, given))
    for head in range(case.group):
        assert torch.equal(weights[:, head] > 0, table)
    assert torch.allclose(weights.sum(-1), table.any(-1)[:, None].float().expand(-1, case.group), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_three_backends_agree_and_none_has_a_nan(case: AttentionCase) -> None:
    """Kernel, reference and torch's flex attention under the loop's mask, padding slots included."""
    given = cases.options(case)
    q, k, v, _ = cases.tensors(case, torch.float32)
    table = torch.tensor(seen(case, 0, given))
    mask = flex_attention.create_block_mask(
        lambda batch, head, row, key: table[row, key], 1, None, *table.shape, device="cpu"
    )
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        wanted = flex_attention.flex_attention(*heads_first, block_mask=mask, enable_gqa=True).transpose(1, 2)
    assert wanted.isfinite().all()
    for attention in (anchor_attention, reference_attention):
        found = attention(q, k, v, **given)
        assert found.isfinite().all()
        assert cases.error(found, wanted) <= 1e-5
