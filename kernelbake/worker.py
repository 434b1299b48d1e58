"""A child process that can be killed at any moment, and the JSON lines spoken with it.

Both ends are here: ``Child`` for the builder, ``Channel`` for the process itself. A child's own output goes to a log
file, so that a library that prints cannot disturb the lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelbake.errors import BuildError

_PR_SET_PDEATHSIG = 1
_UNKILLABLE_S = 60.0


class ChildDiedError(Exception):
    """The child ended; its lines are all read.

    Args:
        how: ``signal SIGABRT``, ``exit status 3``.
    """

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Lines:
    """JSON lines out of a descriptor, as they come.

    Attributes:
        waiting: whole lines that were read and not yet taken.
        ended: the other end is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.waiting: deque[dict[str, Any]] = deque()
        self.ended = False

    def fill(self) -> None:
        """Reads what is there, and waits if nothing is."""
        try:
            data = os.read(self._descriptor, 1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            self.ended = True
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.waiting.extend(json.loads(line) for line in lines)


def write_line(descriptor: int, message: Mapping[str, Any]) -> None:
    """Writes one JSON line.

    Raises:
        OSError: nobody reads any more.
    """
    data = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


class Child:
    """A process of its own session, started from a Python module of this package or beside it.

    Args:
        arguments: what follows ``python``: ``-m kernelbake.worker_main``.
        environment: the child's whole environment.
        log: file that takes its standard output and error, appended.
    """

    def __init__(self, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        read_end, write_end = os.pipe()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, *arguments, str(write_end), str(os.getpid())],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write_end,),
                    env=dict(environment),
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._events = read_end
        self._selector = selectors.DefaultSelector()
        self._selector.register(read_end, selectors.EVENT_READ)
        self._lines = Lines(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when lines wait, so that several children can be selected on."""
        return self._events

    def send(self, message: Mapping[str, Any]) -> None:
        """Writes one line; a child that is gone is noticed by ``receive``, not here."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            write_line(self._process.stdin.fileno(), message)

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next line, or None after ``timeout_s`` seconds without one; None waits as long as it takes.

        Raises:
            ChildDiedError: the child ended and every line of it was read.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._lines.waiting:
            if self._lines.ended:
                raise ChildDiedError(self._end())
            if not self._selector.select(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return None
            self._lines.fill()
        return self._lines.waiting.popleft()

    def _end(self) -> str:
        """How it ended; kills it first if it closed its pipe and lingers."""
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        return describe_status(status)

    def kill(self) -> None:
        """Ends the child and whatever it started, and waits until it is gone.

        Raises:
            BuildError: the operating system does not end it (a GPU driver that hangs, say).
        """
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        try:
            self._process.wait(_UNKILLABLE_S)
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"worker process {self.pid}: still there {_UNKILLABLE_S:.0f} s after SIGKILL; wanted it gone",
                hint="the GPU driver hangs; reset the GPU or restart the machine, then run the build again: it goes on",
            ) from None

    def close(self) -> None:
        """Kills the child if it still runs and frees the pipes."""
        if self._process.poll() is None:
            self.kill()
        self._selector.close()
        os.close(self._events)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def log_tail(self, lines: int = 6) -> tuple[str, ...]:
        """The last lines that the child wrote, for a message."""
        try:
            text = self.log.read_bytes()[-16384:].decode(errors="replace")
        except OSError:
            return ()
        return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-lines:]


def describe_status(status: int) -> str:
    """A process status in words: ``signal SIGSEGV``, ``exit status 3``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


class Channel:
    """The child's end: reads messages from standard input, writes events to the pipe whose number it was given.

    Args:
        arguments: the last two command line arguments: pipe, process id of the parent.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._events = int(arguments[-2])
        os.set_inheritable(self._events, False)
        die_with_parent(int(arguments[-1]))
        self._input = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)  # nothing else reads what is ours
        os.close(null)
        self.lines = Lines(self._input)

    def fileno(self) -> int:
        """Readable when messages wait; ``lines.fill`` then reads them."""
        return self._input

    def close(self) -> None:
        """Gives both ends up; for a forked process that has its own."""
        os.close(self._events)
        os.close(self._input)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends an event; ends this process if the parent is gone."""
        try:
            write_line(self._events, message)
        except BrokenPipeError:
            os._exit(1)

    def receive(self) -> dict[str, Any]:
        """Waits for the next message; ends this process if the parent is gone."""
        while not self.lines.waiting:
            if self.lines.ended:
                os._exit(1)
            self.lines.fill()
        return self.lines.waiting.popleft()

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and waits for the answer."""
        self.send(message)
        return self.receive()


def die_with_parent(parent: int) -> None:
    """Makes the kernel end this process when its parent ends, however that happens, and first when memory runs out."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_helpers_too() -> None:
    """Makes the kernel also end every helper that this process starts through ``subprocess``: a process that is killed
    cannot end the assembler that it waits for, and one that hangs would stay. Only for a process without threads."""
    start = subprocess.Popen.__init__

    def started(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **{"preexec_fn": functools.partial(die_with_parent, os.getpid()), **options})

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
