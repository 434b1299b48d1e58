"""Files that appear whole or not at all: a temporary file beside the target, flushed, then renamed over it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from kernelbake.errors import InputError

_ROOM = "free some room, or name another folder; an older file of that name is untouched"
_RIGHT = "name a folder that can be written to"
_HINTS = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.ENOENT: "make the folder first",
    errno.EROFS: _RIGHT,
    errno.EACCES: _RIGHT,
    errno.EPERM: _RIGHT,
}


@contextlib.contextmanager
def replacing(path: Path, what: str, *, keep: bool = True) -> Iterator[tuple[int, Path]]:
    """A temporary file beside the target that takes its place if the block succeeds, and else leaves nothing.

    The file is locked for as long as it is being written, so that one left by a killed process can be told from one in
    use, and is removed by the next who writes here.

    Args:
        path: the target.
        what: what it is, for messages: ``bundle``.
        keep: False only tries whether a file can be written there.

    Yields:
        The open descriptor and the temporary file's path.

    Raises:
        InputError: the file cannot be written there: no folder, no right, no room.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{what} {path}: something that is no regular file is there; wanted a file or nothing")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise _cannot_write(path, what, error) from error
    prefix, suffix = f".{path.name[:100]}.", ".partial"
    temporary = path.parent / f"{prefix}{secrets.token_hex(8)}{suffix}"
    descriptor = -1
    try:
        _remove_abandoned(path.parent, prefix, suffix)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor, temporary
        if keep:
            os.replace(temporary, path)
            _sync_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path, what, error) from error
    finally:
        if descriptor >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            os.close(descriptor)


def write_all(descriptor: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes the pieces one after another and flushes them to the disk.

    Raises:
        OSError: the disk is full, or fails.
    """
    with os.fdopen(descriptor, "wb", buffering=1 << 20, closefd=False) as file:
        for piece in pieces:
            file.write(piece)
    os.fsync(descriptor)


def _cannot_write(path: Path, what: str, error: OSError | ValueError) -> InputError:
    number = error.errno if isinstance(error, OSError) else None
    reason = getattr(error, "strerror", None) or error
    hint = _HINTS.get(number) if number is not None else None
    return InputError(f"{what} {path}: it cannot be written ({reason}); wanted a writable folder with room", hint=hint)


def _remove_abandoned(folder: Path, prefix: str, suffix: str) -> None:
    for name in os.listdir(folder):
        if name.startswith(prefix) and name.endswith(suffix):
            with contextlib.suppress(OSError):
                descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(folder / name)
                finally:
                    os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
