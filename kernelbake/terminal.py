"""What a command line says, and how it ends: for ``kernelbake``, and for the commands of packages that build on it.

stdout is data, stderr is everything else. The only file that touches these streams: they may be closed from the start,
full, or gone with their terminal, and none of that ends what a command is doing. Where stderr is a terminal, reasons
are folded to its width and rich draws bars. click and rich are loaded inside functions, where they are needed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, cast

from kernelbake.errors import ExitCode, InputError, KernelbakeError
from kernelbake.words import fold

if TYPE_CHECKING:
    from click import Group
    from rich.console import Console
    from rich.progress import Progress

_NARROWEST = 40
"""Columns; a terminal that says it has fewer gets lines of this width."""
_says = {"progress": True}


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
    """Writes; a reader that went away (a terminal, ``| head``) ends the output, not the command and not its exit code.

    What the stream's encoding lacks, bytes in the name of a file among it, is written as an escape.

    Raises:
        InputError: stdout cannot take it.
    """
    encoding = _encoding(stream)
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except OSError as failure:
        _lose(stream, failure)


def _lose(stream: TextIO, failure: OSError) -> None:
    """From now on a stream that failed leads nowhere.

    Raises:
        InputError: it is stdout, and has a reader still.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    if not isinstance(failure, BrokenPipeError) and stream is sys.stdout:
        raise InputError(f"stdout: {failure.strerror}; wanted to write all of the output") from failure


def _encoding(stream: TextIO) -> str:
    return stream.encoding or "utf-8"


def flush() -> None:
    """Hands on what is still buffered.

    Raises:
        InputError: stdout cannot take it.
    """
    for stream in (sys.stdout, sys.stderr):
        _write(stream, "")


def width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that stdout, or another stream, is; None for a pipe or a file."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    columns = shutil.get_terminal_size((0, 0)).columns  # COLUMNS, else of the stdout that Python began with
    if "COLUMNS" not in os.environ or columns < 1:
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(stream.fileno()).columns
    return max(columns or 80, _NARROWEST)


# ---------------------------------------------------------------------------------------------- data


def line(text: str = "") -> None:
    """One line of data."""
    _write(sys.stdout, f"{text}\n")


def lines(texts: Iterable[str]) -> None:
    """Lines of data."""
    for text in texts:
        line(text)


def folded(text: str, hang: int = 4) -> None:
    """One line of data; on a terminal, as many as it takes, all but the first indented by ``hang`` columns."""
    lines(fold(text, width(), hang))


def data(value: Any) -> None:
    """Data as strict JSON; characters that the encoding of stdout lacks are escaped by JSON's rules."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(_encoding(sys.stdout))
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, allow_nan=False)
    line(text)


# ---------------------------------------------------------------------------------------------- everything else


def only_errors() -> None:
    """From now on this process says no more than why it fails: one of several ranks tells."""
    _says["progress"] = False


def note(text: str) -> None:
    """One line that is no data."""
    if _says["progress"]:
        _say(text)


def folded_note(text: str, hang: int = 4) -> None:
    """One line that is no data; on a terminal, as many as it takes."""
    for part in fold(text, width(sys.stderr), hang):
        note(part)


def _say(text: str) -> None:
    _write(sys.stderr, f"{text}\n")


def error(failure: KernelbakeError) -> None:
    """A refusal: its message, all its reasons, its hint. A terminal gets reasons folded; a hint may be copied."""
    columns = width(sys.stderr)
    first, *rest = f"error: {failure}".split("\n")
    _say(first)
    for text in rest:
        indent = len(text) - len(text.lstrip())
        may_fold = indent >= 2 and not text[indent:].startswith("hint: ")
        for part in fold(text, columns if may_fold else None, indent + 2):
            _say(part)


def fault(text: str, command: str) -> None:
    """An exception that no one expected, and how to report it."""
    _say(text.rstrip())
    _say(f"this is a fault of {command}: please report it with the lines above and the output of `{command} --version`")


def stacks() -> None:
    """Where every thread of this process is."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stderr.flush()


# ---------------------------------------------------------------------------------------------- drawing


class _Lasting:
    """A stream for rich, which would end a command with the terminal that it writes to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        _write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        _write(self._stream, "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def draws() -> bool:
    """Whether progress is drawn: stderr is a terminal, and this process tells."""
    return sys.stderr.isatty() and _says["progress"]


def console() -> Console:
    """stderr for rich."""
    from rich.console import Console

    return Console(file=cast("TextIO", _Lasting(sys.stderr)))


def bars(label: str, bar_width: int) -> Progress:
    """Progress bars on stderr, to be entered; a task has a field ``message``.

    Args:
        label: what stands before a bar, as rich formats it.
        bar_width: in columns.
    """
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
        TextColumn(label),
        BarColumn(bar_width=bar_width),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[message]}", markup=False, table_column=Column()),  # wraps before others shrink
    )
    return Progress(*columns, console=console())


# ---------------------------------------------------------------------------------------------- ending


class Terminated(BaseException):
    """SIGTERM arrived."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into ``Terminated``, so that child processes and what is open end too; a second one ends at once.

    Only the main thread may handle signals; in another one nothing changes.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def invoke(group: Group, name: str, arguments: list[str] | None) -> None:
    """Parses with click and does what was asked for; click's own ``main`` handles signals and lost readers its way.

    Args:
        group: the commands.
        name: of the program.
        arguments: None takes those of the process.

    Raises:
        InputError: stdout cannot take a help text or a version.
    """
    try:
        with group.make_context(name, list(sys.argv[1:] if arguments is None else arguments)) as context:
            group.invoke(context)
    except OSError as failure:
        *_, (frame, _) = traceback.walk_tb(failure.__traceback__)
        if not frame.f_globals["__name__"].startswith("click."):
            raise
        _lose(sys.stdout, failure)  # help and versions are all that click prints


def refuse(failure: KernelbakeError) -> int:
    """Says why a command is refused, after what it has said so far; gives the exit code."""
    with contextlib.suppress(Exception):
        flush()
    error(failure)
    return failure.exit_code


def run(function: Callable[[], object], command: str, *, refused: Callable[[KernelbakeError], int] = refuse) -> int:
    """Calls a function and says what it raised; the caller exits.

    Args:
        function: parses with click (``invoke``), does the work, prints.
        command: the name of the command.
        refused: says an error of the library and gives its exit code.

    Returns:
        The exit code of the process.
    """
    import click

    open_closed_streams()
    try:
        with terminable():
            function()
            flush()
    except (KeyboardInterrupt, click.Abort):
        note("interrupted")
        return ExitCode.INTERRUPTED
    except Terminated:
        note("terminated")
        return ExitCode.TERMINATED
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.exceptions.NoArgsIsHelpError as help_:
        note(help_.format_message())
        return ExitCode.INPUT
    except click.UsageError as usage:
        path = usage.ctx.command_path if usage.ctx else command
        return refuse(InputError(f"{path}: {usage.format_message().rstrip('.')}", hint=f"see {path} --help"))
    except click.ClickException as other:
        return refuse(InputError(f"{command}: {other.format_message().rstrip('.')}"))
    except KernelbakeError as failure:
        return refused(failure)
    except Exception:
        fault(traceback.format_exc(), command)
        return ExitCode.FAULT
    return ExitCode.DONE
