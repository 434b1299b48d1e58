"""What a bundle holds, as data: shown, explained, and compared with a plan made anew. Prints nothing."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelbake import bundle, plan, preflight, profiles, workload
from kernelbake.bounds import Limits
from kernelbake.errors import InputError, MisfitError
from kernelbake.keys import Config, key_text
from kernelbake.plan import Choice, Coverage, Launch, Plan
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.bundle import Bundle

VARIANT_LIMIT = 32
"""Binaries of one kernel, at one config each, above which a warning is due; ``bounds`` refuses twice as many."""


# ---------------------------------------------------------------------------------------------- plan


@dataclasses.dataclass(frozen=True)
class KernelCount:
    """What a plan asks of one kernel.

    Args:
        kernel: its name.
        keys: launches at which something is chosen.
        launches: all launches, those with nothing to choose included.
        candidates: candidates over all launches.
        binaries: distinct binaries to compile for all candidates.
        frozen: binaries that a bundle will hold, one config chosen at each launch; at most.
        cases: ids of the cases that launch it.
    """

    kernel: str
    keys: int
    launches: int
    candidates: int
    binaries: int
    frozen: int
    cases: tuple[str, ...]


def is_interpreted(found: Plan) -> bool:
    """Whether a plan is for Triton's interpreter, which compiles nothing."""
    return bool(found.profile["backend"] == profiles.INTERPRETER)


def by_kernel(found: Plan) -> list[KernelCount]:
    """The counts of every kernel of a plan, by name."""
    groups: dict[str, list[Launch]] = {}
    for launch in found.launches:
        groups.setdefault(launch.kernel.name, []).append(launch)
    return [_count(name, launches) for name, launches in sorted(groups.items())]


def _count(name: str, launches: Sequence[Launch]) -> KernelCount:
    binaries = {spec.token for launch in launches for variant in launch.variants for spec in variant.specializations}
    return KernelCount(
        name,
        sum(launch.key is not None for launch in launches),
        len(launches),
        sum(len(launch.candidates) for launch in launches),
        len(binaries),
        sum(len(launch.variants) for launch in launches),
        tuple(dict.fromkeys(case for launch in launches for case in launch.cases)),
    )


def by_case(found: Plan) -> list[tuple[str, list[Launch]]]:
    """Every case's id with the launches that it makes."""
    launches: dict[str, list[Launch]] = {case.id: [] for case in found.cases}
    for launch in found.launches:
        for case in launch.cases:
            launches[case].append(launch)
    return list(launches.items())


def warnings(found: Plan, limit: int = VARIANT_LIMIT) -> list[str]:
    """What a person should know before a plan is compiled: kernels with very many binaries, and what drives them."""
    lines = []
    for item in found.unbounded:
        axis = f", which follows `{item.axis}`" if item.axis else ""
        lines.append(
            f"kernel `{item.kernel.name}`: {counted(len(item.values), 'value')} of argument `{item.argument}`{axis}, "
            f"each with a binary or key of its own; the cases make them finite"
        )
    things = "variants of arguments" if is_interpreted(found) else "binaries to hold"
    for count in by_kernel(found):
        if count.frozen > limit:
            lines.append(f"kernel `{count.kernel}`: {count.frozen:,} {things}; more than {limit} are rarely intended")
    return lines


def only_cases(found: Plan, wanted: Sequence[str]) -> Plan:
    """The part of a plan that belongs to the cases whose ids hold one of the texts; all of it where there is none.

    Raises:
        InputError: a text that no case's id holds.
    """
    if not wanted:
        return found
    unknown = [text for text in wanted if not any(text in case.id for case in found.cases)]
    if unknown:
        raise InputError(
            f"--case: no case holds {', '.join(f'`{text}`' for text in unknown)}; wanted part of a case's id",
            hint=f"the first case is `{found.cases[0].id}`" if found.cases else None,
        )
    cases = tuple(case for case in found.cases if any(text in case.id for text in wanted))
    kept = {case.id for case in cases}
    launches = []
    for launch in found.launches:
        variants = tuple(
            dataclasses.replace(variant, cases=tuple(case for case in variant.cases if case in kept))
            for variant in launch.variants
            if kept.intersection(variant.cases)
        )
        if variants:
            launches.append(dataclasses.replace(launch, variants=variants))
    names = {launch.kernel.name for launch in launches}
    kernels = {name: facts for name, facts in found.kernels.items() if name in names}
    return dataclasses.replace(found, cases=cases, skipped=(), launches=tuple(launches), kernels=kernels)


# ---------------------------------------------------------------------------------------------- show


