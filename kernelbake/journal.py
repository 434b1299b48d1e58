"""The journal of a build: one fsynced line for everything that must survive a kill, and the lock beside it.

A line is ``<checksum> <canonical JSON>``. The checksum is the first 16 hex digits of the sha256 of the line before's
and the JSON together, so that a line that is lost, repeated or out of place shows as well. Only the last line may be
torn, by a kill in the middle of its write; it is cut off. Anything else that does not check is damage, and the journal
starts afresh.
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

FORMAT = 2


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
        lines, end, self._last, damage = _read(path)
        self.restarted = damage or _difference(lines[0] if lines else None, self._header)
        fresh = self.restarted is not None or not lines
        self.records: list[dict[str, Any]] = [] if fresh else lines[1:]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, 0 if fresh else end)
        os.lseek(self._file, 0, os.SEEK_END)
        if fresh:
            self._last = b""
            self.append(self._header)
            sync_folder(path.parent)

    def append(self, record: Mapping[str, Any], *, durable: bool = True) -> None:
        """Adds a record; when it returns, the record survives a kill and, if ``durable``, a crash of the machine.

        Raises:
            ValueError: the record holds a number that strict JSON does not have.
            OSError: the disk is full, say.
        """
        body = digest.canonical_json(record)
        checksum = _checksum(self._last, body)
        data = memoryview(checksum + b" " + body + b"\n")
        while data:
            data = data[os.write(self._file, data) :]
        self._last = checksum
        if durable:
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def _checksum(last: bytes, body: bytes) -> bytes:
    """Of a line, given the checksum of the line before."""
    return digest.of_bytes(last + body).removeprefix(digest.PREFIX)[:16].encode()


def _read(path: Path) -> tuple[list[dict[str, Any]], int, bytes, str | None]:
    """The records, the offset behind the last whole one, its checksum, and what is damaged, if anything."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0, b"", None
    records: list[dict[str, Any]] = []
    end, last = 0, b""
    *lines, torn = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        checksum, _, body = line.partition(b" ")
        if checksum != _checksum(last, body):
            if number == len(lines) and not torn:
                break  # its blocks did not all reach the disk
            return [], 0, b"", f"line {number} of the journal is damaged"
        records.append(json.loads(body))
        end, last = end + len(line) + 1, checksum
    return records, end, last, None


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
