"""Hostile bundles whose every byte and document is right, and which still say two different things (MUST 27 to 46)."""

from __future__ import annotations

from typing import Any

import samples
from forge import Forged
from hostile import attack, sound
from hostile_documents import Change, edited, edited_field

from kernelbake import digest
from kernelbake.rules import Rule

# ---------------------------------------------------------------------------------------------- MUST 27 to 35


@attack("an entry without metadata", Rule.ENTRY_HALVES, place="kernel.json")
def _(forged: Forged) -> None:
    del forged.files[f"{forged.folders[0]}/kernel.json"]


@attack("an entry without code", Rule.ENTRY_HALVES, place="kernel.cubin")
def _(forged: Forged) -> None:
    del forged.files[f"{forged.folders[0]}/kernel.cubin"]


def _swap(half: str) -> None:
    @attack(f"{half} of two entries exchanged, every file's digest refreshed", Rule.ENTRY_DIGEST, place="kernels/")
    def _(forged: Forged) -> None:
        first, second, *_ = forged.folders
        one, two = f"{first}/{half}", f"{second}/{half}"
        forged.files[one], forged.files[two] = forged.files[two], forged.files[one]


_swap("kernel.json")
_swap("kernel.cubin")


@attack("metadata replaced, every file's digest refreshed", Rule.ENTRY_DIGEST, place="kernels/")
def _(forged: Forged) -> None:
    name = f"{forged.folders[0]}/kernel.json"
    forged.files[name] = forged.files[name].replace(b'"shared":1024', b'"shared":4096')


@attack("an entry's folder renamed", Rule.ENTRY_DIGEST, place="kernels/" + "0" * 64)
def _(forged: Forged) -> None:
    old, new = forged.folders[0], "kernels/" + "0" * 64
    for half in ("kernel.cubin", "kernel.json"):
        forged.files[f"{new}/{half}"] = forged.files.pop(f"{old}/{half}")
    forged.files["choices.json"] = forged.files["choices.json"].replace(old.split("/")[1].encode(), b"0" * 64)


def _entry(what: str, rule: Rule, change: Change, place: str = "kernel.json") -> None:
    """An attack on what ``kernel.json`` of one entry says; its folder and the choices follow."""

    @attack(what, rule, place=place)
    def _(forged: Forged) -> None:
        forged.change_entry(forged.folders[0], describe=change)


_entry("an entry without warps", Rule.ENTRY_FIELDS, lambda data: data["metadata"].pop("num_warps"), "num_warps")
_entry("an entry without target", Rule.ENTRY_FIELDS, lambda data: data["metadata"].pop("target"), "target")
_entry("an entry without name", Rule.ENTRY_FIELDS, lambda data: data["metadata"].update(name=""), "name")
_entry("shared memory as a text", Rule.ENTRY_FIELDS, lambda data: data["metadata"].update(shared="0"), "shared")
_entry("negative shared memory", Rule.ENTRY_FIELDS, lambda data: data["metadata"].update(shared=-1), "shared")
_entry("an entry with a field more", Rule.ENTRY_FIELDS, lambda data: data.update(extra=1), "extra")
_entry("a specialization of no form", Rule.ENTRY_FIELDS, lambda data: data.update(specialization=[]), "specialization")
_entry("a launcher that is no digest", Rule.ENTRY_FIELDS, lambda data: data.update(launcher="x.so"), "launcher")


@attack("two entries for one specialization", Rule.ENTRY_UNIQUE, place="kernels/")
def _(forged: Forged) -> None:
    other = sound().copy()
    new = other.change_entry(other.folders[0], cubin=samples.cubin(seed=99))
    forged.files |= {name: data for name, data in other.files.items() if name.startswith(new)}
    forged.header["counts"]["entries"] += 1


for _arch in (80, 100, 120, 121):

    @attack(f"code for sm_{_arch} in a bundle for sm_90", Rule.CUBIN_ARCH, place=f"sm_{_arch}")
    def _(forged: Forged, arch: int = _arch) -> None:
        forged.change_entry(forged.folders[0], cubin=samples.cubin(arch, new_abi=arch >= 100))


@attack("a bundle for sm_120 edited to claim sm_121", Rule.CUBIN_ARCH, Rule.METADATA_TARGET, place="sm_120")
def _(forged: Forged) -> bytes:
    other = sound(profile="rtx-pro-6000-blackwell").copy()
    _claim(other, "121a", [12, 1])
    return other.data()