@dataclasses.dataclass(frozen=True)
class Shown:
    """A bundle in short.

    Args:
        name, digest, made: as the bundle says.
        size_bytes: of the file.
        gpu: device name and gpu target.
        fingerprint: (field, class, value) of every field.
        counts: cases, kernels, keys, candidates, rejected, entries.
        rejected: candidates rejected, by reason.
        choices: one for each launch, filtered by kernel where asked.
    """

    name: str
    digest: str
    made: str
    size_bytes: int
    fingerprint: tuple[tuple[str, str, Any], ...]
    counts: Mapping[str, int]
    rejected: Mapping[str, int]
    skipped: tuple[tuple[str, str], ...]
    choices: tuple[Choice, ...]

    @property
    def interpreted(self) -> bool:
        """Whether it holds decisions of Triton's interpreter, and no code."""
        return self.made == "interpreted"

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(dataclasses.replace(self, choices=()))
        data["fingerprint"] = [{"field": name, "class": cls, "value": value} for name, cls, value in self.fingerprint]
        data["skipped"] = [{"case": case, "reason": reason} for case, reason in self.skipped]
        data["choices"] = [choice.to_json() for choice in self.choices]
        return data


def show(path: Path, *, kernel: str | None = None) -> Shown:
    """Reads a bundle, with its whole integrity check, and sums it up.

    Raises:
        BundleError: it cannot be trusted.
        CoverageError: a kernel was named, and the bundle was not measured yet.
        InputError: no kernel's name holds the text.
    """
    held = bundle.read(path)
    choices = tuple(choice for choice in held.choices if kernel is None or kernel in choice.kernel.name)
    if kernel is not None and not choices:
        raise _unknown_kernel(held, kernel, "show")
    outcomes = collections.Counter(str(item["outcome"]) for item in held.record)
    rejected = {reason: count for reason, count in sorted(outcomes.items()) if reason != "ok"}
    counts = {
        "cases": len(held.plan.cases),
        "kernels": len(held.plan.kernels),
        "keys": held.plan.num_keys,
        "launches": len(held.plan.launches),
        "candidates": held.plan.num_candidates,
        "tried": sum(outcomes.values()),
        "rejected": sum(rejected.values()),
        "entries": len(held.entries),
    }
    fields = tuple((field.name, str(field.cls), field.value) for field in held.fingerprint.fields)
    skipped = tuple((case.id, reason) for case, reason in held.plan.skipped)
    return Shown(held.name, held.digest, held.made, held.size_bytes, fields, counts, rejected, skipped, choices)


def _unknown_kernel(held: Bundle, text: str, where: str) -> InputError:
    bundle.refuse_unmeasured(held.made, held.name, where)
    known = sorted({choice.kernel.name for choice in held.choices})
    return InputError(
        f"kernel: no name in the bundle holds `{text}`; wanted part of a kernel's name",
        reasons=[f"it holds `{name}`" for name in known],
    )


# ---------------------------------------------------------------------------------------------- explain


@dataclasses.dataclass(frozen=True)
class Tried:
    """What became of one candidate.

    Args:
        config: the candidate.
        outcome: ``ok``, or the reason of its rejection.
        median_ms: its time; None where it was not measured.
        error: its largest relative deviation from the reference; None where it was not compared.
        note: detail of a rejection, or the candidate whose code is the same; "" for neither.
    """

    config: str
    outcome: str
    median_ms: float | None
    error: float | None
    note: str


@dataclasses.dataclass(frozen=True)
class Explained:
    """Why one decision is in the bundle.

    Args:
        choice: the decision.
        cases: ids of the cases that make the launch.
        variants: the specializations launched, for people.
        tried: every candidate, the fastest first, then those not measured.
        nearest: the other key of the same kernel that differs least: its text, and ``field: this `…`; nearest `…```
            for each difference. None where the kernel has one key only.
    """

    choice: Choice
    cases: tuple[str, ...]
    variants: tuple[str, ...]
    tried: tuple[Tried, ...]
    nearest: tuple[str, tuple[str, ...]] | None

    def to_json(self) -> dict[str, Any]:
        return {
            "choice": self.choice.to_json(),
            "cases": list(self.cases),
            "variants": list(self.variants),
            "tried": [dataclasses.asdict(candidate) for candidate in self.tried],
            "nearest": None if self.nearest is None else {"key": self.nearest[0], "differences": list(self.nearest[1])},
        }


def explain(path: Path, kernel: str, key: str = "") -> list[Explained]:
    """Why a kernel's keys are in the plan, and how each was decided.

    Args:
        path: the bundle.
        kernel: part of the kernel's name.
        key: part of the key's text; empty for all keys.

    Raises:
        BundleError: the bundle cannot be trusted.
        CoverageError: the bundle was not measured yet.
        InputError: nothing fits the texts.
    """
    held = bundle.read(path)
    of_kernel = [choice for choice in held.choices if kernel in choice.kernel.name]
    if not of_kernel:
        raise _unknown_kernel(held, kernel, "explain")
    wanted = [choice for choice in of_kernel if key in str(choice.key or "")]
    if not wanted:
        known = [f"`{choice.kernel.name}` has `{key_text(choice.key)}`" for choice in of_kernel]
        raise InputError(f"--key: no key of `{kernel}` holds `{key}`; wanted part of one", reasons=known)
    return [_explained(held, choice) for choice in wanted]


