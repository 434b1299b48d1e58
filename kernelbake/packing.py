"""What a build found out, put together as the contents of a bundle, and the check of the finished file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelbake import digest
from kernelbake.bundle import Bundle, Contents, Entry, Made
from kernelbake.errors import BuildError
from kernelbake.fingerprint import Fingerprint
from kernelbake.keys import Kernel, Specialization
from kernelbake.outcome import OK, Code, Files, Rejected, shape_of
from kernelbake.plan import Choice, Launch, Plan
from kernelbake.state import State
from kernelbake.words import counted
from kernelbake.worker import Child, ChildDiedError

if TYPE_CHECKING:
    from kernelbake.manifest import Manifest

_SELF_CHECK_LIMIT_S = 900.0
"""Importing kernel libraries and loading a few thousand modules."""


def contents(
    manifest: Manifest,
    made: Made,
    plan: Plan,
    state: State,
    fingerprint: Fingerprint,
    files: Files,
    utilities: str | None,
) -> Contents:
    """The contents of the bundle.

    Args:
        manifest, made, plan, fingerprint: what goes in as it is.
        state: everything that was found out.
        files: the build's folder of code.
        utilities: digest of Triton's helper library, where its version has one.
    """
    entries: dict[tuple[str, str], Entry] = {}
    choices = []
    if made == "compiled-only":
        for launch in plan.launches:
            for variant in launch.variants:
                for specialization in variant.specializations:
                    _entry(launch.kernel, specialization, state, files, entries)
    else:
        for place, launch in enumerate(plan.launches):
            choices.append(_choice(launch, state.decided[place], made, state, files, entries))
    named = {entry.launcher for entry in entries.values() if entry.launcher is not None}
    libraries = named | ({utilities} if utilities is not None and entries else set())
    return Contents(
        name=manifest.name,
        made=made,
        manifest_text=manifest.text,
        manifest_resolved=manifest.resolved(),
        fingerprint=fingerprint,
        plan=plan,
        choices=tuple(choices),
        record=_records(plan, state),
        entries={entry.digest: entry for entry in entries.values()},
        libs={name: files[name] for name in sorted(libraries)},
        line_info=manifest.compile.line_info,
    )


def _entry(
    kernel: Kernel,
    specialization: Specialization,
    state: State,
    files: Files,
    entries: dict[tuple[str, str], Entry],
) -> str | None:
    """Digest of the entry, made at the first asking; None for code that was rejected."""
    name = (kernel.to_json(), specialization.digest)
    if name not in entries:
        data = state.codes[name[0]][name[1]]
        if data["outcome"] != OK:
            return None
        code = Code.from_json(data["code"])
        metadata = json.loads(files[code.metadata])
        entries[name] = Entry(kernel, specialization, metadata, files[code.binary], code.launcher)
    return entries[name].digest


def _choice(
    launch: Launch,
    decided: Mapping[str, Any],
    made: Made,
    state: State,
    files: Files,
    entries: dict[tuple[str, str], Entry],
) -> Choice:
    winner = decided["winner"]
    held: dict[str, str | None] = {}
    for variant in launch.variants:
        specialization = variant.specializations[winner]
        identity = None if made == "interpreted" else _entry(launch.kernel, specialization, state, files, entries)
        held[specialization.token] = identity
    return Choice(launch.kernel, launch.key, launch.candidates[winner], held, _times(launch, decided))


def _times(launch: Launch, decided: Mapping[str, Any]) -> dict[str, Any]:
    """What people want to know of a decision; configs as they print."""
    winner = decided["candidates"][str(decided["winner"])]
    times = {"median_ms": winner["median_ms"], "spread_ms": winner["spread_ms"], "repeatable": winner["repeatable"]}
    if decided.get("conditions"):
        times["conditions"] = decided["conditions"]
    if decided["runner_up"] is not None:
        runner_up = decided["candidates"][str(decided["runner_up"])]
        times |= {
            "runner_up": str(launch.candidates[decided["runner_up"]]),
            "runner_up_ms": runner_up["median_ms"],
            "margin": round(decided["margin"], 6),
            "told_apart": decided["told_apart"],
            "tied": len(decided["tied"]),
        }
    return times


def _records(plan: Plan, state: State) -> tuple[dict[str, Any], ...]:
    """One line for each candidate of each launch."""
    lines = []
    for place, launch in enumerate(plan.launches):
        decided = state.decided.get(place, {"candidates": {}})
        fates = state.fates(place)
        for candidate in range(len(launch.candidates)):
            line = _record(launch, candidate, fates.get(candidate), decided["candidates"])
            if candidate == decided.get("winner") and state.outputs.get(place):
                line["outputs"] = {
                    launch.variants[variant].specializations[candidate].digest: data
                    for variant, data in sorted(state.outputs[place].items())
                }
            lines.append(line)
    return tuple(lines)


def _record(
    launch: Launch, candidate: int, fate: Rejected | None, measured: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    facts = dict(measured.get(str(candidate), {}))
    if "same_code_as" in facts:
        facts["same_code_as"] = launch.candidates[facts["same_code_as"]].to_json()
    if facts.get("error") is not None:
        facts["error"] = round(facts["error"], 9)
    return {
        "kernel": launch.kernel.to_json(),
        "key": launch.key.to_json() if launch.key else None,
        "config": launch.candidates[candidate].to_json(),
        "specializations": [variant.specializations[candidate].digest for variant in launch.variants],
        **facts,
        **(fate.to_json() if fate is not None else {"outcome": OK}),
    }


def take_code(source: Bundle, files: Files) -> dict[tuple[str, str], dict[str, Any]]:
    """Unpacks the code of a compile-only bundle: outcome by kernel and digest of the specialization.

    Rejected specializations are not told apart in a bundle's record, so a candidate's rejection stands for each of its
    specializations that has no code.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for library in source.libs.values():
        files.put(library)
    for entry in source.entries.values():
        code = Code(
            binary=files.put(entry.binary),
            metadata=files.put(digest.canonical_json(entry.metadata)),
            launcher=entry.launcher,
            shape=shape_of(entry.binary, entry.metadata),
            shared_bytes=int(entry.metadata["shared"]),
        )
        found[entry.kernel.to_json(), entry.specialization.digest] = {"outcome": OK, "code": code.to_json()}
    for line in source.record:
        if line["outcome"] != OK:
            for specialization in line["specializations"]:
                found.setdefault((line["kernel"], specialization), Rejected.from_json(line).to_json())
    return found


# ---------------------------------------------------------------------------------------------- the check


def self_check(packed: Path, *, environment: Mapping[str, str], log: Path, on_device: bool) -> None:
    """Resolves everything planned from the packed bundle, in a fresh process; on a device, also loads every entry.

    Raises:
        BuildError: something is missing or does not load; all of it.
    """
    child = Child(["-P", "-m", "kernelbake.selfcheck"], environment=environment, log=log)
    try:
        child.send({"bundle": str(packed), "on_device": on_device})
        answer = child.receive(_SELF_CHECK_LIMIT_S)
    except ChildDiedError as death:
        raise BuildError(
            f"self-check: its process ended with {death.how}; wanted every entry to load", reasons=child.log_tail()
        ) from death
    finally:
        child.close()
    if answer is None:
        raise BuildError(f"self-check: not done after {_SELF_CHECK_LIMIT_S:.0f} s; wanted every entry to load")
    if answer["faults"]:
        things = counted(len(answer["faults"]), "thing")
        raise BuildError(
            f"self-check: {things} that the plan needs cannot be had from the bundle; wanted all",
            reasons=answer["faults"],
        )
