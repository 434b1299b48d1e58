"""Where a build stands: the journal's records folded into what is known, and nothing else."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernelbake.outcome import OK, Reason, Rejected
from kernelbake.plan import Launch, Plan


def boot_id() -> str:
    """Which start of the machine this is; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class State:
    """What is known about the candidates of a plan.

    Attributes:
        codes: outcome of compiling, by kernel and digest of the specialization.
        rejected: by launch and candidate, those that cannot be used; only what measuring found.
        decided: what was decided, by launch.
        outputs: what winners wrote, by launch and variant.
        cases: ids of the cases whose steps have run to their end.
        met: launch and variant of every call that a finished worker has seen.
        facts: of the workers that finished a build's steps, added up.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.codes: dict[str, dict[str, Any]] = collections.defaultdict(dict)
        self.rejected: dict[int, dict[int, Rejected]] = collections.defaultdict(dict)
        self.decided: dict[int, Mapping[str, Any]] = {}
        self.outputs: dict[int, dict[int, Mapping[str, Any]]] = collections.defaultdict(dict)
        self.cases: dict[str, None] = {}
        self.met: dict[tuple[int, int], None] = {}
        self._started: dict[tuple[int, int], str] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes one record in."""
        kind = record["kind"]
        if kind == "compiled":
            self.codes[record["kernel"]][record["specialization"]] = record["data"]
        elif kind == "start":
            self._started[record["launch"], record["candidate"]] = record["boot"]
        elif kind == "outcome":
            self._started.pop((record["launch"], record["candidate"]), None)
            if record["data"]["outcome"] != OK:
                fate = Rejected.from_json(record["data"])
                self.rejected[record["launch"]][record["candidate"]] = fate
        elif kind == "decided":
            self.decided[record["launch"]] = record["data"]
        elif kind == "outputs":
            self.outputs[record["launch"]][record["variant"]] = record["data"]
        elif kind == "case":
            self.cases[record["case"]] = None
            self.met.update(dict.fromkeys((launch, variant) for launch, variant in record["met"]))

    def fallen(self, boot: str) -> Iterable[dict[str, Any]]:
        """Outcomes for candidates that took the whole machine with them.

        A start without an outcome says nothing if only the builder was killed; the candidate starts again. If the
        machine was started anew since, the candidate is not given a second chance to bring it down.
        """
        for (launch, candidate), then in sorted(self._started.items()):
            if boot and then and then != boot:
                fate = Rejected(Reason.CRASH, "the machine went down while it ran")
                yield {"kind": "outcome", "launch": launch, "candidate": candidate, "data": fate.to_json()}

    def records_of(self, place: int) -> list[dict[str, Any]]:
        """The records that tell another state what measuring found out about a launch."""
        records: list[dict[str, Any]] = [
            {"kind": "outcome", "launch": place, "candidate": candidate, "data": fate.to_json()}
            for candidate, fate in sorted(self.rejected.get(place, {}).items())
        ]
        if place in self.decided:
            records.append({"kind": "decided", "launch": place, "data": dict(self.decided[place])})
        for variant, data in sorted(self.outputs.get(place, {}).items()):
            records.append({"kind": "outputs", "launch": place, "variant": variant, "data": dict(data)})
        return records

    def fates(self, place: int) -> dict[int, Rejected]:
        """All candidates of a launch that cannot be used, those that did not compile included."""
        launch = self.plan.launches[place]
        found = dict(self.rejected.get(place, {}))
        for candidate in range(len(launch.candidates)):
            fate = self.uncompiled(launch, candidate)
            if fate is not None:
                found.setdefault(candidate, fate)
        return found

    def uncompiled(self, launch: Launch, candidate: int) -> Rejected | None:
        """Why a candidate has no code for one of its variants, or None."""
        codes = self.codes.get(launch.kernel.to_json(), {})
        for variant in launch.variants:
            data = codes.get(variant.specializations[candidate].digest)
            if data is not None and data["outcome"] != OK:
                return Rejected.from_json(data)
        return None
