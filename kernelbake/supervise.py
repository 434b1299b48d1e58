"""The builder's side of measuring: one worker at a time, killed when it hangs, replaced when it is gone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernelbake import errors
from kernelbake.errors import BuildError, KernelbakeError
from kernelbake.outcome import OK, Reason, Rejected
from kernelbake.progress import Event, OnEvent
from kernelbake.state import State
from kernelbake.worker import Child, ChildDiedError

QUIET_LIMIT_S = 1800.0
"""The longest time without news outside of any candidate: importing libraries, building a model, one training step."""


@dataclasses.dataclass(frozen=True)
class Supervision:
    """What a supervisor needs to start workers.

    Args:
        job: for ``kernelbake.worker_main``, without what changes from worker to worker.
        environment: of the workers.
        log: file for what they print.
        time_limit_s: for one candidate.
        arguments: what follows ``python``.
    """

    job: Mapping[str, Any]
    environment: Mapping[str, str]
    log: Path
    time_limit_s: float
    arguments: tuple[str, ...] = ("-P", "-m", "kernelbake.worker_main")


class Supervisor:
    """Runs workers until every launch is decided.

    Args:
        supervision: how to start them.
        state: what is known; kept up to date.
        write: puts a record on disk and into the state.
        boot: which start of the machine this is.
        on_event: told of progress and rejections.

    Attributes:
        conditions: asked after every decision; what it says is kept with the decision.
        workers: how many have measured.
        opening_s: how long was waited for workers to import their libraries and build their models.
    """

    def __init__(
        self,
        supervision: Supervision,
        state: State,
        write: Callable[[Mapping[str, Any]], None],
        boot: str,
        on_event: OnEvent,
    ) -> None:
        self._supervision, self._state, self._write, self._boot = supervision, state, write, boot
        self._on_event = on_event
        self.conditions: Callable[[], Mapping[str, Any]] = dict
        self._current: tuple[int, int] | None = None
        self._next: Child | None = None
        self.workers = 0
        self.opening_s = 0.0

    def prepare(self, *, open_now: bool) -> None:
        """Starts the next worker ahead of time.

        Args:
            open_now: whether it shall also open the workload, which uses the GPU; else it imports its libraries only.
        """
        supervision = self._supervision
        child = Child(supervision.arguments, environment=supervision.environment, log=supervision.log)
        child.send({**supervision.job, "open_now": open_now})
        self._next = child

    def close(self) -> None:
        """Ends a worker that was started and not used."""
        if self._next is not None:
            self._next.close()
            self._next = None

    def run(self) -> dict[str, Any]:
        """The facts with which the last worker ended.

        Raises:
            KernelbakeError: what a worker refused with, or that it ended outside of any candidate.
            KeyboardInterrupt: a candidate was interrupted by a person.
        """
        try:
            while True:
                facts = self._one_worker()
                if facts is not None:
                    return facts
        finally:
            self.close()

    def _one_worker(self) -> dict[str, Any] | None:
        """Runs one worker to its end; None if another one has to go on."""
        self.workers += 1
        self._current = None
        if self._next is None:
            self.prepare(open_now=True)
        child, self._next = self._next, None
        assert child is not None
        if self.workers > 1:
            self.prepare(open_now=False)  # where one has fallen more will, and imports take longest
        try:
            self._open(child)
            while True:
                limit = self._supervision.time_limit_s if self._current else QUIET_LIMIT_S
                message = child.receive(limit)
                if message is None:
                    child.kill()
                    self._blame(Rejected(Reason.TIMEOUT, f"it took longer than {limit:g} s"), child)
                    return None
                if message["event"] in _ENDS:
                    return self._end(message, child)
                self._take(message, child)
        except ChildDiedError as death:
            self._blame(Rejected(Reason.CRASH, f"the worker ended with {death.how}"), child)
            return None
        finally:
            child.close()

    def _open(self, child: Child) -> None:
        """Waits until a worker has opened the workload and tells it what is known."""
        start = time.monotonic()
        child.send({"open": True})
        message = child.receive(QUIET_LIMIT_S)
        self.opening_s += time.monotonic() - start
        if message is None:
            raise BuildError(f"measure: the workload is not open after {QUIET_LIMIT_S:g} s; wanted it open")
        if message["event"] in _ENDS:
            self._end(message, child)
        child.send(self._known())

    def _known(self) -> dict[str, Any]:
        """What a new worker has to know of the earlier ones."""
        state = self._state
        rejected = {
            place: {candidate: fate.to_json() for candidate, fate in state.fates(place).items()}
            for place in range(len(state.plan.launches))
            if place not in state.decided
        }
        return {
            "decided": {place: data["winner"] for place, data in state.decided.items()},
            "rejected": rejected,
            "cases_done": list(state.cases),
            "met": list(state.met),
        }

    def _take(self, message: Mapping[str, Any], child: Child) -> None:
        event = message["event"]
        if event == "start":
            self._current = message["launch"], message["candidate"]
            launch, candidate = self._current
            self._write({"kind": "start", "launch": launch, "candidate": candidate, "boot": self._boot})
            child.send({"go": True})
        elif event == "sampling":
            self._current = message["launch"], message["candidate"]
        elif event == "outcome":
            self._outcome(message["launch"], message["candidate"], message["data"])
        elif event == "decided":
            self._current = None
            data = {**message["data"], "conditions": self.conditions()}
            self._write({"kind": "decided", "launch": message["launch"], "data": data})
            self._progress(str(self._state.plan.launches[message["launch"]].kernel.name))
        elif event == "outputs":
            record = {"kind": "outputs", "launch": message["launch"], "variant": message["variant"]}
            self._write({**record, "data": message["data"]})
        elif event == "case":
            self._write({"kind": "case", "case": message["case"], "met": message["met"]})

    def _outcome(self, launch: int, candidate: int, data: Mapping[str, Any]) -> None:
        self._write({"kind": "outcome", "launch": launch, "candidate": candidate, "data": data})
        if data["outcome"] != OK:
            planned = self._state.plan.launches[launch]
            config = planned.candidates[candidate]
            fate = Rejected.from_json(data)
            facts = {"kernel": planned.kernel.name, "config": str(config), "outcome": fate.reason.value}
            message = f"{planned} {config}: {fate}"
            self._on_event(Event("rejected", "measure", message=message, data=facts))

    def _progress(self, message: str) -> None:
        done, total = len(self._state.decided), len(self._state.plan.launches)
        self._on_event(Event("progress", "measure", done, total, message))

    def _blame(self, fate: Rejected, child: Child) -> None:
        """Writes down whose fault the end of a worker is.

        Raises:
            BuildError: no candidate was on trial.
        """
        if self._current is None:
            raise BuildError(
                f"measure: {fate.detail} while no candidate was on trial; wanted the step to go on",
                reasons=child.log_tail(),
            )
        launch, candidate = self._current
        self._outcome(launch, candidate, fate.to_json())

    def _end(self, message: Mapping[str, Any], child: Child) -> dict[str, Any] | None:
        event = message["event"]
        if event == "done":
            facts: dict[str, Any] = message["facts"]
            return facts
        if event == "lost":
            return None
        if event == "interrupted":
            raise KeyboardInterrupt
        if event == "refused":
            raise refusal(message)
        raise BuildError(
            f"measure: the step failed with `{message['kind']}`; wanted it to run",
            reasons=[*message["message"].splitlines()[:4], *child.log_tail(12)],
        )


_ENDS = frozenset({"done", "lost", "interrupted", "refused", "fault"})


def refusal(message: Mapping[str, Any]) -> KernelbakeError:
    """The error with which a worker refused."""
    kind = getattr(errors, message["kind"], BuildError)
    error: KernelbakeError = kind(message["message"], hint=message["hint"], reasons=message["reasons"])
    return error
