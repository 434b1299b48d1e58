"""The plan: all launches of all cases, with union, coverage and the nearest entry. Pure values.

A plan comes out of a shadow run. What a bundle holds is an ``Inventory``; ``coverage`` is the difference of the two,
and is what ``verify``, ``coverage`` and the preflight of a run all report.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kernelbake.keys import AutotuneKey, Case, Config, Kernel, Specialization, Symbol, Value, key_text


@dataclasses.dataclass(frozen=True)
class KernelFacts:
    """What decides whether a kernel is still the one that was planned.

    Args:
        kernel: where it is found.
        wrappers: the objects around the function, outermost first: ``("Autotuner", "Heuristics", "JITFunction")``.
        parameters: the parameters' names, in order.
        key_names: the autotuner's ``key=``; empty without an autotuner.
        source_digest: digest of the source with every callee, captured global, heuristic and pruning hook.
        configs_digest: digest of the autotuner's list of configs before pruning; None without an autotuner.
        num_configs: their number.
        hooks: what runs around a launch, of ``pre_hook`` (of some config), ``reset_to_zero``, ``restore_value``.
        mutated: the arguments named by ``reset_to_zero`` and ``restore_value``.
    """

    kernel: Kernel
    wrappers: tuple[str, ...]
    parameters: tuple[str, ...]
    key_names: tuple[str, ...]
    source_digest: str
    configs_digest: str | None
    num_configs: int
    hooks: tuple[str, ...] = ()
    mutated: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["kernel"] = self.kernel.to_json()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelFacts:
        fields: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in data.items()}
        fields["kernel"] = Kernel.from_json(data["kernel"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One class of arguments with which a planned launch is made.

    Args:
        specializations: what Triton would compile, one for each candidate of the launch and in the same order.
        cases: the ids of the cases that launch it.
        grids: the distinct grids seen, at most eight, for people.
    """

    specializations: tuple[Specialization, ...]
    cases: tuple[str, ...]
    grids: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "specializations": [specialization.to_json() for specialization in self.specializations],
            "cases": list(self.cases),
            "grids": [list(grid) for grid in self.grids],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Variant:
        return cls(
            tuple(Specialization.from_json(item) for item in data["specializations"]),
            tuple(data["cases"]),
            tuple(tuple(grid) for grid in data["grids"]),
        )


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel at one autotune key: its candidates and every variant of arguments that meets it.

    Args:
        kernel: the kernel.
        key: the autotune key; None where nothing is tuned (no autotuner, or one config only).
        candidates: the configs after pruning; exactly one where ``key`` is None.
        variants: at least one.
    """

    kernel: Kernel
    key: AutotuneKey | None
    candidates: tuple[Config, ...]
    variants: tuple[Variant, ...]

    @functools.cached_property
    def id(self) -> tuple[str, str]:
        """Kernel name and the key's token: what makes two launches the same decision."""
        return self.kernel.name, self.key.token if self.key else ""

    @functools.cached_property
    def cases(self) -> tuple[str, ...]:
        """The ids of the cases that meet it, in order of first appearance."""
        return tuple(dict.fromkeys(case for variant in self.variants for case in variant.cases))

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel.to_json(),
            "key": self.key.to_json() if self.key else None,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "variants": [variant.to_json() for variant in self.variants],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launch:
        return cls(
            Kernel.from_json(data["kernel"]),
            AutotuneKey.from_json(data["key"]) if data["key"] else None,
            tuple(Config.from_json(item) for item in data["candidates"]),
            tuple(Variant.from_json(item) for item in data["variants"]),
        )

    def __str__(self) -> str:
        return f"{self.kernel.name} {key_text(self.key)}"


