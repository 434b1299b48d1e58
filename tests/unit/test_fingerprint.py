"""The fingerprint: each field's class decides what a difference does, and all differences are reported at once."""

from __future__ import annotations

import dataclasses

import pytest
import samples

from kernelbake import fingerprint, profiles
from kernelbake.fingerprint import FIELDS, REQUIRED, FieldClass, Fingerprint, compare

H200 = profiles.load("h200")


@pytest.fixture
def held() -> Fingerprint:
    return samples.fingerprint_of(H200, [], python__abi="cpython-311-x86_64-linux-gnu")


def altered(base: Fingerprint, **changes) -> Fingerprint:
    """The fingerprint with other values; ``...`` drops a field."""
    values = {field.name: field.value for field in base.fields}
    for name, value in changes.items():
        if value is ...:
            del values[name.replace("__", ".")]
        else:
            values[name.replace("__", ".")] = value
    return Fingerprint.of(values)


def test_every_field_has_a_class_and_a_sample(held):
    assert {field.name for field in held.fields} == set(FIELDS)
    assert {name for name, cls in FIELDS.items() if cls is FieldClass.ENFORCED} - {"python.abi"} == REQUIRED


def test_no_difference(held):
    assert compare(held, held) == ()
    assert compare(held, Fingerprint.from_json(held.to_json())) == ()


_OTHER = {
    "gpu.backend": "hip",
    "gpu.capability": "121a",
    "gpu.device": "NVIDIA H100 80GB HBM3",
    "gpu.sm_count": 131,
    "gpu.shared_memory_bytes": 101376,
    "triton.version": "3.8.0",
    "triton.key": "sha256:" + "00" * 32,
    "triton.environment": {"TRITON_DEBUG": "1"},
    "python.abi": "cpython-312-x86_64-linux-gnu",
    "kernel.sources": "sha256:" + "11" * 32,
    "build.ptxas": "13.1.80",
    "build.line_info": True,
    "build.fp_fusion": False,
    "build.environment": {"PTXAS_OPTIONS": "-O1"},
    "driver.version": "570.10",
    "torch.version": "2.14.0",
    "fla.version": "0.7.0",
    "transformers.version": "6.0.0",
}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_alone_does_what_its_class_says(held, name):
    """R034: alter one field, and the outcome is that of the table in docs/bundle-format.md."""
    here = altered(held, **{name.replace(".", "__"): _OTHER[name]})
    [difference] = compare(held, here)
    assert difference.name == name
    assert (difference.bundle, difference.here) == (held[name], _OTHER[name])
    assert difference.refuses == (FIELDS[name] in (FieldClass.ENFORCED, FieldClass.FLOOR))
    assert difference.to_json()["cls"] == FIELDS[name].value


def test_three_differences_are_one_report(held):
    """R081."""
    here = altered(held, triton__version="3.9.0", gpu__sm_count=1, torch__version="2.12.0")
    differences = compare(held, here)
    assert [(d.name, d.refuses) for d in differences] == [
        ("gpu.sm_count", True),
        ("torch.version", False),
        ("triton.version", True),
    ]
    assert str(differences[0]) == "gpu.sm_count: here `1`; bundle: `132`"


@pytest.mark.parametrize(
    ("bundle", "here", "refuses"),
    [
        ("580.65.06", "580.65.06", None),
        ("580.65.06", "580.65.5", True),
        ("580.65.06", "580.65.7", False),
        ("580.65.06", "590.1", False),
        ("580.65.06", "99.1", True),
        ("580.65.06", "580.65", True),
        ("580.65", "580.65.06", False),
        ("580.65.06", None, True),
        ("580.65.06", ..., True),
        (None, "580.65.06", False),
        ("580.65.06", "unknown", True),
        ("580.65.06", "580.65.06-beta", True),
    ],
)
def test_the_drivers_version_is_a_floor(held, bundle, here, refuses):
    """R034: a newer driver alone has a stated outcome: it is shown and does not refuse."""
    differences = compare(altered(held, driver__version=bundle), altered(held, driver__version=here))
    assert [d.refuses for d in differences] == ([] if refuses is None else [refuses])
    if refuses is False and bundle is not None:
        assert "newer, which is fine" in str(differences[0])


