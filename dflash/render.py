"""What a person sees of a run. The only file of dflash that imports rich, and beside ``cli`` the only one that writes.

stdout is data: the path of what was made, JSON. stderr is everything else. Plain lines say the same as bars.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

from kernelbake.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from dflash.profiling import Profile
    from dflash.trainer import StepReport
    from kernelbake.errors import KernelbakeError

REPORT_HINT = "this is a fault of dflash: please report it with the lines above and the output of `dflash --version`"
_PLAIN_INTERVAL_S = 2.0


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
    """Writes; a reader that went away (a terminal, ``| head``) ends the output, and no training.

    Raises:
        InputError: stdout cannot take it.
    """
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
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
    line(json.dumps(value, indent=2, allow_nan=False))


_says = {"progress": True}


def only_errors() -> None:
    """From now on this process says nothing else: one of several ranks tells."""
    _says["progress"] = False


def note(text: str) -> None:
    """One line that is no data."""
    if _says["progress"]:
        _say(text)


def _say(text: str) -> None:
    _write(sys.stderr, f"{text}\n")


def error(failure: KernelbakeError) -> None:
    """A refusal: its message, all its reasons, its hint."""
    _say(f"error: {failure}")


def fault(text: str) -> None:
    """An exception that no one expected."""
    _say(text.rstrip())
    _say(REPORT_HINT)


def stacks() -> None:
    """Where every thread of this process is."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stderr.flush()


def flush() -> None:
    """Writes what is still held back."""
    for stream in (sys.stdout, sys.stderr):
        _write(stream, "")


class _Lasting:
    """A stream for rich, which would end a run with the terminal that it writes to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        _write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        _write(self._stream, "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _console() -> Console:
    """stderr for rich."""
    from rich.console import Console

    return Console(file=cast("TextIO", _Lasting(sys.stderr)))


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Says what is being done, and how long it took."""
    begin = time.monotonic()
    if sys.stderr.isatty() and _says["progress"]:
        with _console().status(what):
            yield
    else:
        note(f"{what} …")
        yield
    note(f"{what}: {time.monotonic() - begin:.1f} s")


@contextlib.contextmanager
def _bar(description: str) -> Iterator[Any]:
    """A rich progress bar on a terminal, None elsewhere."""
    if not sys.stderr.isatty() or not _says["progress"]:
        yield None
        return
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
        TextColumn(description),
        BarColumn(bar_width=24),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[message]}", markup=False, table_column=Column()),  # wraps before others shrink
    )
    with Progress(*columns, console=_console()) as bar:
        bar.add_task(description, total=None, message="")
        yield bar


@contextlib.contextmanager
def evaluating() -> Iterator[Callable[[int, int], None]]:
    """A callback ``(prompts answered, prompts in all)`` for an evaluation."""
    last = [0.0]
    with _bar("prompts") as bar:

        def show(done: int, total: int) -> None:
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=total)
            elif time.monotonic() - last[0] > _PLAIN_INTERVAL_S:
                last[0] = time.monotonic()
                note(f"prompts {done}/{total}")

        yield show


@contextlib.contextmanager
def planning() -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(cases done, cases in all, message)`` for the preflight."""
    last = [0.0]
    with _bar("preflight") as bar:

        def show(done: int, total: int, message: str) -> None:
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=total or None, message=message)
            elif time.monotonic() - last[0] > _PLAIN_INTERVAL_S:
                last[0] = time.monotonic()
                note(f"preflight {done}/{total}: {message}" if total else f"preflight: {message}")

        yield show


@contextlib.contextmanager
def training(steps: int, log: str) -> Iterator[Callable[[StepReport], None]]:
    """A callback for the reports of steps.

    Without a bar, lines keep a distance in time; the first step and the last one that was made always have one.

    Args:
        steps: of the whole run.
        log: where all steps are, for people.
    """
    last, told = 0.0, False
    skipped: StepReport | None = None

    def tell(report: StepReport) -> None:
        note(f"step {report.step}/{steps}  {_step(report)}")

    def show(report: StepReport) -> None:
        nonlocal last, skipped, told
        if bar is not None:
            bar.update(bar.task_ids[0], completed=report.step, total=steps, message=_step(report))
        elif not last or report.step == steps or time.monotonic() - last > _PLAIN_INTERVAL_S:
            last, skipped = time.monotonic(), None
            tell(report)
        else:
            skipped = report
            if not told:
                note(f"steps are shown here every {_PLAIN_INTERVAL_S:g} s, and the last one; all are in `{log}`")
                told = True

    with _bar("train") as bar:
        try:
            yield show
        finally:
            if skipped is not None:
                tell(skipped)


def profile(found: Profile) -> None:
    """A table of each pair: where the time of a step goes."""
    from rich.table import Table

    for pair in found.pairs:
        title = f"pair {pair.pair}: a step takes {found.step_ms:.1f} ms (mean of {pair.steps} after the first)"
        table = Table("part", title=title, title_justify="left")
        for name in ("device ms", "of the step", "host ms"):
            table.add_column(name, justify="right")
        rows: list[tuple[str, float | None, float | None]] = [
            *((part, device, host) for part, (device, host) in pair.parts.items()),
            ("device without work", pair.idle_ms, None),
            ("wait for batches", None, found.data_ms),
            ("everything else", None, found.rest_ms),
        ]
        for part, device, host in rows:
            share = f"{device / max(found.step_ms, 1e-9):.1%}" if device is not None else ""
            table.add_row(part, _ms(device), share, _ms(host))
        _console().print(table)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _step(report: StepReport) -> str:
    scores = report.scores
    parts = [
        f"loss {report.loss:.4f}",
        f"accuracy {scores.accuracy:.3f}",
        f"acceptance {scores.acceptance_length:.2f}",
        f"lr {report.lr:.2e}",
        f"{report.num_tokens / max(report.seconds, 1e-9):,.0f} tokens/s",
    ]
    if report.peak_bytes is not None:
        parts.append(f"peak {report.peak_bytes / 2**30:.1f} GiB")
    return "  ".join(parts)
