"""Two onlookers of a process: Python's audit hook, and strace where it is installed. Both note writes and processes.

A deed is (what, path): a file opened for writing, made, renamed, removed or changed, or a process started, whose path
is its program where that is known. Deeds count although they fail.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Deed: TypeAlias = tuple[str, str]

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
PROCESS = "a process"

_CHANGES = frozenset(
    ("mkdir", "rename", "remove", "rmdir", "link", "symlink", "truncate", "chmod", "chown", "utime", "setxattr",
     "removexattr")
)  # fmt: skip
_PROCESSES = frozenset(("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "os.system"))


class Audit:
    """What Python does from now on, in any thread; an audit hook stays as long as the process."""

    def __init__(self) -> None:
        self.deeds: list[Deed] = []
        self._busy = threading.local()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            if event == "open":
                path, _, flags = args
                if flags & WRITING and not isinstance(path, int):
                    self.deeds.append(("open", _absolute(path)))
            elif event in _PROCESSES:
                self.deeds.append((PROCESS, str(args[0]) if args else ""))
            elif event.startswith("os.") and event[3:] in _CHANGES:
                self.deeds += [
                    (event[3:], _absolute(path)) for path in args[:2] if isinstance(path, str | bytes | Path)
                ]
        finally:
            self._busy.now = False


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))


def mark(name: str) -> None:
    """Leaves a mark in what strace sees."""
    os.path.exists(f"/mark/{name}")


# ---------------------------------------------------------------------------------------------- strace

STRACE = ("strace", "-f", "-y", "-q", "-s", "512", "--seccomp-bpf", "-e", "trace=%file,%process,ftruncate,fallocate")
"""To be followed by ``-o FILE`` and the command."""

_CALL = re.compile(r"^\d+ +(?:<\.\.\. )?(\w+)[( ]")
_PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
_FLAGS = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
_OPENS = frozenset(("open", "openat", "openat2"))
_MAKES = re.compile(
    r"creat|mkdir(at)?|rename(at2?)?|unlink(at)?|rmdir|link(at)?|symlink(at)?|mknod(at)?|truncate|f?chmod(at2?)?|"
    r"[fl]?chown(at)?|utimes?|utimensat|futimesat|l?setxattr|l?removexattr|ftruncate|fallocate"
)
_STARTS = frozenset(("execve", "execveat", "fork", "vfork", "clone", "clone3"))


def seen_by_strace(log: Path, begin: str, end: str, folder: Path) -> list[Deed]:
    """The deeds between two marks.

    Args:
        log: strace's file.
        begin, end: names of the marks.
        folder: in which the process runs.
    """
    lines = iter(log.read_text(errors="replace").splitlines())
    for line in lines:
        if f"/mark/{begin}" in line:
            break
    else:
        raise ValueError(f"{log}: no mark `{begin}`")
    found: list[Deed] = []
    for line in lines:
        if f"/mark/{end}" in line:
            return found
        found += _deeds(line, folder)
    raise ValueError(f"{log}: no mark `{end}`")


def _deeds(line: str, folder: Path) -> Iterator[Deed]:
    call = _CALL.match(line)
    if call is None or "resumed>" in line:
        return
    name = call[1]
    if name in _STARTS:
        if "CLONE_THREAD" not in line:
            yield PROCESS, next((path for _, path in _PATH.findall(line)), "")
    elif (name in _OPENS and _FLAGS.search(line)) or _MAKES.fullmatch(name):
        paths = [os.path.join(folder, parent, path) for parent, path in _PATH.findall(line)]
        for path in paths or re.findall(r"\(\d+<([^>]*)>", line):
            yield "open" if name in _OPENS else name, os.path.normpath(path)