@pytest.mark.parametrize(
    ("bundle", "here", "note"),
    [
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3", "one name begins with the other"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100", "one name begins with the other"),
        ("NVIDIA H200 ", "NVIDIA H200", "only spaces or letter case differ"),
        ("NVIDIA  H200", "NVIDIA H200", "only spaces or letter case differ"),
        ("nvidia h200", "NVIDIA H200", "only spaces or letter case differ"),
        ("NVIDIA A100-SXM4/80GB (MIG)", "NVIDIA H200", ""),
    ],
)
def test_a_near_miss_of_the_device_is_pointed_out(held, bundle, here, note):
    """R018: names are compared exactly, and both are shown as they are."""
    [difference] = compare(altered(held, gpu__device=bundle), altered(held, gpu__device=here))
    assert difference.refuses
    assert f"here `{here}`; bundle: `{bundle}`" in str(difference)
    assert difference.note.startswith(note)
    assert bool(difference.note) == bool(note)


def test_another_gpu_is_refused_by_name():
    """R016: the architecture is a field of the fingerprint, so no driver has to find out."""
    here = samples.fingerprint_of(H200, [])
    for other in ("rtx-pro-6000-blackwell", "b200", "h100"):
        differences = compare(samples.fingerprint_of(profiles.load(other), []), here)
        refusing = {difference.name: difference for difference in differences if difference.refuses}
        assert "gpu.device" in refusing
        assert ("gpu.capability" in refusing) == (other != "h100")
    assert str(compare(samples.fingerprint_of(profiles.load("rtx-5090"), []), here)[0]) == (
        "gpu.capability: here `90a`; bundle: `120a`"
    )


def test_what_only_one_side_has(held):
    run = altered(held, build__ptxas=..., build__line_info=..., build__fp_fusion=..., build__environment=...)
    assert compare(held, run) == (), "a run has no build facts"
    without = altered(held, python__abi=...)
    assert compare(without, held) == (), "without a launcher library the ABI does not matter"
    [difference] = compare(held, without)
    assert difference.refuses
    [difference] = compare(held, altered(held, fla__version=...))
    assert (difference.refuses, difference.here) == (False, None)
    [difference] = compare(altered(held, triton__key=...), held)
    assert difference.refuses, "a bundle that leaves an enforced field out fits nothing"


def test_types_are_not_confused(held):
    [difference] = compare(altered(held, gpu__sm_count=1), altered(held, gpu__sm_count=True))
    assert difference.refuses


def test_unknown_fields_are_not_taken():
    with pytest.raises(KeyError):
        Fingerprint.of({"gpu.colour": "green"})


def test_access(held):
    assert held["gpu.sm_count"] == 132
    assert held.get("nothing") is None
    assert "gpu.device" in held
    assert "nothing" not in held
    assert dataclasses.replace(held, fields=held.fields[:1]).get("gpu.device", "none") == "none"


@pytest.mark.parametrize(
    ("pair", "text", "arch"), [((8, 0), "80", 80), ((9, 0), "90a", 90), ((10, 0), "100a", 100), ((12, 1), "121a", 121)]
)
def test_capabilities(pair, text, arch):
    assert fingerprint.capability(*pair) == text
    assert fingerprint.arch_of(text) == arch


@pytest.mark.parametrize("text", ["", "9.0", "sm_90", "90b", "9", "1200a0", "90a\n", "٩٠", "None"])
def test_no_capability(text):
    with pytest.raises(ValueError, match="no compute capability"):
        fingerprint.arch_of(text)


def test_the_digest_of_sources_depends_on_each_and_on_no_order():
    kernels = [samples.facts(samples.Kernel("m", f"k{number}")) for number in range(3)]
    whole = fingerprint.sources_digest(kernels)
    assert fingerprint.sources_digest(reversed(kernels)) == whole
    assert fingerprint.sources_digest([*kernels, kernels[0]]) == whole
    assert fingerprint.sources_digest(kernels[:2]) != whole
    other = dataclasses.replace(kernels[0], source_digest="sha256:" + "0" * 64)
    assert fingerprint.sources_digest([other, *kernels[1:]]) != whole
