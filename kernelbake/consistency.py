"""What the contents of a sound archive say, each document and each entry by itself (MUST 21 to 30).

The bytes were checked before (``verify.inspect``). What is found here is not damage: it is a bundle that was made by
something that does not know the format, or was put together from parts of others. Whether the parts agree with each
other is the next question (``agreement``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kernelbake import agreement, digest, documents, fingerprint, tables
from kernelbake.agreement import Described, Meaning, folder_of
from kernelbake.documents import Shape
from kernelbake.fingerprint import Fingerprint
from kernelbake.keys import Kernel, Specialization
from kernelbake.outcome import OK
from kernelbake.plan import Choice, Plan
from kernelbake.profiles import DeviceProfile
from kernelbake.rules import Findings, Rule
from kernelbake.tables import Table
from kernelbake.verify import Sound
from kernelbake.words import counted

T = TypeVar("T")


def check(sound: Sound, path: Path | str) -> Meaning:
    """Checks what the contents say, each by itself and then against each other.

    Raises:
        ViolationsError: with everything that was found.
    """
    findings = Findings()
    meaning = _Reader(sound, findings).read()
    findings.raise_if_any(path)
    assert meaning is not None  # nothing was found, so everything was read
    agreement.check(sound, meaning, findings)
    findings.raise_if_any(path)
    return meaning


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the documents and entries of one archive."""

    sound: Sound
    findings: Findings

    def read(self) -> Meaning | None:
        """MUST 21 to 30 and, for all of them, MUST 11."""
        resolved = self._document("manifest.resolved.json", documents.MANIFEST, dict, Rule.MANIFEST)  # MUST 21
        try:
            str(self.sound.content("manifest.yaml"), "utf-8")
        except UnicodeDecodeError as error:
            self.findings.add(Rule.MANIFEST, "`manifest.yaml`", f"no UTF-8 at byte {error.start}; wanted a text")
        facts = self._document("fingerprint.json", documents.FINGERPRINT, Fingerprint.from_json, Rule.FINGERPRINT)
        if facts is not None:
            self._check_fingerprint(facts)  # MUST 22
        table = self._document("specializations.json", documents.TABLE, Table.from_json, Rule.TABLE)  # MUST 23
        plan = choices = None
        if table is not None:  # MUST 24 and 25
            plan = self._document("plan.json", documents.PLAN, functools.partial(_plan, table=table), Rule.PLAN)
            build = functools.partial(_choices, table=table)
            choices = self._document("choices.json", documents.CHOICES, build, Rule.CHOICES)
        proven = self._proven()  # MUST 26
        entries = self._entries(table)  # MUST 27 to 30
        if resolved is None or facts is None or plan is None or choices is None:
            return None
        return Meaning(resolved, facts, plan, choices, proven, entries)

    def _json(self, name: str, content: bytes | memoryview, shape: Shape, rule: Rule) -> Any:
        """A document: strict JSON of its shape, or None with the reasons noted."""
        try:
            data = documents.parse(content)
        except ValueError as error:
            self.findings.add(Rule.STRICT_JSON, f"`{name}`", f"{error}; wanted canonical JSON")
            return None
        faults = shape.check(data)
        for inner, message in faults:
            self.findings.add(rule, f"`{name}` {inner}".rstrip(), message)
        return None if faults else data

    def _document(self, name: str, shape: Shape, build: Callable[[Any], T], rule: Rule) -> T | None:
        """What a document stands for."""
        data = self._json(name, self.sound.content(name), shape, rule)
        if data is None:
            return None
        try:
            return build(data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            found = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.findings.add(rule, f"`{name}`", f"{found:.300}; wanted what the format describes")
            return None

    def _check_fingerprint(self, facts: Fingerprint) -> None:
        """What decides about a fit is there, and can be understood."""
        place = "`fingerprint.json`"
        for name in sorted(fingerprint.REQUIRED - {field.name for field in facts.fields}):
            self.findings.add(Rule.FINGERPRINT, place, f"no field `{name}`; wanted one")
        for name in ("gpu.sm_count", "gpu.shared_memory_bytes"):
            value = facts.get(name)
            if name in facts and (type(value) is not int or value <= 0):
                self.findings.add(Rule.FINGERPRINT, place, f"`{name}` is `{value}`; wanted a positive integer")
        try:
            fingerprint.arch_of(str(facts.get("gpu.capability")))
        except ValueError as error:
            self.findings.add(Rule.FINGERPRINT, place, f"{error}; wanted `gpu.capability` as in `90a`")
        if any(name.startswith("lib/") for name in self.sound.spans) and facts.get("python.abi") is None:
            self.findings.add(Rule.FINGERPRINT, place, "no field `python.abi`; wanted one beside a launcher library")

    def _proven(self) -> frozenset[bytes]:
        """Kernel, key and config of every candidate of which the record says that it is ok."""
        number, proven = 0, set[bytes]()
        try:
            for line in record_lines(self.sound.content("record.jsonl")):
                number += 1
                if line["outcome"] == OK:
                    proven.add(digest.canonical_json([line["kernel"], line["key"], line["config"]]))
        except ValueError as error:
            self.findings.add(Rule.RECORD, "`record.jsonl`", str(error))
            return frozenset()
        claimed = self.sound.header["counts"]["record"]
        if number != claimed:
            self.findings.add(Rule.COUNTS, "`bundle.json`", f"{claimed} record; found {number}")
        return frozenset(proven)

    # ------------------------------------------------------------------------------------------ entries

    def _entries(self, table: Table | None) -> dict[str, Described]:
        """The entries by digest."""
        known = {row.token.encode(): row for row in table.rows} if table is not None else {}
        halves: dict[str, list[str]] = {}
        for name in self.sound.spans:
            if name.startswith("kernels/"):
                folder, _, half = name.rpartition("/")
                halves.setdefault(folder, []).append(half)
        found: dict[str, Described] = {}
        made_for: dict[tuple[Kernel, str], str] = {}
        for folder, names in halves.items():
            if len(names) != 2:  # MUST 27
                other = "kernel.json" if names == ["kernel.cubin"] else "kernel.cubin"
                self.findings.add(Rule.ENTRY_HALVES, f"`{folder}`", f"`{names[0]}` without `{other}`; wanted both")
                continue
            identity = entry_digest(*(self.sound.spans[f"{folder}/{half}"].digest for half in names))
            if folder != folder_of(identity):  # MUST 28
                message = f"its two files belong to entry `{identity}`; wanted those of the folder's name"
                self.findings.add(Rule.ENTRY_DIGEST, f"`{folder}`", message)
            described = self._described(f"{folder}/kernel.json", known)  # MUST 29
            if described is not None:
                found[identity] = described
                first = made_for.setdefault((described.kernel, described.specialization.token), folder)
                if first != folder:  # MUST 30
                    message = f"of the same kernel and specialization as `{first}`; wanted one entry for it"
                    self.findings.add(Rule.ENTRY_UNIQUE, f"`{folder}`", message)
        return found

    def _described(self, name: str, known: Mapping[bytes, Specialization]) -> Described | None:
        """What ``kernel.json`` says.

        The specialization stands last in it and is canonical, as the whole is. So its text is looked up in the table,
        which was read already; no string in it can hold the mark, whose quotes would be escaped there.
        """
        content = bytes(self.sound.content(name))
        head, _, tail = content.rpartition(_MARK)
        specialization = known.get(tail[:-1]) if tail.endswith(b"}") else None
        if specialization is None:
            data = self._json(name, content, documents.ENTRY, Rule.ENTRY_FIELDS)
            specialization = Specialization.from_json(data["specialization"]) if data is not None else None
        else:
            data = self._json(name, head + b"}", documents.ENTRY_HEAD, Rule.ENTRY_FIELDS)
        if data is None or specialization is None:
            return None
        return Described(Kernel.from_json(data["kernel"]), specialization, data["metadata"], data["launcher"])


_MARK = b',"specialization":'


def _plan(data: Any, table: Table) -> Plan:
    plan = tables.plan_from_json(data, table)
    DeviceProfile.from_json(plan.profile)
    for launch in plan.launches:
        number = len(launch.candidates)
        if any(len(variant.specializations) != number for variant in launch.variants):
            raise ValueError(f"{launch}: not one specialization for each candidate")
        if launch.key is None and number != 1:
            raise ValueError(f"{launch}: {counted(number, 'candidate')} without a key")
    ids = [launch.id for launch in plan.launches]
    if ids != sorted(set(ids)):
        raise ValueError("launches that are not sorted, or one twice")
    launched = {id(row) for launch in plan.launches for item in launch.variants for row in item.specializations}
    if len(launched) < len(table.rows):
        raise ValueError("a row of `specializations.json` that is not launched")
    return plan


def _choices(data: Any, table: Table) -> tuple[Choice, ...]:
    choices = tuple(tables.choice_from_json(item, table) for item in data)
    ids = [choice.id for choice in choices]
    if ids != sorted(set(ids)):
        raise ValueError("choices that are not sorted, or one twice")
    return choices


def record_lines(content: memoryview) -> Iterator[dict[str, Any]]:
    """The lines of ``record.jsonl``, one after another.

    Raises:
        ValueError: a line is not what the format describes; the text begins with its number.
    """
    text = bytes(content)
    if text and not text.endswith(b"\n"):
        raise ValueError("the last line has no end; wanted a newline")
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            data = documents.parse(line, max_values=100_000)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}; wanted canonical JSON") from None
        for path, message in documents.RECORD_LINE.check(data)[:1]:
            raise ValueError(f"line {number} {path}: {message}")
        yield data


def entry_digest(binary: str, description: str) -> str:
    """The digest of an entry, over both of its halves together.

    Args:
        binary: digest of ``kernel.cubin``.
        description: digest of ``kernel.json``: kernel, specialization, launch metadata and launcher.
    """
    return digest.of_bytes(digest.canonical_json({"binary": binary, "description": description}))
