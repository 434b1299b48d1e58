"""Plans: collecting launches, coverage with every difference, and the nearest thing that a bundle holds."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelbake import plan
from kernelbake.keys import AutotuneKey, Case, Config, Kernel, Parameter, Specialization, Symbol
from kernelbake.plan import Choice, Inventory, KernelFacts, Launch, Missing, Plan, Unbounded, Variant

NORM, CONV = Kernel("lib.norm", "norm_kernel"), Kernel("lib.conv", "conv_kernel")
SMALL, LARGE = Config((("BT", 32),), 4), Config((("BT", 64),), 8)


def specialization(config: Config, n: Any = "D") -> Specialization:
    parameters = (
        Parameter("x", "*bf16", "D"),
        Parameter("n", "i32", n),
        Parameter("BT", "constexpr", config.meta[0][1]),
    )
    return Specialization(parameters, (("num_warps", config.num_warps),))


def key(**values: Any) -> AutotuneKey:
    return AutotuneKey(tuple(values.items()), (("x", "torch.bfloat16"),))


def launch(kernel: Kernel, key_: AutotuneKey | None, *ns: Any, case: str = "", grid: int = 1) -> Launch:
    """A launch with one variant for each way in which ``n`` is specialized."""
    configs = (SMALL, LARGE) if key_ is not None else (SMALL,)
    cases = (case,) if case else ()
    variants = tuple(
        Variant(tuple(specialization(config, n) for config in configs), cases, ((grid,),)) for n in ns or ("D",)
    )
    return Launch(kernel, key_, configs, variants)


def facts(kernel: Kernel, source: str = "sha256:" + "1" * 64) -> KernelFacts:
    return KernelFacts(kernel, ("Autotuner", "JITFunction"), ("x", "n", "BT"), ("NB",), source, "sha256:" + "2" * 64, 2)


def plan_of(*launches: Launch, **changes: Any) -> Plan:
    kernels = {item.kernel.name: facts(item.kernel) for item in launches}
    cases = (Case((("bucket", 32),)), Case((("bucket", 2048),)))
    fields: dict[str, Any] = {"implementations": {"conv": "triton"}, "skipped": (), "unbounded": (), **changes}
    return Plan({"name": "NVIDIA H200"}, {"triton": "3.7.1"}, cases=cases, kernels=kernels, launches=launches, **fields)


def holding(held: Plan, winner: int = 0) -> Inventory:
    """A bundle that holds everything of a plan."""
    choices = [
        Choice(
            item.kernel,
            item.key,
            item.candidates[min(winner, len(item.candidates) - 1)],
            {
                variant.specializations[min(winner, len(item.candidates) - 1)].token: "sha256:" + "0" * 64
                for variant in item.variants
            },
        )
        for item in held.launches
    ]
    return Inventory(choices, held.kernels, held.implementations)


FULL = plan_of(
    launch(CONV, None, 1, case="bucket=32"),
    launch(NORM, key(NB=1), "D", "", case="bucket=32"),
    launch(NORM, key(NB=2), "D", case="bucket=2048"),
)


# ---------------------------------------------------------------------------------------------- collecting


def test_observations_become_sorted_launches_with_their_cases_and_grids() -> None:
    seen = [
        ("b", launch(NORM, key(NB=2), grid=9)),
        ("a", launch(NORM, key(NB=1), "D", grid=1)),
        ("b", launch(NORM, key(NB=1), "", grid=2)),
        ("b", launch(NORM, key(NB=1), "D", grid=3)),
        ("b", launch(NORM, key(NB=1), "D", grid=3)),
        ("a", launch(CONV, None)),
    ]
    found = plan.collect(seen)
    assert [(item.kernel, str(item.key)) for item in found] == [
        (CONV, "None"),
        (NORM, "NB=1 [x:bfloat16]"),
        (NORM, "NB=2 [x:bfloat16]"),
    ]
    aligned = next(v for v in found[1].variants if v.specializations == (specialization(SMALL), specialization(LARGE)))
    assert (aligned.cases, aligned.grids) == (("a", "b"), ((1,), (3,)))
    assert len(found[1].variants) == 2
    assert found[1].cases in (("a", "b"), ("b", "a"))


@given(st.permutations(range(6)))
def test_the_order_of_observations_does_not_decide(order: list[int]) -> None:
    launches = [launch(NORM, key(NB=number % 3), ("D", "")[number // 3]) for number in range(6)]
    found = plan.collect([("one", launches[number]) for number in order])
    assert [item.to_json() for item in found] == [
        item.to_json() for item in plan.collect([("one", item) for item in launches])
    ]


def test_at_most_eight_grids_are_kept() -> None:
    [found] = plan.collect([("a", launch(NORM, key(NB=1), grid=number)) for number in range(20)])
    assert found.variants[0].grids == tuple((number,) for number in range(8))


def test_one_key_with_two_lists_of_candidates_is_no_key() -> None:
    other = dataclasses.replace(launch(NORM, key(NB=1)), candidates=(LARGE, SMALL))
    with pytest.raises(ValueError, match=r"norm_kernel NB=1 .*: the candidates differ between calls"):
        plan.collect([("a", launch(NORM, key(NB=1))), ("b", other)])


def test_keys_of_different_types_are_different_launches() -> None:
    found = plan.collect([("a", launch(NORM, key(NB=value))) for value in (1, True, 1.0)])
    assert len(found) == 3


# ---------------------------------------------------------------------------------------------- JSON and counts


def test_a_plan_comes_back() -> None:
    full = dataclasses.replace(
        FULL,
        skipped=((Case((("bucket", 1),)), "too small"),),
        unbounded=(Unbounded(NORM, "T", (1, 2, 3), "bucket"),),
    )
    data = json.loads(json.dumps(full.to_json(), allow_nan=False))
    again = Plan.from_json(data)
    assert again.to_json() == data
    assert again.launches == full.launches
    assert again.kernels == full.kernels
    assert (again.skipped, again.unbounded) == (full.skipped, full.unbounded)


def test_counts() -> None:
    assert (FULL.num_keys, FULL.num_candidates) == (2, 5)
    assert FULL.launch(FULL.launches[1].id) is FULL.launches[1]
    assert FULL.launch(("nothing", "")) is None


def test_a_choice_comes_back() -> None:
    choice = holding(FULL).choices[1]
    choice = dataclasses.replace(choice, times={"median_ms": 0.5})
    assert Choice.from_json(json.loads(json.dumps(choice.to_json()))) == choice


def test_a_missing_thing_comes_back() -> None:
    missing = Missing("key", "lib.norm.norm_kernel", "NB=2", ("a", "b"), ("NB: needed `2`; bundle: `1`",))
    assert Missing.from_json(json.loads(json.dumps(missing.to_json()))) == missing


# ---------------------------------------------------------------------------------------------- coverage


@pytest.mark.parametrize("winner", [0, 1])
def test_a_bundle_covers_the_plan_it_was_made_from(winner: int) -> None:
    found = plan.coverage(FULL, holding(FULL, winner))
    assert found.complete
    assert (found.missing, found.unused, found.num_needed) == ((), (), 3)


def test_the_bundle_of_a_small_plan_lacks_the_keys_of_a_large_one() -> None:
    small = plan_of(FULL.launches[0], FULL.launches[1])
    found = plan.coverage(FULL, holding(small))
    [missing] = found.missing
    assert (missing.kind, missing.where, missing.cases) == ("key", NORM.name, ("bucket=2048",))
    assert missing.nearest == ("NB: needed `2`; bundle: `1`",)
    assert str(missing) == (
        "key lib.norm.norm_kernel: NB=2 [x:bfloat16]; needed by bucket=2048; "
        "nearest in the bundle differs in NB: needed `2`; bundle: `1`"
    )


def test_what_a_plan_does_not_need_is_unused() -> None:
    small = plan_of(FULL.launches[1])
    found = plan.coverage(small, holding(FULL))
    assert found.complete
    assert found.unused == (FULL.launches[0].id, FULL.launches[2].id)


def test_a_kernel_that_the_bundle_does_not_know() -> None:
    [missing] = plan.coverage(FULL, holding(plan_of(*FULL.launches[1:]))).missing
    assert (missing.kind, missing.where, missing.wanted, missing.nearest) == ("kernel", CONV.name, "(not tuned)", ())


def test_a_specialization_that_the_bundle_lacks_names_the_argument() -> None:
    held = plan_of(FULL.launches[0], launch(NORM, key(NB=1), "D", case="bucket=32"), FULL.launches[2])
    [missing] = plan.coverage(FULL, holding(held)).missing
    assert (missing.kind, missing.cases) == ("specialization", ("bucket=32",))
    assert missing.nearest == ("n: needed `n:i32`; bundle: `n:i32%D`",)


def test_a_missing_specialization_of_a_kernel_that_is_not_tuned_says_so() -> None:
    held = holding(plan_of(launch(NORM, None, "D")))
    [missing] = plan.coverage(plan_of(launch(NORM, None, "1")), held).missing
    assert str(missing).startswith(f"specialization {NORM.name}: (not tuned); nearest in the bundle differs in n: ")


def test_a_winner_that_is_no_candidate_of_this_plan() -> None:
    held = holding(FULL)
    foreign = Config((("BT", 128),), 4)
    choices = [dataclasses.replace(choice, winner=foreign) if choice.key else choice for choice in held.choices]
    found = plan.coverage(FULL, dataclasses.replace(held, choices=choices))
    assert [missing.kind for missing in found.missing] == ["config", "config"]
    assert "BT=128" in found.missing[0].wanted


def test_another_source_of_a_kernel_is_missing() -> None:
    held = dataclasses.replace(holding(FULL), kernels={NORM.name: facts(NORM, "sha256:" + "9" * 64)})
    [missing] = plan.coverage(FULL, held).missing
    assert (missing.kind, missing.where) == ("source", NORM.name)
    assert "1111" in missing.wanted
    assert "9999" in missing.wanted


def test_another_implementation_behind_a_call_is_missing() -> None:
    held = dataclasses.replace(holding(FULL), implementations={"conv": "torch", "attention": "flash"})
    found = plan.coverage(FULL, held)
    assert [(missing.kind, missing.where, missing.wanted) for missing in found.missing] == [
        ("implementation", "attention", "`None`; bundle: `flash`"),
        ("implementation", "conv", "`triton`; bundle: `torch`"),
    ]


def test_everything_that_is_missing_is_listed_at_once() -> None:
    held = Inventory([], {}, {})
    found = plan.coverage(FULL, held)
    assert [missing.kind for missing in found.missing] == ["implementation", "kernel", "kernel", "kernel"]
    assert not found.complete


# ---------------------------------------------------------------------------------------------- the nearest


def test_the_nearest_key_differs_in_the_fewest_fields() -> None:
    wanted = key(D=128, NB=2, dtype=Symbol("dtype", "bf16"))
    others = [key(D=64, NB=1, dtype=Symbol("dtype", "bf16")), key(D=128, NB=2, dtype=Symbol("dtype", "fp32"))]
    assert plan.nearest_key(wanted, others, "mine", "theirs") == ("dtype: mine `bf16`; theirs `fp32`",)
    assert plan.nearest_key(wanted, [], "mine", "theirs") == ()


def test_a_difference_in_type_alone_and_in_a_tensors_dtype_shows() -> None:
    assert plan.nearest_key(key(NB=1), [key(NB=True)], "mine", "theirs") == ("NB: mine `1`; theirs `True`",)
    other = AutotuneKey((("NB", 1),), (("x", "torch.float32"), ("h0", "torch.float32")))
    assert plan.nearest_key(key(NB=1), [other], "mine", "theirs") == (
        "dtype of x: mine `torch.bfloat16`; theirs `torch.float32`",
        "dtype of h0: mine `absent`; theirs `torch.float32`",
    )


def test_an_optional_argument_that_is_absent_differs_from_none() -> None:
    assert plan.nearest_key(key(NB=1), [key(NB=1, state=None)], "mine", "theirs") == (
        "state: mine `absent`; theirs `None`",
    )


def test_tuned_and_not_tuned_differ_altogether() -> None:
    assert plan.nearest_key(None, [key(NB=1)], "mine", "theirs") == ("tuned at all: mine `False`; theirs `True`",)
