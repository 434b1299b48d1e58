"""The bundle: one checksummed file with choices, code and the facts that decide whether it fits.

``docs/bundle-format.md`` is the format. Writing goes to a temporary file beside the target, which is read back by the
one path by which bundles are read and then renamed, so that the final name never holds less than a sound bundle.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kernelbake import __version__, agreement, archive, atomic, consistency, digest, tables, verify
from kernelbake.errors import BuildError, CoverageError, InputError
from kernelbake.fingerprint import Fingerprint
from kernelbake.keys import Kernel, Specialization
from kernelbake.members import HEADER, INDEX
from kernelbake.plan import Choice, Inventory, Plan
from kernelbake.rules import FORMAT, ViolationsError

Made: TypeAlias = Literal["measured", "compiled-only", "interpreted"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """The machine code of one specialization, with what is needed to launch it.

    Args:
        kernel: the kernel.
        specialization: what it was compiled for.
        metadata: Triton's launch metadata, as JSON: ``name``, ``num_warps``, ``shared``, ``target`` and what else
            Triton needs. No path of a machine may stand in it.
        binary: the cubin.
        launcher: digest of the launcher library that this Triton needs, or None.
    """

    kernel: Kernel
    specialization: Specialization
    metadata: Mapping[str, Any]
    binary: bytes
    launcher: str | None = None

    @functools.cached_property
    def description(self) -> bytes:
        """The bytes of ``kernel.json``."""
        return digest.canonical_json(
            {
                "kernel": self.kernel.to_json(),
                "launcher": self.launcher,
                "metadata": self.metadata,
                "specialization": self.specialization.to_json(),
            }
        )

    @functools.cached_property
    def digest(self) -> str:
        """Covers binary, metadata, kernel, specialization and launcher together."""
        return consistency.entry_digest(digest.of_bytes(self.binary), digest.of_bytes(self.description))


@dataclasses.dataclass(frozen=True)
class Contents:
    """Everything that goes into a bundle.

    Args:
        name: the bundle's name, the manifest's.
        made: how it was made.
        manifest_text, manifest_resolved: the manifest as given, and after everything was filled in.
        fingerprint, plan, choices: theirs; the choices in any order.
        record: the outcome of every candidate.
        entries: by digest.
        libs: launcher libraries by digest.
        line_info: whether the code carries line information.
    """

    name: str
    made: Made
    manifest_text: bytes
    manifest_resolved: Mapping[str, Any]
    fingerprint: Fingerprint
    plan: Plan
    choices: tuple[Choice, ...]
    record: tuple[Mapping[str, Any], ...]
    entries: Mapping[str, Entry]
    libs: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    line_info: bool = False


class _Entries(Mapping[str, Entry]):
    """The entries of a bundle by digest; the code of each is copied when it is asked for."""

    def __init__(self, sound: verify.Sound, described: Mapping[str, agreement.Described]) -> None:
        self._sound, self._described = sound, described

    def __getitem__(self, identity: str) -> Entry:
        found = self._described[identity]
        binary = bytes(self._sound.content(f"{agreement.folder_of(identity)}/kernel.cubin"))
        return Entry(found.kernel, found.specialization, found.metadata, binary, found.launcher)

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)


class Bundle:
    """A bundle that was read and found sound; it lives in memory, and its file is no longer needed.

    Attributes:
        header: ``bundle.json``.
        fingerprint, plan, choices: theirs.
        manifest_resolved: the manifest after everything was filled in.
        entries: by digest, each parsed when it is asked for.
        path: the file that was read.
        data: the bytes of that file, as they were checked.
        size_bytes: their number.
    """

    def __init__(self, path: Path, sound: verify.Sound, meaning: agreement.Meaning) -> None:
        self._sound = sound
        self.path = path
        self.data = sound.data
        self.header: Mapping[str, Any] = sound.header
        self.fingerprint = meaning.fingerprint
        self.plan = meaning.plan
        self.choices = meaning.choices
        self.manifest_resolved = meaning.resolved
        self.entries: Mapping[str, Entry] = _Entries(sound, meaning.entries)
        self.size_bytes = len(sound.data)

    @property
    def digest(self) -> str:
        """The bundle's digest: over its index, which holds the digest of everything else."""
        return str(self.header["bundle_digest"])

    @property
    def name(self) -> str:
        return str(self.header["name"])

    @property
    def made(self) -> Made:
        """``measured``, ``compiled-only`` (code, and nothing chosen by measurement) or ``interpreted`` (no code)."""
        made: Made = self.header["made"]
        return made

    @property
    def manifest_text(self) -> bytes:
        return bytes(self._sound.content("manifest.yaml"))

    @functools.cached_property
    def record(self) -> tuple[dict[str, Any], ...]:
        """The outcome of every candidate."""
        return tuple(consistency.record_lines(self._sound.content("record.jsonl")))

    @functools.cached_property
    def libs(self) -> Mapping[str, bytes]:
        """Launcher libraries by digest."""
        names = [name for name in self._sound.spans if name.startswith("lib/")]
        return {self._sound.spans[name].digest: bytes(self._sound.content(name)) for name in names}

    def inventory(self) -> Inventory:
        """What the bundle holds, as far as coverage is concerned."""
        return Inventory(self.choices, self.plan.kernels, self.plan.implementations)


