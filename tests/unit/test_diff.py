"""Two bundles compared: what differs is named, and nothing else."""

from __future__ import annotations

import dataclasses
import json

import pytest
import samples

from kernelbake import bundle, diff
from kernelbake.plan import Choice


@pytest.fixture
def base():
    return samples.contents()


@pytest.fixture
def compare(tmp_path):
    def run(old, new) -> diff.Diff:
        for name, contents in (("old", old), ("new", new)):
            bundle.write(tmp_path / name, contents)
        found = diff.diff(bundle.read(tmp_path / "old"), bundle.read(tmp_path / "new"))
        json.dumps(found.to_json(), allow_nan=False)
        return found

    return run


def _titles(found: diff.Diff) -> list[str]:
    return [title for title, _ in found.sections()]


def test_the_same(base, compare):
    found = compare(base, samples.contents())
    assert found.same_bytes
    assert _titles(found) == []
    assert str(found) == f"the same to the last byte: {found.old}"


def test_fingerprint_and_header(base, compare):
    facts = samples.fingerprint_of(
        samples.profiles.load("h200"), list(base.plan.kernels.values()), triton__version="3.8.0", fla__version=None
    )
    found = compare(base, samples.changed(samples.named(base, "other"), fingerprint=facts))
    assert _titles(found) == ["header", "manifest", "fingerprint"]
    assert [str(change) for change in found.header] == ["name: `sample` → `other`"]
    assert {change.name: (change.old, change.new) for change in found.fingerprint} == {
        "triton.version": ("3.7.1", "3.8.0"),
        "fla.version": ("0.6.0", None),
    }
    assert not found.same_bytes
    assert found.old != found.new


def test_manifest(base, compare):
    resolved = {**base.manifest_resolved, "measure": {"rounds": 5}, "compile": {"line_info": 0, "fp_fusion": True}}
    found = compare(base, samples.changed(base, manifest_resolved=resolved))
    assert [str(change) for change in found.manifest] == [
        "compile.line_info: `false` → `0`",
        "measure: `{}` → `none`",
        "measure.rounds: `none` → `5`",
    ]
    found = compare(base, samples.changed(base, manifest_text=base.manifest_text + b"# a remark\n"))
    assert [change.name for change in found.manifest] == ["text"]


def test_keys_gained_and_lost(compare):
    found = compare(samples.contents(2), samples.contents(3))
    assert [key.kernel for key in found.gained] == ["sample.module2.kernel2"] * 2
    assert found.lost == ()
    assert "n=512" in found.gained[1].key
    assert {change.kind for change in found.code} == {"gained"}
    assert len(found.code) == 4
    back = compare(samples.contents(3), samples.contents(2))
    assert back.lost == found.gained
    assert {change.kind for change in back.code} == {"lost"}


def _with_winner(base, position: int, winner: int, median: float):
    """The contents with another winner at one launch, its entries with it."""
    launch, choice = base.plan.launches[position], base.choices[position]
    entries = {identity: entry for identity, entry in base.entries.items() if identity not in choice.entries.values()}
    config = launch.candidates[winner]
    made = {
        variant.specializations[winner].token: samples.Entry(
            launch.kernel,
            variant.specializations[winner],
            samples.metadata(90, config.num_warps, seed=0),
            samples.cubin(90, 5000, 1000 + number),
        )
        for number, variant in enumerate(launch.variants)
    }
    named = {token: entry.digest for token, entry in made.items()}
    new = Choice(choice.kernel, choice.key, config, named, {"median_ms": median})
    choices = (*base.choices[:position], new, *base.choices[position + 1 :])
    added = {entry.digest: entry for entry in made.values()}
    return samples.changed(base, choices=choices, entries=entries | added)


def test_a_choice_changed(base, compare):
    found = compare(base, _with_winner(base, 0, 1, 0.25))
    [change] = found.choices
    assert (change.old, change.new) == (str(samples.CANDIDATES[0]), str(samples.CANDIDATES[1]))
    assert (change.old_ms, change.new_ms) == (0.5, 0.25)
    assert "(0.5 ms) → `BLOCK=128 num_warps=8 num_stages=3` (0.25 ms)" in str(change)
    assert sorted(change.kind for change in found.code) == ["gained", "gained", "lost", "lost"]
    assert found.retimed == ()


def test_cubin_and_metadata_changed(base, compare):
    found = compare(base, _with_winner(base, 0, 0, 0.5))
    assert _titles(found) == ["code"]
    assert {change.kind for change in found.code} == {"cubin"}
    assert {(change.old_bytes, change.new_bytes) for change in found.code} == {(4096, 5000)}
    assert all([field.name for field in change.fields] == ["seed"] for change in found.code)

    first = next(iter(base.choices[0].entries))
    old = base.entries[base.choices[0].entries[first]]
    new = dataclasses.replace(old, metadata={**old.metadata, "shared": 2048})
    choice = dataclasses.replace(base.choices[0], entries={**base.choices[0].entries, first: new.digest})
    entries = {**{k: v for k, v in base.entries.items() if k != old.digest}, new.digest: new}
    found = compare(base, samples.changed(base, choices=(choice, *base.choices[1:]), entries=entries))
    [change] = found.code
    assert change.kind == "metadata"
    assert [str(field) for field in change.fields] == ["shared: `1024` → `2048`"]


def test_times_and_record(base, compare):
    slower = dataclasses.replace(base.choices[0], times={**base.choices[0].times, "median_ms": 0.625})
    found = compare(base, samples.changed(base, choices=(slower, *base.choices[1:])))
    assert _titles(found) == ["times changed, choices the same"]
    assert (found.retimed[0].old, found.retimed[0].new) == (0.5, 0.625)
    record = ({**base.record[0], "samples_ms": [0.5]}, *base.record[1:])
    found = compare(base, samples.changed(base, record=record))
    assert _titles(found) == []
    assert str(found).splitlines()[1] == "only the record of the candidates differs"


def test_bundles_of_different_kinds(compare):
    found = compare(samples.contents(), samples.contents(profile="rtx-pro-6000-blackwell"))
    assert {"gpu.device", "gpu.capability", "gpu.sm_count", "gpu.shared_memory_bytes"} <= {
        change.name for change in found.fingerprint
    }
    assert {change.kind for change in found.code} == {"cubin"}
    found = compare(samples.contents(launchers=True), samples.contents(made="interpreted"))
    assert len(found.libs) == 1
    assert {change.kind for change in found.code} == {"lost"}
