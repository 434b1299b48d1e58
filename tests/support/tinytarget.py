"""Tiny hybrid targets and drafters on the CPU, with transformers' own torch arithmetic instead of Triton kernels."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import drafter, target
from dflash.drafter import Drafter
from dflash.spec import Spec
from dflash.target import Target

VOCAB = 61
EXPERTS = {"num": 4, "per_token": 2, "intermediate_size": 24, "shared_intermediate_size": 24}
DRAFTER = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 48, "block_size": 5}


def spec(architecture: str = "qwen3_5", **drafter_fields: Any) -> Spec:
    """A target of three layers, the middle one attention, and a drafter of two."""
    section: dict[str, Any] = {
        "target": {
            "model": "random",
            "architecture": architecture,
            "num_layers": 3,
            "full_attention_interval": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "vocab_size": VOCAB,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            **({} if architecture == "qwen3_5" else {"experts": EXPERTS}),
        },
        "drafter": {**DRAFTER, "mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1, 2], **drafter_fields},
        "axes": {"buckets": [64], "anchors": [8], "dtype": "float32"},
    }
    return Spec.parse(section)


@functools.cache
def modeling(architecture: str) -> Any:
    """transformers' modeling module, a second time: as if no kernel package were there, and in fp64 throughout.

    Its torch implementations compute in fp32 whatever they are given; in fp64 the order in which numbers are added up
    cannot decide which token is chosen.
    """
    package = f"transformers.models.{architecture}"
    found = importlib.util.find_spec(f"{package}.modeling_{architecture}")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text()
    for narrow, wide in (("torch.float32", "torch.float64"), (".float()", ".double()")):
        assert narrow in source
        source = source.replace(narrow, wide)
    module = types.ModuleType(f"{package}.modeling_in_fp64")
    module.__package__, module.__file__ = package, found.origin
    sys.modules[module.__name__] = module
    with pytest.MonkeyPatch.context() as patch:
        for kernels in ("fla", "causal_conv1d"):
            patch.setitem(sys.modules, kernels, None)  # makes its import fail
        exec(compile(source, found.origin, "exec"), vars(module))
    return module


def build(made: Spec, seed: int = 0, dtype: torch.dtype = torch.float64) -> Target:
    """A target whose random weights are large enough for its choices to be clear."""
    prefix = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}[made.target.architecture]
    torch.manual_seed(seed)
    model = getattr(modeling(made.target.architecture), f"{prefix}ForCausalLM")(target.model_config(made.target))
    model.config._experts_implementation = "eager"
    spread(model)
    return Target(model.to(dtype), made.drafter.target_layer_ids, "tiny")


def spread(model: torch.nn.Module) -> None:
    """Draws all matrices anew, so that no activation vanishes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.3 / parameter.shape[-1] ** 0.5)


def build_drafter(made: Spec, seed: int = 1, dtype: torch.dtype = torch.float64) -> Drafter:
    torch.manual_seed(seed)
    network = drafter.build(made.drafter, made.target.hidden_size, torch.device("cpu"), dtype)
    spread(network)
    return network


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 40 tokens."""
    random = torch.Generator().manual_seed(seed)
    lengths = [1 + number * 39 // max(count - 1, 1) for number in range(count)]
    return [torch.randint(0, VOCAB - 1, (length,), generator=random).tolist() for length in lengths]
