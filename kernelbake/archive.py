"""The archive of a bundle: one canonical ustar form, and nothing but it.

There is exactly one right sequence of bytes for a list of named contents and a time. A reader therefore never asks
what an archive *means*: it builds the header that has to stand at a place and compares. What differs is then described,
field by field, for people; no decision hangs on the description.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

BLOCK = 512
TRAILER = bytes(2 * BLOCK)
MAX_TIME = 8**11 - 1
"""Largest time that the header's field can hold, in seconds since 1970."""
MAX_SIZE = 8**11 - 1
"""Largest size that the header's field can hold, in bytes."""

_FIELDS = (
    ("name", 0, 100),
    ("mode", 100, 108),
    ("uid", 108, 116),
    ("gid", 116, 124),
    ("size", 124, 136),
    ("time", 136, 148),
    ("checksum", 148, 156),
    ("type", 156, 157),
    ("link name", 157, 257),
    ("magic", 257, 263),
    ("version", 263, 265),
    ("user name", 265, 297),
    ("group name", 297, 329),
    ("device major", 329, 337),
    ("device minor", 337, 345),
    ("prefix", 345, 500),
    ("reserved", 500, 512),
)

TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a directory",
    b"6": "a FIFO",
    b"7": "a contiguous file",
    b"D": "a GNU directory dump",
    b"K": "a GNU long link name",
    b"L": "a GNU long name",
    b"M": "a GNU continuation of a volume",
    b"N": "an old GNU long name",
    b"S": "a GNU sparse file",
    b"V": "a GNU volume header",
    b"X": "a Solaris extended header",
    b"g": "a pax global header",
    b"x": "a pax extended header",
}
"""What a header's type says other than a regular file, in words."""

MAGICS = (
    (b"\x1f\x8b", "gzip data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PK\x05\x06", "a zip archive"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"\x28\xb5\x2f\xfd", "zstandard data"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x7fELF", "an ELF file"),
)
"""First bytes of what is given instead of a tar, for the message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive.

    Args:
        name: its name, at most 100 bytes of ASCII.
        size: its length in bytes.
    """

    name: str
    size: int


def padded(size: int) -> int:
    """The length that a content of this size takes up, in bytes: whole blocks."""
    return -(-size // BLOCK) * BLOCK


def length(members: Iterable[Member]) -> int:
    """The length of the whole archive in bytes."""
    return sum(BLOCK + padded(member.size) for member in members) + len(TRAILER)


def header(name: str, size: int, time: int) -> bytes:
    """The canonical ustar header: a regular file, mode 0644, owner 0:0 without names.

    Args:
        name: the member's name.
        size: its length in bytes.
        time: its modification time in seconds since 1970.

    Raises:
        ValueError: the name, the size or the time does not fit.
    """
    encoded = name.encode("ascii")
    if not 0 < len(encoded) <= 100 or not 0 <= size <= MAX_SIZE or not 0 <= time <= MAX_TIME:
        raise ValueError(f"member `{name:.120}` of {size} bytes at time {time} does not fit a ustar header")
    before, after, base = _template(time)
    numbers = b"%011o\0" % size
    checksum = base + sum(encoded) + sum(numbers)
    return b"%b%b%b%06o\0 %b" % (encoded.ljust(100, b"\0"), before, numbers + b"%011o\0" % time, checksum, after)


@functools.lru_cache(maxsize=8)
def _template(time: int) -> tuple[bytes, bytes, int]:
    """What does not depend on name and size: the bytes before the size, those after the checksum, and their sum."""
    before = b"0000644\0" + 2 * b"0000000\0"
    after = b"0" + bytes(100) + b"ustar\0" + b"00" + bytes(BLOCK - 265)
    return before, after, sum(before) + sum(after) + sum(b"%011o\0" % time) + 8 * ord(" ")


def pack(contents: Iterable[tuple[str, bytes | memoryview]], time: int) -> Iterator[bytes | memoryview]:
    """The archive's bytes, piece by piece."""
    for name, data in contents:
        yield header(name, len(data), time)
        yield data
        yield bytes(padded(len(data)) - len(data))
    yield TRAILER


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a header block says by itself, whether or not it is canonical.

    Args:
        name: the name as text; bytes outside ASCII escaped.
        size: the size, or None where the field is no number.
        time: the time, or None where the field is no number.
        kind: the type in words where it is not a regular file's, else None.
        intact: whether the block's own checksum is right.
    """

    name: str
    size: int | None
    time: int | None
    kind: str | None
    intact: bool


def parse(block: bytes) -> Found:
    """Reads a header block of 512 bytes without trusting it; never raises."""
    type_ = block[156:157]
    kind = None if type_ == b"0" else TYPES.get(type_, f"of the unknown type `{type_!r:.12}`")
    stored = _number(block[148:156])
    actual = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    name = block[:100].split(b"\0", 1)[0].decode("ascii", "backslashreplace")
    prefix = block[345:500].split(b"\0", 1)[0].decode("ascii", "backslashreplace")
    return Found(
        f"{prefix}/{name}" if prefix else name,
        _number(block[124:136]),
        _number(block[136:148]),
        kind,
        stored == actual,
    )


def _number(field: bytes) -> int | None:
    """Octal digits or, where GNU tar needs more room, a number to the base of 256."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.rstrip(b"\0 ")
    return int(digits, 8) if digits and all(byte in b"01234567" for byte in digits) else None


def differing_fields(block: bytes, wanted: bytes) -> tuple[str, ...]:
    """The names of the header's fields in which two blocks differ."""
    return tuple(name for name, start, end in _FIELDS if block[start:end] != wanted[start:end])
