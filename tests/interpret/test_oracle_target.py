"""The target: features at the right layers, documents kept apart, loading with nothing missing."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import dflashspec
import interpreted
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import drafter, hub, memory, target
from dflash.anchors import Drafting
from dflash.buckets import Batch, Sample, Shape, assemble
from dflash.spec import Spec, TargetSpec
from dflash.target import Target
from kernelbake.errors import InputError

CPU = torch.device("cpu")
DRAFTING = Drafting(4, 256)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted.last_configs():
        yield


def spec(**changes: object) -> TargetSpec:
    return dataclasses.replace(Spec.parse(dflashspec.TINY).target, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny() -> Target:
    return target.random_target(spec(), (0, 1), CPU, torch.float32, seed=0)


def sample(length: int, index: int) -> Sample:
    tokens = np.random.default_rng(index).integers(0, 256, length)
    return Sample(0, index, tokens, np.ones(length, np.bool_))


def batch(lengths: list[int], bucket: int, layout: str) -> Batch:
    samples = [sample(length, index) for index, length in enumerate(lengths)]
    rows = [samples] if layout == "packed" else [[item] for item in samples]
    return assemble(rows, Shape(bucket, 4, len(rows), layout, "float32"), DRAFTING, 0)


def test_layers_behind_the_last_chosen_one_are_not_needed() -> None:
    """Nor may anybody ask for what they would have given."""
    section = {**dflashspec.TINY["target"], "num_layers": 4}
    longer = dataclasses.replace(Spec.parse({**dflashspec.TINY, "target": section}).target, model="random")
    asked = batch([40, 17], 48, "padded")
    whole = target.load_target(longer, (0, 1), CPU, torch.float32, seed=3)
    ended = target.load_target(longer, (0, 1), CPU, torch.float32, seed=3, whole=False)
    assert len(whole.model.model.layers) == 4
    assert len(ended.model.model.layers) == 2
    assert ended.num_parameters < whole.num_parameters
    assert torch.equal(ended.features(asked), whole.features(asked))
    ended.appends_last = True
    with pytest.raises(InputError, match="all of its layers"):
        ended.features(asked)


@pytest.mark.parametrize("lengths", [[65, 30], [9, 4, 7, 40]])
def test_packed_features_are_those_of_each_document_alone(tiny: Target, lengths: list[int]) -> None:
    """Neither the recurrence, nor the convolution, nor attention, nor positions cross a boundary."""
    packed = tiny.features(batch(lengths, 96, "packed"))
    begin = 0
    for index, length in enumerate(lengths):
        alone = assemble([[sample(length, index)]], Shape(96, 4, 1, "padded", "float32"), DRAFTING, 0)
        wanted = tiny.features(alone)[:, :length]
        found = packed[:, begin : begin + length]
        assert (found - wanted).norm() <= 2e-5 * wanted.norm()
        begin += length
    assert packed.isfinite().all()


def test_without_boundaries_the_documents_would_mix(tiny: Target) -> None:
    """The test above can fail: the same row without boundaries has other features from the second document on."""
    packed = batch([65, 30], 96, "packed")
    apart = tiny.features(packed)
    mixed = tiny.features(dataclasses.replace(packed, doc_ids_BS=None, cu_seqlens_D=None, chunk_indices=None))
    assert torch.allclose(apart[:, :65], mixed[:, :65], atol=1e-5)
    assert (apart[:, 65:95] - mixed[:, 65:95]).norm() > 0.01 * apart[:, 65:95].norm()


def test_padding_changes_no_feature_before_it(tiny: Target) -> None:
    short, long = (batch([40], bucket, "padded") for bucket in (64, 128))
    assert torch.allclose(tiny.features(short)[:, :40], tiny.features(long)[:, :40], atol=1e-5)


def test_features_are_the_outputs_of_the_chosen_layers(tiny: Target) -> None:
    """Side by side in the order of the ids; the same as transformers' own hidden states, one further on."""
    padded = batch([64], 64, "padded")
    states = tiny._model.model(input_ids=padded.input_ids_BS, output_hidden_states=True).hidden_states
    features = tiny.features(padded)
    assert torch.allclose(features[..., :64], states[1], atol=1e-5)
    assert features.shape == (1, 64, 128)


def test_features_take_no_gradient(tiny: Target) -> None:
    assert not tiny.features(batch([8], 32, "padded")).requires_grad
    assert not any(parameter.requires_grad for parameter in tiny._model.parameters())


