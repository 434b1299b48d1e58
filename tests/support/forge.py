"""Takes a sound bundle apart and puts it together again with something wrong in it.

The forger is as able as can be: whatever digest a change would break is refreshed, unless the attack is that it is not.
Only the checks that look at meaning are then left to find it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from kernelbake import agreement, archive, consistency, digest, verify
from kernelbake.members import HEADER, INDEX

Headers = Callable[[str, bytes], bytes]


def checksummed(block: bytes) -> bytes:
    """The header block with its checksum made right."""
    blank = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(blank) + block[156:]


def patched(block: bytes, start: int, field: bytes) -> bytes:
    """The header block with one field changed and the checksum made right."""
    return checksummed(block[:start] + field + block[start + len(field) :])


def header(name: str | bytes, size: int = 0, type_: bytes = b"0", link: bytes = b"") -> bytes:
    """A header of any name and type, its checksum right."""
    raw = name.encode() if isinstance(name, str) else name
    block = archive.header("x", size, 0)
    block = patched(block, 0, raw[:100].ljust(100, b"\0"))
    return patched(patched(block, 156, type_), 157, link.ljust(100, b"\0"))


@dataclasses.dataclass
class Forged:
    """A bundle in parts.

    Args:
        header: ``bundle.json`` without its digests.
        files: every member that the index lists, by name.
    """

    header: dict[str, Any]
    files: dict[str, bytes]

    @classmethod
    def of(cls, data: bytes) -> Forged:
        """Takes a bundle apart."""
        members, offset = {}, 0
        while any(data[offset : offset + 512]):
            found = archive.parse(data[offset : offset + 512])
            assert found.size is not None
            members[found.name] = data[offset + 512 : offset + 512 + found.size]
            offset += 512 + archive.padded(found.size)
        head = json.loads(members.pop(HEADER))
        del members[INDEX], head["bundle_digest"], head["header_digest"]
        return cls(head, members)

    def copy(self) -> Forged:
        """Another one, to be changed alone."""
        return copy.deepcopy(self)

    # ------------------------------------------------------------------------------------------ parts

    def document(self, name: str) -> Any:
        """A document, parsed."""
        return json.loads(self.files[name])

    def put(self, name: str, value: Any) -> None:
        """Writes a document in canonical form."""
        self.files[name] = digest.canonical_json(value)

    @property
    def folders(self) -> list[str]:
        """The folders of the entries, sorted."""
        return sorted({name.rpartition("/")[0] for name in self.files if name.startswith("kernels/")})

    def change_entry(
        self, folder: str, *, cubin: bytes | None = None, describe: Callable[[dict[str, Any]], None] | None = None
    ) -> str:
        """Changes an entry and everything that names it: its folder and the choices. Returns the new folder."""
        binary = self.files.pop(f"{folder}/kernel.cubin") if cubin is None else cubin
        self.files.pop(f"{folder}/kernel.cubin", None)
        data = json.loads(self.files.pop(f"{folder}/kernel.json"))
        if describe is not None:
            describe(data)
        description = digest.canonical_json(data)
        identity = consistency.entry_digest(digest.of_bytes(binary), digest.of_bytes(description))
        new = agreement.folder_of(identity)
        self.files |= {f"{new}/kernel.cubin": binary, f"{new}/kernel.json": description}
        old_name, new_name = folder.split("/")[1], new.split("/")[1]
        self.files["choices.json"] = self.files["choices.json"].replace(old_name.encode(), new_name.encode())
        return new

    # ------------------------------------------------------------------------------------------ the whole

    def index(self) -> dict[str, Any]:
        """The index of the files as they are."""
        members = {name: [len(data), digest.of_bytes(data)] for name, data in self.files.items()}
        return {"about": verify.about_digest(self.header), "members": members}

    def members(
        self, *, index: Any = None, head: dict[str, Any] | None = None, seal: bool = True
    ) -> list[tuple[str, bytes]]:
        """All members in their order, with every digest refreshed unless one is given."""
        raw_index = index if isinstance(index, bytes) else digest.canonical_json(index or self.index())
        whole = dict(head or self.header)
        whole.setdefault("bundle_digest", digest.of_bytes(raw_index))
        if seal:
            whole["header_digest"] = verify.header_digest(whole)
        first = [(HEADER, digest.canonical_json(whole)), (INDEX, raw_index)]
        return [*first, *sorted(self.files.items())]

    def data(self, **options: Any) -> bytes:
        """The bytes of the bundle as it is, every digest refreshed."""
        return pack(self.members(**options))


def pack(members: Iterable[tuple[str, bytes]], headers: Headers | None = None, trailer: bytes = bytes(1024)) -> bytes:
    """An archive of these members, with headers made by another hand if one is given."""
    parts = []
    for name, data in members:
        parts.append(headers(name, data) if headers else archive.header(name, len(data), 0))
        parts += [data, bytes(-len(data) % 512)]
    return b"".join([*parts, trailer])


def inserted(members: list[tuple[str, bytes]], block: bytes, content: bytes = b"", *, after: int = 2) -> bytes:
    """An archive with a foreign member after some of its own."""
    body = block + content + bytes(-len(content) % 512)
    return pack(members[:after], trailer=body) + pack(members[after:])
