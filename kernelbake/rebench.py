"""Whether winners would win again: some keys of a bundle, decided anew on this machine as a build decides them.

For each sampled key all candidates are compiled (the winner's code is the bundle's own) and go through checks, race and
confirmation on live inputs, under the bundle's own policy. All other launches of the steps run the bundle's winners.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelbake import bundle, children, digest, gpu, packing
from kernelbake.compiling import Task, tasks_of
from kernelbake.errors import BuildError
from kernelbake.manifest import Manifest
from kernelbake.outcome import OK, Files
from kernelbake.plan import Launch
from kernelbake.progress import Event, OnEvent
from kernelbake.state import State, boot_id
from kernelbake.supervise import Supervision, Supervisor
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.bundle import Bundle

ENGINE = "kernelbake.measure:run"


class Standing(enum.StrEnum):
    """How a winner fares against the other candidates now."""

    WINNER = "still the winner"
    TIED = "tied"
    BEATEN = "beaten"
    REJECTED = "rejected"


@dataclasses.dataclass(frozen=True)
class Rebenched:
    """One key, decided anew.

    Args:
        name: kernel and key, for people.
        winner: the bundle's, as text.
        standing: how it fares.
        best: the fastest candidate now.
        median_ms, best_ms: of the two; None for a winner that was rejected.
        then_ms: what the bundle says of the winner.
        slower: by how much the winner is slower than the fastest, relative; None for one that was rejected.
        detail: why it was rejected; empty if it was not.
    """

    name: str
    winner: str
    standing: Standing
    best: str
    median_ms: float | None
    best_ms: float
    then_ms: float | None
    slower: float | None
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "standing": self.standing.value}

    def __str__(self) -> str:
        if self.median_ms is None or self.slower is None:
            return f"{self.name}: `{self.winner}` is rejected now ({self.detail}); `{self.best}`: {self.best_ms:.4f} ms"
        times = f"`{self.winner}` {self.median_ms:.4f} ms"
        if self.best != self.winner:
            times += f", `{self.best}` {self.best_ms:.4f} ms ({self.slower:+.1%})"
        return f"{self.name}: {self.standing}: {times}"


def sampled(held: Bundle, number: int, seed: int) -> list[int]:
    """Places of launches at which something is chosen: as many as wanted or there are, drawn by a seed, in order."""
    choosable = [place for place, launch in enumerate(held.plan.launches) if len(launch.candidates) > 1]
    return sorted(random.Random(seed).sample(choosable, min(number, len(choosable))))


def rebench(
    held: Bundle,
    number: int,
    *,
    seed: int = 0,
    allow_busy_gpu: bool = False,
    jobs: int | None = None,
    on_event: OnEvent = lambda event: None,
) -> tuple[Rebenched, ...]:
    """Decides some keys of a bundle anew.

    Args:
        held: the bundle.
        number: how many keys.
        seed: which.
        allow_busy_gpu: measure although other processes use the GPU.
        jobs: compiling processes; None for one per core.
        on_event: told of everything as it happens.

    Raises:
        BuildError: this machine has not the bundle's GPU, or it is busy; nothing can be compiled; a step does not run.
        CoverageError: the bundle was not measured yet.
        MisfitError: what would be compiled here is not what the bundle was compiled from or with.
    """
    bundle.refuse_unmeasured(held.made, held.name, "rebench")
    places = sampled(held, number, seed)
    if not places:
        return ()
    with tempfile.TemporaryDirectory(prefix="kernelbake-") as folder, contextlib.ExitStack() as stack:
        state = _Rebench(held, places, Path(folder), on_event, stack).run(allow_busy_gpu, jobs)
    return tuple(_standing(held, place, state) for place in places)


class _Rebench:
    """A build's measuring with all but some decisions known beforehand; its journal is memory."""

    def __init__(
        self, held: Bundle, places: list[int], folder: Path, on_event: OnEvent, stack: contextlib.ExitStack
    ) -> None:
        self._held, self._places, self._folder, self._on_event = held, places, folder, on_event
        self._stack = stack
        self._manifest = Manifest.from_resolved(held.manifest_resolved, held.manifest_text, held.name)
        self._files = Files(folder / "code")
        self._files.folder.mkdir()
        self._state = _known(held, places)

    def run(self, allow_busy_gpu: bool, jobs: int | None) -> State:
        environment = children.worker_environment(self._manifest, self._folder)
        if not self._manifest.interpreted:
            profile = self._manifest.profile.to_json()
            log = self._folder / "probe.log"
            monitor = gpu.wanted(profile, environment, log, allow_busy=allow_busy_gpu)
            self._stack.enter_context(gpu.reserved(monitor.uuid))
            self._compile(jobs or len(os.sched_getaffinity(0)))
        (self._folder / "codes.json").write_bytes(digest.canonical_json(self._state.codes))
        (self._folder / "plan.json").write_bytes(digest.canonical_json(self._held.plan.to_json()))
        limit = self._manifest.measure.time_limit_s
        supervision = Supervision(self._job(), environment, self._folder / "worker.log", limit)
        supervisor = Supervisor(supervision, self._state, self._state.add, boot_id(), self._on_event)
        supervisor.run()
        return self._state

    def _compile(self, jobs: int) -> None:
        """Takes the bundle's code and makes the rest."""
        plan, state = self._held.plan, self._state
        for (kernel, specialization), data in packing.take_code(self._held, self._files).items():
            if data["outcome"] == OK:
                state.codes[kernel][specialization] = data
        part = dataclasses.replace(plan, launches=tuple(plan.launches[place] for place in self._places))
        missing = [task for task in tasks_of(part) if task.id[1] not in state.codes[task.id[0]]]
        done = 0

        def on_done(task: Task, data: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            state.codes[task.id[0]][task.id[1]] = data
            self._on_event(Event("progress", "compile", done, len(missing), task.kernel.name))

        with children.compile_server(self._manifest, plan, self._files.folder, self._folder, jobs) as server:
            here, _ = server.facts()
            children.check_fits(self._held, here, "rebench")
            server.compile(missing, on_done)

    def _job(self) -> dict[str, Any]:
        manifest, folder = self._manifest, self._folder
        return {
            "engine": ENGINE,
            "plan": str(folder / "plan.json"),
            "codes": str(folder / "codes.json"),
            "folder": str(self._files.folder),
            "plugin": manifest.plugin,
            "section": dict(manifest.section),
            "interpreted": manifest.interpreted,
            "policy": manifest.measure.to_json(),
            "owned": self._places,
        }


def _known(held: Bundle, places: list[int]) -> State:
    """Where the measuring stands: all but the sampled launches are decided, and all but their cases done.

    The case of a launch is the last that makes it, in which a build meets it first.
    """
    state, wanted = State(held.plan), set(places)
    choices = {choice.id: choice for choice in held.choices}
    for place, launch in enumerate(held.plan.launches):
        if place not in wanted:
            state.decided[place] = {"winner": launch.candidates.index(choices[launch.id].winner)}
            state.met.update(dict.fromkeys((place, variant) for variant in range(len(launch.variants))))
    order = {case.id: place for place, case in enumerate(held.plan.cases)}
    needed = {max(held.plan.launches[place].cases, key=lambda case: order.get(case, -1)) for place in places}
    state.cases.update({case.id: None for case in held.plan.cases if case.id not in needed})
    return state


def _standing(held: Bundle, place: int, state: State) -> Rebenched:
    """How a launch's winner fares, from what was measured."""
    launch, decided = held.plan.launches[place], state.decided[place]
    choice = next(choice for choice in held.choices if choice.id == launch.id)
    return standing(launch, launch.candidates.index(choice.winner), choice.times, decided, state)


def standing(launch: Launch, held: int, then: Mapping[str, Any], decided: Mapping[str, Any], state: State) -> Rebenched:
    """How the winner of a bundle fares.

    Args:
        launch: the planned launch.
        held: the winner's place among the candidates.
        then: its times in the bundle.
        decided: what was decided now; ``tune.Report.decided`` says in what form.
        state: what became of candidates now.
    """
    candidates = decided["candidates"]
    best = min(candidates, key=lambda place: (candidates[place]["ratio"], int(place) != held))
    mine = candidates.get(str(held))
    names = {"name": str(launch), "winner": str(launch.candidates[held])}
    best_name, best_ms = str(launch.candidates[int(best)]), candidates[best]["median_ms"]
    if mine is None:
        fate = state.fates(state.plan.launches.index(launch)).get(held)
        return Rebenched(
            **names,
            standing=Standing.REJECTED,
            best=best_name,
            median_ms=None,
            best_ms=best_ms,
            then_ms=then.get("median_ms"),
            slower=None,
            detail=str(fate),
        )
    return Rebenched(
        **names,
        standing=_fares(decided, held, mine),
        best=best_name,
        median_ms=mine["median_ms"],
        best_ms=best_ms,
        then_ms=then.get("median_ms"),
        slower=mine["ratio"] - 1,
    )


def _fares(decided: Mapping[str, Any], held: int, mine: Mapping[str, Any]) -> Standing:
    """Beaten is who is slower than the fastest by more than a tie may be, beyond the uncertainty."""
    leaders = {decided["winner"], decided["candidates"][str(decided["winner"])].get("same_code_as")}
    if {held, mine.get("same_code_as")} & (leaders - {None}):
        return Standing.WINNER
    return Standing.BEATEN if mine["ratio"] - 1 - decided["band"] > mine["doubt"] else Standing.TIED


def refuse(found: tuple[Rebenched, ...], name: str) -> None:
    """Refuses a bundle of which a winner is beaten or rejected now.

    Raises:
        BuildError: a build would choose otherwise here; with every such key.
    """
    lost = [str(one) for one in found if one.standing in (Standing.BEATEN, Standing.REJECTED)]
    if lost:
        winners = f"{len(lost)} of {counted(len(found), 'winner')}"
        raise BuildError(
            f"bundle `{name}`: {winners} would not win again; wanted all of them to win or tie",
            reasons=lost,
            hint="the bundle still gives right results; for the best times, build it again on this machine",
        )
