"""Lines of text for a terminal or a file: tables, keys with what they share said once. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kernelbake.keys import NOT_TUNED, AutotuneKey
from kernelbake.plan import Choice
from kernelbake.words import counted, fold

if TYPE_CHECKING:
    from kernelbake.inspect import Explained

_LEAST = 16
"""Columns below which no column of a table is folded."""


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = (), width: int | None = None
) -> list[str]:
    """Lines of a table with columns two spaces apart.

    Args:
        header: the columns' names.
        rows: their cells.
        right: the columns whose cells stand at the right; they are never folded.
        width: of the terminal, into which the widest columns are folded; None for one line a row.
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    if width is not None:
        _narrow(widths, right, width)

    def lined(row: Sequence[str]) -> str:
        parts = [
            text.rjust(w) if i in right else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    if width is None:
        return [lined(row) for row in cells]
    folded = [[fold(text, w, 2) for text, w in zip(row, widths, strict=True)] for row in cells]
    return [lined(parts) for row in folded for parts in itertools.zip_longest(*row, fillvalue="")]


def _narrow(widths: list[int], right: Sequence[int], width: int) -> None:
    """Takes from the widest columns what is too much, and leaves each of them wide enough to be read."""
    for column in sorted(set(range(len(widths))) - set(right), key=lambda column: -widths[column]):
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        if excess > 0:
            widths[column] = max(widths[column] - excess, min(widths[column], _LEAST))


# ---------------------------------------------------------------------------------------------- keys


Field = tuple[str, str, str]
"""``value`` or ``dtype``, the argument, and its value or dtype as text."""


def fields(key: AutotuneKey) -> list[Field]:
    """The fields of a key, in its order."""
    values = [("value", name, str(value)) for name, value in key.values]
    return [*values, *(("dtype", name, dtype.removeprefix("torch.")) for name, dtype in key.dtypes)]


def field_lines(wanted: Iterable[Field]) -> Iterator[str]:
    """``n=512 dtype=bf16``, then a line for each dtype: ``bfloat16: x y``."""
    wanted = list(wanted)
    values = [f"{name}={text}" for kind, name, text in wanted if kind == "value"]
    if values:
        yield " ".join(values)
    dtypes: dict[str, list[str]] = {}
    for kind, name, text in wanted:
        if kind == "dtype":
            dtypes.setdefault(text, []).append(name)
    for text, names in dtypes.items():
        yield f"{text}: {' '.join(names)}"


def by_kernel(choices: Iterable[Choice]) -> Iterator[tuple[str, list[Field], list[Choice]]]:
    """Choices by kernel: its name, what all their keys have in common, and the choices.

    Of a single key nothing is common, so that all of it stands beside the choice.
    """
    for name, group in itertools.groupby(choices, lambda choice: choice.kernel.name):
        members = list(group)
        keys = [fields(choice.key) if choice.key is not None else [] for choice in members]
        shared = [field for field in keys[0] if all(field in key for key in keys)] if len(keys) > 1 else []
        yield name, shared, members


def own_lines(key: AutotuneKey | None, shared: Sequence[Field]) -> list[str]:
    """A key without what it shares with the others of its kernel."""
    if key is None:
        return [NOT_TUNED]
    return list(field_lines(field for field in fields(key) if field not in shared)) or ["the same in another order"]


# ---------------------------------------------------------------------------------------------- choices


def decided(choice: Choice) -> Iterator[tuple[str, str]]:
    """What was chosen, each part with its label: ``winner``, ``runner-up`` where there is one, ``code``."""
    times = choice.times
    yield "winner", f"{choice.winner}: {_ms(times['median_ms'])}" if "median_ms" in times else str(choice.winner)
    if "runner_up" in times:
        tied = ", tied" if not times.get("told_apart", True) else ""
        yield "runner-up", f"{times['runner_up']}: {_ms(times['runner_up_ms'])}{tied}"
    repeatable = "not the same bits twice; " if times.get("repeatable") is False else ""
    yield "code", f"{repeatable}{counted(len(choice.entries), _code_of(choice))}"


def decided_text(choice: Choice) -> str:
    """``BT=64 num_warps=4: 0.5000 ms; runner-up BT=32 num_warps=8: 0.7500 ms; 2 binaries``."""
    return "; ".join(f"{label} {text}" if label == "runner-up" else text for label, text in decided(choice))


def _code_of(choice: Choice) -> str:
    """What a choice has for each specialization; for the interpreter there are no binaries."""
    return "variant" if all(entry is None for entry in choice.entries.values()) else "binary"


def why(item: Explained) -> Iterator[tuple[str, str]]:
    """What is known about a choice, each with its label: ``case``, ``binary`` or ``variant``, ``tried``."""
    yield from (("case", case) for case in item.cases)
    yield from ((_code_of(item.choice), variant) for variant in item.variants)
    for candidate in item.tried:
        said = candidate.outcome if candidate.median_ms is None else _ms(candidate.median_ms)
        error = f", deviation {candidate.error:.1e}" if candidate.error is not None else ""
        remark = f" ({candidate.note})" if candidate.note else ""
        yield "tried", f"{candidate.config}: {said}{error}{remark}"


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f} ms"
