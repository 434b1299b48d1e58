"""Whether the contents of a sound archive mean something and agree with each other (MUST 21 to 45).

The bytes were checked before (``verify.inspect``), so what is found here is not damage: it is a bundle that says two
different things, or one that was put together from parts of others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kernelbake import digest, documents, elf, fingerprint
from kernelbake.fingerprint import Fingerprint
from kernelbake.outcome import OK
from kernelbake.plan import Choice, Launch, Plan
from kernelbake.profiles import DeviceProfile
from kernelbake.rules import Findings, Rule
from kernelbake.verify import Sound

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a bundle, parsed.

    Args:
        resolved: the manifest after defaults and model configuration were filled in.
        fingerprint, plan, choices: theirs.
        proven: kernel, key and config of every candidate whose outcome was ``ok``, as canonical JSON.
    """

    resolved: Mapping[str, Any]
    fingerprint: Fingerprint
    plan: Plan
    choices: tuple[Choice, ...]
    proven: frozenset[bytes]


@dataclasses.dataclass(frozen=True)
class Described:
    """What ``kernel.json`` of an entry says.

    Args:
        kernel: ``module:qualname``.
        token: the specialization's token.
        options: the launch options of the specialization.
        metadata: Triton's launch metadata.
        launcher: digest of the launcher library, or None.
    """

    kernel: str
    token: str
    options: Mapping[str, Any]
    metadata: Mapping[str, Any]
    launcher: str | None


_UTILITIES = b"PyInit_cuda_utils\0"
"""What Triton's helper library exports, through which modules are loaded; it serves all entries and none names it."""


def check(sound: Sound, path: Path | str) -> Documents:
    """Checks what the contents say, each by itself and then against each other.

    Raises:
        ViolationsError: with everything that was found.
    """
    findings = Findings()
    parsed = _documents(sound, findings)
    entries = _entries(sound, findings)
    findings.raise_if_any(path)
    assert parsed is not None  # nothing was found, so everything was parsed
    _check_entries(sound, parsed.fingerprint, entries, findings)
    _check_libraries(sound, entries, findings)
    _check_choice_entries(parsed, entries, findings)
    _check_entry_choices(sound, parsed, entries, findings)
    _check_winners(parsed, entries, findings)
    _check_planned(sound, parsed, findings)
    _check_made(sound, parsed, entries, findings)
    _check_profile(sound, parsed, findings)
    _check_sources(parsed, findings)
    _check_counts(sound, parsed, entries, findings)
    findings.raise_if_any(path)
    return parsed


# ---------------------------------------------------------------------------------------------- documents


