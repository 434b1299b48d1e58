"""What a person sees. The only file of kernelbake that imports rich, and beside ``cli`` the only one that writes.

stdout is data: tables, JSON, digests, paths. stderr is everything else: progress, notes, refusals. All is plain text.
In a pipe or a file it has one layout, with an entry on a line; on a terminal keys stand in parts and lines are folded
to its width, with nothing cut. rich draws progress, on terminals only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kernelbake import layout
from kernelbake.errors import InputError, KernelbakeError
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.diff import Diff
    from kernelbake.inspect import Covered, Explained, Shown
    from kernelbake.levels import Report
    from kernelbake.plan import Choice, Launch, Plan
    from kernelbake.progress import BuildResult, Event

REPORT_HINT = (
    "this is a fault of kernelbake: please report it with the lines above and the output of `kernelbake --version`"
)
_PLAIN_INTERVAL_S = 5.0
_NARROWEST = 40
"""Columns; a terminal that says it has fewer gets lines of this width."""


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


def width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that stdout, or another stream, is; None for a pipe or a file."""
    return max(shutil.get_terminal_size().columns, _NARROWEST) if (stream or sys.stdout).isatty() else None


def line(text: str = "") -> None:
    """One line of data."""
    _write(sys.stdout, f"{text}\n")


def folded(text: str, hang: int = 4) -> None:
    """One line of data; on a terminal, as many as it takes, all but the first indented by ``hang`` columns."""
    _print(layout.fold(text, width(), hang))


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
    """A refusal: its message, all its reasons, its hint. A terminal gets reasons folded; a hint may be copied."""
    first, *rest = f"error: {failure}".split("\n")
    note(first)
    for text in rest:
        for part in layout.fold(text, width(sys.stderr) if text.startswith("  ") else None):
            note(part)


def fault(text: str) -> None:
    """An exception that no one expected."""
    note(text.rstrip())
    note(REPORT_HINT)


# ---------------------------------------------------------------------------------------------- numbers