@dataclasses.dataclass(frozen=True)
class Unbounded:
    """A kernel that would need another binary or another key for every value of one of its arguments.

    Args:
        kernel: the kernel.
        argument: the argument that drives it.
        values: the distinct values seen over the cases.
        axis: the axis of the cases that the values follow, where one was found.
    """

    kernel: Kernel
    argument: str
    values: tuple[Any, ...]
    axis: str | None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "kernel": self.kernel.to_json(), "values": list(self.values)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Unbounded:
        return cls(Kernel.from_json(data["kernel"]), data["argument"], tuple(data["values"]), data["axis"])


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything a workload launches, over all its cases, on one device profile.

    Args:
        profile: the device profile's facts (name, capability, SM count, shared memory …), as data.
        versions: of python, torch, triton, fla and transformers in the planning process.
        implementations: which implementation serves each call that could be rerouted (``causal_conv1d: torch`` …).
        cases: the cases planned; skipped ones with their reason beside them.
        kernels: facts of every kernel launched and of every device function given to one as a value, by name.
        launches: sorted by kernel and key.
        unbounded: what the static cases had to make finite.
    """

    profile: Mapping[str, Any]
    versions: Mapping[str, str]
    implementations: Mapping[str, str]
    cases: tuple[Case, ...]
    skipped: tuple[tuple[Case, str], ...]
    kernels: Mapping[str, KernelFacts]
    launches: tuple[Launch, ...]
    unbounded: tuple[Unbounded, ...] = ()

    def launch(self, id_: tuple[str, str]) -> Launch | None:
        """The launch of that id, or None."""
        return self._by_id.get(id_)

    @functools.cached_property
    def _by_id(self) -> dict[tuple[str, str], Launch]:
        return {launch.id: launch for launch in self.launches}

    @property
    def num_keys(self) -> int:
        """Launches at which something is chosen."""
        return sum(launch.key is not None for launch in self.launches)

    @property
    def num_candidates(self) -> int:
        """Candidates over all launches, those with nothing to choose included."""
        return sum(len(launch.candidates) for launch in self.launches)

    def to_json(self) -> dict[str, Any]:
        return {
            "profile": dict(self.profile),
            "versions": dict(self.versions),
            "implementations": dict(self.implementations),
            "cases": [case.to_json() for case in self.cases],
            "skipped": [[case.to_json(), reason] for case, reason in self.skipped],
            "kernels": {name: facts.to_json() for name, facts in sorted(self.kernels.items())},
            "launches": [launch.to_json() for launch in self.launches],
            "unbounded": [item.to_json() for item in self.unbounded],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        return cls(
            data["profile"],
            data["versions"],
            data["implementations"],
            tuple(Case.from_json(item) for item in data["cases"]),
            tuple((Case.from_json(item), str(reason)) for item, reason in data["skipped"]),
            {name: KernelFacts.from_json(item) for name, item in data["kernels"].items()},
            tuple(Launch.from_json(item) for item in data["launches"]),
            tuple(Unbounded.from_json(item) for item in data["unbounded"]),
        )


def sources_of(launches: Iterable[Launch]) -> tuple[Kernel, ...]:
    """What the code of these launches is made from, by name: their kernels, and device functions given as values.

    Nothing in a kernel's own source says which function a caller gives to it.
    """
    found: dict[str, Kernel] = {}
    for launch in launches:
        values = [value for _, value in launch.key.values] if launch.key is not None else []
        for specialization in (one for variant in launch.variants for one in variant.specializations):
            values += [parameter.key for parameter in specialization.parameters]
            values += [value for _, value in specialization.options]
        for kernel in (launch.kernel, *functions_in(tuple(values))):
            found[kernel.name] = kernel
    return tuple(found[name] for name in sorted(found))


def functions_in(value: Value) -> Iterator[Kernel]:
    """The device functions in a value."""
    if isinstance(value, tuple):
        for part in value:
            yield from functions_in(part)
    elif isinstance(value, Symbol) and value.kind == "jit":
        yield Kernel.from_json(value.text)


def collect(observations: Iterable[tuple[str, Launch]]) -> tuple[Launch, ...]:
    """Launches seen one by one, each with the id of its case, merged into the sorted launches of a plan.

    An observed launch has one variant; its ``cases`` are filled in here.

    Raises:
        ValueError: one decision was seen with two different lists of candidates, so that its key is no key.
    """
    merged: dict[tuple[str, str], tuple[Launch, dict[tuple[str, ...], Variant]]] = {}
    for case, launch in observations:
        known, variants = merged.setdefault(launch.id, (launch, {}))
        if known.candidates != launch.candidates:
            raise ValueError(f"{launch}: the candidates differ between calls at one autotune key")
        for variant in launch.variants:
            identity = tuple(specialization.token for specialization in variant.specializations)
            old = variants.get(identity)
            cases = (*old.cases, case) if old else (case,)
            grids = (*old.grids, *variant.grids) if old else variant.grids
            variants[identity] = Variant(
                variant.specializations, tuple(dict.fromkeys(cases)), tuple(dict.fromkeys(grids))[:8]
            )
    launches = [
        dataclasses.replace(launch, variants=tuple(variants[identity] for identity in sorted(variants)))
        for launch, variants in merged.values()
    ]
    return tuple(sorted(launches, key=lambda launch: launch.id))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The decision at one launch, and the binaries that carry it out.

    Args:
        kernel, key: the launch; ``key`` is None where nothing was tuned.
        winner: the config that runs.
        entries: token of each specialization that the winner is launched with → digest of its entry (None when the
            bundle was made by the interpreter and has no code).
        times: what the measurement said, as data for people (``median_ms``, ``runner_up`` …); empty when not measured.
    """

    kernel: Kernel
    key: AutotuneKey | None
    winner: Config
    entries: Mapping[str, str | None]
    times: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def id(self) -> tuple[str, str]:
        return self.kernel.name, self.key.token if self.key else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel.to_json(),
            "key": self.key.to_json() if self.key else None,
            "winner": self.winner.to_json(),
            "entries": dict(self.entries),
            "times": dict(self.times),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        return cls(
            Kernel.from_json(data["kernel"]),
            AutotuneKey.from_json(data["key"]) if data["key"] else None,
            Config.from_json(data["winner"]),
            dict(data["entries"]),
            dict(data["times"]),
        )