def read(path: Path | str) -> Bundle:
    """Reads a bundle after checking all of it.

    Raises:
        InputError: the file cannot be opened.
        BundleError: it breaks the format (``ViolationsError`` with everything that was found).
    """
    path = Path(path)
    sound = verify.inspect(path)
    return Bundle(path, sound, consistency.check(sound, path))


def read_header(path: Path | str) -> dict[str, Any]:
    """``bundle.json`` alone, checked as far as it can be by itself: fast, and no substitute for ``read``.

    Raises:
        InputError: the file cannot be opened.
        BundleError: it is no bundle, or its header is damaged.
    """
    return verify.read_header(Path(path))


# ---------------------------------------------------------------------------------------------- writing


def write(path: Path | str, contents: Contents) -> str:
    """Writes a bundle; an old file of that name stays until the new one is complete and was read back.

    The same contents give the same bytes. ``SOURCE_DATE_EPOCH`` sets the time of the members, and is 0 where unset.

    Returns:
        The bundle's digest.

    Raises:
        InputError: the file cannot be written there: no folder, no right, no room. Nothing is left behind.
        BuildError: the contents contradict each other; ``reasons`` holds every contradiction.
    """
    path = Path(path)
    time = _source_date_epoch()
    try:
        members, bundle_digest = _members(contents, time)
    except LookupError as error:
        raise _contradiction(path, [str(error)]) from error
    with atomic.replacing(path, "bundle") as (descriptor, temporary):
        atomic.write_all(descriptor, archive.pack(members, time))
        try:
            read(temporary)
        except ViolationsError as error:
            raise _contradiction(path, error.reasons) from error
    return bundle_digest


def _contradiction(path: Path, reasons: Iterable[str]) -> BuildError:
    message = f"bundle `{path}`: its contents contradict each other; wanted a bundle that agrees with itself"
    return BuildError(message, reasons=reasons)


def check_output(path: Path | str) -> None:
    """Finds out, before hours of work, whether a bundle can be written there.

    Raises:
        InputError: it cannot.
    """
    _source_date_epoch()
    with atomic.replacing(Path(path), "bundle", keep=False):
        pass


def _source_date_epoch() -> int:
    text = os.environ.get("SOURCE_DATE_EPOCH", "0")
    if not re.fullmatch("[0-9]{1,11}", text) or int(text) > archive.MAX_TIME:
        raise InputError(f"SOURCE_DATE_EPOCH: `{text:.40}`; wanted seconds since 1970, at most {archive.MAX_TIME}")
    return int(text)


def _members(contents: Contents, time: int) -> tuple[list[tuple[str, bytes]], str]:
    """The members in their order, and the bundle's digest."""
    table = tables.table_of(contents.plan)
    numbers = table.numbers()
    choices = sorted(contents.choices, key=lambda choice: choice.id)
    files: dict[str, bytes] = {
        "manifest.yaml": contents.manifest_text,
        "manifest.resolved.json": digest.canonical_json(contents.manifest_resolved),
        "fingerprint.json": digest.canonical_json(contents.fingerprint.to_json()),
        "specializations.json": digest.canonical_json(table.to_json()),
        "plan.json": digest.canonical_json(tables.plan_to_json(contents.plan, table)),
        "choices.json": digest.canonical_json([tables.choice_to_json(choice, numbers) for choice in choices]),
        "record.jsonl": b"".join(digest.canonical_json(line) + b"\n" for line in contents.record),
    }
    for identity, entry in contents.entries.items():
        folder = agreement.folder_of(identity)
        files[f"{folder}/kernel.cubin"] = entry.binary
        files[f"{folder}/kernel.json"] = entry.description
    files |= {agreement.lib_name(identity): data for identity, data in contents.libs.items()}
    header = {
        "complete": True,
        "counts": agreement.counts(
            contents.plan, len(contents.choices), len(contents.entries), len(contents.libs), len(contents.record)
        ),
        "format": FORMAT,
        "kernelbake": __version__,
        "line_info": contents.line_info,
        "made": contents.made,
        "name": contents.name,
        "time": time,
    }
    listed = {name: [len(data), digest.of_bytes(data)] for name, data in files.items()}
    index = digest.canonical_json({"about": verify.about_digest(header), "members": listed})
    header["bundle_digest"] = digest.of_bytes(index)
    header["header_digest"] = verify.header_digest(header)
    first = [(HEADER, digest.canonical_json(header)), (INDEX, index)]
    return [*first, *sorted(files.items())], str(header["bundle_digest"])


def refuse_unmeasured(made: str, name: str, where: str) -> None:
    """Refuses a bundle in which nothing was chosen yet.

    It lacks a choice for every launch, so this is a gap like any other and no misfit: on the right GPU, too, it has to
    be measured first.

    Args:
        made: how it was made.
        name: its name.
        where: who asks, for the message.

    Raises:
        CoverageError: it was made by ``--compile-only``.
    """
    if made == "compiled-only":
        raise CoverageError(
            f"{where}: bundle `{name}` holds code for every candidate and no choice; wanted a measured one",
            hint="measure it on the GPU: `kernelbake build --manifest FILE --from BUNDLE`",
        )
