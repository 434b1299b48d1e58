"""What keeps a plan finite: arguments that follow an axis are found and named, and variants are limited."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelbake import bounds
from kernelbake.bounds import Limits
from kernelbake.errors import PlanError
from kernelbake.keys import AutotuneKey, Case, Config, Kernel, Parameter, Specialization
from kernelbake.plan import Launch, Variant, collect

KERNEL = Kernel("lib.norm", "norm_kernel")


def case(length: int, batch: int = 1, layout: str = "padded") -> Case:
    return Case((("length", length), ("batch", batch), ("layout", layout)))


def launch(key: dict[str, Any], constants: dict[str, Any], cases: list[Case]) -> Launch:
    config = Config((("BLOCK", key.get("D", 64)),), 4)
    parameters = (
        Parameter("x", "*bf16", "D"),
        Parameter("n", "i32", ""),
        *(Parameter(name, "constexpr", value) for name, value in constants.items()),
        Parameter("BLOCK", "constexpr", 64),
    )
    variant = Variant((Specialization(parameters),), tuple(one.id for one in cases))
    return Launch(KERNEL, AutotuneKey(tuple(key.items()), ()), (config,), (variant,))


def merged(*observed: tuple[Case, dict[str, Any], dict[str, Any]]) -> tuple[Launch, ...]:
    return collect((one.id, launch(key, constants, [])) for one, key, constants in observed)


def found(*observed: tuple[Case, dict[str, Any], dict[str, Any]]) -> list[tuple[str, tuple[Any, ...], str | None]]:
    launches = merged(*observed)
    items = bounds.check(launches, list(dict.fromkeys(one for one, _, _ in observed)), Limits())
    return [(item.argument, item.values, item.axis) for item in items]


def test_a_key_that_follows_the_length_is_named() -> None:
    lengths = (512, 2048, 8192)
    assert found(*((case(n), {"D": 128, "NB": n // 64}, {}) for n in lengths)) == [("NB", (8, 32, 128), "length")]


def test_a_constant_that_follows_the_length_is_named() -> None:
    assert found(*((case(n), {"D": 128}, {"N": n * 4096}) for n in (512, 1024))) == [
        ("N", (512 * 4096, 1024 * 4096), "length")
    ]


def test_a_key_that_takes_steps_has_a_bound() -> None:
    assert found(*((case(n), {"NB": -(-n // 4096)}, {}) for n in (512, 2048, 8192))) == []


def test_the_axis_is_the_one_that_drives() -> None:
    grid = [(length, batch) for length in (512, 2048) for batch in (1, 4)]
    assert found(*((case(n, b), {"B": b}, {}) for n, b in grid)) == [("B", (1, 4), "batch")]


def test_a_layout_in_which_nothing_follows_hides_nothing() -> None:
    rows = [(b, layout) for b in (1, 4) for layout in ("padded", "packed")]
    observed = [(case(512, b, layout), {"B": b if layout == "padded" else 1}, {}) for b, layout in rows]
    assert found(*observed) == [("B", (1, 4), "batch")]


def test_a_value_that_is_always_there_hides_nothing() -> None:
    """One kernel for a weight's gradient of one size and an input's of another."""
    observed = [(case(n), {"D": 64}, {"N": size}) for n in (32, 64, 128) for size in (777, n * 10)]
    assert found(*observed) == [("N", (320, 640, 777, 1280), "length")]


def test_flags_and_layouts_are_no_numbers() -> None:
    observed = [(case(512, 1, layout), {}, {"IS_VARLEN": layout == "packed"}) for layout in ("padded", "packed")]
    assert found(*observed) == []


def test_what_is_tuned_is_no_argument() -> None:
    observed = [(case(n), {}, {}) for n in (1, 2)]
    assert found(*observed) == []


def test_too_many_variants_are_refused_with_the_argument_that_drives_them() -> None:
    observed = [(case(n), {}, {"N": n}) for n in range(1, 66)]
    with pytest.raises(PlanError) as caught:
        found(*observed)
    assert caught.value.message == "plan: 1 kernel has more than 64 variants of arguments; wanted fewer"
    assert "--max-variants" in str(caught.value.hint)
    [reason] = caught.value.reasons
    assert reason == "kernel `lib.norm.norm_kernel`: 65 variants because of argument `N` (axis `length`)"


def test_the_limit_can_be_raised() -> None:
    observed = [(case(n), {}, {"N": n}) for n in range(1, 66)]
    launches = merged(*observed)
    assert bounds.check(launches, [one for one, _, _ in observed], Limits(max_variants=65))[0].argument == "N"


@given(
    lengths=st.lists(st.integers(1, 1 << 20), min_size=2, max_size=8, unique=True),
    batches=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
)
def test_an_injective_function_of_an_axis_is_always_found(lengths: list[int], batches: list[int]) -> None:
    observed = [(case(n, b), {}, {"N": n * 3 + 1}) for n in lengths for b in batches]
    assert [(argument, axis) for argument, _, axis in found(*observed)] == [("N", "length")]


@given(value=st.integers(), lengths=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=8, unique=True))
def test_a_constant_is_never_found(value: int, lengths: list[int]) -> None:
    assert found(*((case(n), {"D": value}, {"E": value}) for n in lengths)) == []
