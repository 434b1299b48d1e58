"""Plan and choices as a bundle stores them: every specialization once, in a table, and every parameter once in that.

A workload launches a few dozen parameters in thousands of combinations. Written out they are most of a plan, and
reading them most of the time that a frozen process spends before its first step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernelbake import digest
from kernelbake.keys import AutotuneKey, Config, Kernel, Parameter, Specialization, decode, encode
from kernelbake.plan import Choice, Launch, Plan, Variant
from kernelbake.words import counted

MAX_TEXT = 1 << 28
"""Longest text, in characters, of all specializations together: a small table could stand for any length."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Specializations by number, sorted by token.

    Args:
        rows: the specializations.
    """

    rows: tuple[Specialization, ...]

    @classmethod
    def of(cls, specializations: Iterable[Specialization]) -> Table:
        """The table of all of these, each once."""
        by_token = {specialization.token: specialization for specialization in specializations}
        return cls(tuple(by_token[token] for token in sorted(by_token)))

    def numbers(self) -> dict[str, int]:
        """The number of every token."""
        return {row.token: number for number, row in enumerate(self.rows)}

    def to_json(self) -> dict[str, Any]:
        """``parameters``: sorted by their text; ``rows``: options, and the numbers of the parameters."""
        texts = sorted({parameter.token for row in self.rows for parameter in row.parameters})
        numbers = {text: number for number, text in enumerate(texts)}
        known = {parameter.token: parameter for row in self.rows for parameter in row.parameters}
        return {
            "parameters": [known[text].to_json() for text in texts],
            "rows": [
                [[[name, encode(value)] for name, value in row.options], [numbers[p.token] for p in row.parameters]]
                for row in self.rows
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Table:
        """The table whose JSON form this is.

        Raises:
            ValueError: it is not in order, something stands in it twice, or a number has nothing behind it.
        """
        parameters = [Parameter(name, decode(type_), decode(key)) for name, type_, key in data["parameters"]]
        texts = [parameter.token for parameter in parameters]
        if any(first >= second for first, second in itertools.pairwise(texts)):
            raise ValueError("parameters that are not sorted, or one twice")
        rows: list[Specialization] = []
        used: set[int] = set()
        size = 0
        for options, numbers in data["rows"]:
            if numbers and max(numbers) >= len(parameters):
                raise ValueError(f"parameter {max(numbers)} of {len(parameters)}")
            size += sum([len(texts[number]) for number in numbers])
            if size > MAX_TEXT:
                raise ValueError(f"specializations of more than {MAX_TEXT} characters when written out")
            row = Specialization(
                tuple([parameters[number] for number in numbers]), tuple((name, decode(v)) for name, v in options)
            )
            # What `token` would compute, put together from the texts of the parameters that many rows share.
            inner = ",".join([texts[number] for number in numbers])
            vars(row)["token"] = f'{{"options":{digest.canonical_json(options).decode()},"parameters":[{inner}]}}'
            used.update(numbers)
            rows.append(row)
        if any(first.token >= second.token for first, second in itertools.pairwise(rows)):
            raise ValueError("specializations that are not sorted, or one twice")
        if len(used) < len(parameters):
            raise ValueError("a parameter that no specialization has")
        return cls(tuple(rows))


def table_of(plan: Plan) -> Table:
    """The table of everything that a plan launches."""
    return Table.of(
        specialization
        for launch in plan.launches
        for variant in launch.variants
        for specialization in variant.specializations
    )


def plan_to_json(plan: Plan, table: Table) -> dict[str, Any]:
    """The plan with numbers in place of specializations."""
    numbers = table.numbers()
    data = dataclasses.replace(plan, launches=()).to_json()
    data["launches"] = [
        {
            "kernel": launch.kernel.to_json(),
            "key": launch.key.to_json() if launch.key else None,
            "candidates": [candidate.to_json() for candidate in launch.candidates],
            "variants": [
                {
                    "specializations": [numbers[item.token] for item in variant.specializations],
                    "cases": list(variant.cases),
                    "grids": [list(grid) for grid in variant.grids],
                }
                for variant in launch.variants
            ],
        }
        for launch in plan.launches
    ]
    return data


def plan_from_json(data: Mapping[str, Any], table: Table) -> Plan:
    """The plan whose JSON form this is.

    Raises:
        ValueError: a number has nothing behind it.
    """
    plan = Plan.from_json({**data, "launches": []})
    return dataclasses.replace(plan, launches=tuple(_launch(item, table.rows) for item in data["launches"]))


def _launch(data: Mapping[str, Any], rows: Sequence[Specialization]) -> Launch:
    variants = tuple(
        Variant(
            tuple([_row(rows, number) for number in item["specializations"]]),
            tuple(item["cases"]),
            tuple(tuple(grid) for grid in item["grids"]),
        )
        for item in data["variants"]
    )
    candidates = tuple(Config.from_json(item) for item in data["candidates"])
    return Launch(Kernel.from_json(data["kernel"]), _key(data["key"]), candidates, variants)


def _key(data: Mapping[str, Any] | None) -> AutotuneKey | None:
    return AutotuneKey.from_json(data) if data is not None else None


def _row(rows: Sequence[Specialization], number: int) -> Specialization:
    if number >= len(rows):
        raise ValueError(f"specialization {number} of {len(rows)}")
    return rows[number]


def choice_to_json(choice: Choice, numbers: Mapping[str, int]) -> dict[str, Any]:
    """The choice with numbers in place of specializations, sorted by them.

    Raises:
        LookupError: it has an entry for a specialization that the plan does not launch.
    """
    unplanned = choice.entries.keys() - numbers.keys()
    if unplanned:
        place = f"{choice.kernel.name} {choice.key or ''}".rstrip()
        number = counted(len(unplanned), "entry")
        raise LookupError(f"choice {place}: {number} for what the plan does not launch; wanted none")
    entries = sorted([numbers[token], identity] for token, identity in choice.entries.items())
    return {**choice.to_json(), "entries": entries}


def choice_from_json(data: Mapping[str, Any], table: Table) -> Choice:
    """The choice whose JSON form this is.

    Raises:
        ValueError: a number has nothing behind it, or the numbers are not sorted.
    """
    numbers = [number for number, _ in data["entries"]]
    if any(first >= second for first, second in itertools.pairwise(numbers)):
        raise ValueError("entries that are not sorted, or one twice")
    entries = {_row(table.rows, number).token: identity for number, identity in data["entries"]}
    return Choice(
        Kernel.from_json(data["kernel"]),
        _key(data["key"]),
        Config.from_json(data["winner"]),
        entries,
        dict(data["times"]),
    )
