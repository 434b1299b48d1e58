"""The measuring worker's process: ``python -m kernelbake.worker_main``, started and killed by the builder.

It gets one job, does it with the engine that the job names, and tells the builder of every start and outcome. The
builder alone writes the journal; a start is answered once it is on disk.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from kernelbake.errors import KernelbakeError
from kernelbake.outcome import Rejected
from kernelbake.plan import Plan
from kernelbake.worker import Channel

ENGINE = "kernelbake.measure:run"
"""What measures for real: called with job, plan and report. A job may name another function of that form."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What earlier workers have found out.

    Args:
        decided: winner of each launch, by their places in the plan.
        cases: ids of the cases whose steps have run to their end.
        met: launch and variant of every call of those steps.
    """

    decided: Mapping[int, int]
    cases: frozenset[str]
    met: tuple[tuple[int, int], ...]


class ChannelReport:
    """Tells the builder; implements ``measure.Progress``.

    Args:
        channel: to the builder.
        open_now: whether the workload may be opened at once.
    """

    def __init__(self, channel: Channel, *, open_now: bool) -> None:
        self._channel, self._open_now = channel, open_now
        self._rejected: dict[int, dict[int, Rejected]] = {}

    def rejected(self, launch: int) -> Mapping[int, Rejected]:
        return self._rejected.get(launch, {})

    def start(self, launch: int, candidate: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._channel.send({"event": "start", "launch": launch, "candidate": candidate})
        try:
            meanwhile()
        finally:
            self._channel.receive()

    def sampling(self, launch: int, candidate: int) -> None:
        self._channel.send({"event": "sampling", "launch": launch, "candidate": candidate})

    def outcome(self, launch: int, candidate: int, data: Mapping[str, Any]) -> None:
        self._channel.send({"event": "outcome", "launch": launch, "candidate": candidate, "data": dict(data)})

    def decided(self, launch: int, data: Mapping[str, Any]) -> None:
        self._channel.send({"event": "decided", "launch": launch, "data": dict(data)})

    def lost(self, message: str) -> None:
        self._channel.send({"event": "lost", "message": message})
        os._exit(0)

    def imported(self) -> None:
        if not self._open_now:
            self._channel.receive()

    def ready(self) -> Known:
        if self._open_now:
            self._channel.receive()
        known = self._channel.ask({"event": "ready"})
        self._rejected = {
            int(launch): {int(candidate): Rejected.from_json(data) for candidate, data in found.items()}
            for launch, found in known["rejected"].items()
        }
        return Known(
            decided={int(launch): winner for launch, winner in known["decided"].items()},
            cases=frozenset(known["cases_done"]),
            met=tuple((launch, variant) for launch, variant in known["met"]),
        )

    def outputs(self, launch: int, variant: int, data: Mapping[str, Any]) -> None:
        self._channel.send({"event": "outputs", "launch": launch, "variant": variant, "data": dict(data)})

    def case_done(self, case: str, met: Collection[tuple[int, int]]) -> None:
        self._channel.send({"event": "case", "case": case, "met": list(met)})


def work(channel: Channel) -> dict[str, Any]:
    """Does the job that waits on the channel; returns the last event, in which it ends."""
    job = channel.receive()
    try:
        module, _, name = job["engine"].partition(":")
        engine = getattr(importlib.import_module(module), name)
        plan = Plan.from_json(json.loads(Path(job["plan"]).read_bytes()))
        report = ChannelReport(channel, open_now=job["open_now"])
        return {"event": "done", "facts": engine(job, plan, report)}
    except KeyboardInterrupt:
        return {"event": "interrupted"}
    except KernelbakeError as error:
        return {
            "event": "refused",
            "kind": type(error).__name__,
            "message": error.message,
            "hint": error.hint,
            "reasons": list(error.reasons),
        }
    except Exception as error:
        traceback.print_exc()
        return {"event": "fault", "kind": type(error).__name__, "message": str(error).strip()}


def main() -> None:
    """The process; it ends without destructors, since a device that is lost can make those hang."""
    channel = Channel(sys.argv)
    channel.send(work(channel))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
