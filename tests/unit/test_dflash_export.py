"""The exported drafter has the names, shapes and keys that engines serve; anything else is refused, all at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinytarget
import torch
from safetensors.torch import load_file, save_file

from dflash import checkpoint, export
from dflash.spec import Spec
from kernelbake.errors import InputError

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": True}


def exported(folder: Path, spec: Spec) -> Path:
    checkpoint.export(folder / "drafter", tinytarget.build_drafter(spec, dtype=torch.float32), spec)
    return folder / "drafter"


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / export.CONFIG).read_text())
    change(config)
    (folder / export.CONFIG).write_text(json.dumps(config))
    return folder


def reasons(folder: Path) -> tuple[str, ...]:
    with pytest.raises(InputError, match=r"^drafter `.*`: \d+ faults?") as caught:
        export.load(folder)
    assert caught.value.exit_code == 2
    return caught.value.reasons


@pytest.mark.parametrize("fields", [{}, SLIDING])
def test_what_is_exported_is_read_back(tmp_path: Path, fields: dict[str, Any]) -> None:
    spec = tinytarget.spec(**fields)
    served = export.load(exported(tmp_path, spec))
    assert served.spec == spec.drafter
    served.check_target(spec.target)
    before = tinytarget.build_drafter(spec, dtype=torch.float32).state_dict()
    after = served.build(torch.device("cpu"), torch.float32).state_dict()
    assert set(before) == set(after)
    for name, weight in before.items():
        assert torch.equal(after[name], weight.bfloat16().float())


def test_the_list_of_names_and_shapes(tmp_path: Path) -> None:
    tensors = load_file(exported(tmp_path, tinytarget.spec()) / export.WEIGHTS)
    layer = {
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
        "self_attn.q_proj": (256, 32),
        "self_attn.k_proj": (128, 32),
        "self_attn.v_proj": (128, 32),
        "self_attn.o_proj": (32, 256),
        "self_attn.q_norm": (64,),
        "self_attn.k_norm": (64,),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    wanted = {"fc.weight": (32, 96), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    wanted |= {f"layers.{number}.{name}.weight": shape for number in range(2) for name, shape in layer.items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("fields", [{}, SLIDING])
def test_transformers_reads_the_configuration_and_knows_every_layer(tmp_path: Path, fields: dict[str, Any]) -> None:
    from transformers import AutoConfig, Qwen3Model

    folder = exported(tmp_path, tinytarget.spec(**fields))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        theirs = Qwen3Model(config).state_dict()
    ours = load_file(folder / export.WEIGHTS)
    shared = {name: tuple(tensor.shape) for name, tensor in theirs.items() if name != "embed_tokens.weight"}
    assert set(ours) - set(shared) == {"fc.weight", "hidden_norm.weight"}
    assert {name: tuple(ours[name].shape) for name in shared} == shared
    assert config.layer_types == list(tinytarget.spec(**fields).drafter.layer_types)
    assert config.sliding_window == fields.get("sliding_window")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_one_token_fewer_is_speculated_than_a_block_has_positions(tmp_path: Path, block_size: int) -> None:
    folder = exported(tmp_path, tinytarget.spec(block_size=block_size))
    assert export.load(folder).num_speculative_tokens == block_size - 1
    config = json.loads((folder / export.CONFIG).read_text())
    assert config["num_speculative_tokens"] == block_size - 1
    assert config["block_size"] == config["dflash_config"]["block_size"] == block_size
    changed(folder, lambda config: config.update(num_speculative_tokens=block_size))
    why = "one fewer than the block size, as the first position is the anchor"
    assert reasons(folder) == (
        f"`config.json`: num_speculative_tokens: found `{block_size}`; wanted `{block_size - 1}`, {why}",
    )


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda c: c.pop("is_causal"), "is_causal: missing; wanted `true` or `false`"),
        (lambda c: c["dflash_config"].update(causal=True), "dflash_config.causal: found `True`; wanted `False`"),
        (lambda c: c["dflash_config"].pop("block_size"), "dflash_config.block_size: found `None`; wanted `5`"),
        (lambda c: c.update(block_size=6, num_speculative_tokens=5), "dflash_config.block_size: found `5`; wanted `6`"),
        (lambda c: c.pop("block_size"), "block_size: missing"),
        (lambda c: c.pop("dflash_config"), "dflash_config: missing; wanted a mapping"),
        (lambda c: c.update(architectures=["Qwen3ForCausalLM"]), "architectures: found `['Qwen3ForCausalLM']`"),
        (lambda c: c.update(model_type="qwen3_5"), "model_type: found `qwen3_5`; wanted `qwen3`"),
        (lambda c: c.update(partial_rotary_factor=0.25), "partial_rotary_factor: wanted none"),
        (
            lambda c: c["rope_parameters"].update(mrope_section=[1, 2, 3]),
            "rope_parameters.mrope_section: wanted none",
        ),
        (
            lambda c: c["rope_parameters"].update(partial_rotary_factor=1.0),
            "rope_parameters.partial_rotary_factor: wanted none",
        ),
        (lambda c: c.update(rope_theta=1e6), "rope_parameters.rope_theta: wanted `1e+06`"),
        (lambda c: c["rope_parameters"].update(rope_type="yarn"), "rope_parameters.rope_type: found `yarn`"),
        (lambda c: c.update(rope_scaling={"factor": 2}), "rope_scaling: wanted `null`"),
        (lambda c: c["dflash_config"].update(mask_token_id=61), "dflash_config.mask_token_id: found `61`"),
        (
            lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 4]),
            "dflash_config.target_layer_ids.2: found `4`",
        ),
        (lambda c: c.pop("num_target_layers"), "num_target_layers: missing"),
        (lambda c: c["dflash_config"].update(num_target_layers=9), "dflash_config.num_target_layers: found `9`"),
        (lambda c: c.update(sliding_window=6), "sliding_window: found `6`; wanted a window exactly if a layer slides"),
        (lambda c: c.update(use_sliding_window=True), "use_sliding_window: found `True`; wanted `False`"),
        (lambda c: c.update(layer_types=["full_attention"]), "layer_types: found `['full_attention']`"),
        (lambda c: c.update(layer_types=["linear_attention"] * 2), "layer_types: found"),
        (lambda c: c.update(num_key_value_heads=3), "num_attention_heads: found `4`; wanted a multiple of `3`"),
        (lambda c: c.update(attention_bias=True), "attention_bias: found `True`"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings: found `True`"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act: found `gelu`"),
        (lambda c: c.update(dtype="float64"), "dtype: found `'float64'`"),
        (lambda c: c.pop("max_position_embeddings"), "max_position_embeddings: missing"),
    ],
)
def test_each_fault_of_the_configuration(tmp_path: Path, change: Callable[[dict[str, Any]], Any], wanted: str) -> None:
    found = reasons(changed(exported(tmp_path, tinytarget.spec()), change))
    named = [reason for reason in found if reason.startswith("`config.json`")]
    assert len(named) == 1
    assert named[0].removeprefix("`config.json`: ").startswith(wanted)


def test_all_faults_at_once(tmp_path: Path) -> None:
    folder = exported(tmp_path, tinytarget.spec())
    tensors = load_file(folder / export.WEIGHTS)
    tensors["model.norm.weight"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()
    tensors["hidden_norm.weight"] = tensors["hidden_norm.weight"].float()
    tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"] * float("nan")
    save_file(tensors, folder / export.WEIGHTS)
    changed(folder, lambda config: config.pop("is_causal"))
    assert reasons(folder) == (
        "`config.json`: is_causal: missing; wanted `true` or `false`",
        "`model.safetensors`: `norm.weight` is missing",
        "`model.safetensors`: `model.norm.weight` is unknown",
        "`model.safetensors`: `fc.weight` has shape (32, 64); wanted (32, 96)",
        "`model.safetensors`: `hidden_norm.weight` is float32; wanted `bfloat16`",
        "`model.safetensors`: `layers.0.mlp.up_proj.weight` holds numbers that are not finite",
    )


@pytest.mark.parametrize("file", [export.CONFIG, export.WEIGHTS])
def test_files_that_cannot_be_read(tmp_path: Path, file: str) -> None:
    folder = exported(tmp_path, tinytarget.spec())
    (folder / file).write_bytes(b"{")
    with pytest.raises(InputError, match="cannot be read"):
        export.load(folder)
    (folder / file).unlink()
    with pytest.raises(InputError, match="cannot be read"):
        export.load(folder)


def test_a_configuration_that_is_no_object(tmp_path: Path) -> None:
    folder = exported(tmp_path, tinytarget.spec())
    (folder / export.CONFIG).write_text("[]")
    with pytest.raises(InputError, match=r"`config.json` is no object"):
        export.load(folder)


def test_another_target_is_refused_with_every_difference(tmp_path: Path) -> None:
    served = export.load(changed(exported(tmp_path, tinytarget.spec()), lambda config: config.update(vocab_size=99)))
    other = tinytarget.spec("qwen3_next").target
    with pytest.raises(InputError, match="made for another target than `random`") as caught:
        served.check_target(other)
    assert caught.value.reasons == ("vocab_size: `99`; the target has `61`",)
