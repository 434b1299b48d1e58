"""Joining bundles: the launches of both, the evidence of both, and no bundle made for something else."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import scripted

from kernelbake import build, bundle, merge
from kernelbake.build import Options
from kernelbake.bundle import Bundle, Contents
from kernelbake.errors import BuildError, InputError, MisfitError
from kernelbake.fingerprint import Fingerprint
from kernelbake.plan import Plan

SUPPORT = Path(scripted.__file__).parent
ROOT = Path(__file__).parents[2]

SHARED = scripted.launch("shared", ["time=1.0", "time=1.5", "time=2.0"], cases=["size=1"])
FIRST = scripted.plan([SHARED, scripted.launch("first", ["time=1.0", "wrong", "time=2.0"], cases=["size=1"])])
SECOND = scripted.plan(
    [
        dataclasses.replace(SHARED, variants=(dataclasses.replace(SHARED.variants[0], cases=("size=2",)),)),
        scripted.launch("second", ["time=1.0"], key=None, cases=["size=1", "size=2"]),
    ],
    cases=2,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Contents, Contents]:
    folder = tmp_path_factory.mktemp("pair")
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{SUPPORT}{os.pathsep}{ROOT}")
        for name, plan in (("first", FIRST), ("second", SECOND)):
            options = Options(engine=scripted.ENGINE, plan=plan, fingerprint=scripted.fingerprint(plan))
            build.run(scripted.manifest(name), folder / f"{name}.tar", options, lambda event: None)
            found.append(merge._contents(bundle.read(folder / f"{name}.tar")))
    first, second = found
    return first, second


def _merged(folder: Path, *contents: Contents) -> Bundle:
    paths = [folder / f"{place}.tar" for place in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        bundle.write(path, content)
    merge.merge(paths, folder / "merged.tar")
    return bundle.read(folder / "merged.tar")


def _with_times(content: Contents, times: Mapping[str, list[float]], winner: str) -> Contents:
    """The bundle as if its candidates of ``shared`` had taken these times."""

    def line(found: Mapping[str, Any]) -> Mapping[str, Any]:
        script = dict(found["config"]["meta"])["DO"]
        if not found["kernel"].endswith(":shared") or script not in times:
            return found
        return {**found, "samples_ms": times[script], "median_ms": sorted(times[script])[len(times[script]) // 2]}

    choices = []
    for choice in content.choices:
        if choice.kernel.qualname == "shared":
            launch = content.plan.launch(choice.id)
            assert launch is not None
            place = [dict(config.meta)["DO"] for config in launch.candidates].index(winner)
            entries = {variant.specializations[place].token: None for variant in launch.variants}
            choice = dataclasses.replace(choice, winner=launch.candidates[place], entries=entries)
        choices.append(choice)
    return dataclasses.replace(content, record=tuple(map(line, content.record)), choices=tuple(choices))


def _winner(held: Bundle, name: str) -> str:
    [choice] = [choice for choice in held.choices if choice.kernel.qualname == name]
    return str(dict(choice.winner.meta)["DO"])


def test_the_launches_and_cases_of_both_are_there(pair: tuple[Contents, Contents], tmp_path: Path) -> None:
    held = _merged(tmp_path, *pair)
    assert [launch.kernel.qualname for launch in held.plan.launches] == ["first", "second", "shared"]
    [shared] = [launch for launch in held.plan.launches if launch.kernel.qualname == "shared"]
    assert shared.cases == ("size=1", "size=2")
    assert [case.id for case in held.plan.cases] == ["size=1", "size=2"]
    assert {choice.kernel.qualname for choice in held.choices} == {"first", "second", "shared"}
    assert held.name == "first"


def test_the_evidence_of_both_is_there(pair: tuple[Contents, Contents], tmp_path: Path) -> None:
    held = _merged(tmp_path, *pair)
    lines = {dict(line["config"]["meta"])["DO"]: line for line in held.record if line["kernel"].endswith(":shared")}
    alone = next(line for line in pair[0].record if line["kernel"].endswith(":shared"))
    assert len(lines) == 3
    assert len(lines["time=1.0"]["samples_ms"]) == 2 * len(alone["samples_ms"])
    [wrong] = [line for line in held.record if line["outcome"] == "wrong-result"]
    assert wrong["kernel"].endswith(":first")


def test_the_choice_with_the_better_evidence_is_kept(pair: tuple[Contents, Contents], tmp_path: Path) -> None:
    first = _with_times(pair[0], {"time=1.0": [1.0] * 3, "time=1.5": [0.9] * 3}, "time=1.5")
    second = _with_times(pair[1], {"time=1.0": [1.0] * 9, "time=1.5": [1.6] * 9}, "time=1.0")
    assert _winner(_merged(tmp_path, first, second), "shared") == "time=1.0", "12 samples against 12, pooled"
    assert _winner(_merged(tmp_path, second, first), "shared") == "time=1.0", "in either order"


def test_what_one_bundle_rejected_does_not_win(pair: tuple[Contents, Contents], tmp_path: Path) -> None:
    def reject(line: Mapping[str, Any]) -> Mapping[str, Any]:
        if line["kernel"].endswith(":shared") and dict(line["config"]["meta"])["DO"] == "time=1.0":
            return {**line, "outcome": "not-repeatable", "detail": "two runs differ"}
        return line

    first = _with_times(pair[0], {}, "time=1.5")
    first = dataclasses.replace(first, record=tuple(map(reject, first.record)))
    assert _winner(_merged(tmp_path, first, pair[1]), "shared") == "time=1.5"


def _other_field(name: str, value: Any) -> Callable[[Contents], Contents]:
    def change(content: Contents) -> Contents:
        facts = {field.name: field.value for field in content.fingerprint.fields}
        return dataclasses.replace(content, fingerprint=Fingerprint.of({**facts, name: value}))

    return change


def _other_policy(content: Contents) -> Contents:
    resolved = dict(content.manifest_resolved)
    return dataclasses.replace(content, manifest_resolved={**resolved, "measure": {**resolved["measure"], "rounds": 9}})


def _other_source(content: Contents) -> Contents:
    from kernelbake.fingerprint import sources_digest

    kernels = {
        name: dataclasses.replace(facts, source_digest="sha256:" + "7" * 64)
        for name, facts in content.plan.kernels.items()
    }
    facts = {field.name: field.value for field in content.fingerprint.fields}
    facts["kernel.sources"] = sources_digest(kernels.values())
    plan: Plan = dataclasses.replace(content.plan, kernels=kernels)
    return dataclasses.replace(content, plan=plan, fingerprint=Fingerprint.of(facts))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_field("triton.version", "3.8.0"), "triton.version: first `3.7.1`; second `3.8.0`"),
        (_other_field("build.ptxas", "13.1"), "build.ptxas: first `None`; second `13.1`"),
        (_other_field("triton.environment", {"FLA_X": "1"}), "triton.environment: first `{}`; second `{'FLA_X': '1'}`"),
        (_other_policy, "measure.rounds: first `2`; second `9`"),
        (_other_source, "kernel `scripted_kernels.shared`: its source or its configs differ"),
    ],
)
def test_something_else_is_refused(
    pair: tuple[Contents, Contents], tmp_path: Path, change: Callable[[Contents], Contents], reason: str
) -> None:
    with pytest.raises(MisfitError) as caught:
        _merged(tmp_path, pair[0], change(pair[1]))
    assert caught.value.reasons == (reason,)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "merged.tar").exists()


def test_informational_differences_do_not_matter(pair: tuple[Contents, Contents], tmp_path: Path) -> None:
    held = _merged(tmp_path, pair[0], _other_field("torch.version", "2.99")(pair[1]))
    assert held.made == "interpreted"


def test_a_bundle_with_itself_is_the_same_choices(pair: tuple[Contents, Contents], tmp_path: Path) -> None:
    held = _merged(tmp_path, pair[0], pair[0])
    assert [(choice.id, choice.winner) for choice in held.choices] == [
        (choice.id, choice.winner) for choice in pair[0].choices
    ]


def test_one_bundle_is_none_to_merge(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wanted two or more"):
        merge.merge([tmp_path / "a.tar"], tmp_path / "b.tar")


def test_winners_without_code_for_all_variants_are_refused(pair: tuple[Contents, Contents], tmp_path: Path) -> None:
    """The second bundle meets the shared launch in another variant, and has another winner for it."""
    [shared] = [launch for launch in pair[1].plan.launches if launch.kernel.qualname == "shared"]
    [variant] = shared.variants
    changed = tuple(
        dataclasses.replace(found, parameters=(dataclasses.replace(found.parameters[0], key=""), *found.parameters[1:]))
        for found in variant.specializations
    )
    other = dataclasses.replace(shared, variants=(dataclasses.replace(variant, specializations=changed),))
    launches = tuple(other if launch is shared else launch for launch in pair[1].plan.launches)
    second = dataclasses.replace(pair[1], plan=dataclasses.replace(pair[1].plan, launches=launches))
    with pytest.raises(BuildError, match="no winner of the bundles is sound in all of them with code for all variants"):
        _merged(tmp_path, pair[0], _with_times(second, {}, "time=1.5"))
    held = _merged(tmp_path, pair[0], _with_times(second, {}, "time=1.0"))
    [choice] = [choice for choice in held.choices if choice.kernel.qualname == "shared"]
    assert len(choice.entries) == 2
