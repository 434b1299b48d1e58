"""Strict JSON, shapes and tables: what fits has no faults, what does not is explained, nothing is lost on the way."""

from __future__ import annotations

import json
import math

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st

from kernelbake import digest, documents, elf, tables
from kernelbake.keys import Parameter, Specialization, Symbol, encode
from kernelbake.tables import Table

_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_canonical_json_is_read_and_nothing_else_is(value):
    text = digest.canonical_json(value)
    again = documents.parse(text)
    assert digest.canonical_json(again) == text
    assert documents.parse(memoryview(text)) == again
    for other in (b" " + text, text + b"\n", json.dumps(value, indent=1).encode(), b"\xef\xbb\xbf" + text):
        if other != text:
            with pytest.raises(ValueError, match=r"JSON|UTF-8"):
                documents.parse(other)


@given(st.binary(max_size=60))
def test_bytes_are_read_or_refused(data):
    try:
        value = documents.parse(data)
    except ValueError:
        return
    assert digest.canonical_json(value) == data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":1,"a":2}', "the name `a` twice"),
        (b'{"b":{"x":1,"x":1}}', "the name `x` twice"),
        (b"NaN", "the number `NaN`"),
        (b"[-Infinity]", "the number `-Infinity`"),
        (b"1e400", "beyond the range"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b"\xff", "no UTF-8 at byte 0"),
        (b"[1,]", "no JSON at byte"),
        (b"", "no JSON at byte 0"),
        (b"1.0e1", "not canonical"),
        (b"[" * 33 + b"]" * 33, "deeper than 32"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "deeper than 32"),
        (b"[" * 100_000, "deeper than 32"),
        (b"9" * 5000, "digits"),
    ],
)
def test_why_it_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        documents.parse(text)


def test_depth_and_number_of_values_are_bounded():
    assert documents.parse(b"[" * 32 + b"]" * 32)
    assert documents.parse(b"[1,2,3]", max_values=4) == [1, 2, 3]
    with pytest.raises(ValueError, match="more than 3 values"):
        documents.parse(b"[1,2,3]", max_values=3)


_SHAPES = {name: shape for name, shape in vars(documents).items() if isinstance(shape, documents.Shape)}
_GOOD = {
    "PLAN": tables.plan_to_json(samples.contents().plan, tables.table_of(samples.contents().plan)),
    "TABLE": tables.table_of(samples.contents().plan).to_json(),
    "FINGERPRINT": samples.contents().fingerprint.to_json(),
    "RECORD_LINE": samples.contents().record[0],
    "CONFIG": samples.CANDIDATES[0].to_json(),
    "SPECIALIZATION": samples.specialization(64, 4, True).to_json(),
}


@pytest.mark.parametrize("name", _SHAPES)
@given(value=JSON)
def test_what_does_not_fit_has_faults_and_what_fits_has_none(name, value):
    shape = _SHAPES[name]
    assert bool(shape.check(value)) == (not shape.fits(value))
    assert bool(list(shape.faults(value, ""))) == (not shape.fits(value))


@pytest.mark.parametrize("name", _GOOD)
@given(data=st.data())
def test_a_document_with_one_value_exchanged(name, data):
    """Every fault of a changed document is explained; and only where it no longer fits."""
    value = json.loads(json.dumps(_GOOD[name]))
    assert _SHAPES[name].check(value) == []
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        if not keys:
            return
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 4)) == 0:
            break
        place = place[key]
    place[key] = data.draw(JSON)
    shape = _SHAPES[name]
    faults = shape.check(value)
    assert bool(faults) == (not shape.fits(value))
    assert all("; wanted" in message for _, message in faults)


# ---------------------------------------------------------------------------------------------- tables

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | _TEXTS
    | st.builds(Symbol, st.just("dtype"), _TEXTS),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner),
    max_leaves=4,
)
_ROWS = st.builds(
    Specialization,
    st.lists(st.builds(Parameter, _TEXTS, _VALUES, _VALUES), max_size=4).map(tuple),
    st.lists(st.tuples(_TEXTS, _VALUES), max_size=3).map(tuple),
)


@given(st.lists(_ROWS, max_size=5))
def test_a_table_gives_back_every_specialization(rows):
    table = Table.of(rows)
    text = digest.canonical_json(table.to_json())
    again = Table.from_json(documents.parse(text))
    assert documents.TABLE.check(json.loads(text)) == []
    assert set(again.rows) == set(rows)
    assert digest.canonical_json(again.to_json()) == text
    for row in again.rows:
        assert row.token == Specialization(row.parameters, row.options).token, "the text that was put together"
        assert Specialization.from_json(json.loads(row.token)) == row
    assert [again.rows[number].token for number in again.numbers().values()] == list(again.numbers())


def test_plan_and_choices_come_back_whole():
    contents = samples.contents(3, keys_each=3)
    table = tables.table_of(contents.plan)
    plan = tables.plan_from_json(json.loads(json.dumps(tables.plan_to_json(contents.plan, table))), table)
    assert plan == contents.plan
    for choice in contents.choices:
        data = json.loads(json.dumps(tables.choice_to_json(choice, table.numbers())))
        assert tables.choice_from_json(data, table) == choice


def test_values_of_a_key_keep_their_type():
    for value in (1, True, 1.0, "1", None, (1,), ((1, True), "x"), Symbol("dtype", "bf16"), math.inf, -0.0):
        assert documents.VALUE.fits(encode(value))
    for data in ([1], {"tuple": 1}, {"float": "x"}, {"float": "1"}, {"dtype": 1}, {"other": "x"}, 1.5, {}):
        assert not documents.VALUE.fits(data)


# ---------------------------------------------------------------------------------------------- cubins


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 103, 120, 121])
@pytest.mark.parametrize("new_abi", [False, True])
def test_the_architecture_of_a_cubin(arch, new_abi):
    assert elf.read(samples.cubin(arch, new_abi=new_abi)).arch == arch
    assert elf.read(memoryview(samples.cubin(arch, new_abi=new_abi))).arch == arch


@given(st.binary(max_size=80))
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError, match="ELF"):
        elf.read(data)
