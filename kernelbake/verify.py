"""Whether a file is a bundle: the one path by which ``verify``, ``freeze`` and everything else reads one.

The checks stand in the order of ``docs/bundle-format.md`` and carry its numbers (``rules.Rule``). Nothing is decided by
what an archive says about itself: the index gives the list of members, and the one archive that has those members is
compared with the file byte for byte. Every byte is read once, into memory that no one else can change.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelbake import archive, digest, documents
from kernelbake.archive import BLOCK, TRAILER, Member
from kernelbake.describe import compare_header, describe
from kernelbake.errors import InputError
from kernelbake.members import (
    DOCUMENTS,
    HEADER,
    INDEX,
    MAX_BYTES,
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MIB,
    Source,
    Span,
    limit_of,
)
from kernelbake.rules import FORMAT, Findings, Rule
from kernelbake.words import counted

_READ_BYTES = MIB // 2
"""So little that it is still in the processor's cache when it is hashed."""


@dataclasses.dataclass(frozen=True)
class Sound:
    """A file whose every byte was found to be right, in memory.

    Args:
        header: ``bundle.json``.
        data: the whole file.
        spans: where each member lies, by name, in the file's order.
    """

    header: Mapping[str, Any]
    data: memoryview
    spans: Mapping[str, Span]

    def content(self, name: str) -> memoryview:
        """The bytes of a member."""
        span = self.spans[name]
        return self.data[span.offset : span.offset + span.size]


