"""The members that a bundle can have: their names, their bounds, and where they lie in an open file."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

HEADER, INDEX = "bundle.json", "index.json"
DOCUMENTS = (
    "choices.json",
    "fingerprint.json",
    "manifest.resolved.json",
    "manifest.yaml",
    "plan.json",
    "record.jsonl",
    "specializations.json",
)
"""The members that every bundle has beside its header and index, sorted."""

MIB = 1 << 20
MAX_BYTES = 2 << 30
"""Longest bundle."""
MAX_MEMBERS = 65_536
"""Most members that an index may list."""
MAX_MEMBER_BYTES: Mapping[str, int] = {
    HEADER: MIB // 16,
    INDEX: 16 * MIB,
    "choices.json": 32 * MIB,
    "fingerprint.json": MIB,
    "manifest.resolved.json": 4 * MIB,
    "manifest.yaml": 4 * MIB,
    "plan.json": 32 * MIB,
    "record.jsonl": 64 * MIB,
    "specializations.json": 32 * MIB,
    "kernel.json": 4 * MIB,
    "kernel.cubin": 64 * MIB,
    ".so": 64 * MIB,
}
"""Largest member, by name or by the end of its name."""

_ENTRY_NAME = re.compile(r"kernels/[0-9a-f]{64}/kernel\.(cubin|json)")
_LIB_NAME = re.compile(r"lib/[0-9a-f]{64}\.so")


@dataclasses.dataclass(frozen=True)
class Span:
    """Where a member's content lies.

    Args:
        offset: of its first byte in the file.
        size: its length in bytes.
        digest: of its content.
    """

    offset: int
    size: int
    digest: str


class Source:
    """An open file that is read by position, so that nothing else can move it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size

    def at(self, offset: int, length: int) -> bytes:
        """The bytes at a place; fewer where the file ends."""
        return os.pread(self.descriptor, length, offset)

    def into(self, target: memoryview, offset: int) -> int:
        """Fills the target from a place; returns how many bytes there were."""
        done = 0
        while done < len(target):
            count = os.preadv(self.descriptor, [target[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done


def limit_of(name: str) -> int | None:
    """The largest size of a member of this name, in bytes; None where the format has no such name."""
    if name in (HEADER, INDEX, *DOCUMENTS):
        return MAX_MEMBER_BYTES[name]
    if _ENTRY_NAME.fullmatch(name):
        return MAX_MEMBER_BYTES[name.rsplit("/", 1)[1]]
    return MAX_MEMBER_BYTES[".so"] if _LIB_NAME.fullmatch(name) else None