def test_the_same_seed_gives_the_same_weights() -> None:
    one, same, other = (
        target.random_target(spec(), (0,), CPU, torch.float32, seed=seed).head_VE.clone() for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_moe"])
def test_mixtures_of_experts_run(architecture: str) -> None:
    section = copy.deepcopy(dflashspec.TINY)
    section["target"] |= {
        "architecture": architecture,
        "experts": {"num": 4, "per_token": 2, "intermediate_size": 16, "shared_intermediate_size": 16},
    }
    model = target.random_target(Spec.parse(section).target, (0, 1), CPU, torch.float32, seed=0)
    features = model.features(batch([20, 9], 32, "packed"))
    alone = model.features(batch([20], 32, "padded"))
    assert torch.allclose(features[:, :20], alone[:, :20], atol=1e-5)


# ---------------------------------------------------------------------------------------------- loading


def saved(folder: Path, wanted: TargetSpec) -> Path:
    model = target.random_target(wanted, (0,), CPU, torch.float32, seed=7)
    model._model.save_pretrained(folder)
    return folder


def load(folder: Path, **changes: object) -> Target:
    found = hub.resolve(str(folder), spec(**changes))
    return target.load_target(found, (0,), CPU, torch.float32, seed=0)


@pytest.mark.parametrize("tie", [False, True])
def test_a_folder_gives_its_weights_and_dimensions(
    tmp_path: Path, tie: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    made = target.random_target(spec(tie_embeddings=tie), (0,), CPU, torch.float32, seed=7)
    made._model.save_pretrained(tmp_path)
    found = hub.resolve(str(tmp_path), spec(num_layers=4))
    assert found == spec(model=str(tmp_path), tie_embeddings=tie)
    capfd.readouterr()
    loaded = target.load_target(found, (0,), CPU, torch.float32, seed=0)
    assert "Loading weights" not in capfd.readouterr().err  # a bar has no place in a log
    assert torch.equal(loaded.head_VE, made.head_VE)
    assert torch.equal(loaded.embed(torch.arange(5)), made.embed(torch.arange(5)))
    padded = batch([20], 32, "padded")
    assert torch.equal(loaded.features(padded), made.features(padded))


def rewrite(folder: Path, drop: str = "", rename: tuple[str, str] = ("", "")) -> None:
    tensors = {
        name.replace(*rename) if rename[0] else name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name != drop
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_head_that_is_not_in_the_file_is_the_embedding(tmp_path: Path) -> None:
    saved(tmp_path, spec(tie_embeddings=True))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert torch.equal(loaded.head_VE, loaded.embed(torch.arange(264)))


@pytest.mark.parametrize("lacking", ["lm_head.weight", "model.layers.0.linear_attn.A_log"])
def test_a_missing_weight_is_refused_by_name(tmp_path: Path, lacking: str) -> None:
    saved(tmp_path, spec())
    rewrite(tmp_path, drop=lacking)
    with pytest.raises(InputError, match="not those of its `config.json`: 1 missing") as caught:
        load(tmp_path)
    assert caught.value.reasons == (f"`{lacking}` is missing",)


def test_weights_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    """Beside a missing one: another vocabulary, a layer too many, the scale of weights that were quantized."""
    saved(tmp_path, spec())
    rewrite(tmp_path, drop="model.norm.weight")
    path = tmp_path / "model.safetensors"
    more = {
        "lm_head.weight": torch.zeros(100, 64),
        "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1),
        "model.layers.2.mlp.up_proj.weight": torch.zeros(64, 64),
        "mtp.fc.weight": torch.zeros(64, 64),
    }
    save_file({**load_file(path), **more}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match="1 missing, 1 of another shape, 2 without a place in the model") as caught:
        load(tmp_path)
    assert caught.value.reasons == (
        "`model.norm.weight` is missing",
        "`lm_head.weight` has shape (100, 64); wanted (264, 64)",
        "`model.layers.0.mlp.up_proj.weight_scale_inv` has no place in the model",
        "`model.layers.2.mlp.up_proj.weight` has no place in the model",
    )


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_moe"])
def test_experts_come_from_the_files(tmp_path: Path, architecture: str) -> None:
    """Files hold them one by one, transformers all in one tensor: none is missing and none without a place."""
    section = copy.deepcopy(dflashspec.TINY)
    section["target"] |= {
        "architecture": architecture,
        "experts": {"num": 4, "per_token": 2, "intermediate_size": 16, "shared_intermediate_size": 16},
    }
    wanted = Spec.parse(section).target
    made = target.random_target(wanted, (0, 1), CPU, torch.float32, seed=7)
    made._model.save_pretrained(tmp_path)
    loaded = target.load_target(hub.resolve(str(tmp_path), wanted), (0, 1), CPU, torch.float32, seed=0)
    padded = batch([20], 32, "padded")
    assert torch.equal(loaded.features(padded), made.features(padded))


@pytest.mark.parametrize("part", ["config", "text_config"])
def test_a_quantized_target_is_refused_before_anything_is_loaded(tmp_path: Path, part: str) -> None:
    """Its layers are other modules with kernels of their own, of which neither plan nor memory prediction knows."""
    saved(tmp_path, spec())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    whole = config if part == "config" else {"model_type": "qwen3_5", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(InputError, match="are quantized \\(`fp8`\\); wanted weights in bfloat16 or float32"):
        hub.resolve(str(tmp_path), spec())


def test_the_text_part_of_a_multimodal_checkpoint_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, spec())
    plain = load(tmp_path).head_VE.clone()
    rewrite(tmp_path, rename=("model.", "model.language_model."))
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert torch.equal(load(tmp_path).head_VE, plain)


def test_what_cannot_be_loaded_names_the_choices(tmp_path: Path) -> None:
    for model in (str(tmp_path), "no such model"):
        with pytest.raises(InputError, match="wanted `random`, a folder"):
            hub.resolve(model, spec())
    saved(tmp_path, spec())
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match="cannot be loaded; wanted `random`"):
        load(tmp_path)


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    with pytest.raises(InputError, match="model type `llama`; wanted one of `qwen3_5`"):
        hub.resolve(str(tmp_path), spec())


def test_an_irregular_pattern_of_layers_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, spec(num_layers=4, full_attention_interval=2))
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"] = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="layer `2` .* breaks the pattern"):
        hub.resolve(str(tmp_path), spec())


def test_the_size_is_known_before_anything_is_made() -> None:
    wanted = spec(num_layers=8, full_attention_interval=4)
    made = target.random_target(wanted, (0,), CPU, torch.float32, seed=0)
    assert target.parameter_bytes(wanted, torch.float32) == made.num_parameters * 4


def test_a_run_that_does_not_fit_lists_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device target and drafter are added up; on two, each has its own, and the head is there twice."""
    whole = Spec.parse(dflashspec.TINY)
    needs = memory.needs(whole, CPU, CPU)
    network = drafter.build(whole.drafter, 64, CPU, torch.float32)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert [need.num_bytes for need in needs[1:]] == [4 * count, 16 * count]
    total = sum(need.num_bytes for need in needs)
    monkeypatch.setattr(memory.devices, "free_bytes", lambda device: total)
    memory.check(needs)
    monkeypatch.setattr(memory.devices, "free_bytes", lambda device: total - 1)
    with pytest.raises(InputError, match=f"cpu: {total:,} bytes .* needed, {total - 1:,} bytes") as caught:
        memory.check(needs)
    assert len(caught.value.reasons) == 4
    apart = memory.needs(whole, CPU, torch.device("meta"))
    assert apart[-1].num_bytes == 264 * 64 * 4
    memory.check(apart)


@pytest.mark.parametrize(("terms", "dropped"), [(["ce"], 2), (["kl"], 0)])
def test_what_the_target_holds_is_predicted_of_the_layers_that_training_keeps(terms: list[str], dropped: int) -> None:
    """Layers behind the last whose output is read are dropped, unless the loss reads the last hidden state."""
    section = copy.deepcopy(dflashspec.TINY)
    section["target"] |= {"num_layers": 4, "full_attention_interval": 2}
    section["drafter"]["target_layer_ids"] = [0, 1]
    whole = Spec.parse({**section, "loss": {"terms": terms}})
    ids = whole.drafter.target_layer_ids
    made = target.load_target(whole.target, ids, CPU, torch.float32, seed=0, whole=not dropped)
    assert len(made.model.model.layers) == 4 - dropped
    assert memory.needs(whole, CPU, CPU)[0].num_bytes == made.num_parameters * 4


def test_a_target_that_does_not_fit_is_refused_with_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = target.parameter_bytes(spec(), torch.float32)
    monkeypatch.setattr(target.devices, "free_bytes", lambda device: 1000)
    with pytest.raises(InputError, match=rf"take {needed:,} bytes .* has 1,000 bytes"):
        target.load_target(spec(), (0,), CPU, torch.float32, seed=0)
