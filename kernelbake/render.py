"""What a person sees. The only file of kernelbake that imports rich, and beside ``cli`` the only one that writes.

stdout is data: tables, JSON, digests, paths. stderr is everything else: progress, notes, refusals. Tables are plain
text of fixed layout, the same on a terminal and in a file; rich draws progress, on terminals only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kernelbake.errors import InputError, KernelbakeError

if TYPE_CHECKING:
    from kernelbake.diff import Diff
    from kernelbake.inspect import Covered, Explained, Shown
    from kernelbake.levels import Report
    from kernelbake.plan import Choice, Plan
    from kernelbake.progress import BuildResult, Event

REPORT_HINT = (
    "this is a fault of kernelbake: please report it with the lines above and the output of `kernelbake --version`"
)
_PLAIN_INTERVAL_S = 5.0


# ---------------------------------------------------------------------------------------------- streams


def open_closed_streams() -> None:
    """Gives a process that was started without standard streams (``>&-``) ones that lead nowhere.

    Without them nothing can be said, and the next file that is opened takes the place of one.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w" if descriptor else "r", encoding="utf-8", closefd=False))


def _write(stream: TextIO, text: str) -> None:
    """Writes; a reader that went away (``| head``) ends the output, not the command and not its exit code.

    What the stream's encoding lacks, bytes in the name of a file among it, is written as an escape.

    Raises:
        InputError: stdout cannot take it.
    """
    encoding = stream.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except OSError as failure:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if not isinstance(failure, BrokenPipeError) and stream is sys.stdout:
            raise InputError(f"stdout: {failure.strerror}; wanted to write all of the output") from failure


def line(text: str = "") -> None:
    """One line of data."""
    _write(sys.stdout, f"{text}\n")


def data(value: Any) -> None:
    """Data as strict JSON."""
    line(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def note(text: str) -> None:
    """One line that is no data."""
    _write(sys.stderr, f"{text}\n")


def flush() -> None:
    """Hands on what is still buffered."""
    _write(sys.stdout, "")


def error(failure: KernelbakeError) -> None:
    """A refusal: its message, all its reasons, its hint."""
    note(f"error: {failure}")


def fault(text: str) -> None:
    """An exception that no one expected."""
    note(text.rstrip())
    note(REPORT_HINT)


# ---------------------------------------------------------------------------------------------- tables


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> list[str]:
    """Lines of a table with columns two spaces apart.

    Args:
        header: the columns' names.
        rows: their cells.
        right: the columns whose cells stand at the right.
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def lined(row: Sequence[str]) -> str:
        parts = [
            text.rjust(w) if i in right else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return [lined(row) for row in cells]


def bytes_text(count: int) -> str:
    """``1.5 MB``: a count of bytes in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def counted(count: int, noun: str) -> str:
    """``1 key``, ``2 keys``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


# ---------------------------------------------------------------------------------------------- progress


class _Lines:
    """Progress as plain lines: the first and last of a phase, and between them one every few seconds."""

    def __init__(self) -> None:
        self._phase = ""
        self._next = 0.0

    def begin(self, phase: str) -> None:
        self._phase = phase
        self._next = time.monotonic() + _PLAIN_INTERVAL_S
        note(phase)

    def update(self, phase: str, done: int, total: int | None, message: str) -> None:
        now = time.monotonic()
        finished = total is not None and done >= total
        if phase == self._phase and now < self._next and not finished:
            return
        self._phase, self._next = phase, now + _PLAIN_INTERVAL_S
        count = f" {done:,}/{total:,}" if total else ""
        note(f"{phase}{count}{': ' + message if message else ''}")


class _Bars:
    """Progress as bars, one for each phase; a phase is over when the next one begins."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}
        self._phase = ""

    def begin(self, phase: str) -> None:
        if self._phase and phase != self._phase:
            task = self._bars.tasks[self._tasks[self._phase]]
            total = task.total if task.total is not None else 1
            self._bars.update(task.id, total=total, completed=total, message="")
        self._phase = phase
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=None, message="")

    def update(self, phase: str, done: int, total: int | None, message: str) -> None:
        if phase != self._phase:
            self.begin(phase)
        self._bars.update(self._tasks[phase], completed=done, total=total or None, message=message)


