"""The fingerprint: named facts outside the keys that decide whether a bundle fits a machine and a process.

Every field has a class that says what a difference does. The class belongs to the field's name, in the table below, and
not to a file: a bundle cannot declare a fact unimportant.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from kernelbake import digest
from kernelbake.plan import KernelFacts


class FieldClass(enum.StrEnum):
    """What a difference in a field does at run time."""

    ENFORCED = "enforced"
    """Any difference refuses."""
    BUILD_ONLY = "build-only"
    """Compared between builds and merges, never refuses a run, in which neither a ptxas nor these settings are used."""
    FLOOR = "floor"
    """An older version than the bundle's refuses."""
    INFORMATIONAL = "informational"
    """Shown, never refuses."""


FIELDS: Mapping[str, FieldClass] = {
    "gpu.backend": FieldClass.ENFORCED,
    "gpu.capability": FieldClass.ENFORCED,
    "gpu.device": FieldClass.ENFORCED,
    "gpu.sm_count": FieldClass.ENFORCED,
    "gpu.shared_memory_bytes": FieldClass.ENFORCED,
    "triton.version": FieldClass.ENFORCED,
    "triton.key": FieldClass.ENFORCED,
    "triton.environment": FieldClass.ENFORCED,
    "python.abi": FieldClass.ENFORCED,
    "kernel.sources": FieldClass.ENFORCED,
    "build.ptxas": FieldClass.BUILD_ONLY,
    "build.line_info": FieldClass.BUILD_ONLY,
    "build.fp_fusion": FieldClass.BUILD_ONLY,
    "build.environment": FieldClass.BUILD_ONLY,
    "driver.version": FieldClass.FLOOR,
    "torch.version": FieldClass.INFORMATIONAL,
    "fla.version": FieldClass.INFORMATIONAL,
    "transformers.version": FieldClass.INFORMATIONAL,
}
"""Every field that format 1 knows, with its class. ``gpu.capability`` is the text that ``capability`` makes."""

REQUIRED = frozenset(name for name, cls in FIELDS.items() if cls is FieldClass.ENFORCED) - {"python.abi"}
"""Fields without which a fingerprint decides nothing. ``python.abi`` is there only where a launcher library is."""

FieldValue: TypeAlias = "str | int | bool | dict[str, str] | None"


@dataclasses.dataclass(frozen=True)
class Field:
    """One named fact.

    Args:
        name: one of ``FIELDS``.
        cls: its class.
        value: text, a number, a truth value, None, or a mapping of names to texts.
    """

    name: str
    cls: FieldClass
    value: FieldValue


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The facts of a bundle, or of the machine and process at hand, sorted by name."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, values: Mapping[str, FieldValue]) -> Fingerprint:
        """The fingerprint of these values, each with the class of its name.

        Raises:
            KeyError: a name that is not in ``FIELDS``.
        """
        return cls(tuple(Field(name, FIELDS[name], values[name]) for name in sorted(values)))

    def __getitem__(self, name: str) -> FieldValue:
        return self._values()[name]

    def get(self, name: str, default: FieldValue = None) -> FieldValue:
        """The value of a field, or the default where there is no such field."""
        return self._values().get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._values()

    def _values(self) -> dict[str, FieldValue]:
        return {field.name: field.value for field in self.fields}

    def to_json(self) -> dict[str, Any]:
        return {field.name: {"class": field.cls.value, "value": field.value} for field in self.fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fingerprint:
        return cls(tuple(Field(name, FieldClass(data[name]["class"]), data[name]["value"]) for name in sorted(data)))


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field in which a bundle and this place differ.

    Args:
        name, cls: the field.
        bundle, here: both values; None where the field is absent.
        refuses: whether the bundle may not be used because of it.
        note: what a person should see beside it, or "".
    """

    name: str
    cls: FieldClass
    bundle: FieldValue
    here: FieldValue
    refuses: bool
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "cls": self.cls.value}

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.name}: here `{_shown(self.here)}`; bundle: `{_shown(self.bundle)}`{note}"


def compare(bundle: Fingerprint, here: Fingerprint) -> tuple[Difference, ...]:
    """Every difference between a bundle's fingerprint and the one found here, sorted by name, all at once.

    Build-only fields are compared where both sides have them: two builds do, a run does not.
    """
    names = sorted({field.name for field in (*bundle.fields, *here.fields)})
    found = (_difference(name, bundle, here) for name in names)
    return tuple(difference for difference in found if difference is not None)


def _difference(name: str, bundle: Fingerprint, here: Fingerprint) -> Difference | None:
    mine, theirs, cls = bundle.get(name), here.get(name), FIELDS[name]
    if name in bundle and name in here and digest.canonical_json(mine) == digest.canonical_json(theirs):
        return None
    if name not in bundle and (cls is not FieldClass.ENFORCED or name == "python.abi"):
        return None  # without a launcher library nothing depends on Python's ABI
    if name not in here and cls is FieldClass.BUILD_ONLY:
        return None  # a run has no build facts
    if cls is FieldClass.FLOOR:
        older = _older(theirs, mine)
        return Difference(name, cls, mine, theirs, older, "older" if older else "newer, which is fine")
    note = _near_miss(str(mine), str(theirs)) if name == "gpu.device" else ""
    return Difference(name, cls, mine, theirs, cls is FieldClass.ENFORCED, note)


def _older(here: FieldValue, bundle: FieldValue) -> bool:
    """Whether a version is older than the bundle's; unknown counts as older, unless the bundle asks for nothing."""
    if bundle is None:
        return False
    mine, theirs = _version(here), _version(bundle)
    return mine is None or theirs is None or mine < theirs


def _version(value: FieldValue) -> tuple[int, ...] | None:
    if not isinstance(value, str) or not re.fullmatch(r"\d{1,9}(\.\d{1,9}){0,7}", value):
        return None
    return tuple(int(part) for part in value.split("."))


def _near_miss(bundle: str, here: str) -> str:
    """Says so where two device names could be taken for one; they stay different."""
    mine, theirs = (" ".join(name.lower().split()) for name in (bundle, here))
    if mine == theirs:
        return "only spaces or letter case differ; names are compared exactly"
    if mine.startswith(theirs) or theirs.startswith(mine):
        return "one name begins with the other; names are compared exactly"
    return ""


def _shown(value: FieldValue) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else digest.canonical_json(value).decode()


def capability(major: int, minor: int) -> str:
    """The exact compute capability as text: ``80``, ``90a``, ``120a``.

    Triton compiles for the architecture-specific set of instructions (suffix ``a``) from 9.0 on.
    """
    return f"{major}{minor}" + ("a" if major >= 9 else "")


def arch_of(text: str) -> int:
    """The number in a capability: 120 of ``120a``.

    Raises:
        ValueError: the text is no capability.
    """
    match = re.fullmatch(r"([1-9]\d{1,2})[af]?", text)
    if match is None:
        raise ValueError(f"`{text:.40}` is no compute capability")
    return int(match[1])


def sources_digest(kernels: Iterable[KernelFacts]) -> str:
    """The value of ``kernel.sources``: a digest over the source digest of every kernel, independent of order."""
    pairs = sorted({(facts.kernel.name, facts.source_digest) for facts in kernels})
    return digest.of_bytes(digest.canonical_json(pairs))
