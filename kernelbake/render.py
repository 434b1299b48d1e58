"""What a person sees: tables, JSON, digests and paths as data; progress and notes beside it. All is plain text.

In a pipe or a file it has one layout, with an entry on a line; on a terminal keys stand in parts and lines are folded
to its width, with nothing cut. Progress is drawn on terminals only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernelbake import layout, terminal
from kernelbake.keys import key_text
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.diff import Diff
    from kernelbake.inspect import Covered, Explained, Shown
    from kernelbake.levels import Report
    from kernelbake.plan import Choice, Launch, Plan
    from kernelbake.progress import BuildResult, Event

_PLAIN_INTERVAL_S = 5.0


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
        terminal.note(phase)

    def update(self, phase: str, done: int, total: int | None, message: str) -> None:
        now = time.monotonic()
        finished = total is not None and done >= total
        if phase == self._phase and now < self._next and not finished:
            return
        self._phase, self._next = phase, now + _PLAIN_INTERVAL_S
        count = f" {done:,}/{total:,}" if total else ""
        terminal.note(f"{phase}{count}{': ' + message if message else ''}")


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
    if not terminal.draws():
        yield _Lines()
        return
    with terminal.bars("{task.description:<10}", bar_width=30) as bars:
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
        yield lambda event: terminal.line(json.dumps(dataclasses.asdict(event), allow_nan=False))
        return
    rejected: collections.Counter[str] = collections.Counter()
    with _drawing() as drawing:

        def show(event: Event) -> None:
            if event.kind == "phase":
                drawing.begin(event.phase)
            elif event.kind == "rejected":
                rejected[str(event.data["outcome"])] += 1
            elif event.kind == "note":
                terminal.note(f"{event.phase}: {event.message}")
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
        terminal.folded_note(f"warning: {warning}", hang=9)
    if as_json:
        terminal.data(found.to_json())
        return
    profile = found.profile
    terminal.line(f"{profile['name']}, {counted(len(found.cases), 'case')}, {len(found.skipped):,} skipped")
    for case, reason in found.skipped:
        terminal.folded(f"skipped {case.id}: {reason}")
    terminal.line()
    if by == "kernel":
        terminal.lines(_by_kernel(found))
    elif terminal.width() is None:
        terminal.lines(_by_case(found))
    else:
        _cases_in_parts(found)
    terminal.line()
    parts = [counted(found.num_keys, "key"), counted(len(found.launches), "launch")]
    terminal.folded(", ".join([*parts, counted(found.num_candidates, "candidate"), _to_compile(found)]))


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
        return layout.table(header, cells, right=(1, 2, 3, 4), width=terminal.width())
    header = ("kernel", "keys", "candidates", "binaries", "held", "cases")
    counts = [(row.kernel, row.keys, row.candidates, row.binaries, row.frozen, len(row.cases)) for row in rows]
    return layout.table(header, counts, right=(1, 2, 3, 4, 5), width=terminal.width())


def _by_case(found: Plan) -> list[str]:
    """A line for each launch of each case, which says all of it."""
    from kernelbake import inspect

    rows = [
        (case, launch.kernel.name, key_text(launch.key))
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
        terminal.line(f"all {counted(len(cases), 'case')}: {counted(len(shared), 'launch')}")
        _launches(shared)
    for case, launches in cases:
        own = [launch for launch in launches if launch not in shared]
        more = "more " if shared else ""
        terminal.folded(f"{case}: {counted(len(own), f'{more}launch') if own else f'no {more}launches'}")
        _launches(own)


def _launches(launches: Iterable[Launch]) -> None:
    for launch in launches:
        terminal.folded(f"  {launch.kernel.name}")
        for text in layout.own_lines(launch.key, ()):
            terminal.folded(f"      {text}", hang=8)


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
        terminal.line(json.dumps(values, allow_nan=False))
        return
    terminal.note(f"keys        {result.keys:,}")
    terminal.note(f"candidates  {result.candidates:,}")
    terminal.note(f"rejected    {_rejected(rejected)}")
    terminal.note(f"entries     {result.entries:,}")
    terminal.note(f"bundle      {result.path}, {bytes_text(result.bundle_bytes)}, made: {result.made}")
    terminal.note(f"seconds     {', '.join(f'{phase} {seconds:.1f}' for phase, seconds in result.seconds.items())}")
    terminal.line(result.digest)


def verified(report: Report, *, as_json: bool) -> None:
    """A verification, one line for each level that proved something or says why it did not."""
    if as_json:
        terminal.data(report.to_json())
        return
    if report.digest is not None:
        terminal.folded(f"digest     {report.digest}", hang=11)
    for level in report.levels:
        outcome = "" if level.outcome == "proved" else f"{level.outcome}: "
        terminal.folded(f"{level.name:<10} {outcome}{level.text}", hang=11)
        for detail in level.details:
            terminal.folded(f"{'':<10} {detail}", hang=13)
        if level.error is not None and level.error is not report.refusals[0]:  # the first is the command's error
            for reason in level.error.reasons:
                terminal.folded(f"{'':<10} {reason}", hang=13)


def shown(summary: Shown, *, as_json: bool) -> None:
    """A bundle in short."""
    if as_json:
        terminal.data(summary.to_json())
        return
    counts = summary.counts
    code = "no code: Triton's interpreter runs it" if summary.interpreted else counted(counts["entries"], "entry")
    planned = ", ".join(counted(counts[noun + "s"], noun) for noun in ("case", "kernel", "key", "candidate"))
    terminal.folded(f"name        {summary.name}", hang=12)
    terminal.folded(f"digest      {summary.digest}", hang=12)
    terminal.line(f"made        {summary.made}")
    terminal.folded(f"size        {bytes_text(summary.size_bytes)}, {code}", hang=12)
    terminal.folded(f"planned     {planned}", hang=12)
    terminal.folded(f"tried       {counts['tried']:,}, rejected {_rejected(summary.rejected)}", hang=12)
    terminal.line()
    fields = [(name, cls, _value(value)) for name, cls, value in summary.fingerprint]
    terminal.lines(layout.table(("field", "class", "value"), fields, width=terminal.width()))
    if summary.skipped:
        terminal.line()
    for case, reason in summary.skipped:
        terminal.folded(f"skipped {case}: {reason}")
    if summary.choices:
        terminal.line()
    if terminal.width() is not None:
        _choices_in_parts(summary.choices, lambda choice: None)
        return
    for choice in summary.choices:
        terminal.line(f"{choice.kernel.name} {key_text(choice.key)}: {layout.decided_text(choice)}")


def _choices_in_parts(choices: Iterable[Choice], more: Callable[[Choice], None]) -> None:
    """Choices on a terminal, by kernel, with what its keys have in common said once.

    Args:
        choices: those of one kernel together.
        more: says what else there is about each.
    """
    for index, (kernel, shared, members) in enumerate(layout.by_kernel(choices)):
        if index > 0:
            terminal.line()
        terminal.folded(kernel)
        _labelled("  all keys", layout.field_lines(shared))
        for choice in members:
            _labelled("  key", layout.own_lines(choice.key, shared))
            for label, text in layout.decided(choice):
                _labelled(f"    {label}", (text,))
            more(choice)


def _labelled(label: str, texts: Iterable[str]) -> None:
    """Lines beside a label, which stands at the first of them."""
    for text in texts:
        terminal.folded(f"{label:<14} {text}", hang=15)
        label = ""


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def coverage(found: Covered, *, as_json: bool) -> None:
    """A bundle against a plan."""
    if as_json:
        terminal.data(found.to_json())
        return
    launches, cases = counted(found.coverage.num_needed, "launch"), counted(len(found.plan.cases), "case")
    terminal.folded(f"digest   {found.held.digest}", hang=9)
    terminal.line(f"needed   {launches} of {cases}")
    terminal.line(f"missing  {len(found.coverage.missing):,}")
    terminal.line(f"unused   {len(found.coverage.unused):,}")
    held = found.held.inventory().by_id
    for id_ in found.coverage.unused:
        terminal.folded(f"unused   {held[id_].kernel.name} {key_text(held[id_].key)}", hang=9)


def explained(items: Sequence[Explained], *, as_json: bool) -> None:
    """Why decisions are in a bundle."""
    if as_json:
        terminal.data([item.to_json() for item in items])
        return
    if terminal.width() is not None:
        by_choice = {item.choice.id: item for item in items}
        _choices_in_parts([item.choice for item in items], lambda choice: _reasons_in_parts(by_choice[choice.id]))
        return
    for item in items:
        choice = item.choice
        terminal.line(f"{choice.kernel.name} {key_text(choice.key)}")
        terminal.line(f"  winner   {layout.decided_text(choice)}")
        for label, text in layout.why(item):
            terminal.line(f"  {label:<8} {text}")
        if item.nearest is not None:
            key, differences = item.nearest
            terminal.line(f"  nearest  {key}; differs in {', '.join(differences)}")


def _reasons_in_parts(item: Explained) -> None:
    for label, text in layout.why(item):
        _labelled(f"    {label}", (text,))
    if item.nearest is not None:  # its other fields are this key's
        _labelled("    nearest", (f"differs in {text}" for text in item.nearest[1]))


def diff(found: Diff, *, as_json: bool) -> None:
    """Two bundles compared."""
    if as_json:
        terminal.data(found.to_json())
        return
    for text in str(found).splitlines():
        terminal.folded(text)
