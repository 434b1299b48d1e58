"""What a bundle holds for one kernel, in the form in which a launch asks for it; and what a miss says. Pure.

Keys are compared by value and type, and do not depend on the order in which a call names its arguments: Triton's own
key does, but means the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from kernelbake.errors import FrozenMissError
from kernelbake.keys import AutotuneKey, Config, Kernel, Specialization, Value
from kernelbake.plan import Choice, KernelFacts, Launch, Plan, nearest_key

Typed: TypeAlias = Hashable


def typed(value: Value) -> tuple[type, Any]:
    """A hashable form in which values of different types differ, and floats of different bits."""
    kind = type(value)
    if kind is tuple:
        return (tuple, tuple(typed(item) for item in value))  # type: ignore[union-attr]
    return (kind, value.hex()) if isinstance(value, float) else (kind, value)


def typed_key(key: AutotuneKey) -> Typed:
    """The form of an autotune key: name, type and value of each argument of the key, then name and dtype, by name."""
    values = [part for name, value in sorted(key.values, key=_first) for part in (name, *typed(value))]
    return tuple(values), tuple(part for pair in sorted(key.dtypes) for part in pair)


def _first(item: tuple[str, Any]) -> str:
    return item[0]


def typed_specialization(specialization: Specialization) -> Typed:
    """The form of a specialization: Triton's type, then type and value of the key, of each parameter; the options."""
    parameters = [part for one in specialization.parameters for part in (one.type, *typed(one.key))]
    return tuple(parameters), frozenset((name, *typed(value)) for name, value in specialization.options)


class Counter:
    """Counts, exactly and without a lock, from any number of threads.

    ``itertools.count`` advances within one call of C code that holds the interpreter's lock throughout, and its text is
    the one way to read it that does not advance it.
    """

    def __init__(self) -> None:
        self._count = itertools.count()
        self.add = self._count.__next__

    @property
    def value(self) -> int:
        return int(repr(self._count).removeprefix("count(").removesuffix(")"))


@dataclasses.dataclass(frozen=True)
class Held:
    """What a bundle holds for one kernel.

    Args:
        kernel: the kernel.
        facts: as planned.
        winners: typed autotune key → its choices; more than one where the plan has that key with its arguments in
            several orders. Launches without a key are not here.
        specializations: typed specialization → the value; over all choices, since equal ones have equal code.
        entries: typed specialization → digest of the entry, None where there is no code.
        choices: all of them.
        reached: choice id → the specializations that its winner is launched with, typed and as they are.
        launches: the plan's, for the kernel.
    """

    kernel: Kernel
    facts: KernelFacts
    winners: dict[Typed, tuple[Choice, ...]]
    specializations: dict[Typed, Specialization]
    entries: dict[Typed, str | None]
    choices: list[Choice]
    reached: dict[tuple[str, str], list[tuple[Typed, Specialization]]]
    launches: tuple[Launch, ...]


def hold(plan: Plan, choices: Sequence[Choice]) -> dict[str, Held]:
    """By kernel name, for every kernel of the plan."""
    launches: dict[str, list[Launch]] = {name: [] for name in plan.kernels}
    for launch in plan.launches:
        launches[launch.kernel.name].append(launch)
    held = {
        name: Held(facts.kernel, facts, {}, {}, {}, [], {}, tuple(launches[name]))
        for name, facts in plan.kernels.items()
    }
    for choice in choices:
        one = held[choice.kernel.name]
        one.choices.append(choice)
        if choice.key is not None:
            key = typed_key(choice.key)
            one.winners[key] = (*one.winners.get(key, ()), choice)
        reached = one.reached.setdefault(choice.id, [])
        for token, identity in choice.entries.items():
            specialization = Specialization.from_json(json.loads(token))
            typed_ = typed_specialization(specialization)
            reached.append((typed_, specialization))
            one.specializations[typed_] = specialization
            one.entries[typed_] = identity
    return held


# ---------------------------------------------------------------------------------------------- misses

_SIDES = ("here", "bundle:")
"""What the values of a call that was refused and those of the bundle are called."""


def missed_key(held: Held, key: AutotuneKey) -> FrozenMissError:
    """The refusal of a call whose autotune key was not planned."""
    nearest = nearest_key(key, [choice.key for choice in held.choices], *_SIDES)
    cases = [
        case for launch in held.launches if nearest_key(key, [launch.key], *_SIDES) == nearest for case in launch.cases
    ]
    return _missed(held, f"no choice for autotune key `{key}`", "a key that was planned", nearest, cases)


def missed_specialization(held: Held, specialization: Specialization, config: Config | None) -> FrozenMissError:
    """The refusal of a call that would need code that the bundle lacks.

    Args:
        held: what there is for the kernel.
        specialization: the call's.
        config: the one that was chosen for it, where something was tuned.
    """
    known_ones = held.specializations.values()
    nearest = min((specialization.differences(known, *_SIDES) for known in known_ones), key=len, default=())
    variants = [variant for launch in held.launches for variant in launch.variants]
    cases = [
        case
        for variant in variants
        if any(specialization.differences(known, *_SIDES) == nearest for known in variant.specializations)
        for case in variant.cases
    ]
    chosen = f" (config `{config}`)" if config is not None else ""
    return _missed(held, f"no code for `{specialization}`{chosen}", "a specialization of the bundle", nearest, cases)


def _missed(held: Held, found: str, wanted: str, nearest: Sequence[str], cases: Sequence[str]) -> FrozenMissError:
    near = f"; the nearest planned launch is in case `{cases[0]}`" if cases else ""
    return FrozenMissError(
        f"kernel `{held.kernel.name}`: {found}; wanted {wanted}",
        reasons=[f"differs from the nearest in {difference}" for difference in nearest],
        hint=f"add the case that makes this launch to the manifest's axes, and build again{near}",
    )


def unknown_kernel(name: str, known: Iterable[str], *, redefined: bool) -> FrozenMissError:
    """The refusal of a launch of an object that was not there when the bundle was frozen."""
    if redefined:
        return FrozenMissError(
            f"kernel `{name}`: the object was defined again after the freeze; wanted the one that was checked then",
            hint="restart the process; do not reload modules of kernels",
        )
    short = name.rpartition(".")[2]
    alike = [f"the bundle has `{other}`" for other in sorted(known) if other.rpartition(".")[2] == short]
    return FrozenMissError(
        f"kernel `{name}`: not in the bundle; wanted one of its kernels",
        reasons=alike,
        hint="add the case that launches it to the workload, and build again",
    )