@attack("a bundle for sm_90 edited to claim sm_120", Rule.CUBIN_ARCH, Rule.METADATA_TARGET, place="sm_90")
def _(forged: Forged) -> None:
    _claim(forged, "120a", [12, 0])


@attack(
    "a bundle of a large card edited to claim a small one",
    Rule.CUBIN_ARCH,
    Rule.METADATA_TARGET,
    Rule.SHARED_MEMORY,
    place="147456 bytes of shared memory; wanted at most 101376",
)
def _(forged: Forged) -> None:
    forged.change_entry(forged.folders[0], describe=lambda data: data["metadata"].update(shared=147_456))
    _claim(forged, "120a", [12, 0])
    facts = forged.document("fingerprint.json")
    facts["gpu.shared_memory_bytes"]["value"] = 101_376
    forged.put("fingerprint.json", facts)
    _claim_profile(forged, shared_memory_bytes=101_376)


def _claim(forged: Forged, capability: str, pair: list[int]) -> None:
    facts = forged.document("fingerprint.json")
    facts["gpu.capability"]["value"] = capability
    forged.put("fingerprint.json", facts)
    _claim_profile(forged, capability=pair)


def _claim_profile(forged: Forged, **changes: Any) -> None:
    plan, resolved = forged.document("plan.json"), forged.document("manifest.resolved.json")
    plan["profile"] |= changes
    resolved["gpu"] |= changes
    forged.put("plan.json", plan)
    forged.put("manifest.resolved.json", resolved)


for _what, _code in {
    "an x86 program": b"\x7fELF\x02\x01\x01\x00" + bytes(10) + b"\x3e\x00" + bytes(100),
    "noise": b"noise" * 40,
    "nothing": b"",
    "half a header": samples.cubin()[:40],
    "a 32-bit file": b"\x7fELF\x01\x01\x01" + samples.cubin()[7:],
    "an unknown layout": samples.cubin()[:7] + b"\x99" + samples.cubin()[8:],
}.items():

    @attack(f"{_what} instead of code", Rule.CUBIN_ARCH, place="kernel.cubin")
    def _(forged: Forged, code: bytes = _code) -> None:
        forged.change_entry(forged.folders[0], cubin=code)


_entry("metadata for another GPU", Rule.METADATA_TARGET, lambda data: data["metadata"]["target"].update(arch=120))
_entry(
    "metadata for another backend", Rule.METADATA_TARGET, lambda data: data["metadata"]["target"].update(backend="hip")
)
_entry("more shared memory than there is", Rule.SHARED_MEMORY, lambda data: data["metadata"].update(shared=232_449))


@attack("shared memory of a large card on a small one", Rule.SHARED_MEMORY, place="147456 bytes")
def _(forged: Forged) -> bytes:
    other = sound(profile="rtx-pro-6000-blackwell").copy()
    other.change_entry(other.folders[0], describe=lambda data: data["metadata"].update(shared=147_456))
    return other.data()


_entry("a path of a machine", Rule.NO_PATHS, lambda data: data["metadata"].update(extern_libs=[["lib", "/opt/lib.bc"]]))


@attack("a launcher that nothing launches by", Rule.LIBRARIES, place="lib/")
def _(forged: Forged) -> bytes:
    other, library = sound(launchers=True).copy(), b"\x7fELF" + bytes(60)
    other.files[f"lib/{digest.of_bytes(library).removeprefix('sha256:')}.so"] = library
    other.header["counts"]["libs"] += 1
    return other.data()


@attack("a launcher under another's name", Rule.LIBRARIES, place="lib/")
def _(forged: Forged) -> bytes:
    other = sound(launchers=True).copy()
    [name] = [name for name in other.files if name.startswith("lib/")]
    other.files[name] = b"\x7fELF" + bytes(60)
    return other.data()


@attack("a launcher that is not there", Rule.LIBRARIES, place="lib/")
def _(forged: Forged) -> bytes:
    other = sound(launchers=True).copy()
    [name] = [name for name in other.files if name.startswith("lib/")]
    del other.files[name]
    other.header["counts"]["libs"] = 0
    return other.data()


