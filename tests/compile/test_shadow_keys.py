"""Plans of flash-linear-attention's operations and of the packaged manifests, against what is known of their keys.

``golden/fla_operations_sm120.json`` lists, for flash-linear-attention 0.6.0 on an sm_120 GPU, every autotune key that
an operation meets at which batch and length, with its candidates and classes of arguments. ``golden/keys_sm120.json``
holds the keys of the packaged ``sm120.yaml``; ``KERNELBAKE_WRITE_GOLDEN=1`` writes that one anew.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kernelbake import manifest, planner, profiles
from kernelbake.bounds import Limits
from kernelbake.errors import PlanError
from kernelbake.plan import Choice, Inventory, Launch, Plan, coverage

SUPPORT = Path(__file__).parents[1] / "support"
GOLDEN = Path(__file__).parent / "golden"
OPERATIONS = (
    *("gdn", "gdn_cache", "recurrent", "gated_norm", "norm", "conv", "rotary", "swiglu"),
    *("linear_cross_entropy", "cross_entropy", "kl_div"),
)
SHORT = {"torch.bfloat16": "bf16", "torch.float32": "f32", "torch.int64": "i64"}
TRITON = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
MORE_CANDIDATES = {"chunk_fwd_kernel_o": 3, "chunk_bwd_kernel_dv_local": 9} if TRITON >= (3, 8) else {}
"""From Triton 3.8 on, flash-linear-attention offers 8 warps again in two kernels on Blackwell."""


def plan_operations(profile: str, limits: Limits | None = None, **section: Any) -> Plan:
    given = {"batches": [1], "lengths": [512], "layouts": ["fixed"], **section}
    return planner.plan(
        "flaworkload:WORKLOAD", given, profiles.load(profile), interpreted=False, paths=[SUPPORT], limits=limits
    )


@pytest.fixture(scope="module")
def operations() -> Plan:
    return plan_operations(
        "rtx-pro-6000-blackwell",
        Limits(max_variants=1000, max_elements=1 << 40),
        operations=OPERATIONS,
        batches=[1, 4],
        lengths=[32, 512, 2048, 8192],
        layouts=["fixed", "packed"],
    )


def rows(plan: Plan) -> dict[str, tuple[int, int, frozenset[str]]]:
    """Operation, kernel and key → number of candidates, of classes of arguments, and the cases."""
    found: dict[str, tuple[int, int, frozenset[str]]] = {}
    for launch in plan.launches:
        by_operation: dict[str, list[frozenset[str]]] = defaultdict(list)
        for variant in launch.variants:
            cases: dict[str, set[str]] = defaultdict(set)
            for case in variant.cases:
                axes = dict(part.split("=") for part in case.split())
                cases[axes["operation"]].add(f"{axes['batch']}x{axes['length']} {axes['layout']}")
            for operation, ids in cases.items():
                by_operation[operation].append(frozenset(ids))
        values = None if launch.key is None else dict(launch.key.values)
        dtypes = [] if launch.key is None else [SHORT[dtype] for _, dtype in launch.key.dtypes]
        for operation, groups in by_operation.items():
            name = json.dumps([operation, launch.kernel.qualname, values, dtypes])
            found[name] = (len(launch.candidates), len(groups), frozenset().union(*groups))
    return found


def test_the_keys_of_every_operation_are_those_that_are_known(operations: Plan) -> None:
    expected = {}
    for row in json.loads((GOLDEN / "fla_operations_sm120.json").read_text()):
        name = json.dumps([row["operation"], row["kernel"], row["key"], row["dtypes"]])
        candidates = MORE_CANDIDATES.get(row["kernel"], row["candidates"])
        expected[name] = (candidates, row["variants"], frozenset(row["cases"]))
    assert len(expected) == 78
    assert rows(operations) == expected


def test_what_follows_the_length_is_named(operations: Plan) -> None:
    found = {(item.kernel.name, item.argument): item.axis for item in operations.unbounded}
    assert found == {
        ("fla.modules.fused_kl_div.ops.elementwise_mul_kernel", "N"): "length",
        ("fla.modules.fused_kl_div.ops.kl_div_kernel", "N"): "length",
        ("fla.modules.fused_linear_cross_entropy.ops.elementwise_mul_kernel", "N"): "length",
        ("fla.modules.norm.layernorm.layer_norm_bwd_kernel", "BS"): "length",
        ("fla.modules.norm.layernorm.layer_norm_bwd_kernel", "NB"): "length",
        ("fla.modules.norm.layernorm.layer_norm_bwd_kernel_row", "BS"): "length",
        ("fla.modules.norm.layernorm.layer_norm_fwd_kernel", "NB"): "length",
        ("fla.modules.rotary.ops.rotary_embedding_kernel", "B"): "batch",
        ("fla.modules.rotary.ops.rotary_embedding_kernel", "BT"): "length",
        ("fla.ops.common.chunk_o.chunk_bwd_kernel_dqkwg", "B"): "batch",
        ("fla.ops.utils.cumsum.chunk_local_cumsum_scalar_kernel", "B"): "batch",
    }


def restricted(plan: Plan, *lengths: int) -> Plan:
    """The plan of the cases of one row with these lengths."""
    cases = tuple(case for case in plan.cases if case["length"] in lengths and case["batch"] == 1)
    ids = {case.id for case in cases}
    launches = []
    for launch in plan.launches:
        met = [(item, tuple(case for case in item.cases if case in ids)) for item in launch.variants]
        variants = tuple(dataclasses.replace(item, cases=of_item) for item, of_item in met if of_item)
        if variants:
            launches.append(dataclasses.replace(launch, variants=variants))
    return dataclasses.replace(plan, cases=cases, launches=tuple(launches))


def baked(plan: Plan) -> Inventory:
    """What a bundle built from the plan would hold."""

    def choice(launch: Launch) -> Choice:
        tokens = {variant.specializations[0].token: None for variant in launch.variants}
        return Choice(launch.kernel, launch.key, launch.candidates[0], tokens)

    return Inventory([choice(launch) for launch in plan.launches], plan.kernels, plan.implementations)


def test_a_warm_up_of_32_tokens_lacks_the_norm_of_8192(operations: Plan) -> None:
    of_gdn = dataclasses.replace(
        operations,
        cases=tuple(case for case in operations.cases if case["operation"] == "gdn"),
        launches=tuple(
            launch for launch in operations.launches if any(id_.startswith("operation=gdn ") for id_ in launch.cases)
        ),
    )
    found = coverage(restricted(of_gdn, 32, 2048, 8192), baked(restricted(of_gdn, 32)))
    assert {(item.kind, item.where) for item in found.missing} == {
        ("key", "fla.modules.norm.l2norm.l2norm_fwd_kernel"),
        ("key", "fla.modules.norm.l2norm.l2norm_bwd_kernel"),
    }
    for item in found.missing:
        assert "NB=2" in item.wanted
        assert item.nearest == ("NB: needed `2`; bundle: `1`",)
        assert all("length=8192" in case for case in item.cases)


def of_operation(plan: Plan, name: str) -> Plan:
    """The part of a plan that one operation needs."""
    ids = {case.id for case in plan.cases if case["operation"] == name}
    launches = []
    for launch in plan.launches:
        variants = tuple(item for item in launch.variants if ids.intersection(item.cases))
        if variants:
            launches.append(dataclasses.replace(launch, variants=variants))
    return dataclasses.replace(plan, launches=tuple(launches))


def test_a_state_that_was_not_baked_is_told_by_its_dtype(operations: Plan) -> None:
    missing = coverage(of_operation(operations, "gdn_cache"), baked(of_operation(operations, "gdn"))).missing
    assert {item.kind for item in missing} == {"key"}
    assert {item.where.rpartition(".")[2] for item in missing} == {"chunk_gated_delta_rule_fwd_kernel_h_blockdim64"}
    for item in missing:
        assert item.nearest == (
            "dtype of h0: needed `torch.float32`; bundle: `absent`",
            "dtype of ht: needed `torch.float32`; bundle: `absent`",
        )


def test_three_lengths_cover_every_length_of_a_convolution() -> None:
    """Its key once followed the number of tokens; now lengths differ by class only: 1, a multiple of 16, or neither."""
    drawn = random.Random(7).sample(range(1, 4097), 24)
    plan = plan_operations(
        "rtx-pro-6000-blackwell", operations=["conv", "conv_update"], lengths=sorted({1, 16, 17, *drawn})
    )
    keys = [(launch.kernel.qualname, len(launch.key.dtypes)) for launch in plan.launches if launch.key]
    names = [f"causal_conv1d_{part}_kernel" for part in ("bwd", "fwd", "update")]
    assert keys == list(zip([*names, names[2]], [6, 3, 4, 3], strict=True))
    assert coverage(plan, baked(restricted(plan, 1, 16, 17))).complete
    updates = [launch for launch in plan.launches if launch.kernel.qualname == "causal_conv1d_update_kernel"]
    assert ["cache" in dict(launch.key.dtypes) for launch in updates if launch.key] == [True, False]
    assert "restore_value" in plan.kernels["fla.modules.causal_conv1d.ops.causal_conv1d_update_kernel"].hooks


def test_hopper_has_candidates_of_its_own_and_no_backward_before_triton_3_7() -> None:
    """The library refuses the backward of Gated DeltaNet there with Triton 3.4 up to 3.7.0; its reason is passed on."""
    if TRITON < (3, 7):
        with pytest.raises(PlanError) as caught:
            plan_operations("h200", operations=["gdn"])
        assert caught.value.message.startswith("case operation=gdn length=512 batch=1 layout=fixed: `RuntimeError`: ")
        assert "Hopper" in str(caught.value)
    found = plan_operations("h200", operations=["gdn" if TRITON >= (3, 7) else "gdn_forward"])
    candidates = {launch.kernel.qualname: len(launch.candidates) for launch in found.launches}
    assert candidates["chunk_gated_delta_rule_fwd_kernel_h_blockdim64"] == 12  # 4 on sm_120
    assert candidates["chunk_fwd_kernel_o"] == 3


def test_the_golden_keys_of_the_packaged_manifest() -> None:
    wanted = manifest.load(manifest.find("sm120.yaml"))
    plan = planner.plan(wanted.plugin, wanted.section, wanted.profile, interpreted=False)
    lines = [
        {
            "kernel": launch.kernel.to_json(),
            "key": str(launch.key) if launch.key else None,
            "candidates": len(launch.candidates),
            "variants": [[str(item.specializations[0]), len(item.cases)] for item in launch.variants],
        }
        for launch in plan.launches
    ]
    text = "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n"
    path = GOLDEN / "keys_sm120.json"
    if os.environ.get("KERNELBAKE_WRITE_GOLDEN"):
        path.write_text(text)
    if TRITON != (3, 7):  # the golden file is that of the tested set; elsewhere keys agree and candidates may not
        names = [(line["kernel"], line["key"]) for line in json.loads(path.read_text())]
        assert [(line["kernel"], line["key"]) for line in lines] == names
    else:
        assert text == path.read_text()


def test_one_layer_of_each_kind_gives_the_set_of_all_layers() -> None:
    """The plug-in opens one target layer of each kind; here the real model is built of all of them."""
    layers = 64 if os.environ.get("KERNELBAKE_LONG") else 8
    few, all_ = plan_layers("dflash", layers), plan_layers("alllayers:WORKLOAD", layers)
    assert len(few) > 8
    assert few == all_


def plan_layers(plugin: str, layers: int) -> set[tuple[tuple[str, str], tuple[str, ...]]]:
    """Launches and classes of arguments of two of the packaged manifest's cases, for a target of so many layers."""
    wanted = manifest.load(manifest.find("sm120.yaml"))
    section = {
        **wanted.section,
        "axes": {**wanted.section["axes"], "buckets": [512, 2048], "anchors": [128]},
        "target": {**wanted.section["target"], "num_layers": layers},
        "drafter": {**wanted.section["drafter"], "target_layer_ids": [layers * place // 6 for place in range(1, 6)]},
    }
    plan = planner.plan(plugin, section, wanted.profile, interpreted=False, paths=[SUPPORT])
    return {
        (launch.id, tuple(item.token for item in variant.specializations))
        for launch in plan.launches
        for variant in launch.variants
    }
