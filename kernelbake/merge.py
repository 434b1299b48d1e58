"""Joins bundles of one fingerprint: the launches of all, and the evidence of all about those that they share."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelbake import bundle, digest, plan
from kernelbake.bundle import Bundle, Contents, Entry
from kernelbake.errors import BuildError, InputError, MisfitError
from kernelbake.fingerprint import FieldClass, Fingerprint, sources_digest
from kernelbake.outcome import OK
from kernelbake.plan import Choice, KernelFacts, Launch, Plan
from kernelbake.progress import BuildResult
from kernelbake.words import counted

_COMPARED = (FieldClass.ENFORCED, FieldClass.BUILD_ONLY, FieldClass.FLOOR)

_DERIVED = "kernel.sources"
"""Of the kernels that a bundle launches: made anew for the merged bundle; shared kernels are compared one by one."""


def merge(paths: Sequence[Path], output: Path) -> BuildResult:
    """Joins bundles into one. Where two hold a choice for the same launch, the one that both records speak for is kept.

    Name and manifest are those of the first. The bundles must agree in everything that decides about code and times:
    fingerprint, device profile, implementations, measuring policy, compile options, sources of shared kernels and
    candidates of shared launches.

    Args:
        paths: two bundles or more.
        output: the merged bundle.

    Raises:
        InputError: fewer than two bundles, or one that cannot be opened.
        BundleError: one of them is damaged.
        MisfitError: they were made for different things; with every difference.
        BuildError: neither of two choices has code for all that the other bundle launches.
    """
    if len(paths) < 2:
        raise InputError(f"merge: {counted(len(paths), 'bundle')}; wanted two or more")
    start = time.monotonic()
    bundle.check_output(output)
    merged, *others = [_contents(bundle.read(path)) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        _check_same(merged, other, f"merge `{paths[0]}` and `{path}`")
        merged = _joined(merged, other)
    written = bundle.write(output, merged)
    rejected = collections.Counter(line["outcome"] for line in merged.record if line["outcome"] != OK)
    return BuildResult(
        path=output,
        digest=written,
        made=merged.made,
        keys=merged.plan.num_keys,
        candidates=merged.plan.num_candidates,
        rejected=rejected,
        bundle_bytes=output.stat().st_size,
        entries=len(merged.entries),
        seconds={"merge": time.monotonic() - start},
    )


def _contents(held: Bundle) -> Contents:
    return Contents(
        name=held.name,
        made=held.made,
        manifest_text=held.manifest_text,
        manifest_resolved=held.manifest_resolved,
        fingerprint=held.fingerprint,
        plan=held.plan,
        choices=held.choices,
        record=held.record,
        entries=dict(held.entries),
        libs=dict(held.libs),
        line_info=bool(held.header["line_info"]),
    )


# ---------------------------------------------------------------------------------------------- what must agree


def _check_same(one: Contents, other: Contents, where: str) -> None:
    reasons = [*_different_facts(one.fingerprint, other.fingerprint), *_different_plans(one.plan, other.plan)]
    if one.made != other.made:
        reasons.append(_differ("made", one.made, other.made))
    for part in ("measure", "compile", "gpu"):
        mine, theirs = one.manifest_resolved.get(part), other.manifest_resolved.get(part)
        reasons += _differences(part, mine, theirs)
    if reasons:
        number = counted(len(reasons), "difference")
        raise MisfitError(f"{where}: {number}; wanted bundles made for the same", reasons=reasons)


def _different_facts(one: Fingerprint, other: Fingerprint) -> list[str]:
    classes = {field.name: field.cls for field in (*one.fields, *other.fields)}
    return [
        _differ(name, one.get(name), other.get(name))
        for name, cls in sorted(classes.items())
        if cls in _COMPARED and name != _DERIVED and one.get(name) != other.get(name)
    ]


def _different_plans(one: Plan, other: Plan) -> list[str]:
    reasons = [*_differences("profile", one.profile, other.profile)]
    reasons += _differences("implementations", one.implementations, other.implementations)
    for name in sorted(one.kernels.keys() & other.kernels.keys()):
        if one.kernels[name] != other.kernels[name]:
            reasons.append(f"kernel `{name}`: its source or its configs differ")
    for launch in one.launches:
        twin = other.launch(launch.id)
        if twin is not None and set(twin.candidates) != set(launch.candidates):
            reasons.append(f"{launch}: its candidates differ")
    return reasons


def _differences(place: str, one: Any, other: Any) -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return [
            line
            for name in sorted({*one, *other})
            for line in _differences(f"{place}.{name}", one.get(name), other.get(name))
        ]
    return [] if one == other else [_differ(place, one, other)]


def _differ(name: str, one: Any, other: Any) -> str:
    return f"{name}: first `{one}`; second `{other}`"


# ---------------------------------------------------------------------------------------------- joining


def _joined(one: Contents, other: Contents) -> Contents:
    joined = _joined_plan(one.plan, other.plan)
    record = _joined_record(one.record, other.record)
    choices = _joined_choices(joined, one, other, record)
    entries: dict[str, Entry] = {**one.entries, **other.entries}
    if one.made != "compiled-only":
        used = {identity for choice in choices for identity in choice.entries.values()}
        entries = {identity: entry for identity, entry in entries.items() if identity in used}
    libs = {**one.libs, **other.libs}
    named = {entry.launcher for entry in entries.values() if entry.launcher is not None}
    unnamed = set(libs) - {entry.launcher for held in (one, other) for entry in held.entries.values()}
    facts = {field.name: field.value for field in one.fingerprint.fields}
    facts[_DERIVED] = sources_digest(joined.kernels.values())
    return dataclasses.replace(
        one,
        fingerprint=Fingerprint.of(facts),
        plan=joined,
        choices=choices,
        record=record,
        entries=entries,
        libs={name: data for name, data in libs.items() if name in named | unnamed},
        line_info=one.line_info or other.line_info,
    )


def _joined_plan(one: Plan, other: Plan) -> Plan:
    observed = [
        (case, dataclasses.replace(launch, variants=(dataclasses.replace(variant, cases=()),)))
        for held in (one, other)
        for launch in held.launches
        for variant in _in_order(launch, one).variants
        for case in variant.cases
    ]
    cases = tuple(dict.fromkeys((*one.cases, *other.cases)))
    skipped = {case: reason for held in (one, other) for case, reason in held.skipped if case not in cases}
    kernels: dict[str, KernelFacts] = {**one.kernels, **other.kernels}
    unbounded = tuple(dict.fromkeys((*one.unbounded, *other.unbounded)))
    return dataclasses.replace(
        one,
        cases=cases,
        skipped=tuple(skipped.items()),
        kernels=dict(sorted(kernels.items())),
        launches=plan.collect((case, _in_order(launch, one)) for case, launch in observed),
        unbounded=unbounded,
    )


def _in_order(launch: Launch, first: Plan) -> Launch:
    """The launch with its candidates in the order in which the first plan has them."""
    twin = first.launch(launch.id)
    if twin is None or twin.candidates == launch.candidates:
        return launch
    places = [launch.candidates.index(candidate) for candidate in twin.candidates]
    variants = tuple(
        dataclasses.replace(variant, specializations=tuple(variant.specializations[place] for place in places))
        for variant in launch.variants
    )
    return dataclasses.replace(launch, candidates=twin.candidates, variants=variants)


def _line_id(line: Mapping[str, Any]) -> str:
    return digest.canonical_json([line["kernel"], line["key"], line["config"]]).decode()


def _joined_record(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """One line for each candidate, with the samples of both; a rejection by either stands."""
    lines = {_line_id(line): dict(line) for line in one}
    for theirs in other:
        mine = lines.get(_line_id(theirs))
        lines[_line_id(theirs)] = dict(theirs) if mine is None else _joined_line(mine, theirs)
    return tuple(lines.values())


def _joined_line(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    rejected = next((line for line in (one, other) if line["outcome"] != OK), None)
    specializations = list(dict.fromkeys((*one["specializations"], *other["specializations"])))
    line = {**other, **one, **(rejected or {}), "specializations": specializations}
    samples = [*one.get("samples_ms", []), *other.get("samples_ms", [])]
    if samples:
        line |= {"samples_ms": samples, "median_ms": round(statistics.median(samples), 6)}
        if len(samples) > 1:
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
            line["spread_ms"] = round(high - low, 6)
    outputs = {**other.get("outputs", {}), **one.get("outputs", {})}
    if outputs:
        line["outputs"] = outputs
    errors = [found["error"] for found in (one, other) if found.get("error") is not None]
    if errors:
        line["error"] = max(errors)
    return line


def _joined_choices(
    joined: Plan, one: Contents, other: Contents, record: Sequence[Mapping[str, Any]]
) -> tuple[Choice, ...]:
    mine = {choice.id: choice for choice in one.choices}
    theirs = {choice.id: choice for choice in other.choices}
    lines = {_line_id(line): line for line in record}
    choices = []
    for launch in joined.launches:
        found = [held[launch.id] for held in (mine, theirs) if launch.id in held]
        if found:
            choices.append(_best(launch, found, lines))
    return tuple(choices)


def _best(launch: Launch, found: Sequence[Choice], lines: Mapping[str, Mapping[str, Any]]) -> Choice:
    """The choice that the evidence of all bundles speaks for, among those with code for every variant."""
    usable = []
    for winner in sorted({choice.winner for choice in found}, key=lambda config: config.token):
        entries = {
            token: entry for choice in found if choice.winner == winner for token, entry in choice.entries.items()
        }
        place = launch.candidates.index(winner)
        complete = all(variant.specializations[place].token in entries for variant in launch.variants)
        key = launch.key.to_json() if launch.key else None
        line = lines[_line_id({"kernel": launch.kernel.to_json(), "key": key, "config": winner.to_json()})]
        if complete and line["outcome"] == OK:
            median = line.get("median_ms", 0.0)
            choice = next(choice for choice in found if choice.winner == winner)
            times = {**choice.times, **({"median_ms": median} if "median_ms" in line else {})}
            usable.append((median, dataclasses.replace(choice, entries=entries, times=times)))
    if not usable:
        raise BuildError(
            f"merge: {launch}: no winner of the bundles is sound in all of them with code for all variants; wanted one",
            hint="build one bundle of all cases",
        )
    return min(usable, key=lambda pair: pair[0])[1]
