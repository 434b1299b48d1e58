"""The build: plan, compile, measure, choose, pack, self-check. Each step writes down what the next one needs.

What a build has found out so far lies in a folder beside its output, ``<output>.work``, with the journal in it. A build
that was killed goes on from there; one that is done removes it. Nothing is printed: a caller follows by ``on_event``.

Every variant of every candidate is compiled before anything is measured (``compiling.tasks_of`` says why), so a
compile-only bundle holds everything that measuring can ask for.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelbake import bundle, children, digest, gpu, journal, packing, planner, workspace
from kernelbake.bounds import Limits
from kernelbake.compiling import CompileServer, Task, tasks_of
from kernelbake.errors import BuildError, InputError, MisfitError
from kernelbake.fingerprint import Fingerprint
from kernelbake.outcome import OK, Code, Files, Rejected
from kernelbake.plan import Plan
from kernelbake.progress import BuildResult, Event, OnEvent
from kernelbake.ranks import Ranks, joined
from kernelbake.state import State, boot_id
from kernelbake.supervise import Supervision, Supervisor
from kernelbake.tune import nobody
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.manifest import Manifest

ENGINE = "kernelbake.measure:run"
"""What measures for real, inside a worker: a function of job, plan and report."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to build, beside what the manifest says.

    Args:
        compile_only: compile all candidates and measure nothing.
        compiled_from: a bundle made with ``compile_only``, whose code is taken.
        jobs: compiling processes; None for one per core.
        allow_busy_gpu: measure although other processes use the GPU.
        max_variants: the most variants of arguments with which the plan may launch a kernel.
        engine: what measures.
        plan, fingerprint: where they are known already; None to find them out. A fingerprint is only known without a
            compile server, so it goes with the interpreter.
    """

    compile_only: bool = False
    compiled_from: Path | None = None
    jobs: int | None = None
    allow_busy_gpu: bool = False
    max_variants: int = Limits.max_variants
    engine: str = ENGINE
    plan: Plan | None = None
    fingerprint: Fingerprint | None = None


def build(
    manifest: Manifest,
    output: Path,
    *,
    compile_only: bool = False,
    compiled_from: Path | None = None,
    jobs: int | None = None,
    allow_busy_gpu: bool = False,
    line_info: bool = False,
    max_variants: int = Limits.max_variants,
    on_event: OnEvent = lambda event: None,
) -> BuildResult:
    """Builds a bundle.

    Args:
        manifest: what to bake.
        output: the bundle's name; an older one stays until the new one is complete and checked.
        compile_only: compile all candidates for the manifest's gpu target and measure nothing; needs no GPU.
        compiled_from: a bundle made with ``compile_only`` for the same plan; only measure.
        jobs: the number of compiling processes; default: cores of this machine that this process may use.
        allow_busy_gpu: measure although other processes use the GPU.
        line_info: keep source lines in the code; the bundle is marked.
        max_variants: the most variants of arguments with which one kernel may be launched.
        on_event: told of everything as it happens.

    Raises:
        BuildError: no bundle can be made; ``reasons`` says why, in full.
        InputError: the output cannot be written, or ``compiled_from`` cannot be read.
        LockedError: another build of this output runs.
        MisfitError: ``compiled_from`` was made for something else.
    """
    if line_info:
        compile_ = manifest.compile.model_copy(update={"line_info": True})
        manifest = dataclasses.replace(manifest, compile=compile_)
    options = Options(compile_only, compiled_from, jobs, allow_busy_gpu, max_variants)
    return run(manifest, Path(output), options, on_event)


def run(manifest: Manifest, output: Path, options: Options, on_event: OnEvent) -> BuildResult:
    """``build`` with its options in one place."""
    if options.compile_only and manifest.interpreted:
        raise InputError("build: the interpreter compiles nothing; wanted `--compile-only` for a GPU")
    if options.compile_only and options.compiled_from is not None:
        raise InputError("build: `--compile-only` and `--from` together; wanted one of them")
    with joined() as ranks:
        ranks.from_leader(lambda: bundle.check_output(output))
        with workspace.opened(output, ranks.rank) as folder:
            return _Build(manifest, output, options, folder, on_event, ranks).run()


class _Build:
    """One build from start to end."""

    def __init__(
        self, manifest: Manifest, output: Path, options: Options, folder: Path, on_event: OnEvent, ranks: Ranks
    ) -> None:
        self._manifest, self._output, self._options = manifest, output, options
        self._folder, self._ranks = folder, ranks
        self._on_event: OnEvent = on_event if ranks.leads else lambda event: None
        self._files = Files(folder / "code")
        self._seconds: dict[str, float] = {}
        self._boot = boot_id()
        self._facts: dict[str, Any] = {}

    def run(self) -> BuildResult:
        ranks = self._ranks
        if self._made == "measured":
            with self._phase("gpu"):
                self._monitor = ranks.together(self._wanted_gpu)
                ranks.check_distinct(self._monitor.uuid, "GPU")
        with self._phase("plan"):
            plan = ranks.from_leader(self._plan)
        state = State(plan)
        owned = ranks.mine([len(launch.candidates) for launch in plan.launches])
        supervisor = self._supervisor(plan, state, owned)
        with contextlib.ExitStack() as stack:
            if self._made == "measured":
                stack.enter_context(gpu.reserved(self._monitor.uuid))
            if not self._options.compile_only:
                stack.callback(supervisor.close)
                supervisor.prepare(open_now=True)  # it imports and opens the workload while others compile
            fingerprint, utilities, server, source = ranks.together(lambda: self._start(plan, stack))
            ranks.check_same(_facts(fingerprint), "fingerprint")
            for name, value in (_facts(fingerprint).get("build.environment") or {}).items():
                self._on_event(Event("note", "start", message=f"`{name}={value}` asks the compiler for other code"))
            self._open_journal(state, fingerprint)
            stack.callback(self._journal.close)
            if server is not None:
                with self._phase("compile"):
                    ranks.together(lambda: self._compile(plan, state, server, source))
                    self._share_code(plan, state)
                    ranks.together(lambda: self._check_usable(plan, state))
                server.close()
            if not self._options.compile_only:
                with self._phase("measure"):
                    ranks.together(lambda: self._measure(state, supervisor))
                    self._share_decisions(state, owned)
                self._seconds["measure"] -= self._seconds["open"]
            result = ranks.from_leader(lambda: self._deliver(plan, state, fingerprint, utilities))
            return dataclasses.replace(result, tells=ranks.leads)

    def _deliver(self, plan: Plan, state: State, fingerprint: Fingerprint, utilities: str | None) -> BuildResult:
        """Packs, checks and renames."""
        with self._phase("pack"):
            packed = self._pack(plan, state, fingerprint, utilities)
        with self._phase("self-check"):
            self._self_check(packed)
        packed.replace(self._output)
        journal.sync_folder(self._output.parent)
        return self._result(plan, state)

    def _start(
        self, plan: Plan, stack: contextlib.ExitStack
    ) -> tuple[Fingerprint, str | None, CompileServer | None, bundle.Bundle | None]:
        """Fingerprint, helper library, the compile server where one is needed, and the bundle to take code from."""
        if self._options.fingerprint is not None:
            return self._options.fingerprint, None, None, None
        source = self._compiled_bundle(plan)
        jobs = self._options.jobs or max(1, len(os.sched_getaffinity(0)) // self._ranks.local_world)
        with self._phase("start"):
            server = stack.enter_context(self._server(plan, 0 if self._manifest.interpreted or source else jobs))
            fingerprint, utilities = server.facts()
        if source is not None:
            children.check_fits(source, fingerprint, "--from")
        return fingerprint, utilities, None if self._manifest.interpreted else server, source

    @property
    def _made(self) -> bundle.Made:
        if self._manifest.interpreted:
            return "interpreted"
        return "compiled-only" if self._options.compile_only else "measured"

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._on_event(Event("phase", name))
        start = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - start

    def _wanted_gpu(self) -> gpu.Monitor:
        """The GPU to measure on, which has to be the manifest's and free; found out before anything takes time."""
        profile, log = self._manifest.profile.to_json(), self._folder / "probe.log"
        return gpu.wanted(profile, self._worker_environment(), log, allow_busy=self._options.allow_busy_gpu)

    # ------------------------------------------------------------------------------------------ plan

    def _plan(self) -> Plan:
        manifest = self._manifest
        if self._options.plan is not None:
            return self._options.plan

        def on_progress(done: int, total: int, message: str) -> None:
            self._on_event(Event("progress", "plan", done, total, message))

        return planner.plan(
            manifest.plugin,
            manifest.section,
            manifest.profile,
            interpreted=manifest.interpreted,
            on_progress=on_progress,
            limits=Limits(max_variants=self._options.max_variants),
        )

    def _compiled_bundle(self, plan: Plan) -> bundle.Bundle | None:
        path = self._options.compiled_from
        if path is None:
            return None
        found = bundle.read(path)
        if found.made != "compiled-only":
            raise InputError(f"--from `{path}`: it was made `{found.made}`; wanted one made with `--compile-only`")
        if _identity(found.plan) != _identity(plan):
            raise MisfitError(
                f"--from `{path}`: it was compiled for another plan; wanted the plan of this manifest on this machine",
                hint="compare the two with `kernelbake coverage`, and compile again",
            )
        return found

    # ------------------------------------------------------------------------------------------ compile

    def _server(self, plan: Plan, jobs: int) -> CompileServer:
        return children.compile_server(self._manifest, plan, self._files.folder, self._folder, jobs)

    def _open_journal(self, state: State, fingerprint: Fingerprint) -> None:
        header = {
            "manifest": digest.of_bytes(digest.canonical_json(self._manifest.resolved())),
            "plan": _identity(state.plan),
            "fingerprint": digest.of_bytes(digest.canonical_json(fingerprint.to_json())),
        }
        self._journal = journal.Journal(self._folder / "journal", header)
        if self._journal.restarted:
            message = f"the journal of an earlier build is not used: {self._journal.restarted}"
            self._on_event(Event("note", "start", message=message))
        elif self._journal.records:
            message = f"going on from a journal of {counted(len(self._journal.records), 'record')}"
            self._on_event(Event("note", "start", message=message))
        for record in self._journal.records:
            state.add(record)
        for record in list(state.fallen(self._boot)):
            self._write(state, record)

    def _write(self, state: State, record: Mapping[str, Any], *, durable: bool = True) -> None:
        self._journal.append(record, durable=durable)
        state.add(record)

    def _compile(self, plan: Plan, state: State, server: CompileServer, source: bundle.Bundle | None) -> None:
        """Fills ``state.codes``; what an earlier build compiled counts if its files are still sound."""
        tasks = tasks_of(plan)[self._ranks.rank :: self._ranks.world]
        known = packing.take_code(source, self._files) if source is not None else {}
        missing = []
        for task in tasks:
            data = known.get(task.id) or state.codes[task.id[0]].get(task.id[1])
            if data is None or not self._sound(data):
                missing.append(task)
            elif task.id in known:
                self._compiled(state, task, data)
        if source is not None and missing:
            lacking = f"{counted(len(missing), 'specialization')} of {len(tasks):,}"
            raise BuildError(f"--from: no code for {lacking}; wanted code for all")
        done = len(tasks) - len(missing)
        self._on_event(Event("progress", "compile", done, len(tasks)))

        def on_done(task: Task, data: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            self._compiled(state, task, data)
            self._on_event(Event("progress", "compile", done, len(tasks), task.kernel.name))

        server.compile(missing, on_done)

    def _share_code(self, plan: Plan, state: State) -> None:
        """Gives every rank what the others compiled."""
        ranks = self._ranks
        if ranks.world == 1:
            return
        mine = []
        for task in tasks_of(plan)[ranks.rank :: ranks.world]:
            data = state.codes[task.id[0]][task.id[1]]
            names = Code.from_json(data["code"]).files if data["outcome"] == OK else ()
            mine.append((task, data, [self._files[name] for name in names]))
        for rank, found in enumerate(ranks.gather(mine)):
            for task, data, contents in found if rank != ranks.rank else ():
                for content in contents:
                    self._files.put(content)
                self._compiled(state, task, data)

    def _sound(self, data: Mapping[str, Any]) -> bool:
        if data["outcome"] != OK:
            return True
        return all(self._files.sound(name) for name in Code.from_json(data["code"]).files)

    def _compiled(self, state: State, task: Task, data: Mapping[str, Any]) -> None:
        kernel, specialization = task.id
        record = {"kind": "compiled", "kernel": kernel, "specialization": specialization, "data": data}
        self._write(state, record)
        if data["outcome"] != OK:
            fate = Rejected.from_json(data)
            facts = {"kernel": task.kernel.name, "specialization": specialization, "outcome": fate.reason.value}
            message = f"{task.kernel.name} {task.specialization}: {fate}"
            self._on_event(Event("rejected", "compile", message=message, data=facts))

    def _check_usable(self, plan: Plan, state: State) -> None:
        """Ends the build before anything is measured if a launch has no candidate left; all such launches at once."""
        failed = []
        for place, launch in enumerate(plan.launches):
            fates = state.fates(place)
            if len(fates) == len(launch.candidates):
                failed.append(nobody(launch, fates))
        if len(failed) == 1:
            raise failed[0]
        if failed:
            reasons = [line for error in failed for line in (error.message, *(f"  {text}" for text in error.reasons))]
            raise BuildError(
                f"compile: {len(failed)} launches have no candidate left; wanted one each", reasons=reasons
            )

    # ------------------------------------------------------------------------------------------ measure

    def _supervisor(self, plan: Plan, state: State, owned: list[int]) -> Supervisor:
        planned = self._folder / "plan.json"
        planned.write_bytes(digest.canonical_json(plan.to_json()))
        manifest = self._manifest
        job = {
            "engine": self._options.engine,
            "plan": str(planned),
            "codes": str(self._folder / "codes.json"),
            "folder": str(self._files.folder),
            "plugin": manifest.plugin,
            "section": dict(manifest.section),
            "interpreted": manifest.interpreted,
            "policy": manifest.measure.to_json(),
            "owned": owned,
        }
        environment, log = self._worker_environment(), self._folder / "worker.log"
        supervision = Supervision(job, environment, log, manifest.measure.time_limit_s)

        def write(record: Mapping[str, Any]) -> None:
            self._write(state, record)

        return Supervisor(supervision, state, write, self._boot, self._on_event)

    def _measure(self, state: State, supervisor: Supervisor) -> None:
        (self._folder / "codes.json").write_bytes(digest.canonical_json(state.codes))
        if self._made == "measured":
            monitor = self._monitor
            first = monitor.conditions(own=1).to_json()
            self._on_event(Event("note", "measure", message=f"GPU `{monitor.uuid}`: {gpu.shown(first)}", data=first))
            supervisor.conditions = lambda: monitor.conditions(own=1).to_json() if monitor.cheap else first
        self._facts = supervisor.run()
        self._seconds["open"] = supervisor.opening_s

    def _share_decisions(self, state: State, owned: list[int]) -> None:
        """Gives every rank what the others found out about their launches."""
        mine = [record for place in owned for record in state.records_of(place)]
        for rank, records in enumerate(self._ranks.gather(mine)):
            for record in records if rank != self._ranks.rank else ():
                self._write(state, record)

    def _worker_environment(self) -> dict[str, str]:
        return {**children.worker_environment(self._manifest, self._folder), **self._ranks.device_variables()}

    # ------------------------------------------------------------------------------------------ pack

    def _pack(self, plan: Plan, state: State, fingerprint: Fingerprint, utilities: str | None) -> Path:
        manifest = self._manifest
        contents = packing.contents(manifest, self._made, plan, state, fingerprint, self._files, utilities)
        path = self._folder / "bundle.tar"
        self._digest = bundle.write(path, contents)
        self._entries = len(contents.entries)
        return path

    def _self_check(self, packed: Path) -> None:
        """Resolves and, on a GPU, loads everything that the plan asks for, in a process that has seen none of it."""
        packing.self_check(
            packed,
            environment=self._worker_environment(),
            log=self._folder / "self-check.log",
            on_device=not (self._manifest.interpreted or self._options.compile_only),
        )

    def _result(self, plan: Plan, state: State) -> BuildResult:
        rejected: collections.Counter[str] = collections.Counter()
        for place in range(len(plan.launches)):
            rejected.update(fate.reason.value for fate in state.fates(place).values())
        wall, busy = self._facts.get("wall_ms"), self._facts.get("busy_ms")
        return BuildResult(
            path=self._output,
            digest=self._digest,
            made=self._made,
            keys=plan.num_keys,
            candidates=plan.num_candidates,
            rejected=rejected,
            bundle_bytes=self._output.stat().st_size,
            entries=self._entries,
            seconds=self._seconds,
            device_busy_share=busy / wall if wall and busy is not None else None,
            measuring=self._facts.get("seconds", {}),
        )


def _facts(fingerprint: Fingerprint) -> dict[str, Any]:
    return {field.name: field.value for field in fingerprint.fields}


def _identity(plan: Plan) -> str:
    """Digest of what a plan asks for; the versions of the planning process are the fingerprint's business."""
    return digest.of_bytes(digest.canonical_json({**plan.to_json(), "versions": None}))