@attack("a launcher without Python's ABI", Rule.FINGERPRINT, place="python.abi")
def _(forged: Forged) -> bytes:
    other = sound(launchers=True).copy()
    facts = other.document("fingerprint.json")
    del facts["python.abi"]
    other.put("fingerprint.json", facts)
    return other.data()


# ---------------------------------------------------------------------------------------------- MUST 36 to 42


@attack("an entry that is not there", Rule.CHOICE_ENTRIES, place="choices.json")
def _(forged: Forged) -> None:
    folder = forged.folders[0]
    for half in ("kernel.cubin", "kernel.json"):
        del forged.files[f"{folder}/{half}"]
    forged.header["counts"]["entries"] -= 1


@attack("two entries exchanged in a choice", Rule.CHOICE_ENTRIES, place="choices.json")
def _(forged: Forged) -> None:
    choices = forged.document("choices.json")
    entries = choices[0]["entries"]
    entries[0][1], entries[1][1] = entries[1][1], entries[0][1]
    forged.put("choices.json", choices)


@attack("an entry of another kernel", Rule.CHOICE_ENTRIES, place="choices.json")
def _(forged: Forged) -> None:
    choices = forged.document("choices.json")
    ours, theirs = choices[0]["entries"], choices[-1]["entries"]
    for mine, other in zip(ours, theirs, strict=True):
        mine[1] = other[1]
    forged.put("choices.json", choices)


@attack("an entry that nothing uses", Rule.ENTRY_CHOICES, place="kernels/")
def _(forged: Forged) -> None:
    other = sound().copy()
    new = other.change_entry(other.folders[0], describe=lambda data: data.update(kernel="sample.module9:kernel9"))
    forged.files |= {name: data for name, data in other.files.items() if name.startswith(new)}
    forged.header["counts"]["entries"] += 1


@attack("an entry that no candidate needs", Rule.ENTRY_CHOICES, place="kernels/")
def _(forged: Forged) -> bytes:
    other = sound(made="compiled-only").copy()
    other.put("choices.json", [])
    other.header["counts"]["choices"] = 0
    other.change_entry(other.folders[0], describe=lambda data: data.update(kernel="sample.module9:kernel9"))
    return other.data()


@attack("another number of warps in a choice", Rule.WINNER_OPTIONS, Rule.WINNER_CANDIDATE, place="num_warps")
def _(forged: Forged) -> None:
    choices = forged.document("choices.json")
    choices[0]["winner"]["num_warps"] = 16
    forged.put("choices.json", choices)


@attack("another number of stages in a choice and the plan", Rule.WINNER_OPTIONS, place="num_stages")
def _(forged: Forged) -> None:
    choices, plan = forged.document("choices.json"), forged.document("plan.json")
    choices[0]["winner"]["num_stages"] = 5
    for candidate in plan["launches"][0]["candidates"]:
        candidate["num_stages"] = 5
    forged.put("choices.json", choices)
    forged.put("plan.json", plan)


for _name, _value in {"num_warps": 2, "num_stages": 4, "num_ctas": 2, "maxnreg": 128}.items():
    if _name in ("num_warps", "num_stages"):
        _entry(
            f"another {_name} in an entry's metadata",
            Rule.WINNER_OPTIONS,
            lambda data, name=_name, value=_value: data["metadata"].update({name: value}),
            _name,
        )
    else:

        @attack(f"{_name} in a choice alone", Rule.WINNER_OPTIONS, place=_name)
        def _(forged: Forged, name: str = _name, value: int = _value) -> None:
            choices = forged.document("choices.json")
            choices[0]["winner"][name] = value
            forged.put("choices.json", choices)


@attack("a choice dropped", Rule.PLANNED_CHOSEN, Rule.ENTRY_CHOICES, place="plan.json")
def _(forged: Forged) -> None:
    forged.put("choices.json", forged.document("choices.json")[1:])
    forged.header["counts"]["choices"] -= 1


@attack("a choice that nobody planned", Rule.PLANNED_CHOSEN, place="choices.json")
def _(forged: Forged) -> None:
    plan = forged.document("plan.json")
    del plan["launches"][0]
    forged.put("plan.json", plan)
    forged.header["counts"]["launches"] -= 1