def _explained(held: Bundle, choice: Choice) -> Explained:
    launch = held.plan.launch(choice.id)
    variants = launch.variants if launch is not None else ()
    index = launch.candidates.index(choice.winner) if launch is not None and choice.winner in launch.candidates else 0
    return Explained(
        choice,
        launch.cases if launch is not None else (),
        tuple(str(variant.specializations[index]) for variant in variants),
        _tried(held.record, choice),
        _nearest(choice, held.choices),
    )


def _nearest(choice: Choice, choices: Iterable[Choice]) -> tuple[str, tuple[str, ...]] | None:
    others = [other for other in choices if other.kernel == choice.kernel and other.id != choice.id]
    if not others:
        return None
    found = [(plan.nearest_key(choice.key, [other.key], "this", "nearest"), other) for other in others]
    differences, nearest = min(found, key=lambda item: len(item[0]))
    return key_text(nearest.key), differences


def _tried(record: Iterable[Mapping[str, Any]], choice: Choice) -> tuple[Tried, ...]:
    key = choice.key.to_json() if choice.key else None
    found = [
        Tried(
            str(Config.from_json(item["config"])),
            str(item["outcome"]),
            item.get("median_ms"),
            item.get("error"),
            _note(item),
        )
        for item in record
        if item["kernel"] == choice.kernel.to_json() and item["key"] == key
    ]
    return tuple(sorted(found, key=lambda row: (row.median_ms is None, row.median_ms or 0.0, row.config)))


def _note(item: Mapping[str, Any]) -> str:
    if "same_code_as" in item:
        return f"same code as {Config.from_json(item['same_code_as'])}"
    return str(item.get("detail", ""))


# ---------------------------------------------------------------------------------------------- coverage


@dataclasses.dataclass(frozen=True)
class Covered:
    """A bundle against a plan.

    Args:
        held: the bundle.
        plan: the plan; the one inside the bundle where it was not ``replanned``.
        coverage: the difference, both ways.
        replanned: whether a shadow run made the plan anew.
    """

    held: Bundle
    plan: Plan
    coverage: Coverage
    replanned: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "digest": self.held.digest,
            "complete": self.coverage.complete,
            "replanned": self.replanned,
            "cases": len(self.plan.cases),
            "needed": self.coverage.num_needed,
            "missing": [missing.to_json() for missing in self.coverage.missing],
            "unused": [list(id_) for id_ in self.coverage.unused],
        }

    def refuse(self, where: str) -> None:
        """Refuses what keeps the plan from running on the bundle.

        Raises:
            MisfitError: the bundle was made with another Triton or from other kernel sources.
            CoverageError: something is missing; all of it is listed.
        """
        preflight.refuse(self.plan, self.held, self.coverage, where)


OnProgress = Callable[[int, int, str], None]


def covered_inside(held: Bundle) -> Covered:
    """Compares the plan inside a bundle with what the bundle holds. No workload runs."""
    return Covered(held, held.plan, plan.coverage(held.plan, held.inventory()), replanned=False)


def coverage_of(
    path: Path,
    *,
    manifest: str | None = None,
    config: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Covered:
    """Plans anew, in a child process, and compares with what a bundle holds.

    Args:
        path: the bundle.
        manifest: path or name of the manifest to plan; the bundle's own where neither is given.
        config: a run's configuration to plan instead, on top of the bundle's own workload.
        on_progress: called with cases done, cases in all, and the case.

    Raises:
        BundleError: the bundle cannot be trusted.
        InputError, ManifestError: what was to be planned cannot be read.
        MisfitError: the manifest is for another GPU than the bundle.
        PlanError: the workload cannot be planned.
    """
    if manifest is not None and config is not None:
        raise InputError("coverage: `--manifest` and `--config` both given; wanted one of them")
    from kernelbake import manifest as manifests
    from kernelbake import planner

    held = bundle.read(path)
    own = manifests.Manifest.from_resolved(held.manifest_resolved, held.manifest_text, str(path))
    plugin, section = own.plugin, own.section
    if manifest is not None:
        wanted = manifests.load(manifests.find(manifest))
        _same_gpu(held, wanted.profile.to_json())
        plugin, section = wanted.plugin, wanted.section
    elif config is not None:
        loaded = workload.load(plugin)
        section = loaded.resolve(loaded.of_run(config, section))
    found = planner.plan(
        plugin,
        section,
        own.profile,
        interpreted=own.interpreted,
        on_progress=on_progress,
        limits=Limits(max_variants=sys.maxsize),  # what is not in the bundle is listed anyway
    )
    return Covered(held, found, plan.coverage(found, held.inventory()), replanned=True)


def _same_gpu(held: Bundle, wanted: Mapping[str, Any]) -> None:
    mine = held.manifest_resolved["gpu"]
    differing = [
        f"gpu.{name}: manifest `{wanted[name]}`; bundle: `{mine.get(name)}`"
        for name in ("backend", "capability", "name", "sm_count", "shared_memory_bytes")
        if wanted[name] != mine.get(name)
    ]
    if differing:
        raise MisfitError(
            f"bundle `{held.name}`: it was made for another GPU than the manifest's; wanted the same",
            reasons=differing,
            hint="build a bundle from this manifest",
        )