@contextlib.contextmanager
def opened(path: Path, findings: Findings) -> Iterator[Source]:
    """MUST 1 and 2: opens a regular file without waiting for one.

    Raises:
        InputError: there is no such file, or it may not be read.
        ViolationsError: it is something else, or no tar by its length.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) != errno.ENXIO:  # a socket
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"bundle `{path}`: it cannot be opened ({reason}); wanted a readable file",
                hint="give the path of a bundle; `kernelbake build` makes one",
            ) from error
        findings.add(Rule.REGULAR_FILE, "file", "a socket; wanted a regular file")
        findings.raise_if_any(path)
    try:
        status = os.fstat(descriptor)
        source = Source(descriptor, status.st_size)
        _check_file(source, status.st_mode, findings)
        findings.raise_if_any(path)
        yield source
    except OSError as error:
        raise InputError(f"bundle `{path}`: it cannot be read ({error.strerror}); wanted a readable file") from error
    finally:
        os.close(descriptor)


def _check_file(source: Source, mode: int, findings: Findings) -> None:
    if not stat.S_ISREG(mode):  # MUST 1
        kinds = {
            stat.S_IFDIR: "a directory",
            stat.S_IFIFO: "a FIFO",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
        }
        kind = kinds.get(stat.S_IFMT(mode), "a special file")
        findings.add(Rule.REGULAR_FILE, "file", f"{kind}; wanted a regular file")
        return
    start = source.at(0, BLOCK)  # MUST 2
    magic = next((what for magic, what in archive.MAGICS if start.startswith(magic)), None)
    if magic is not None:
        findings.add(Rule.LENGTH, "file", f"{magic}; wanted an uncompressed tar")
    elif source.size % BLOCK or not 6 * BLOCK <= source.size <= MAX_BYTES:
        wanted = f"wanted whole blocks of {BLOCK}, at least 6 of them and at most {MAX_BYTES} bytes"
        findings.add(Rule.LENGTH, "file", f"{counted(source.size, 'byte')}; {wanted}")


def read_header(path: Path) -> dict[str, Any]:
    """``bundle.json`` alone, checked as far as it can be by itself (MUST 1 to 14 where they concern it).

    Raises:
        InputError: the file cannot be opened.
        ViolationsError: it is no bundle, or its header is damaged.
    """
    findings = Findings()
    with opened(path, findings) as source:
        header, _ = _header(source, findings, path)
    return header


def inspect(path: Path) -> Sound:
    """Reads the whole file once and checks every byte of it (MUST 1 to 20).

    Raises:
        InputError: the file cannot be opened.
        ViolationsError: with everything that was found.
    """
    findings = Findings()
    with opened(path, findings) as source:
        header, first = _header(source, findings, path)
        index = _index(source, BLOCK + archive.padded(first.size), header, findings, path)
        spans = _layout(first, index)
        expected = archive.length(Member(name, span.size) for name, span in spans.items())
        if expected == source.size:
            data = _memory(source.size)
            clean = _load(source, data, spans, header["time"], findings)
        else:
            clean = False
            message = f"{counted(source.size, 'byte')}; wanted {expected:,}, as the index says"
            findings.add(Rule.TRAILER, "file", message)
        if not clean:
            describe(source, spans, header["time"], findings)
        findings.raise_if_any(path)
    return Sound(header, data.toreadonly(), spans)


# ---------------------------------------------------------------------------------------------- header and index


def _document(source: Source, offset: int, name: str, findings: Findings, path: Path) -> tuple[bytes, bytes]:
    """The header block and the content of a member that has to stand at this place, its size bounded (MUST 3 to 8)."""
    block = source.at(offset, BLOCK)
    found = archive.parse(block.ljust(BLOCK, b"\0"))
    place = f"byte {offset}"
    if found.kind is not None:
        findings.add(Rule.MEMBER_TYPE, f"`{found.name:.100}`", f"{found.kind}; wanted a regular file")
    if found.name != name:
        findings.add(Rule.ORDER, place, f"the member `{found.name:.100}`; wanted `{name}`")
    if len(block) < BLOCK or not found.intact or found.size is None:
        findings.add(Rule.HEADER_BYTES, f"`{name}`", f"a damaged header at {place}; wanted the canonical one")
    elif found.size > MAX_MEMBER_BYTES[name]:
        message = f"{counted(found.size, 'byte')}; wanted at most {MAX_MEMBER_BYTES[name]:,}"
        findings.add(Rule.BOUNDS, f"`{name}`", message)
    findings.raise_if_any(path)
    content = source.at(offset + BLOCK, found.size or 0)
    if len(content) < (found.size or 0):
        message = f"the file ends inside it, after {counted(source.size, 'byte')}; wanted all of it"
        findings.add(Rule.TRAILER, f"`{name}`", message)
        findings.raise_if_any(path)
    return block, content


def _json(content: bytes, name: str, findings: Findings, path: Path, max_values: int) -> Any:
    try:
        return documents.parse(content, max_values=max_values)
    except ValueError as error:
        findings.add(Rule.STRICT_JSON, f"`{name}`", f"{error}; wanted canonical JSON")
        findings.raise_if_any(path)


def _header(source: Source, findings: Findings, path: Path) -> tuple[dict[str, Any], Span]:
    """MUST 11 to 14; also returns where ``bundle.json`` lies, and the digest of what was read of it."""
    block, content = _document(source, 0, HEADER, findings, path)
    header = _json(content, HEADER, findings, path, 1000)
    form = header.get("format") if isinstance(header, dict) else None
    if type(form) is not int or form != FORMAT:
        findings.add(Rule.FORMAT, f"`{HEADER}`", f"format `{form!r:.20}`; wanted {FORMAT}, the one this version reads")
        findings.raise_if_any(path)
    for inner, message in documents.HEADER.check(header):
        findings.add(Rule.HEADER_FIELDS, f"`{HEADER}` {inner}".rstrip(), message)
    findings.raise_if_any(path)
    if header["header_digest"] != header_digest(header):
        findings.add(Rule.HEADER_DIGEST, f"`{HEADER}`", "its digest is not that of its fields; wanted the same")
    wanted = archive.header(HEADER, len(content), min(header["time"], archive.MAX_TIME))
    compare_header(block, wanted, HEADER, findings)
    findings.raise_if_any(path)
    return header, Span(BLOCK, len(content), digest.of_bytes(content))


def header_digest(header: Mapping[str, Any]) -> str:
    """Digest over ``bundle.json``'s own other fields."""
    return digest.of_bytes(digest.canonical_json({k: v for k, v in header.items() if k != "header_digest"}))


def about_digest(header: Mapping[str, Any]) -> str:
    """Digest over what ``bundle.json`` says about the content; it stands in the index, under ``bundle_digest``."""
    return digest.of_bytes(digest.canonical_json({name: header[name] for name in documents.ABOUT_FIELDS}))


def _index(source: Source, offset: int, header: Mapping[str, Any], findings: Findings, path: Path) -> dict[str, Any]:
    """MUST 15 to 17."""
    block, content = _document(source, offset, INDEX, findings, path)
    if digest.of_bytes(content) != header["bundle_digest"]:
        findings.add(Rule.BUNDLE_DIGEST, f"`{INDEX}`", "its digest is not the one in the header; wanted the same")
        findings.raise_if_any(path)
    compare_header(block, archive.header(INDEX, len(content), header["time"]), INDEX, findings)
    index = _json(content, INDEX, findings, path, 4 * MAX_MEMBERS)
    for inner, message in documents.INDEX.check(index):
        findings.add(Rule.INDEX_FIELDS, f"`{INDEX}` {inner}".rstrip(), message)
    findings.raise_if_any(path)
    _check_members(index["members"], findings)
    if index["about"] != about_digest(header):
        findings.add(Rule.ABOUT_DIGEST, f"`{INDEX}`", "its digest of the header's fields is another; wanted the same")
    findings.raise_if_any(path)
    return {**index, "size": len(content), "digest": header["bundle_digest"]}


