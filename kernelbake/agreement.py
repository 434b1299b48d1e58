"""Whether the documents and entries of a bundle agree with each other (MUST 31 to 46).

By now each of them is what the format describes. A bundle that fails here says two different things, or is for another
GPU than it says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kernelbake import digest, elf, fingerprint
from kernelbake.fingerprint import Fingerprint
from kernelbake.keys import Kernel, Specialization
from kernelbake.plan import Choice, Launch, Plan
from kernelbake.rules import Findings, Rule
from kernelbake.verify import Sound
from kernelbake.words import counted


@dataclasses.dataclass(frozen=True)
class Described:
    """What ``kernel.json`` of an entry says.

    Args:
        kernel, specialization: what its code is for.
        metadata: Triton's launch metadata.
        launcher: digest of the launcher library, or None.
    """

    kernel: Kernel
    specialization: Specialization
    metadata: Mapping[str, Any]
    launcher: str | None


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What the documents and entries of a bundle say.

    Args:
        resolved: the manifest after defaults and model configuration were filled in.
        fingerprint, plan, choices: theirs.
        proven: kernel, key and config of every candidate whose outcome was ``ok``, as canonical JSON.
        entries: by digest.
    """

    resolved: Mapping[str, Any]
    fingerprint: Fingerprint
    plan: Plan
    choices: tuple[Choice, ...]
    proven: frozenset[bytes]
    entries: Mapping[str, Described]


_UTILITIES = b"PyInit_cuda_utils\0"
"""What Triton's helper library exports, through which modules are loaded; it serves all entries and none names it."""


def check(sound: Sound, meaning: Meaning, findings: Findings) -> None:
    """Notes every contradiction, in the order of the rules."""
    _check_entries(sound, meaning, findings)
    _check_libraries(sound, meaning, findings)
    _check_choice_entries(meaning, findings)
    _check_entry_choices(sound, meaning, findings)
    _check_winners(meaning, findings)
    _check_planned(sound, meaning, findings)
    _check_made(sound, meaning, findings)
    _check_profile(sound, meaning, findings)
    _check_sources(meaning, findings)
    _check_counts(sound, meaning, findings)


def folder_of(identity: str) -> str:
    """The folder of an entry, by its digest."""
    return "kernels/" + identity.removeprefix(digest.PREFIX)


def _place(choice: Choice) -> str:
    return f"`choices.json` {choice.kernel.name} {choice.key or ''}".rstrip()


def _check_entries(sound: Sound, meaning: Meaning, findings: Findings) -> None:
    """MUST 31 to 34: code and metadata are for the GPU of the fingerprint."""
    facts = meaning.fingerprint
    arch = fingerprint.arch_of(str(facts["gpu.capability"]))
    limit = facts["gpu.shared_memory_bytes"]
    assert isinstance(limit, int)
    for identity, described in meaning.entries.items():
        folder = folder_of(identity)
        try:  # MUST 31
            found = elf.read(sound.content(f"{folder}/kernel.cubin")).arch
            if found != arch:
                message = f"code for sm_{found}; wanted sm_{arch}, as the fingerprint says"
                findings.add(Rule.CUBIN_ARCH, f"`{folder}/kernel.cubin`", message)
        except ValueError as error:
            findings.add(Rule.CUBIN_ARCH, f"`{folder}/kernel.cubin`", f"{error}; wanted a cubin for sm_{arch}")
        place = f"`{folder}/kernel.json`"
        target = described.metadata["target"]
        if target["arch"] != arch or target["backend"] != facts["gpu.backend"]:  # MUST 32
            message = f"a target of `{target['backend']}` `{target['arch']}`; wanted `{facts['gpu.backend']}` `{arch}`"
            findings.add(Rule.METADATA_TARGET, place, message)
        if described.metadata["shared"] > limit:  # MUST 33
            message = f"{described.metadata['shared']} bytes of shared memory; wanted at most {limit}"
            findings.add(Rule.SHARED_MEMORY, place, message)
        # MUST 34; hardly any metadata holds a text that begins with a slash
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


def _check_libraries(sound: Sound, meaning: Meaning, findings: Findings) -> None:
    """MUST 35."""
    wanted = {lib_name(described.launcher) for described in meaning.entries.values() if described.launcher is not None}
    for name, span in sound.spans.items():
        if name.startswith("lib/"):
            if name != lib_name(span.digest):
                findings.add(Rule.LIBRARIES, f"`{name}`", f"its digest is `{span.digest}`; wanted the name's")
            if name not in wanted and _UTILITIES not in bytes(sound.content(name)):
                findings.add(Rule.LIBRARIES, f"`{name}`", "no entry is launched by it; wanted one")
    for name in sorted(wanted - sound.spans.keys()):
        findings.add(Rule.LIBRARIES, f"`{name}`", "an entry is launched by it, and it is not there; wanted it")


def _check_choice_entries(meaning: Meaning, findings: Findings) -> None:
    """MUST 36: every entry that a choice names is there, and is for that kernel and specialization."""
    for choice in meaning.choices:
        place = _place(choice)
        for token, identity in choice.entries.items():
            if identity is None:
                continue
            described = meaning.entries.get(identity)
            if described is None:
                findings.add(Rule.CHOICE_ENTRIES, place, f"entry `{identity}` is not there; wanted it")
            elif (described.kernel, described.specialization.token) != (choice.kernel, token):
                message = f"entry `{identity}` is of another kernel or specialization; wanted the choice's own"
                findings.add(Rule.CHOICE_ENTRIES, place, message)


