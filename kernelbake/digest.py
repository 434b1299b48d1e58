"""Digests, written ``sha256:<hex>``, and the one canonical form of JSON that is ever hashed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PREFIX = "sha256:"
_WELL_FORMED = re.compile("sha256:[0-9a-f]{64}")


def of_bytes(data: bytes | bytearray | memoryview) -> str:
    """Digest of the bytes."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def of_text(text: str) -> str:
    """Digest of the text in UTF-8."""
    return of_bytes(text.encode())


def of_file(path: Path) -> str:
    """Digest of a file's content.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return PREFIX + hashlib.file_digest(file, "sha256").hexdigest()


def of_tree(files: Iterable[tuple[str, bytes]]) -> str:
    """Digest of named contents, independent of the order in which they come."""
    return of_bytes(canonical_json(sorted((name, of_bytes(data)) for name, data in files)))


def canonical_json(value: Any) -> bytes:
    """The one JSON form whose bytes are hashed: sorted keys, no spaces, UTF-8, no infinity and no NaN.

    Raises:
        ValueError: the value holds a number that strict JSON does not have.
        TypeError: the value holds something that JSON does not have.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def is_digest(text: object) -> bool:
    """Whether the text is a well-formed digest."""
    return isinstance(text, str) and _WELL_FORMED.fullmatch(text) is not None
