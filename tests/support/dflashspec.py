"""A tiny section for the dflash plug-in, and sections made from it with one thing changed."""

from __future__ import annotations

import copy
from typing import Any

TINY: dict[str, Any] = {
    "target": {
        "model": "random",
        "architecture": "qwen3_5",
        "num_layers": 2,
        "full_attention_interval": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 264,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "drafter": {
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "intermediate_size": 64,
        "block_size": 4,
        "mask_token_id": 256,
        "target_layer_ids": [0, 1],
    },
    "axes": {"buckets": [32, 64], "anchors": [4, 8], "dtype": "float32", "layouts": ["padded"]},
    "data": {"source": "python-stdlib"},
}


def changed(dotted: str, value: Any) -> dict[str, Any]:
    """The tiny section with one field replaced; ``...`` removes it."""
    section = copy.deepcopy(TINY)
    *parents, last = dotted.split(".")
    here = section
    for name in parents:
        here = here[name]
    if value is ...:
        del here[last]
    else:
        here[last] = value
    return section