def _check_entry_choices(sound: Sound, meaning: Meaning, findings: Findings) -> None:
    """MUST 37: every entry is used: by a choice or, before anything was measured, by a candidate of the plan."""
    used = {identity for choice in meaning.choices for identity in choice.entries.values()}
    planned: set[tuple[Kernel, str]] = set()
    if sound.header["made"] == "compiled-only":
        planned = {
            (launch.kernel, specialization.token)
            for launch in meaning.plan.launches
            for variant in launch.variants
            for specialization in variant.specializations
        }
    for identity, described in meaning.entries.items():
        if identity not in used and (described.kernel, described.specialization.token) not in planned:
            message = "no choice runs it and no candidate needs it; wanted an entry that is used"
            findings.add(Rule.ENTRY_CHOICES, f"`{folder_of(identity)}`", message)


def _check_winners(meaning: Meaning, findings: Findings) -> None:
    """MUST 38: what a winner says about its launch is what its code was compiled with."""
    for choice in meaning.choices:
        place = _place(choice)
        for identity in filter(None, choice.entries.values()):
            described = meaning.entries.get(identity)
            if described is None:
                continue
            options = dict(described.specialization.options)
            for name, value in choice.winner.options().items():
                asked, compiled = options.get(name), described.metadata.get(name)
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


def _check_planned(sound: Sound, meaning: Meaning, findings: Findings) -> None:
    """MUST 39 to 42: one choice for each planned launch, a candidate as its winner, an entry for each variant."""
    choices = {choice.id: choice for choice in meaning.choices}
    for launch in meaning.plan.launches:
        choice = choices.pop(launch.id, None)
        if choice is not None:
            _check_choice(launch, choice, meaning.proven, findings)
        elif sound.header["made"] != "compiled-only":
            findings.add(Rule.PLANNED_CHOSEN, f"`plan.json` {launch}", "no choice for it; wanted one")
    for choice in choices.values():
        place = _place(choice)
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


def _check_made(sound: Sound, meaning: Meaning, findings: Findings) -> None:
    """MUST 43: a bundle made by the interpreter has no code and one made for a GPU has nothing else."""
    made, backend = sound.header["made"], meaning.fingerprint["gpu.backend"]
    interpreted = made == "interpreted"
    if interpreted != (backend == "interpreter"):
        findings.add(Rule.MADE, "`bundle.json`", f"made `{made}` for backend `{backend}`; wanted the two to agree")
    if interpreted and meaning.entries:
        entries = counted(len(meaning.entries), "entry")
        findings.add(Rule.MADE, "`bundle.json`", f"made `{made}` with {entries}; wanted none")
    for choice in meaning.choices:
        coded = sum(identity is not None for identity in choice.entries.values())
        if coded != (0 if interpreted else len(choice.entries)):
            place = _place(choice)
            wanted = "none" if interpreted else "one for each"
            found = f"{counted(coded, 'entry')} for {counted(len(choice.entries), 'specialization')}"
            message = f"{found}, made `{made}`; wanted {wanted}"
            findings.add(Rule.MADE, place, message)


def _check_profile(sound: Sound, meaning: Meaning, findings: Findings) -> None:
    """MUST 44: manifest, plan, fingerprint and header are about one GPU and one build."""
    header, resolved = sound.header, meaning.resolved
    profile, facts = meaning.plan.profile, meaning.fingerprint
    of_profile = {
        "gpu.backend": profile["backend"],
        "gpu.capability": fingerprint.capability(*profile["capability"]),
        "gpu.device": profile["name"],
        "gpu.sm_count": profile["sm_count"],
        "gpu.shared_memory_bytes": profile["shared_memory_bytes"],
    }
    pairs = [("manifest.resolved.json", "gpu", resolved["gpu"], "plan's profile", profile)]
    pairs += [("fingerprint.json", name, facts[name], "plan's profile", value) for name, value in of_profile.items()]
    pairs.append(("manifest.resolved.json", "name", resolved["name"], "header", header["name"]))
    if facts.get("build.line_info") is not None:
        pairs.append(("fingerprint.json", "build.line_info", facts["build.line_info"], "header", header["line_info"]))
    for document, name, found, where, wanted in pairs:
        if found != wanted:
            message = f"`{name}` is `{found!s:.100}`, and `{wanted!s:.100}` in the {where}; wanted the same"
            findings.add(Rule.PROFILE, f"`{document}`", message)


def _check_sources(meaning: Meaning, findings: Findings) -> None:
    """MUST 45: every kernel that is launched has its facts, and the fingerprint is of those facts."""
    facts = meaning.plan.kernels
    for name, kernel in facts.items():
        if kernel.kernel.name != name:
            findings.add(Rule.SOURCES, f"`plan.json` {name}", f"facts of `{kernel.kernel.name}`; wanted its own")
    for name in sorted({launch.kernel.name for launch in meaning.plan.launches} - facts.keys()):
        findings.add(Rule.SOURCES, f"`plan.json` {name}", "it is launched and has no facts; wanted them")
    if fingerprint.sources_digest(facts.values()) != meaning.fingerprint["kernel.sources"]:
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


def _check_counts(sound: Sound, meaning: Meaning, findings: Findings) -> None:
    """MUST 46."""
    claimed = sound.header["counts"]
    libs = sum(name.startswith("lib/") for name in sound.spans)
    found = counts(meaning.plan, len(meaning.choices), len(meaning.entries), libs, claimed["record"])
    for name, number in found.items():
        if claimed[name] != number:
            findings.add(Rule.COUNTS, "`bundle.json`", f"{claimed[name]} {name}; found {number}")