@dataclasses.dataclass(frozen=True)
class Missing:
    """One thing that a plan needs and a bundle lacks.

    Args:
        kind: ``kernel`` (unknown altogether), ``key``, ``config`` (the winner is no candidate of this plan),
            ``specialization``, ``source`` (the kernel's code differs) or ``implementation`` (another back end runs).
        where: kernel name, or the call that is served by another implementation.
        wanted: what the plan needs, for people.
        cases: the ids of the cases that need it.
        nearest: the nearest thing that the bundle holds, field by field: ``field: needed `…`; bundle: `…```.
            Empty if none.
    """

    kind: str
    where: str
    wanted: str
    cases: tuple[str, ...]
    nearest: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Missing:
        return cls(data["kind"], data["where"], data["wanted"], tuple(data["cases"]), tuple(data["nearest"]))

    def __str__(self) -> str:
        cases = f"; needed by {self.cases[0]}" if self.cases else ""
        more = f" and {len(self.cases) - 1} more" if len(self.cases) > 1 else ""
        nearest = f"; nearest in the bundle differs in {', '.join(self.nearest)}" if self.nearest else ""
        return f"{self.kind} {self.where}: {self.wanted}{cases}{more}{nearest}"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Planned ∖ present, and present ∖ planned.

    Args:
        missing: everything that is needed and not held, all of it.
        unused: ids of the decisions that are held and that this plan does not need.
        num_needed: decisions that the plan needs.
    """

    missing: tuple[Missing, ...]
    unused: tuple[tuple[str, str], ...]
    num_needed: int

    @property
    def complete(self) -> bool:
        return not self.missing


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What a bundle holds, as far as coverage is concerned."""

    choices: Sequence[Choice]
    kernels: Mapping[str, KernelFacts]
    implementations: Mapping[str, str]

    @functools.cached_property
    def by_id(self) -> dict[tuple[str, str], Choice]:
        return {choice.id: choice for choice in self.choices}

    @functools.cached_property
    def by_kernel(self) -> dict[str, list[Choice]]:
        groups: dict[str, list[Choice]] = {}
        for choice in self.choices:
            groups.setdefault(choice.kernel.name, []).append(choice)
        return groups