def _read(
    sound: Sound,
    name: str,
    shape: documents.Shape,
    build: Callable[[Any], T],
    rule: Rule,
    findings: Findings,
) -> T | None:
    """A document: strict JSON, of its shape, and such that nothing of it is lost on the way through the program."""
    try:
        data = documents.parse(sound.content(name))
    except ValueError as error:
        findings.add(Rule.STRICT_JSON, f"`{name}`", f"{error}; wanted canonical JSON")
        return None
    faults = shape.check(data)
    for inner, message in faults:
        findings.add(rule, f"`{name}` {inner}".rstrip(), message)
    if faults:
        return None
    try:
        return build(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        findings.add(rule, f"`{name}`", f"`{type(error).__name__}: {error!s:.200}`; wanted what the format describes")
        return None


def _documents(sound: Sound, findings: Findings) -> Documents | None:
    """MUST 11 and 21 to 25."""
    resolved = _read(sound, "manifest.resolved.json", documents.OBJECT, dict, Rule.MANIFEST, findings)  # MUST 21
    try:
        str(sound.content("manifest.yaml"), "utf-8")
    except UnicodeDecodeError as error:
        findings.add(Rule.MANIFEST, "`manifest.yaml`", f"no UTF-8 at byte {error.start}; wanted a text")
    facts = _read(
        sound, "fingerprint.json", documents.FINGERPRINT, Fingerprint.from_json, Rule.FINGERPRINT, findings
    )  # MUST 22
    plan = _read(sound, "plan.json", documents.PLAN, _plan, Rule.PLAN, findings)  # MUST 23
    choices = _read(sound, "choices.json", documents.CHOICES, _choices, Rule.CHOICES, findings)  # MUST 24
    proven = _proven(sound, findings)  # MUST 25
    if resolved is None or facts is None or plan is None or choices is None:
        return None
    _check_fingerprint(sound, facts, findings)
    return Documents(resolved, facts, plan, choices, proven)


def _plan(data: Any) -> Plan:
    plan = Plan.from_json(data)
    DeviceProfile.from_json(plan.profile)
    for launch in plan.launches:
        number = len(launch.candidates)
        if any(len(variant.specializations) != number for variant in launch.variants):
            raise ValueError(f"{launch}: not one specialization for each candidate")
        if launch.key is None and number != 1:
            raise ValueError(f"{launch}: {number} candidates without a key")
    ids = [launch.id for launch in plan.launches]
    if ids != sorted(set(ids)):
        raise ValueError("launches that are not sorted, or one twice")
    return plan


def _choices(data: Any) -> tuple[Choice, ...]:
    choices = tuple(Choice.from_json(item) for item in data)
    ids = [choice.id for choice in choices]
    if ids != sorted(set(ids)):
        raise ValueError("choices that are not sorted, or one twice")
    return choices


def record_lines(content: memoryview) -> Iterator[dict[str, Any]]:
    """The lines of ``record.jsonl``, one after another.

    Raises:
        ValueError: a line is no canonical JSON object; the text begins with its number.
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


def _proven(sound: Sound, findings: Findings) -> frozenset[bytes]:
    number, proven = 0, set[bytes]()
    try:
        for line in record_lines(sound.content("record.jsonl")):
            number += 1
            if line["outcome"] == OK:
                proven.add(digest.canonical_json([line["kernel"], line["key"], line["config"]]))
    except ValueError as error:
        findings.add(Rule.RECORD, "`record.jsonl`", str(error))
        return frozenset()
    claimed = sound.header["counts"]["record"]
    if number != claimed:
        findings.add(Rule.COUNTS, "`bundle.json`", f"{claimed} record; found {number}")
    return frozenset(proven)


def _check_fingerprint(sound: Sound, facts: Fingerprint, findings: Findings) -> None:
    """MUST 22: what decides about a fit is there, and can be understood."""
    place = "`fingerprint.json`"
    for name in sorted(fingerprint.REQUIRED - {field.name for field in facts.fields}):
        findings.add(Rule.FINGERPRINT, place, f"no field `{name}`; wanted one")
    for name in ("gpu.sm_count", "gpu.shared_memory_bytes"):
        value = facts.get(name)
        if name in facts and (type(value) is not int or value <= 0):
            findings.add(Rule.FINGERPRINT, place, f"`{name}` is `{value}`; wanted a positive integer")
    try:
        fingerprint.arch_of(str(facts.get("gpu.capability")))
    except ValueError as error:
        findings.add(Rule.FINGERPRINT, place, f"{error}; wanted `gpu.capability` as in `90a`")
    if any(name.startswith("lib/") for name in sound.spans) and facts.get("python.abi") is None:
        findings.add(Rule.FINGERPRINT, place, "no field `python.abi`; wanted one beside a launcher library")


# ---------------------------------------------------------------------------------------------- entries


def entry_digest(binary: str, description: str) -> str:
    """The digest of an entry, over both of its halves together.

    Args:
        binary: digest of ``kernel.cubin``.
        description: digest of ``kernel.json``: kernel, specialization, launch metadata and launcher.
    """
    return digest.of_bytes(digest.canonical_json({"binary": binary, "description": description}))


def _entries(sound: Sound, findings: Findings) -> dict[str, Described]:
    """MUST 26 to 29: the entries by digest."""
    halves: dict[str, list[str]] = {}
    for name in sound.spans:
        if name.startswith("kernels/"):
            folder, _, half = name.rpartition("/")
            halves.setdefault(folder, []).append(half)
    found: dict[str, Described] = {}
    made_for: dict[tuple[str, str], str] = {}
    for folder, names in halves.items():
        if len(names) != 2:  # MUST 26
            other = "kernel.json" if names == ["kernel.cubin"] else "kernel.cubin"
            findings.add(Rule.ENTRY_HALVES, f"`{folder}`", f"`{names[0]}` without `{other}`; wanted both")
            continue
        binary, description = sound.spans[f"{folder}/kernel.cubin"], sound.spans[f"{folder}/kernel.json"]
        identity = entry_digest(binary.digest, description.digest)
        if folder != folder_of(identity):  # MUST 27
            message = f"its two files belong to entry `{identity}`; wanted those of the folder's name"
            findings.add(Rule.ENTRY_DIGEST, f"`{folder}`", message)
        described = _read(
            sound, f"{folder}/kernel.json", documents.ENTRY, _described, Rule.ENTRY_FIELDS, findings
        )  # MUST 28
        if described is None:
            continue
        first = made_for.setdefault((described.kernel, described.token), folder)
        if first != folder:  # MUST 29
            message = f"of the same kernel and specialization as `{first}`; wanted one entry for it"
            findings.add(Rule.ENTRY_UNIQUE, f"`{folder}`", message)
        found[identity] = described
    return found


def folder_of(identity: str) -> str:
    """The folder of an entry, by its digest."""
    return "kernels/" + identity.removeprefix(digest.PREFIX)


def _described(data: Any) -> Described:
    token = digest.canonical_json(data["specialization"]).decode()
    options = dict(data["specialization"]["options"])
    return Described(data["kernel"], token, options, data["metadata"], data["launcher"])


def _check_entries(sound: Sound, facts: Fingerprint, entries: Mapping[str, Described], findings: Findings) -> None:
    """MUST 30 to 33: code and metadata are for the GPU of the fingerprint."""
    arch = fingerprint.arch_of(str(facts["gpu.capability"]))
    limit = facts["gpu.shared_memory_bytes"]
    assert isinstance(limit, int)
    for identity, described in entries.items():
        folder = folder_of(identity)
        try:  # MUST 30
            found = elf.read(sound.content(f"{folder}/kernel.cubin")).arch
            if found != arch:
                message = f"code for sm_{found}; wanted sm_{arch}, as the fingerprint says"
                findings.add(Rule.CUBIN_ARCH, f"`{folder}/kernel.cubin`", message)
        except ValueError as error:
            findings.add(Rule.CUBIN_ARCH, f"`{folder}/kernel.cubin`", f"{error}; wanted a cubin for sm_{arch}")
        place = f"`{folder}/kernel.json`"
        target = described.metadata["target"]
        if target["arch"] != arch or target["backend"] != facts["gpu.backend"]:  # MUST 31
            message = f"a target of `{target['backend']}` `{target['arch']}`; wanted `{facts['gpu.backend']}` `{arch}`"
            findings.add(Rule.METADATA_TARGET, place, message)
        if described.metadata["shared"] > limit:  # MUST 32
            message = f"{described.metadata['shared']} bytes of shared memory; wanted at most {limit}"
            findings.add(Rule.SHARED_MEMORY, place, message)
        # MUST 33; hardly any metadata holds a text that begins with a slash
        suspicious = b'"/' in bytes(sound.content(f"{folder}/kernel.json"))
        for name, text in _paths(described.metadata, "metadata") if suspicious else ():
            message = f"`{name}` holds the path `{text:.80}`; wanted no path of a machine"
            findings.add(Rule.NO_PATHS, place, message)


def _paths(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value.startswith("/"):
        yield name, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(item, f"{name}.{key}")


def lib_name(identity: str) -> str:
    """The member that holds a launcher library, by its digest."""
    return f"lib/{identity.removeprefix(digest.PREFIX)}.so"


def _check_libraries(sound: Sound, entries: Mapping[str, Described], findings: Findings) -> None:
    """MUST 34."""
    wanted = {lib_name(described.launcher) for described in entries.values() if described.launcher is not None}
    for name, span in sound.spans.items():
        if name.startswith("lib/"):
            if name != lib_name(span.digest):
                findings.add(Rule.LIBRARIES, f"`{name}`", f"its digest is `{span.digest}`; wanted the name's")
            if name not in wanted and _UTILITIES not in bytes(sound.content(name)):
                findings.add(Rule.LIBRARIES, f"`{name}`", "no entry is launched by it; wanted one")
    for name in sorted(wanted - sound.spans.keys()):
        findings.add(Rule.LIBRARIES, f"`{name}`", "an entry is launched by it, and it is not there; wanted it")


# ---------------------------------------------------------------------------------------------- choices and plan


def _check_choice_entries(parsed: Documents, entries: Mapping[str, Described], findings: Findings) -> None:
    """MUST 35: every entry that a choice names is there, and is for that kernel and specialization."""
    for choice in parsed.choices:
        place = f"`choices.json` {choice.kernel.name} {choice.key or ''}".rstrip()
        for token, identity in choice.entries.items():
            if identity is None:
                continue
            described = entries.get(identity)
            if described is None:
                findings.add(Rule.CHOICE_ENTRIES, place, f"entry `{identity}` is not there; wanted it")
            elif (described.kernel, described.token) != (choice.kernel.to_json(), token):
                message = f"entry `{identity}` is of another kernel or specialization; wanted the choice's own"
                findings.add(Rule.CHOICE_ENTRIES, place, message)


def _check_entry_choices(sound: Sound, parsed: Documents, entries: Mapping[str, Described], findings: Findings) -> None:
    """MUST 36: every entry is used: by a choice or, before anything was measured, by a candidate of the plan."""
    used = {identity for choice in parsed.choices for identity in choice.entries.values()}
    planned: set[tuple[str, str]] = set()
    if sound.header["made"] == "compiled-only":
        planned = {
            (launch.kernel.to_json(), specialization.token)
            for launch in parsed.plan.launches
            for variant in launch.variants
            for specialization in variant.specializations
        }
    for identity, described in entries.items():
        if identity not in used and (described.kernel, described.token) not in planned:
            message = "no choice runs it and no candidate needs it; wanted an entry that is used"
            findings.add(Rule.ENTRY_CHOICES, f"`{folder_of(identity)}`", message)


def _check_winners(parsed: Documents, entries: Mapping[str, Described], findings: Findings) -> None:
    """MUST 37: what a winner says about its launch is what its code was compiled with."""
    for choice in parsed.choices:
        place = f"`choices.json` {choice.kernel.name} {choice.key or ''}".rstrip()
        for identity in filter(None, choice.entries.values()):
            described = entries.get(identity)
            if described is None:
                continue
            for name, value in choice.winner.options().items():
                asked, compiled = described.options.get(name), described.metadata.get(name)
                if asked != value or not _compiled_for(name, value, compiled):
                    message = f"`{name}` is {value}; entry `{identity}` was made for {asked} and has {compiled}"
                    findings.add(Rule.WINNER_OPTIONS, place, f"{message}; wanted the same")


def _compiled_for(name: str, value: int, compiled: Any) -> bool:
    """Whether metadata belongs to a launch option: it repeats it, if it names it at all.

    Warp specialization, of which metadata says nothing else, adds whole groups of four warps.
    """
    if compiled is None:
        return name != "maxnreg"
    extra = compiled - value if type(compiled) is int else -1
    return extra == 0 or (name == "num_warps" and extra > 0 and extra % 4 == 0)


def _check_planned(sound: Sound, parsed: Documents, findings: Findings) -> None:
    """MUST 38 to 41: one choice for each planned launch, a candidate as its winner, an entry for each variant."""
    choices = {choice.id: choice for choice in parsed.choices}
    for launch in parsed.plan.launches:
        choice = choices.pop(launch.id, None)
        if choice is not None:
            _check_choice(launch, choice, parsed.proven, findings)
        elif sound.header["made"] != "compiled-only":
            findings.add(Rule.PLANNED_CHOSEN, f"`plan.json` {launch}", "no choice for it; wanted one")
    for choice in choices.values():
        place = f"`choices.json` {choice.kernel.name} {choice.key or ''}".rstrip()
        findings.add(Rule.PLANNED_CHOSEN, place, "the plan has no such launch; wanted only planned ones")


def _check_choice(launch: Launch, choice: Choice, proven: frozenset[bytes], findings: Findings) -> None:
    place = f"`choices.json` {launch}"
    if choice.winner not in launch.candidates:
        message = f"the winner `{choice.winner}` is no candidate of the plan; wanted one of {len(launch.candidates)}"
        findings.add(Rule.WINNER_CANDIDATE, place, message)
        return
    key = launch.key.to_json() if launch.key else None
    if digest.canonical_json([launch.kernel.to_json(), key, choice.winner.to_json()]) not in proven:
        message = f"no line of the record says that the winner `{choice.winner}` is ok; wanted one"
        findings.add(Rule.WINNER_RECORDED, place, message)
    index = launch.candidates.index(choice.winner)
    wanted = {variant.specializations[index].token for variant in launch.variants}
    if wanted != choice.entries.keys():
        missing, extra = len(wanted - choice.entries.keys()), len(choice.entries.keys() - wanted)
        message = f"{missing} planned specializations without an entry, {extra} not planned; wanted exactly the planned"
        findings.add(Rule.SPECIALIZATIONS, place, message)


# ---------------------------------------------------------------------------------------------- the bundle as a whole


def _check_made(sound: Sound, parsed: Documents, entries: Mapping[str, Described], findings: Findings) -> None:
    """MUST 42: a bundle made by the interpreter has no code and one made for a GPU has nothing else."""
    made, backend = sound.header["made"], parsed.fingerprint["gpu.backend"]
    interpreted = made == "interpreted"
    if interpreted != (backend == "interpreter"):
        findings.add(Rule.MADE, "`bundle.json`", f"made `{made}` for backend `{backend}`; wanted the two to agree")
    if interpreted and entries:
        findings.add(Rule.MADE, "`bundle.json`", f"made `{made}` with {len(entries)} entries; wanted none")
    for choice in parsed.choices:
        coded = sum(identity is not None for identity in choice.entries.values())
        if coded != (0 if interpreted else len(choice.entries)):
            place = f"`choices.json` {choice.kernel.name} {choice.key or ''}".rstrip()
            wanted = "none" if interpreted else "one for each"
            message = f"{coded} entries for {len(choice.entries)} specializations, made `{made}`; wanted {wanted}"
            findings.add(Rule.MADE, place, message)


def _check_profile(sound: Sound, parsed: Documents, findings: Findings) -> None:
    """MUST 43: the plan and the header are about the GPU and the build of the fingerprint."""
    profile, facts = parsed.plan.profile, parsed.fingerprint
    line_info = facts.get("build.line_info")
    if line_info is not None and line_info != sound.header["line_info"]:
        message = f"`build.line_info` is `{line_info}`, and another in the header; wanted the same"
        findings.add(Rule.PROFILE, "`fingerprint.json`", message)
    wanted = {
        "gpu.backend": profile["backend"],
        "gpu.capability": fingerprint.capability(*profile["capability"]),
        "gpu.device": profile["name"],
        "gpu.sm_count": profile["sm_count"],
        "gpu.shared_memory_bytes": profile["shared_memory_bytes"],
    }
    for name, value in wanted.items():
        if value != facts[name]:
            message = f"`{name}` is `{facts[name]}`, and `{value}` in the plan's profile; wanted the same"
            findings.add(Rule.PROFILE, "`fingerprint.json`", message)


def _check_sources(parsed: Documents, findings: Findings) -> None:
    """MUST 44: every kernel that is launched has its facts, and the fingerprint is of those facts."""
    facts = parsed.plan.kernels
    for name, kernel in facts.items():
        if kernel.kernel.name != name:
            findings.add(Rule.SOURCES, f"`plan.json` {name}", f"facts of `{kernel.kernel.name}`; wanted its own")
    for name in sorted({launch.kernel.name for launch in parsed.plan.launches} - facts.keys()):
        findings.add(Rule.SOURCES, f"`plan.json` {name}", "it is launched and has no facts; wanted them")
    if fingerprint.sources_digest(facts.values()) != parsed.fingerprint["kernel.sources"]:
        message = "`kernel.sources` is not the digest over the plan's kernels; wanted that"
        findings.add(Rule.SOURCES, "`fingerprint.json`", message)


def counts(plan: Plan, num_choices: int, num_entries: int, num_libs: int, num_records: int) -> dict[str, int]:
    """The numbers that the header repeats."""
    return {
        "cases": len(plan.cases),
        "choices": num_choices,
        "entries": num_entries,
        "kernels": len(plan.kernels),
        "launches": len(plan.launches),
        "libs": num_libs,
        "record": num_records,
    }


def _check_counts(sound: Sound, parsed: Documents, entries: Mapping[str, Described], findings: Findings) -> None:
    """MUST 45."""
    claimed = sound.header["counts"]
    libs = sum(name.startswith("lib/") for name in sound.spans)
    found = counts(parsed.plan, len(parsed.choices), len(entries), libs, claimed["record"])
    for name, number in found.items():
        if claimed[name] != number:
            findings.add(Rule.COUNTS, "`bundle.json`", f"{claimed[name]} {name}; found {number}")


def parsed(sound: Sound, name: str) -> Any:
    """A document that ``check`` has found right."""
    return json.loads(bytes(sound.content(name)))
