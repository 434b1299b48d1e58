"""In what two bundles differ: facts, keys, choices and code. Data for ``kernelbake diff``; nothing is printed here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kernelbake import digest
from kernelbake.bundle import Bundle, Entry
from kernelbake.keys import key_text
from kernelbake.plan import Choice
from kernelbake.words import counted

_ABOUT = ("name", "made", "kernelbake", "line_info", "time")


@dataclasses.dataclass(frozen=True)
class Change:
    """A named value that differs.

    Args:
        name: what it is; dotted where it lies deeper.
        old, new: both values, as JSON; None where there is none.
    """

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: `{_shown(self.old)}` → `{_shown(self.new)}`"


@dataclasses.dataclass(frozen=True)
class Key:
    """A decision that only one of the bundles holds.

    Args:
        kernel: its name.
        key: the autotune key, for people.
        winner: the config that was chosen, for people.
    """

    kernel: str
    key: str
    winner: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.key}: `{self.winner}`"


@dataclasses.dataclass(frozen=True)
class ChoiceChange:
    """A decision that fell otherwise.

    Args:
        kernel, key: where.
        old, new: the winners.
        old_ms, new_ms: their median times in milliseconds, each as its own bundle measured it; None if not measured.
    """

    kernel: str
    key: str
    old: str
    new: str
    old_ms: float | None
    new_ms: float | None

    def __str__(self) -> str:
        times = (f"{time:.4g} ms" if time is not None else "not timed" for time in (self.old_ms, self.new_ms))
        old, new = (f"`{winner}` ({time})" for winner, time in zip((self.old, self.new), times, strict=True))
        return f"{self.kernel} {self.key}: {old} → {new}"


@dataclasses.dataclass(frozen=True)
class CodeChange:
    """Code of one kernel for one specialization that differs or that only one of the bundles holds.

    Args:
        kernel, specialization: what it is the code of.
        kind: ``gained``, ``lost``, ``cubin`` (the machine code differs) or ``metadata`` (only what is said about it).
        old_bytes, new_bytes: sizes of the cubins; None where there is none.
        fields: the fields of the launch metadata that differ.
    """

    kernel: str
    specialization: str
    kind: str
    old_bytes: int | None
    new_bytes: int | None
    fields: tuple[Change, ...] = ()

    def __str__(self) -> str:
        sizes = " → ".join(counted(size, "byte") for size in (self.old_bytes, self.new_bytes) if size is not None)
        fields = f"; {', '.join(map(str, self.fields))}" if self.fields else ""
        return f"{self.kind}: {self.kernel} {self.specialization} ({sizes}){fields}"


@dataclasses.dataclass(frozen=True)
class Diff:
    """Everything in which two bundles differ.

    Args:
        old, new: the bundles' digests.
        same_bytes: whether the files are the same to the last byte.
        header: name, way of making, versions, time.
        manifest: resolved settings by dotted path; and the text, if only that differs.
        fingerprint: its fields.
        gained, lost: decisions that only the new, only the old bundle holds.
        choices: decisions that fell otherwise.
        retimed: decisions that fell the same and have another time: (kernel and key, old, new) in milliseconds.
        code: machine code and launch metadata.
        libs: digests of launcher libraries that only one side has.
    """

    old: str
    new: str
    same_bytes: bool
    header: tuple[Change, ...]
    manifest: tuple[Change, ...]
    fingerprint: tuple[Change, ...]
    gained: tuple[Key, ...]
    lost: tuple[Key, ...]
    choices: tuple[ChoiceChange, ...]
    retimed: tuple[Change, ...]
    code: tuple[CodeChange, ...]
    libs: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def sections(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        """Titles and lines of all that is not empty, in the order in which people ask."""
        parts: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("header", self.header),
            ("manifest", self.manifest),
            ("fingerprint", self.fingerprint),
            ("keys gained", self.gained),
            ("keys lost", self.lost),
            ("choices changed", self.choices),
            ("times changed, choices the same", self.retimed),
            ("code", self.code),
            ("launcher libraries", self.libs),
        )
        return ((title, lines) for title, lines in parts if lines)

    def __str__(self) -> str:
        if self.same_bytes:
            return f"the same to the last byte: {self.old}"
        lines = [f"{self.old} → {self.new}"]
        for title, items in self.sections():
            lines.append(f"{title}: {len(items)}")
            lines += [f"  {item}" for item in items]
        if len(lines) == 1:
            lines.append("only the record of the candidates differs")
        return "\n".join(lines)


def diff(old: Bundle, new: Bundle) -> Diff:
    """Compares two bundles; both were read and are sound, whatever machine they are for."""
    before, after = ({choice.id: choice for choice in held.choices} for held in (old, new))
    both = [(before[id_], after[id_]) for id_ in sorted(before.keys() & after.keys())]
    return Diff(
        old=old.digest,
        new=new.digest,
        same_bytes=old.data == new.data,
        header=tuple(_changes({n: old.header[n] for n in _ABOUT}, {n: new.header[n] for n in _ABOUT})),
        manifest=_manifest(old, new),
        fingerprint=tuple(_changes(_facts(old), _facts(new))),
        gained=tuple(_key(after[id_]) for id_ in sorted(after.keys() - before.keys())),
        lost=tuple(_key(before[id_]) for id_ in sorted(before.keys() - after.keys())),
        choices=tuple(_choice(mine, other) for mine, other in both if mine.winner != other.winner),
        retimed=tuple(_retimed(both)),
        code=tuple(_code(old, new)),
        libs=tuple(_changes(dict.fromkeys(old.libs, "there"), dict.fromkeys(new.libs, "there"))),
    )


def _facts(held: Bundle) -> dict[str, Any]:
    return {field.name: field.value for field in held.fingerprint.fields}


def _manifest(old: Bundle, new: Bundle) -> tuple[Change, ...]:
    changes = tuple(_changes(_flat(old.manifest_resolved), _flat(new.manifest_resolved)))
    if not changes and old.manifest_text != new.manifest_text:
        return (Change("text", digest.of_bytes(old.manifest_text), digest.of_bytes(new.manifest_text)),)
    return changes


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested data by dotted path; lists stay whole."""
    if not isinstance(value, Mapping) or (not value and name):
        return {name: value}
    return {
        path: leaf for key, item in value.items() for path, leaf in _flat(item, f"{name}.{key}".lstrip(".")).items()
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted(old.keys() | new.keys()):
        if (name in old) != (name in new) or digest.canonical_json(old[name]) != digest.canonical_json(new[name]):
            yield Change(name, old.get(name), new.get(name))


def _key(choice: Choice) -> Key:
    return Key(choice.kernel.name, key_text(choice.key), str(choice.winner))


def _choice(old: Choice, new: Choice) -> ChoiceChange:
    times = (choice.times.get("median_ms") for choice in (old, new))
    return ChoiceChange(old.kernel.name, key_text(old.key), str(old.winner), str(new.winner), *times)


def _retimed(both: list[tuple[Choice, Choice]]) -> Iterator[Change]:
    for old, new in both:
        times = old.times.get("median_ms"), new.times.get("median_ms")
        if old.winner == new.winner and times[0] != times[1]:
            yield Change(f"{old.kernel.name} {key_text(old.key)} median_ms", *times)


def _code(old: Bundle, new: Bundle) -> Iterator[CodeChange]:
    """What differs among the entries; those of one digest are the same in every respect."""
    before = _own_entries(old, new)
    after = _own_entries(new, old)
    for place in sorted(before.keys() | after.keys()):
        mine, other = before.get(place), after.get(place)
        known = mine or other
        assert known is not None
        old_bytes, new_bytes = (len(entry.binary) if entry is not None else None for entry in (mine, other))
        fields: tuple[Change, ...] = ()
        if mine is None or other is None:
            kind = "gained" if mine is None else "lost"
        else:
            kind = "metadata" if mine.binary == other.binary else "cubin"
            fields = tuple(_changes(_said(mine), _said(other)))
        yield CodeChange(known.kernel.name, str(known.specialization), kind, old_bytes, new_bytes, fields)


def _own_entries(held: Bundle, other: Bundle) -> dict[tuple[str, str], Entry]:
    entries = (held.entries[identity] for identity in held.entries if identity not in other.entries)
    return {(entry.kernel.name, entry.specialization.token): entry for entry in entries}


def _said(entry: Entry) -> dict[str, Any]:
    return {**_flat(entry.metadata), "launcher": entry.launcher}


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else digest.canonical_json(value).decode()