def bytes_text(count: int) -> str:
    """``1.5 MB``: a count of bytes in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


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
        for text in layout.fold(f"warning: {warning}", width(sys.stderr), hang=9):
            note(text)
    if as_json:
        data(found.to_json())
        return
    profile = found.profile
    line(f"{profile['name']}, {counted(len(found.cases), 'case')}, {len(found.skipped):,} skipped")
    for case, reason in found.skipped:
        folded(f"skipped {case.id}: {reason}")
    line()
    if by == "kernel":
        _print(_by_kernel(found))
    elif width() is None:
        _print(_by_case(found))
    else:
        _cases_in_parts(found)
    line()
    parts = [counted(found.num_keys, "key"), counted(len(found.launches), "launch")]
    folded(", ".join([*parts, counted(found.num_candidates, "candidate"), _to_compile(found)]))


def _to_compile(found: Plan) -> str:
    from kernelbake import inspect

    if inspect.is_interpreted(found):
        return "nothing to compile for Triton's interpreter"
    kernels = inspect.by_kernel(found)
    binaries, frozen = sum(row.binaries for row in kernels), sum(row.frozen for row in kernels)
    return f"{counted(binaries, 'binary')} to compile, {frozen:,} to hold"


def _by_kernel(found: Plan) -> list[str]:
    from kernelbake import inspect

    rows = inspect.by_kernel(found)
    if inspect.is_interpreted(found):
        header: tuple[str, ...] = ("kernel", "keys", "candidates", "variants", "cases")
        cells = [(row.kernel, row.keys, row.candidates, row.frozen, len(row.cases)) for row in rows]
        return layout.table(header, cells, right=(1, 2, 3, 4), width=width())
    header = ("kernel", "keys", "candidates", "binaries", "held", "cases")
    counts = [(row.kernel, row.keys, row.candidates, row.binaries, row.frozen, len(row.cases)) for row in rows]
    return layout.table(header, counts, right=(1, 2, 3, 4, 5), width=width())


def _by_case(found: Plan) -> list[str]:
    """A line for each launch of each case, which says all of it."""
    from kernelbake import inspect

    rows = [
        (case, launch.kernel.name, layout.key_text(launch.key))
        for case, launches in inspect.by_case(found)
        for launch in launches
    ]
    return layout.table(("case", "kernel", "key"), rows)


def _cases_in_parts(found: Plan) -> None:
    """The launches that all cases make, once; then those of each case beyond them."""
    from kernelbake import inspect

    cases = inspect.by_case(found)
    shared = [launch for launch in found.launches if len(launch.cases) == len(cases)] if len(cases) > 1 else []
    if shared:
        line(f"all {counted(len(cases), 'case')}: {counted(len(shared), 'launch')}")
        _launches(shared)
    for case, launches in cases:
        own = [launch for launch in launches if launch not in shared]
        more = "more " if shared else ""
        folded(f"{case}: {counted(len(own), f'{more}launch') if own else f'no {more}launches'}")
        _launches(own)


def _launches(launches: Iterable[Launch]) -> None:
    for launch in launches:
        folded(f"  {launch.kernel.name}")
        for text in layout.own_lines(launch.key, ()):
            folded(f"      {text}", hang=8)


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
        folded(f"digest     {report.digest}", hang=11)
    for level in report.levels:
        outcome = "" if level.outcome == "proved" else f"{level.outcome}: "
        folded(f"{level.name:<10} {outcome}{level.text}", hang=11)
        for detail in level.details:
            folded(f"{'':<10} {detail}", hang=13)
        if level.error is not None and level.error is not report.refusals[0]:  # the first is the command's error
            for reason in level.error.reasons:
                folded(f"{'':<10} {reason}", hang=13)


def shown(summary: Shown, *, as_json: bool) -> None:
    """A bundle in short."""
    if as_json:
        data(summary.to_json())
        return
    counts = summary.counts
    code = "no code: Triton's interpreter runs it" if summary.interpreted else counted(counts["entries"], "entry")
    planned = ", ".join(counted(counts[noun + "s"], noun) for noun in ("case", "kernel", "key", "candidate"))
    folded(f"name        {summary.name}", hang=12)
    folded(f"digest      {summary.digest}", hang=12)
    line(f"made        {summary.made}")
    folded(f"size        {bytes_text(summary.size_bytes)}, {code}", hang=12)
    folded(f"planned     {planned}", hang=12)
    folded(f"tried       {counts['tried']:,}, rejected {_rejected(summary.rejected)}", hang=12)
    line()
    fields = [(name, cls, _value(value)) for name, cls, value in summary.fingerprint]
    _print(layout.table(("field", "class", "value"), fields, width=width()))
    if summary.skipped:
        line()
    for case, reason in summary.skipped:
        folded(f"skipped {case}: {reason}")
    if summary.choices:
        line()
    if width() is not None:
        _choices_in_parts(summary.choices, lambda choice: None)
        return
    for choice in summary.choices:
        line(f"{choice.kernel.name} {layout.key_text(choice.key)}: {layout.decided_text(choice)}")


def _choices_in_parts(choices: Iterable[Choice], more: Callable[[Choice], None]) -> None:
    """Choices on a terminal, by kernel, with what its keys have in common said once.

    Args:
        choices: those of one kernel together.
        more: says what else there is about each.
    """
    for index, (kernel, shared, members) in enumerate(layout.by_kernel(choices)):
        if index > 0:
            line()
        folded(kernel)
        _labelled("  all keys", layout.field_lines(shared))
        for choice in members:
            _labelled("  key", layout.own_lines(choice.key, shared))
            for label, text in layout.decided(choice):
                _labelled(f"    {label}", (text,))
            more(choice)


def _labelled(label: str, texts: Iterable[str]) -> None:
    """Lines beside a label, which stands at the first of them."""
    for text in texts:
        folded(f"{label:<14} {text}", hang=15)
        label = ""


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def coverage(found: Covered, *, as_json: bool) -> None:
    """A bundle against a plan."""
    if as_json:
        data(found.to_json())
        return
    launches, cases = counted(found.coverage.num_needed, "launch"), counted(len(found.plan.cases), "case")
    folded(f"digest   {found.held.digest}", hang=9)
    line(f"needed   {launches} of {cases}")
    line(f"missing  {len(found.coverage.missing):,}")
    line(f"unused   {len(found.coverage.unused):,}")
    held = found.held.inventory().by_id
    for id_ in found.coverage.unused:
        folded(f"unused   {held[id_].kernel.name} {layout.key_text(held[id_].key)}", hang=9)


def explained(items: Sequence[Explained], *, as_json: bool) -> None:
    """Why decisions are in a bundle."""
    if as_json:
        data([item.to_json() for item in items])
        return
    if width() is not None:
        by_choice = {item.choice.id: item for item in items}
        _choices_in_parts([item.choice for item in items], lambda choice: _reasons_in_parts(by_choice[choice.id]))
        return
    for item in items:
        choice = item.choice
        line(f"{choice.kernel.name} {layout.key_text(choice.key)}")
        line(f"  winner   {layout.decided_text(choice)}")
        for label, text in layout.why(item):
            line(f"  {label:<8} {text}")
        if item.nearest is not None:
            key, differences = item.nearest
            line(f"  nearest  {key}; differs in {', '.join(differences)}")


def _reasons_in_parts(item: Explained) -> None:
    for label, text in layout.why(item):
        _labelled(f"    {label}", (text,))
    if item.nearest is not None:  # its other fields are this key's
        _labelled("    nearest", (f"differs in {text}" for text in item.nearest[1]))


def diff(found: Diff, *, as_json: bool) -> None:
    """Two bundles compared."""
    if as_json:
        data(found.to_json())
        return
    for text in str(found).splitlines():
        folded(text)