def coverage(plan: Plan, held: Inventory) -> Coverage:
    """Compares what a plan needs with what a bundle holds; every difference is reported."""
    missing = [*_implementations(plan, held), *_sources(plan, held)]
    for launch in plan.launches:
        choice = held.by_id.get(launch.id)
        if choice is None:
            missing.append(_missing_key(launch, held.by_kernel.get(launch.kernel.name, [])))
        elif choice.winner not in launch.candidates:
            missing.append(Missing("config", launch.kernel.name, f"{choice.winner} at {launch.key}", launch.cases))
        else:
            missing.extend(_missing_specializations(launch, choice))
    needed = {launch.id for launch in plan.launches}
    unused = tuple(choice.id for choice in held.choices if choice.id not in needed)
    return Coverage(tuple(missing), unused, len(plan.launches))


def _implementations(plan: Plan, held: Inventory) -> list[Missing]:
    names = sorted({*plan.implementations, *held.implementations})
    return [
        Missing(
            "implementation",
            name,
            f"`{plan.implementations.get(name)}`; bundle: `{held.implementations.get(name)}`",
            (),
        )
        for name in names
        if plan.implementations.get(name) != held.implementations.get(name)
    ]


def _sources(plan: Plan, held: Inventory) -> list[Missing]:
    missing = []
    for name, facts in sorted(plan.kernels.items()):
        theirs = held.kernels.get(name)
        if theirs is not None and theirs.source_digest != facts.source_digest:
            wanted = f"source `{facts.source_digest:.19}`; bundle: `{theirs.source_digest:.19}`"
            missing.append(Missing("source", name, wanted, ()))
    return missing


def _missing_key(launch: Launch, choices: Sequence[Choice]) -> Missing:
    if not choices:
        return Missing("kernel", launch.kernel.name, key_text(launch.key), launch.cases)
    nearest = nearest_key(launch.key, [choice.key for choice in choices], "needed", "bundle:")
    return Missing("key", launch.kernel.name, key_text(launch.key), launch.cases, nearest)


def nearest_key(
    key: AutotuneKey | None, others: Iterable[AutotuneKey | None], mine: str, theirs: str
) -> tuple[str, ...]:
    """How the nearest of other keys of the same kernel differs; empty where there is none.

    Args:
        key: the key.
        others: the other ones.
        mine, theirs: what to call the two sides, as in ``field: needed `…`; bundle: `…```.
    """
    return min((_key_differences(key, other, mine, theirs) for other in others), key=len, default=())


def _key_differences(
    wanted: AutotuneKey | None, held: AutotuneKey | None, name_wanted: str, name_held: str
) -> tuple[str, ...]:
    if wanted is None or held is None:
        return (f"tuned at all: {name_wanted} `{wanted is not None}`; {name_held} `{held is not None}`",)
    mine = {**dict(wanted.values), **{f"dtype of {name}": dtype for name, dtype in wanted.dtypes}}
    theirs = {**dict(held.values), **{f"dtype of {name}": dtype for name, dtype in held.dtypes}}
    return tuple(
        f"{name}: {name_wanted} `{mine.get(name, 'absent')}`; {name_held} `{theirs.get(name, 'absent')}`"
        for name in dict.fromkeys((*mine, *theirs))
        if (type(mine.get(name)), mine.get(name)) != (type(theirs.get(name)), theirs.get(name))
        or (name in mine) != (name in theirs)
    )


def _missing_specializations(launch: Launch, choice: Choice) -> list[Missing]:
    index = launch.candidates.index(choice.winner)
    held = [Specialization.from_json(json.loads(token)) for token in choice.entries]
    missing = []
    for variant in launch.variants:
        wanted = variant.specializations[index]
        if wanted.token not in choice.entries:
            nearest = min((wanted.differences(other, "needed", "bundle:") for other in held), key=len, default=())
            key = key_text(launch.key)
            missing.append(Missing("specialization", launch.kernel.name, key, variant.cases, nearest))
    return missing
