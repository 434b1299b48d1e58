"""Keys: values of different types stay different, and everything comes back from its JSON form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelbake import digest
from kernelbake.keys import AutotuneKey, Case, Config, Kernel, Parameter, Specialization, Symbol, decode, encode

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.builds(Symbol, st.sampled_from(["dtype", "jit"]), st.text(max_size=20))
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8)
NAMES = st.text("abcXYZ_0", min_size=1, max_size=8)
ITEMS = st.lists(st.tuples(NAMES, VALUES), max_size=4).map(tuple)
PARAMETERS = st.lists(st.builds(Parameter, NAMES, VALUES, VALUES), max_size=4, unique_by=lambda item: item.name)
OPTION = st.none() | st.integers(1, 32)


def _typed(value: Any) -> Any:
    """The value together with the types that ``==`` overlooks."""
    if isinstance(value, tuple):
        return tuple(_typed(item) for item in value)
    return type(value), value, str(value)


@given(VALUES)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    assert _typed(decode(json.loads(json.dumps(encode(value), allow_nan=False)))) == _typed(value)


@given(VALUES, VALUES)
def test_tokens_differ_exactly_if_values_or_their_types_do(one: Any, other: Any) -> None:
    same = Case((("a", one),)) == Case((("a", other),))
    assert same == (_typed(one) == _typed(other))


@pytest.mark.parametrize("one", [1, True, 1.0, "1", (1,), None, 0, False, 0.0, -0.0, "", (), Symbol("dtype", "1")])
def test_one_and_true_and_one_point_nought_are_three_values(one: Any) -> None:
    everything = [1, True, 1.0, "1", (1,), None, 0, False, 0.0, -0.0, "", (), Symbol("dtype", "1")]
    keys = [AutotuneKey((("n", value),), ()) for value in everything]
    mine = AutotuneKey((("n", one),), ())
    assert sum(mine == key for key in keys) == 1
    assert len(set(keys)) == len(everything)


@pytest.mark.parametrize("value", [object(), [1], {"a": 1}, b"bytes", 1 + 2j, {1}])
def test_what_has_no_token_cannot_stand_in_a_key(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot stand in a key"):
        encode(value)


@pytest.mark.parametrize(
    "data", [[1], {}, {"float": 1.0}, {"tuple": 1}, {"other": "x"}, {"dtype": 1}, {"a": 1, "b": 2}, 1.5, b"x"]
)
def test_data_that_is_no_value_is_refused(data: Any) -> None:
    with pytest.raises(TypeError, match="is not the JSON form"):
        decode(data)


@given(ITEMS, st.lists(st.tuples(NAMES, NAMES), max_size=3).map(tuple))
def test_an_autotune_key_comes_back(values: Any, dtypes: Any) -> None:
    key = AutotuneKey(values, dtypes)
    assert AutotuneKey.from_json(json.loads(key.token)) == key
    assert key.triton_key() == (*(value for _, value in values), *(dtype for _, dtype in dtypes))


@given(ITEMS, OPTION, OPTION, OPTION, OPTION)
def test_a_config_comes_back(meta: Any, warps: Any, stages: Any, ctas: Any, registers: Any) -> None:
    config = Config(meta, warps, stages, ctas, registers)
    assert Config.from_json(json.loads(config.token)) == config


def test_configs_that_differ_in_options_only_are_different() -> None:
    configs = {Config((), *options) for options in ((4, 3), (8, 3), (4, 2), (4, 3, 2), (4, 3, None, 64))}
    assert len(configs) == 5


@given(PARAMETERS.map(tuple), ITEMS)
def test_a_specialization_comes_back(parameters: Any, options: Any) -> None:
    found = Specialization(parameters, options)
    again = Specialization.from_json(json.loads(found.token))
    assert again == found
    assert again.digest == found.digest
    assert digest.is_digest(found.digest)
    assert found.differences(again, "mine", "theirs") == ()


def test_differences_name_each_parameter_and_the_options() -> None:
    one = Specialization(
        (Parameter("x", "*bf16", "D"), Parameter("n", "i32", ""), Parameter("B", "constexpr", 64)), (("num_warps", 4),)
    )
    other = Specialization(
        (Parameter("x", "*bf16", ""), Parameter("n", "i64", ""), Parameter("B", "constexpr", 64)), (("num_warps", 8),)
    )
    assert one.differences(other, "mine", "theirs") == (
        "x: mine `x:*bf16%D`; theirs `x:*bf16`",
        "n: mine `n:i32`; theirs `n:i64`",
        "options: mine `{'num_warps': 4}`; theirs `{'num_warps': 8}`",
    )


def test_a_kernel_is_named_by_module_and_name() -> None:
    kernel = Kernel("fla.ops.common.chunk_o", "chunk_fwd_kernel_o")
    assert kernel.name == "fla.ops.common.chunk_o.chunk_fwd_kernel_o"
    assert Kernel.from_json(kernel.to_json()) == kernel
    assert Kernel("a", "b.c").name == Kernel("a.b", "c").name
    assert Kernel("a", "b.c").to_json() != Kernel("a.b", "c").to_json()


def test_texts_for_people() -> None:
    key = AutotuneKey(
        (("T", 512), ("dtype", Symbol("dtype", "bf16"))), (("x", "torch.bfloat16"), ("y", "torch.float32"))
    )
    assert str(key) == "T=512 dtype=bf16 [x:bfloat16,y:float32]"
    assert str(Config((("BT", 64),), 4, 3)) == "BT=64 num_warps=4 num_stages=3"
    assert str(Config()) == "(default)"
    case = Case((("bucket", 512), ("layout", "padded")))
    assert (case.id, str(case), case["bucket"]) == ("bucket=512 layout=padded",) * 2 + (512,)
    with pytest.raises(KeyError):
        case["anchors"]
