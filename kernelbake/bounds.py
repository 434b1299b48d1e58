"""What keeps a plan finite: keys and binaries that follow an axis of the cases are found, named, and limited."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from kernelbake.errors import PlanError
from kernelbake.keys import Case, Value
from kernelbake.plan import Launch, Unbounded
from kernelbake.words import counted


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan may grow to.

    Args:
        max_variants: the most variants of arguments, over all keys, with which one kernel may be launched.
        max_elements: the most elements that an argument of a kernel may span. Kernels compute offsets in 32 bits unless
            they take care not to, and wrap silently beyond.
    """

    max_variants: int = 64
    max_elements: int = 1 << 31


def check(launches: Sequence[Launch], cases: Sequence[Case], limits: Limits) -> tuple[Unbounded, ...]:
    """Names every argument that needs another key or another binary for each value of an axis.

    Raises:
        PlanError: a kernel has more variants than allowed; the message says which argument drives them.
    """
    found = [item for group in _by_kernel(launches).values() for item in _unbounded(group, cases)]
    reasons = []
    for name, group in _by_kernel(launches).items():
        number = sum(len(launch.variants) for launch in group)
        if number > limits.max_variants:
            drivers = [f"`{item.argument}` (axis `{item.axis}`)" for item in found if item.kernel.name == name]
            because = f" because of argument {', '.join(drivers)}" if drivers else ""
            reasons.append(f"kernel `{name}`: {number} variants{because}")
    if reasons:
        kernels = counted(len(reasons), "kernel has", "kernels have")
        raise PlanError(
            f"plan: {kernels} more than {counted(limits.max_variants, 'variant')} of arguments; wanted fewer",
            hint="give the workload fewer static shapes, or allow more with `--max-variants`",
            reasons=reasons,
        )
    return tuple(found)


def _by_kernel(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
    groups: dict[str, list[Launch]] = {}
    for launch in launches:
        groups.setdefault(launch.kernel.name, []).append(launch)
    return groups


def _unbounded(launches: Sequence[Launch], cases: Sequence[Case]) -> list[Unbounded]:
    by_id = {case.id: case for case in cases}
    found = []
    for argument, seen in sorted(_arguments(launches).items()):
        values = {value for of_case in seen.values() for value in of_case}
        axis = _driver({by_id[case]: frozenset(of_case) for case, of_case in seen.items()}) if len(values) > 1 else None
        if axis is not None:
            found.append(Unbounded(launches[0].kernel, argument, tuple(sorted(values)), axis))
    return found


def _arguments(launches: Sequence[Launch]) -> dict[str, dict[str, set[int]]]:
    """Argument → case id → the numbers seen there, of arguments that stand in the key or are compiled in."""
    seen: dict[str, dict[str, set[int]]] = {}

    def note(argument: str, value: Value, case_ids: Iterable[str]) -> None:
        if type(value) is int:
            for case in case_ids:
                seen.setdefault(argument, {}).setdefault(case, set()).add(value)

    for launch in launches:
        for name, value in launch.key.values if launch.key else ():
            note(name, value, launch.cases)
        tuned = {name for candidate in launch.candidates for name, _ in candidate.meta}
        for variant in launch.variants:
            for parameter in variant.specializations[0].parameters:
                if parameter.type == "constexpr" and parameter.name not in tuned:
                    note(parameter.name, parameter.key, variant.cases)
    return seen


def _driver(values: Mapping[Case, frozenset[int]]) -> str | None:
    """The axis that an argument follows: whatever the other numbers are, each of its values brings numbers of its own.

    Axes that are no numbers (a layout, a dtype) choose the code, so one of their combinations is enough.
    """
    names = [name for name, value in next(iter(values)).axes if type(value) is int]
    always = frozenset.intersection(*values.values())
    for name in names:
        kinds: dict[str, dict[str, list[frozenset[int]]]] = {}
        for case, numbers in values.items():
            kind = repr([pair for pair in case.axes if type(pair[1]) is not int])
            others = repr([pair for pair in case.axes if type(pair[1]) is int and pair[0] != name])
            kinds.setdefault(kind, {}).setdefault(others, []).append(numbers - always)
        if any(all(_all_differ(group) for group in groups.values()) for groups in kinds.values()):
            return name
    return None


def _all_differ(sets: Sequence[frozenset[int]]) -> bool:
    return len(sets) > 1 and all(sets) and sum(map(len, sets)) == len(frozenset().union(*sets))
