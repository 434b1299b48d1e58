"""The journal of a build: one fsynced line for everything that must survive a kill, and the lock beside it.

A line is ``<first 16 hex digits of its sha256> <canonical JSON>``. Only the last line may be torn, by a kill in the
middle of its write; it is cut off. Anything else that does not check is damage, and the journal starts afresh.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelbake import digest
from kernelbake.errors import LockedError

FORMAT = 1


class Journal:
    """An append-only file of records that belong to one header.

    Args:
        path: the file; made where it is missing.
        header: what the records are valid for (digests of manifest, plan and fingerprint …). Another header in the file
            makes the journal start afresh.

    Attributes:
        records: what the file held, in order; empty when it started afresh.
        restarted: why an existing file could not be used, or None.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._header = {"kind": "header", "format": FORMAT, **header}
        lines, end, damage = _read(path)
        self.restarted = damage or _difference(lines[0] if lines else None, self._header)
        fresh = self.restarted is not None or not lines
        self.records: list[dict[str, Any]] = [] if fresh else lines[1:]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, 0 if fresh else end)
        os.lseek(self._file, 0, os.SEEK_END)
        if fresh:
            self.append(self._header)
            sync_folder(path.parent)

    def append(self, record: Mapping[str, Any], *, durable: bool = True) -> None:
        """Adds a record; when it returns, the record survives a kill and, if ``durable``, a crash of the machine.

        Raises:
            ValueError: the record holds a number that strict JSON does not have.
            OSError: the disk is full, say.
        """
        body = digest.canonical_json(record)
        data = memoryview(_checksum(body) + b" " + body + b"\n")
        while data:
            data = data[os.write(self._file, data) :]
        if durable:
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def _checksum(body: bytes) -> bytes:
    return digest.of_bytes(body).removeprefix(digest.PREFIX)[:16].encode()


def _read(path: Path) -> tuple[list[dict[str, Any]], int, str | None]:
    """The records, the offset behind the last whole one, and what is damaged, if anything."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0, None
    records: list[dict[str, Any]] = []
    end = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # torn by a kill
        checksum, _, body = line[:-1].partition(b" ")
        if checksum != _checksum(body):
            if end + len(line) == len(data):
                break
            return [], 0, f"line {number} of the journal is damaged"
        records.append(json.loads(body))
        end += len(line)
    return records, end, None


def _difference(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> str | None:
    """Which fields of the header differ, in words."""
    if found is None or found == wanted:
        return None
    names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    return f"it was made for another {', '.join(names)}"


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # a file system without it (some network ones) gives what it can
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Holds a lock until the end; the kernel frees it however the process ends.

    Args:
        path: the lock's file.
        what: what is locked, for the message.

    Raises:
        LockedError: another process holds it.
    """
    import filelock

    held = filelock.FileLock(path, timeout=0)
    try:
        held.acquire()
    except filelock.Timeout:
        raise LockedError(
            f"{what}: another process holds its lock `{path}`; wanted it free", hint="wait for it, or end that process"
        ) from None
    try:
        yield
    finally:
        held.release()