@attack("a winner that was no candidate", Rule.WINNER_CANDIDATE, place="BLOCK=32")
def _(forged: Forged) -> None:
    choices = forged.document("choices.json")
    choices[0]["winner"]["meta"] = [["BLOCK", 32]]
    forged.put("choices.json", choices)


@attack("a winner that was rejected", Rule.WINNER_RECORDED, place="choices.json")
def _(forged: Forged) -> None:
    forged.files["record.jsonl"] = forged.files["record.jsonl"].replace(b'"outcome":"ok"', b'"outcome":"timeout"')


@attack("a winner that was never tried", Rule.WINNER_RECORDED, place="no line of the record")
def _(forged: Forged) -> None:
    lines = forged.files["record.jsonl"].splitlines(keepends=True)
    forged.files["record.jsonl"] = b"".join(lines[2:])
    forged.header["counts"]["record"] -= 2


@attack("a planned variant without an entry", Rule.SPECIALIZATIONS, Rule.ENTRY_CHOICES, place="1 planned")
def _(forged: Forged) -> None:
    choices = forged.document("choices.json")
    choices[0]["entries"].pop()
    forged.put("choices.json", choices)


@attack("another winner's entries", Rule.SPECIALIZATIONS, place="choices.json")
def _(forged: Forged) -> None:
    choices, plan = forged.document("choices.json"), forged.document("plan.json")
    winners = plan["launches"][0]["candidates"]
    choices[0]["winner"] = next(winner for winner in winners if winner != choices[0]["winner"])
    forged.put("choices.json", choices)


# ---------------------------------------------------------------------------------------------- MUST 43 to 46


@attack("code in a bundle of the interpreter", Rule.MADE, place="interpreted")
def _(forged: Forged) -> None:
    forged.header["made"] = "interpreted"


@attack("measured without code", Rule.MADE, place="measured")
def _(forged: Forged) -> bytes:
    other = sound(made="interpreted").copy()
    other.header["made"] = "measured"
    return other.data()


@attack("interpreted for a GPU", Rule.MADE, place="interpreted")
def _(forged: Forged) -> None:
    choices = forged.document("choices.json")
    for choice in choices:
        choice["entries"] = [[number, None] for number, _ in choice["entries"]]
    forged.put("choices.json", choices)
    forged.files = {name: data for name, data in forged.files.items() if not name.startswith("kernels/")}
    forged.header["made"] = "interpreted"
    forged.header["counts"]["entries"] = 0


edited(
    "a manifest for another GPU",
    Rule.PROFILE,
    "manifest.resolved.json",
    lambda resolved: resolved["gpu"].update(name="NVIDIA B200"),
    "`gpu`",
)
edited(
    "a manifest of another name", Rule.PROFILE, "manifest.resolved.json", lambda resolved: resolved.update(name="other")
)
edited_field("gpu.device", "NVIDIA H100 80GB HBM3", rule=Rule.PROFILE)
edited_field("gpu.device", "NVIDIA H200 ", rule=Rule.PROFILE)
edited_field("gpu.sm_count", 131, rule=Rule.PROFILE)
edited_field("gpu.shared_memory_bytes", 232_447, rule=Rule.PROFILE)
edited_field("build.line_info", True, rule=Rule.PROFILE)
edited_field("kernel.sources", "sha256:" + "0" * 64, rule=Rule.SOURCES)
edited(
    "plan: facts of another kernel",
    Rule.SOURCES,
    "plan.json",
    lambda plan: next(iter(plan["kernels"].values())).update(kernel="sample.module9:kernel9"),
    "sample.module",
)
edited("plan: another source", Rule.SOURCES, "plan.json", lambda plan: _other_source(plan), "kernel.sources")


def _other_source(plan: dict[str, Any]) -> None:
    next(iter(plan["kernels"].values()))["source_digest"] = "sha256:" + "0" * 64


@attack("a kernel without facts", Rule.SOURCES, place="sample.module0.kernel0")
def _(forged: Forged) -> None:
    plan = forged.document("plan.json")
    del plan["kernels"]["sample.module0.kernel0"]
    forged.put("plan.json", plan)


for _name in ("cases", "choices", "entries", "kernels", "launches", "libs", "record"):

    @attack(f"a wrong count of {_name}", Rule.COUNTS, place=_name)
    def _(forged: Forged, name: str = _name) -> None:
        forged.header["counts"][name] += 1