@contextlib.contextmanager
def _drawing() -> Iterator[_Lines | _Bars]:
    """Bars where stderr is a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[message]}", markup=False, table_column=Column()),  # wraps before others shrink
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield _Bars(bars)


@contextlib.contextmanager
def progress(phase: str = "plan") -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(done, in all, message)`` that shows how far something is: planning, where nothing else is said."""
    with _drawing() as drawing:

        def show(done: int, total: int, message: str) -> None:
            drawing.update(phase, done, total, message)

        yield show


@contextlib.contextmanager
def events(*, as_json: bool) -> Iterator[Callable[[Event], None]]:
    """A callback for the events of a build: JSON lines on stdout, or progress with rejected candidates counted."""
    if as_json:
        yield lambda event: line(json.dumps(dataclasses.asdict(event), allow_nan=False))
        return
    rejected: collections.Counter[str] = collections.Counter()
    with _drawing() as drawing:

        def show(event: Event) -> None:
            if event.kind == "phase":
                drawing.begin(event.phase)
            elif event.kind == "rejected":
                rejected[str(event.data["outcome"])] += 1
            elif event.kind == "note":
                note(f"{event.phase}: {event.message}")
            else:
                counts = f" (rejected: {_reasons(rejected)})" if rejected else ""
                drawing.update(event.phase, event.done or 0, event.total, f"{event.message}{counts}")

        yield show


def _rejected(rejected: Mapping[str, int]) -> str:
    return f"{sum(rejected.values()):,}{f' ({_reasons(rejected)})' if rejected else ''}"


def _reasons(rejected: Mapping[str, int]) -> str:
    """``3 timeout, 1 crash``: counts by reason, the most frequent first."""
    ordered = sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


# ---------------------------------------------------------------------------------------------- results


def plan(found: Plan, *, by: str, as_json: bool) -> None:
    """A plan: its launches by kernel or by case, what was skipped, and warnings on stderr."""
    from kernelbake import inspect

    for warning in inspect.warnings(found):
        note(f"warning: {warning}")
    if as_json:
        data(found.to_json())
        return
    profile = found.profile
    line(f"{profile['name']}, {counted(len(found.cases), 'case')}, {len(found.skipped)} skipped")
    for case, reason in found.skipped:
        line(f"skipped {case.id}: {reason}")
    line()
    _print(_by_case(found) if by == "case" else _by_kernel(found))
    line()
    kernels = inspect.by_kernel(found)
    binaries, frozen = sum(row.binaries for row in kernels), sum(row.frozen for row in kernels)
    line(
        f"{counted(found.num_keys, 'key')}, {counted(len(found.launches), 'launch').replace('launchs', 'launches')}, "
        f"{counted(found.num_candidates, 'candidate')}, {counted(binaries, 'binary')} to compile, {frozen:,} to hold"
    )


def _by_kernel(found: Plan) -> list[str]:
    from kernelbake import inspect

    header = ("kernel", "keys", "candidates", "binaries", "held", "cases")
    rows = [
        (row.kernel, row.keys, row.candidates, row.binaries, row.frozen, len(row.cases))
        for row in inspect.by_kernel(found)
    ]
    return table(header, rows, right=(1, 2, 3, 4, 5))


def _by_case(found: Plan) -> list[str]:
    from kernelbake import inspect

    rows = []
    for case, launches in inspect.by_case(found):
        rows += [
            (case if index == 0 else "", launch.kernel.name, launch.key or "-") for index, launch in enumerate(launches)
        ]
    return table(("case", "kernel", "key"), rows)


def _print(lines: Iterable[str]) -> None:
    for text in lines:
        line(text)


def built(result: BuildResult, *, as_json: bool) -> None:
    """What a build came to; its digest is the only data."""
    rejected = dict(sorted(result.rejected.items()))
    if as_json:
        values = {
            "kind": "result",
            "path": str(result.path),
            "digest": result.digest,
            "made": result.made,
            "keys": result.keys,
            "candidates": result.candidates,
            "rejected": rejected,
            "entries": result.entries,
            "bundle_bytes": result.bundle_bytes,
            "seconds": dict(result.seconds),
            "measuring": dict(result.measuring),
        }
        line(json.dumps(values, allow_nan=False))
        return
    note(f"keys        {result.keys:,}")
    note(f"candidates  {result.candidates:,}")
    note(f"rejected    {_rejected(rejected)}")
    note(f"entries     {result.entries:,}")
    note(f"bundle      {result.path}, {bytes_text(result.bundle_bytes)}, made: {result.made}")
    note(f"seconds     {', '.join(f'{phase} {seconds:.1f}' for phase, seconds in result.seconds.items())}")
    line(result.digest)


