"""Hostile bundles with flawless bytes, one document of which is not what the format describes (MUST 21 to 26)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge import Forged
from hostile import attack

from kernelbake.rules import Rule

Change = Callable[[Any], None]


def edited(what: str, rule: Rule, name: str, change: Change, place: str = "") -> None:
    """An attack that changes one document and refreshes every digest."""

    @attack(what, rule, place=place or name)
    def _(forged: Forged) -> None:
        value = forged.document(name)
        change(value)
        forged.put(name, value)


def edited_field(name: str, value: Any, *, rule: Rule = Rule.FINGERPRINT) -> None:
    """An attack on one field of the fingerprint."""

    @attack(f"fingerprint: {name} is {value!r}", rule, place=name)
    def _(forged: Forged) -> None:
        facts = forged.document("fingerprint.json")
        facts[name]["value"] = value
        forged.put("fingerprint.json", facts)


# ---------------------------------------------------------------------------------------------- MUST 21 to 26


@attack("a manifest that is no text", Rule.MANIFEST, place="manifest.yaml")
def _(forged: Forged) -> None:
    forged.files["manifest.yaml"] = b"\xff\xfe"


@attack("a resolved manifest that is a list", Rule.MANIFEST, place="manifest.resolved.json")
def _(forged: Forged) -> None:
    forged.put("manifest.resolved.json", [1])


for _part in ("format", "name", "gpu", "workload", "measure", "compile"):
    edited(
        f"a resolved manifest without {_part}",
        Rule.MANIFEST,
        "manifest.resolved.json",
        lambda resolved, part=_part: resolved.pop(part),
        _part,
    )
edited(
    "a resolved manifest without plug-in",
    Rule.MANIFEST,
    "manifest.resolved.json",
    lambda resolved: resolved["workload"].pop("plugin"),
    "workload",
)


@attack("a fingerprint that is a list", Rule.FINGERPRINT, place="fingerprint.json")
def _(forged: Forged) -> None:
    forged.put("fingerprint.json", [])


for _name in ("gpu.capability", "gpu.device", "triton.key", "triton.environment", "kernel.sources"):
    edited(
        f"fingerprint: no {_name}",
        Rule.FINGERPRINT,
        "fingerprint.json",
        lambda facts, name=_name: facts.pop(name),
        _name,
    )
    edited(
        f"fingerprint: {_name} called informational",
        Rule.FINGERPRINT,
        "fingerprint.json",
        lambda facts, name=_name: facts[name].update({"class": "informational"}),
        _name,
    )
edited(
    "fingerprint: a field of another format",
    Rule.FINGERPRINT,
    "fingerprint.json",
    lambda facts: facts.update({"gpu.colour": {"class": "enforced", "value": "green"}}),
    "gpu.colour",
)
edited_field("gpu.sm_count", "132")
edited_field("gpu.sm_count", True)
edited_field("gpu.shared_memory_bytes", -1)
edited_field("gpu.capability", "9.0")
edited_field("gpu.capability", "90a\n")
edited_field("gpu.device", 1.5)
edited_field("triton.environment", {"TRITON_DEBUG": 1})
edited_field("triton.version", ["3.7.1"])


def _table(what: str, change: Change, place: str = "specializations.json") -> None:
    edited(f"specializations: {what}", Rule.TABLE, "specializations.json", change, place)


_table("a list", lambda table: table.update(rows={}), "rows")
_table("a field more", lambda table: table.update(extra=1), "extra")
_table("a row twice", lambda table: table["rows"].append(table["rows"][0]), "twice")
_table("unsorted rows", lambda table: table["rows"].reverse(), "sorted")
_table("unsorted parameters", lambda table: table["parameters"].reverse(), "sorted")
_table("a parameter twice", lambda table: table["parameters"].insert(0, table["parameters"][0]), "twice")
_table("a parameter that is not there", lambda table: table["rows"][0][1].append(99), "parameter 99")
_table("a negative number", lambda table: table["rows"][0][1].append(-1), "rows.0.1")
_table("an unused parameter", lambda table: table["parameters"].append(["z", "i32", None]), "no specialization has")
_table("a value of no type", lambda table: table["parameters"][0].__setitem__(2, []), "parameters.0.2")


def _grow(table: dict[str, Any]) -> None:
    table["parameters"].append(["z" * 10_000, "i32", None])
    table["rows"][-1][1] += [len(table["parameters"]) - 1] * 100_000


_table("a text that grows without end", _grow, "characters when written out")
edited(
    "specializations: a row that nothing launches",
    Rule.PLAN,
    "specializations.json",
    lambda table: table["rows"].append([[["zz", 1]], table["rows"][0][1]]),
    "not launched",
)
edited(
    "plan: a specialization that is not there",
    Rule.PLAN,
    "plan.json",
    lambda plan: _first(plan)["variants"][0]["specializations"].__setitem__(0, 99),
    "specialization 99",
)
edited(
    "choices: a specialization that is not there",
    Rule.CHOICES,
    "choices.json",
    lambda choices: choices[0]["entries"][1].__setitem__(0, 99),
    "specialization 99",
)
edited(
    "choices: unsorted entries", Rule.CHOICES, "choices.json", lambda choices: choices[0]["entries"].reverse(), "sorted"
)
edited("plan: no launches", Rule.PLAN, "plan.json", lambda plan: plan.pop("launches"))
edited("plan: a field more", Rule.PLAN, "plan.json", lambda plan: plan.update(extra=1), "extra")
edited(
    "plan: an unknown wrapper", Rule.PLAN, "plan.json", lambda plan: _first(plan)["variants"].append({}), "variants.2"
)
edited("plan: no variants", Rule.PLAN, "plan.json", lambda plan: _first(plan).update(variants=[]), "variants")
edited("plan: a kernel without module", Rule.PLAN, "plan.json", lambda plan: _first(plan).update(kernel="k"), "kernel")
edited(
    "plan: warps as a text", Rule.PLAN, "plan.json", lambda plan: _first(plan)["candidates"][0].update(num_warps="4")
)
edited(
    "plan: a value of no type",
    Rule.PLAN,
    "plan.json",
    lambda plan: _first(plan)["candidates"][0]["meta"][0].__setitem__(1, {"dtype": 1}),
    "meta.0.1",
)
edited("plan: a candidate less", Rule.PLAN, "plan.json", lambda plan: _first(plan)["candidates"].pop(), "candidate")
edited("plan: tuned without a key", Rule.PLAN, "plan.json", lambda plan: _first(plan).update(key=None), "without a key")
edited("plan: half a million faults", Rule.PLAN, "plan.json", lambda plan: plan.update(cases=[0] * 500_000), "cases.99")
edited("plan: a launch twice", Rule.PLAN, "plan.json", lambda plan: plan["launches"].append(_first(plan)), "twice")
edited("plan: unsorted", Rule.PLAN, "plan.json", lambda plan: plan["launches"].reverse(), "sorted")
edited("plan: a profile of another kind", Rule.PLAN, "plan.json", lambda plan: plan["profile"].update(colour="green"))
edited(
    "plan: a capability that is a text", Rule.PLAN, "plan.json", lambda plan: plan["profile"].update(capability="90")
)
edited(
    "plan: a source digest that is none",
    Rule.PLAN,
    "plan.json",
    lambda plan: next(iter(plan["kernels"].values())).update(source_digest="x"),
    "source_digest",
)


def _first(plan: dict[str, Any]) -> dict[str, Any]:
    launch: dict[str, Any] = plan["launches"][0]
    return launch


edited("choices: no winner", Rule.CHOICES, "choices.json", lambda choices: choices[0].pop("winner"), "winner")
edited("choices: a choice twice", Rule.CHOICES, "choices.json", lambda choices: choices.append(choices[0]), "twice")
edited("choices: unsorted", Rule.CHOICES, "choices.json", lambda choices: choices.reverse(), "sorted")
edited(
    "choices: an entry that is a number",
    Rule.CHOICES,
    "choices.json",
    lambda choices: choices[0]["entries"][0].__setitem__(1, 1),
    "entries",
)
edited(
    "choices: times that are a list", Rule.CHOICES, "choices.json", lambda choices: choices[0].update(times=[]), "times"
)


@attack("choices: an object", Rule.CHOICES, place="choices.json")
def _(forged: Forged) -> None:
    forged.put("choices.json", {})


for _what, _line in {
    "a last line without end": b"{}",
    "a line that is no object": b"[1]\n",
    "a line without kernel": b'{"config":{"meta":[]},"key":null,"outcome":"ok"}\n',
    "an unknown outcome": b'{"config":{"meta":[]},"kernel":"a:b","key":null,"outcome":"great"}\n',
    "outputs that are a list": b'{"config":{"meta":[]},"kernel":"a:b","key":null,"outcome":"ok","outputs":[]}\n',
    "outputs of no case": (
        b'{"config":{"meta":[]},"kernel":"a:b","key":null,"outcome":"ok","outputs":{"a":{"tensors":[],"tolerance":1}}}\n'
    ),
    "an empty line": b"\n",
    "NaN": b'{"median_ms":NaN}\n',
    "Infinity": b'{"median_ms":Infinity}\n',
    "a line with spaces": b'{"a": 1}\n',
    "a deep line": b"[" * 50_000 + b"]" * 50_000 + b"\n",
}.items():

    @attack(f"record: {_what}", Rule.RECORD, place="record.jsonl")
    def _(forged: Forged, line: bytes = _line) -> None:
        forged.files["record.jsonl"] += line
