"""The plug-in's section of a manifest: every fault with its dotted path, computed layers, cases."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import dflashspec
import pytest

from dflash import workload as workload_module
from dflash.spec import Spec, computed_layer_ids
from dflash.workload import WORKLOAD
from kernelbake import workload
from kernelbake.errors import InputError, PlanError
from kernelbake.workload import FaultsError


def paths(section: dict[str, Any]) -> list[str]:
    with pytest.raises(FaultsError) as caught:
        WORKLOAD.parse(section)
    return [fault.path for fault in caught.value.faults]


def test_the_plug_in_is_found_by_its_name() -> None:
    assert workload.load("dflash") is WORKLOAD


def test_parsing_what_was_resolved_gives_the_same() -> None:
    spec = WORKLOAD.parse(dflashspec.TINY)
    assert WORKLOAD.parse(WORKLOAD.resolve(spec)) == spec
    assert "experts" not in WORKLOAD.resolve(spec)["target"]


def test_parsing_and_cases_load_no_torch() -> None:
    program = (
        "import sys, dflashspec\n"
        "from dflash.workload import WORKLOAD\n"
        "WORKLOAD.cases(WORKLOAD.parse(WORKLOAD.resolve(WORKLOAD.parse(dflashspec.TINY))))\n"
        "assert not {'torch', 'triton', 'fla', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": "tests/support"})


@pytest.mark.parametrize(
    ("dotted", "value", "path"),
    [
        ("target.num_layers", ..., "target.num_layers"),
        ("target.num_layers", True, "target.num_layers"),
        ("target.num_layers", 2.0, "target.num_layers"),
        ("target.num_layers", "2", "target.num_layers"),
        ("target.num_layers", 0, "target.num_layers"),
        ("target.num_layers", 10**11, "target.num_layers"),
        ("drafter.num_layers", 10**11, "drafter.num_layers"),
        ("axes.buckets", [10**30], "axes.buckets.0"),
        ("target.hidden_size", None, "target.hidden_size"),
        ("target.model", 7, "target.model"),
        ("target.model", "", "target.model"),
        ("target.architecture", "llama", "target.architecture"),
        ("target.num_heads", 3, None),
        ("target.num_kv_heads", 4, "target.num_heads"),
        ("target.linear_num_key_heads", 4, "target.linear_num_value_heads"),
        ("target.full_attention_interval", 3, "target.full_attention_interval"),
        ("target.partial_rotary_factor", 0.01, "target.partial_rotary_factor"),
        ("target.partial_rotary_factor", 1.5, "target.partial_rotary_factor"),
        ("target.rope_theta", "1e7", "target.rope_theta"),
        ("target.rope_theta", True, "target.rope_theta"),
        ("target.rope_theta", float("nan"), "target.rope_theta"),
        ("target.frozen", 1, "target.frozen"),
        ("target.tie_embeddings", "no", "target.tie_embeddings"),
        ("target.experts", {"num": 4}, "target.experts"),
        ("target.moe", 1, "target.moe"),
        ("target", [], "target"),
        ("drafter", ..., "drafter"),
        ("drafter.head_dim", 48, "drafter.head_dim"),
        ("drafter.num_heads", 40, "drafter.num_heads"),
        ("drafter.block_size", 1, "drafter.block_size"),
        ("drafter.mask_token_id", 264, "drafter.mask_token_id"),
        ("drafter.mask_token_id", -1, "drafter.mask_token_id"),
        ("drafter.target_layer_ids", [0, 2], "drafter.target_layer_ids.1"),
        ("drafter.target_layer_ids", [1, 0], "drafter.target_layer_ids.1"),
        ("drafter.target_layer_ids", [], "drafter.target_layer_ids"),
        ("drafter.target_layer_ids", None, "drafter.target_layer_ids"),
        ("drafter.layer_types", ["full_attention"], "drafter.layer_types"),
        ("drafter.layer_types", ["sliding_attention", "full_attention"], "drafter.sliding_window"),
        ("drafter.sliding_window", 32, "drafter.sliding_window"),
        ("axes.buckets", [], "axes.buckets"),
        ("axes.buckets", 512, "axes.buckets"),
        ("axes.buckets", [64, 32], "axes.buckets.1"),
        ("axes.buckets", [32, 32], "axes.buckets.1"),
        ("axes.buckets", [32, True], "axes.buckets.1"),
        ("axes.buckets", [32, "64"], "axes.buckets.1"),
        ("axes.anchors", [64], "axes.anchors"),
        ("axes.anchors", [0, 4], "axes.anchors.0"),
        ("axes.batch_sizes", [0], "axes.batch_sizes.0"),
        ("axes.layouts", ["padded", "padded"], "axes.layouts.1"),
        ("axes.layouts", ["nested"], "axes.layouts.0"),
        ("axes.dtype", "float16", "axes.dtype"),
        ("axes.bucket", [64], "axes.bucket"),
        ("data.source", 3, "data.source"),
        ("data.tokenizer", "words", "data.tokenizer"),
        ("extra", {}, "extra"),
    ],
)
def test_each_fault_names_its_place(dotted: str, value: Any, path: str | None) -> None:
    section = dflashspec.changed(dotted, value)
    if path is None:
        WORKLOAD.parse(section)
    else:
        assert paths(section) == [path]


def test_all_faults_come_at_once() -> None:
    section = dflashspec.changed("target.num_layers", "many")
    section["axes"]["buckets"] = [64, 32]
    section["drafter"]["block_sise"] = 8
    section["data"]["too_long"] = "cut"
    assert paths(section) == ["target.num_layers", "drafter.block_sise", "axes.buckets.1", "data.too_long"]


def test_an_unknown_key_gets_the_nearest_known_one() -> None:
    with pytest.raises(FaultsError, match="did you mean `block_size`"):
        WORKLOAD.parse(dflashspec.changed("drafter.block_sise", 8))


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (28, 5, (1, 7, 13, 19, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (64, 1, (32,)),
    ],
)
def test_target_layers_are_chosen_as_published_drafters_have_them(
    layers: int, count: int, ids: tuple[int, ...]
) -> None:
    assert computed_layer_ids(layers, count) == ids


def test_a_mixture_needs_its_experts() -> None:
    section = dflashspec.changed("target.architecture", "qwen3_next")
    assert paths(section) == ["target.experts"]
    section["target"]["experts"] = {
        "num": 4,
        "per_token": 5,
        "intermediate_size": 8,
        "shared_intermediate_size": 8,
    }
    assert paths(section) == ["target.experts.per_token"]
    section["target"]["experts"]["per_token"] = 2
    assert WORKLOAD.resolve(WORKLOAD.parse(section))["target"]["experts"]["num"] == 4


def test_cases_are_the_pairs_with_at_most_half_a_bucket_of_anchors() -> None:
    spec = WORKLOAD.parse(dflashspec.changed("axes.anchors", [4, 16, 32]))
    cases = WORKLOAD.cases(spec)
    assert [(case["bucket"], case["anchors"]) for case in cases.planned] == [
        (32, 4),
        (32, 16),
        (64, 4),
        (64, 16),
        (64, 32),
    ]
    assert [(case["bucket"], case["anchors"], why) for case, why in cases.skipped] == [
        (32, 32, "more anchors than half the bucket")
    ]
    assert cases.planned[0].id == "bucket=32 anchors=4 batch=1 layout=padded dtype=float32"


def test_the_largest_slots_alone_are_the_cases_of_a_run() -> None:
    section = dflashspec.changed("axes.anchors", [4, 16, 32])
    section["axes"]["anchor_slots"] = "largest"
    planned = WORKLOAD.cases(WORKLOAD.parse(section)).planned
    assert [(case["bucket"], case["anchors"]) for case in planned] == [(32, 16), (64, 32)]


def test_packed_batches_of_several_rows_are_skipped_with_the_reason() -> None:
    section = dflashspec.changed("axes.layouts", ["padded", "packed"])
    section["axes"]["batch_sizes"] = [1, 2]
    cases = WORKLOAD.cases(WORKLOAD.parse(section))
    assert {(case["layout"], case["batch"]) for case in cases.planned} == {("padded", 1), ("padded", 2), ("packed", 1)}
    assert {(case["layout"], case["batch"]) for case, _ in cases.skipped} == {("packed", 2)}
    section["axes"].update(layouts=["packed"], batch_sizes=[2])
    assert paths(section) == ["axes.batch_sizes"]


def test_a_slot_count_may_be_missing_for_a_bucket() -> None:
    spec = Spec.parse(dflashspec.changed("axes.anchors", [32]))
    assert spec.axes.slots(32) is None
    assert spec.axes.slots(64) == 32


def test_bfloat16_is_refused_where_the_interpreter_would_get_it_wrong() -> None:
    spec = WORKLOAD.parse(dflashspec.changed("axes.dtype", "bfloat16"))
    with pytest.raises(PlanError, match="dtype `bfloat16` on the CPU; wanted `float32`"):
        WORKLOAD.open(spec, device="cpu", seed=0)


@pytest.mark.parametrize(("frozen", "file"), [(False, "fla"), (True, "fla"), (False, "other")])
def test_what_fla_refuses_of_a_backward_pass_is_a_refusal_to_plan(
    frozen: bool, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper with Triton 3.4 to 3.7.0 flash-linear-attention raises in its backward pass, with the reason."""
    scope: dict[str, Any] = {}
    source = "def step(batches, lr):\n    raise RuntimeError('produces incorrect results')\n"
    exec(compile(source, f"/somewhere/{file}/ops/common/chunk_o.py", "exec"), scope)
    pair = SimpleNamespace(step=scope["step"], train_with=lambda objective: None)
    monkeypatch.setattr(workload_module, "_representative_pair", lambda *args: pair)
    spec = WORKLOAD.parse(dflashspec.changed("target.frozen", frozen))
    session = WORKLOAD.open(spec, device="cpu", seed=0)
    wanted = PlanError if not frozen and file == "fla" else RuntimeError
    with pytest.raises(wanted, match="produces incorrect results"):
        session.step(WORKLOAD.cases(spec).planned[0])


def test_a_target_that_is_a_file_is_refused_without_asking_the_hub(tmp_path, monkeypatch):
    from dflash import hub

    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    monkeypatch.setattr(hub, "_hub_file", lambda *_: pytest.fail("the Hub was asked"))
    with pytest.raises(InputError, match=r"is no folder; wanted `random`, a folder"):
        hub.config_of(str(file))