def verified(report: Report, *, as_json: bool) -> None:
    """A verification, one line for each level that proved something or says why it did not."""
    if as_json:
        data(report.to_json())
        return
    if report.digest is not None:
        line(f"digest     {report.digest}")
    for level in report.levels:
        outcome = "" if level.outcome == "proved" else f"{level.outcome}: "
        line(f"{level.name:<10} {outcome}{level.text}")
        _print(f"{'':<10} {detail}" for detail in level.details)
        if (
            level.error is not None and level.error is not report.refusals[0]
        ):  # the first is shown as the command's error
            _print(f"{'':<10} {reason}" for reason in level.error.reasons)


def shown(summary: Shown, *, as_json: bool) -> None:
    """A bundle in short."""
    if as_json:
        data(summary.to_json())
        return
    counts = summary.counts
    line(f"name        {summary.name}")
    line(f"digest      {summary.digest}")
    line(f"made        {summary.made}")
    line(f"size        {bytes_text(summary.size_bytes)}, {counted(counts['entries'], 'entry')}")
    line(
        f"planned     {', '.join(counted(counts[noun + 's'], noun) for noun in ('case', 'kernel', 'key', 'candidate'))}"
    )
    line(f"tried       {counts['tried']:,}, rejected {_rejected(summary.rejected)}")
    line()
    fields = [(name, cls, _value(value)) for name, cls, value in summary.fingerprint]
    _print(table(("field", "class", "value"), fields))
    if summary.skipped:
        line()
    for case, reason in summary.skipped:
        line(f"skipped {case}: {reason}")
    kernel = ""
    for choice in summary.choices:
        if choice.kernel.name != kernel:
            kernel = choice.kernel.name
            line()
            line(kernel)
        line(f"  {choice.key or '(not tuned)'}")
        line(f"    {_decided(choice)}")


def _decided(choice: Choice) -> str:
    """``BT=64 num_warps=4: 0.5000 ms; runner-up BT=32 num_warps=8: 0.7500 ms; 2 binaries``."""
    times = choice.times
    parts = [f"{choice.winner}: {_ms(times['median_ms'])}" if "median_ms" in times else f"{choice.winner}"]
    if "runner_up" in times:
        tied = ", tied" if not times.get("told_apart", True) else ""
        parts.append(f"runner-up {times['runner_up']}: {_ms(times['runner_up_ms'])}{tied}")
    if times.get("repeatable") is False:
        parts.append("not the same bits twice")
    parts.append(counted(len(choice.entries), "binary"))
    return "; ".join(parts)


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f} ms"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def coverage(found: Covered, *, as_json: bool) -> None:
    """A bundle against a plan."""
    if as_json:
        data(found.to_json())
        return
    line(f"digest   {found.held.digest}")
    line(f"needed   {found.coverage.num_needed:,} launches of {counted(len(found.plan.cases), 'case')}")
    line(f"missing  {len(found.coverage.missing):,}")
    line(f"unused   {len(found.coverage.unused):,}")
    held = found.held.inventory().by_id
    for id_ in found.coverage.unused:
        line(f"unused   {held[id_].kernel.name} {held[id_].key or '(not tuned)'}")


def explained(items: Sequence[Explained], *, as_json: bool) -> None:
    """Why decisions are in a bundle."""
    if as_json:
        data([item.to_json() for item in items])
        return
    for item in items:
        choice = item.choice
        line(f"{choice.kernel.name} {choice.key or '(not tuned)'}")
        line(f"  winner   {_decided(choice)}")
        for case in item.cases:
            line(f"  case     {case}")
        for variant in item.variants:
            line(f"  binary   {variant}")
        for candidate in item.tried:
            said = candidate.outcome if candidate.median_ms is None else _ms(candidate.median_ms)
            error = f", deviation {candidate.error:.1e}" if candidate.error is not None else ""
            remark = f" ({candidate.note})" if candidate.note else ""
            line(f"  tried    {candidate.config}: {said}{error}{remark}")
        if item.nearest is not None:
            key, differences = item.nearest
            line(f"  nearest  {key}; differs in {', '.join(differences)}")


def diff(found: Diff, *, as_json: bool) -> None:
    """Two bundles compared."""
    if as_json:
        data(found.to_json())
        return
    _print(str(found).splitlines())
