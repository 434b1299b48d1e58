"""Whatever bytes a manifest has, reading it ends soon, in a manifest or in a refusal that says where."""

from __future__ import annotations

import json
import time
from typing import Any

import fakeplugin
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelbake import digest, manifest, workload, yamlfile
from kernelbake.errors import ManifestError

LIMIT_S = 5.0
TEXTS = [path.read_bytes() for path in sorted(manifest.PACKAGED.glob("*.yaml"))]
SIGNS = (b"[", b"]", b"{", b"}", b": ", b"- ", b"'", b'"', b"\n", b"\t", b"? ", b"|\n", b">\n", b"# ", b",", b"  ")
WORDS = (b"&a", b"*a", b"!!int ", b"<<: ", b"---\n", b"%YAML 1.1\n", b".inf", b"1e999", b"null", b"no", b"\xff")
PIECES = (*SIGNS, *WORDS, b'"\\ud800"', b"\xed\xa0\x80", b"\x00")


@pytest.fixture(autouse=True)
def _fake_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "load", lambda name: fakeplugin.FakeWorkload())


def outcome(text: bytes) -> None:
    start = time.process_time()
    found, refusal = None, None
    try:
        found = manifest.parse(text, "fuzzed")
    except ManifestError as error:
        refusal = error
    if refusal is not None:
        assert refusal.reasons
        assert all(reason.startswith(("line ", "and ")) for reason in refusal.reasons)
        str(refusal).encode()
    else:
        assert found is not None
        digest.canonical_json(found.resolved())
        assert manifest.Manifest.from_resolved(found.resolved(), found.text, "fuzzed") == found
    assert time.process_time() - start < LIMIT_S


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.binary(max_size=2000))
def test_fuzz_bytes(text: bytes) -> None:
    outcome(text)


@FUZZ
@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=4), max_size=60).map(b"".join))
def test_fuzz_pieces_of_yaml(text: bytes) -> None:
    outcome(text)


@FUZZ
@given(st.sampled_from(TEXTS), st.data())
def test_fuzz_damaged_manifests(text: bytes, data: st.DataObject) -> None:
    damaged = bytearray(text)
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, len(damaged)))
        end = data.draw(st.integers(start, min(len(damaged), start + 30)))
        damaged[start:end] = data.draw(st.sampled_from(PIECES) | st.binary(max_size=8))
    outcome(bytes(damaged))


VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.booleans())
def test_fuzz_json_is_read_as_it_is(value: Any, ascii_only: bool) -> None:
    """JSON is YAML: text, numbers and nesting come back exactly."""
    found = yamlfile.read(json.dumps({"value": value}, ensure_ascii=ascii_only).encode())
    strange = not ascii_only and any(character in STRANGE for leaf in leaves(value) for character in str(leaf))
    if strange:
        assert "wanted it escaped" in str(found.faults[0])
    else:
        assert (found.faults, found.data) == ((), {"value": value})


STRANGE = [*map(chr, range(0x7F, 0xA0)), "\u2028", "\u2029", "\ufeff", "\ufffe", "\uffff"]
"""Characters that JSON lets stand unescaped and that are refused here."""


def leaves(value: Any) -> list[Any]:
    """What nested data is made of, keys too."""
    if isinstance(value, dict):
        return [leaf for item in value.items() for part in item for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]