def _check_members(members: Mapping[str, tuple[int, str]], findings: Findings) -> None:
    """MUST 3 and 5 for the names and sizes that the index lists, and MUST 18 for those it has to list."""
    if len(members) > MAX_MEMBERS:
        findings.add(Rule.BOUNDS, f"`{INDEX}`", f"{counted(len(members), 'member')}; wanted at most {MAX_MEMBERS}")
        return
    for name, (size, _) in members.items():
        limit = limit_of(name)
        if limit is None or name in (HEADER, INDEX):
            findings.add(Rule.MEMBER_NAME, f"`{INDEX}`", f"the name `{name:.100}`; wanted one that the format knows")
        elif size > limit:
            findings.add(Rule.BOUNDS, f"`{name}`", f"{counted(size, 'byte')}; wanted at most {limit:,}")
    for name in DOCUMENTS:
        if name not in members:
            findings.add(Rule.LISTED, f"`{INDEX}`", f"no member `{name}`; wanted one")


def _layout(first: Span, index: Mapping[str, Any]) -> dict[str, Span]:
    """Where the one archive of this index has each member."""
    spans = {HEADER: first}
    offset = BLOCK + archive.padded(first.size)
    listed = [(INDEX, (index["size"], index["digest"])), *sorted(index["members"].items())]
    for name, (size, digest_) in listed:
        spans[name] = Span(offset + BLOCK, size, digest_)
        offset += BLOCK + archive.padded(size)
    return spans


# ---------------------------------------------------------------------------------------------- the rest of the file


def _memory(size: int) -> memoryview:
    """Private memory, in large pages where the system has them: clearing small ones costs half as much as hashing."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


def _load(source: Source, data: memoryview, spans: Mapping[str, Span], time: int, findings: Findings) -> bool:
    """Reads everything and compares it with the canonical archive (MUST 8 to 10) and the index (MUST 20).

    Returns whether the archive around the contents is the canonical one.
    """
    batches = list(_batches(spans))
    threads = min(4, len(os.sched_getaffinity(0)), len(batches))

    def work(batch: list[tuple[str, Span]]) -> tuple[bool, list[str]]:
        return _load_batch(source, data, batch, time)

    if threads > 1:
        with concurrent.futures.ThreadPoolExecutor(threads, "kernelbake-verify") as pool:
            results = list(pool.map(work, batches))
    else:
        results = [work(batch) for batch in batches]
    end = len(data) - len(TRAILER)
    complete = source.into(data[end:], end) == len(TRAILER)
    for name in (name for _, damaged in results for name in damaged):
        message = "its digest is not the one in the index; wanted the same"
        findings.add(Rule.DIGEST, f"`{name}`", message)
    return complete and data[end:] == TRAILER and all(clean for clean, _ in results)


def _batches(spans: Mapping[str, Span]) -> Iterator[list[tuple[str, Span]]]:
    """Neighbouring members, some megabytes at a time."""
    batch: list[tuple[str, Span]] = []
    size = 0
    for name, span in spans.items():
        batch.append((name, span))
        size += BLOCK + span.size
        if size >= _READ_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _load_batch(source: Source, data: memoryview, batch: list[tuple[str, Span]], time: int) -> tuple[bool, list[str]]:
    """Whether headers and padding are canonical, and the members whose content is not what the index says."""
    start = batch[0][1].offset - BLOCK
    last = batch[-1][1]
    end = last.offset + archive.padded(last.size)
    clean = source.into(data[start:end], start) == end - start
    damaged = []
    for name, span in batch:
        stop = span.offset + span.size
        padding = -span.size % BLOCK
        clean = (
            clean
            and data[span.offset - BLOCK : span.offset] == archive.header(name, span.size, time)
            and data[stop : stop + padding] == bytes(padding)
        )
        if hashlib.sha256(data[span.offset : stop]).hexdigest() != span.digest[len(digest.PREFIX) :]:
            damaged.append(name)
    return clean, damaged
