"""What became of a candidate: values that the journal and the bundle's record hold."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelbake import digest


class Reason(enum.StrEnum):
    """Why a candidate cannot be used."""

    COMPILE_ERROR = "compile-error"
    SHARED_MEMORY = "out-of-shared-memory"
    MEMORY = "out-of-memory"
    TIMEOUT = "timeout"
    CRASH = "crash"
    WRONG = "wrong-result"
    UNREPEATABLE = "not-repeatable"


OK = "ok"


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A candidate that cannot be used.

    Args:
        reason: the class of the fault.
        detail: one line for people: the exception, what was needed and what there is.
        error: size of the deviation, where one was measured and is finite.
        need_bytes, limit_bytes: of shared memory, where that is the reason.
    """

    reason: Reason
    detail: str
    error: float | None = None
    need_bytes: int | None = None
    limit_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        return {"outcome": data.pop("reason").value, **{name: item for name, item in data.items() if item is not None}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rejected:
        fields = ("error", "need_bytes", "limit_bytes")
        return cls(Reason(data["outcome"]), data["detail"], **{name: data.get(name) for name in fields})

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class Code:
    """Machine code of one specialization in the build's work folder, by content.

    Args:
        binary, metadata: digests of the cubin and of Triton's launch metadata (canonical JSON).
        launcher: digest of the compiled launcher library, where the Triton version needs one for each signature.
        shape: digest of the cubin and of all metadata that a launch depends on; equal for two candidates that are the
            same to the GPU.
        shared_bytes: shared memory that a block needs.
    """

    binary: str
    metadata: str
    launcher: str | None
    shape: str
    shared_bytes: int

    @property
    def files(self) -> tuple[str, ...]:
        """The digests of everything in the folder that belongs to it."""
        return tuple(name for name in (self.binary, self.metadata, self.launcher) if name is not None)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Code:
        return cls(data["binary"], data["metadata"], data["launcher"], data["shape"], data["shared_bytes"])


class Files(Mapping[str, bytes]):
    """The contents of a folder in which every file is named by its digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Where the content of that digest lies."""
        return self.folder / name.removeprefix(digest.PREFIX)

    def __getitem__(self, name: str) -> bytes:
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def put(self, content: bytes) -> str:
        """Keeps a content and gives its digest back; no other process ever sees a part of it."""
        name = digest.of_bytes(content)
        path = self.path(name)
        if not self.sound(name):
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            temporary.write_bytes(content)
            temporary.replace(path)
        return name

    def sound(self, name: str) -> bool:
        """Whether the file is there and its content is what its name says."""
        return self.path(name).exists() and digest.of_file(self.path(name)) == name

    def __iter__(self) -> Iterator[str]:
        found = (digest.PREFIX + path.name for path in self.folder.iterdir())
        return (name for name in found if digest.is_digest(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


_LAUNCH_FIELDS = (
    "name",
    "shared",
    "num_warps",
    "num_ctas",
    "cluster_dims",
    "launch_cooperative_grid",
    "launch_pdl",
    "tmem_size",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "tensordesc_meta",
)


def shape_of(binary: bytes, metadata: Mapping[str, Any]) -> str:
    """``Code.shape``: options that left no trace in the code, as the stages of a kernel without a loop, drop out."""
    facts = {name: metadata.get(name) for name in _LAUNCH_FIELDS}
    return digest.of_bytes(digest.canonical_json([digest.of_bytes(binary), facts]))


def one_line(error: BaseException, limit: int = 300) -> str:
    """Type and first telling line of an exception, or of the one that caused it."""
    if error.__cause__ is not None:
        return one_line(error.__cause__, limit)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"[:limit]
