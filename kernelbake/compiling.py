"""The builder's side of compiling: hands tasks to the compile server and takes the outcomes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelbake.errors import BuildError, InputError
from kernelbake.fingerprint import Fingerprint
from kernelbake.keys import Kernel, Specialization
from kernelbake.plan import Plan
from kernelbake.worker import Child, ChildDiedError

_START_LIMIT_S = 600.0
"""Importing a kernel library takes seconds, on a slow network file system minutes."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One specialization of one kernel."""

    kernel: Kernel
    specialization: Specialization

    @property
    def id(self) -> tuple[str, str]:
        """Kernel and digest of the specialization."""
        return self.kernel.to_json(), self.specialization.digest


def tasks_of(plan: Plan) -> list[Task]:
    """Everything that a plan may need: every variant of every candidate, each once.

    A winner has to run in all its variants. That a candidate fails to compile in one of them has to be known before it
    is chosen, so all are compiled and none is made later, while the GPU waits.
    """
    found: dict[tuple[str, str], Task] = {}
    for launch in plan.launches:
        for variant in launch.variants:
            for specialization in variant.specializations:
                task = Task(launch.kernel, specialization)
                found.setdefault(task.id, task)
    return list(found.values())


class CompileServer:
    """A compile server while it is needed; a context manager.

    Args:
        job: for ``kernelbake.compile``: ``profile``, ``kernels``, ``folder``, ``jobs``, ``time_limit_s`` and
            ``interpreted``.
        environment: of the process.
        log: file for what it prints.
    """

    def __init__(self, job: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> None:
        self._job, self._environment, self._log = job, environment, log

    def __enter__(self) -> CompileServer:
        self._child = Child(["-P", "-m", "kernelbake.compile"], environment=self._environment, log=self._log)
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends its processes."""
        if self._open:
            self._open = False
            self._child.close()

    def facts(self) -> tuple[Fingerprint, str | None]:
        """Waits until it is ready: the fingerprint of its process, and the digest of Triton's helper library.

        Raises:
            BuildError: a kernel is not found, or the process ended.
        """
        self._child.send(self._job)
        ready = self._receive(_START_LIMIT_S)
        if ready is None:
            raise BuildError(f"compile: the server is not ready after {_START_LIMIT_S:.0f} s; wanted it ready")
        if ready["event"] == "refused":
            raise BuildError(f"compile: {ready['message']}")
        self._sizes: Mapping[str, int] = ready["sizes"]
        return Fingerprint.from_json(ready["fingerprint"]), ready["utilities"]

    def compile(self, tasks: Sequence[Task], on_done: Callable[[Task, dict[str, Any]], None]) -> None:
        """Compiles everything; ``on_done`` is called as outcomes come, in no fixed order.

        Raises:
            BuildError: nothing can be compiled for this gpu target here, or the server ended.
            InputError: the disk is full.
            KeyboardInterrupt: a candidate was interrupted by a person.
        """
        # the longest first, else the end is one by one
        longest_first = sorted(tasks, key=lambda task: -self._sizes[task.kernel.to_json()])
        waiting: Iterator[tuple[int, Task]] = iter(enumerate(longest_first))
        running: dict[int, Task] = {}
        room = 2 * self._job["jobs"]
        for number, task in waiting:
            self._submit(number, task, running)
            if len(running) >= room:
                break
        while running:
            answer = self._receive(None)
            assert answer is not None
            task = running.pop(answer.pop("id"))
            _check(answer)
            on_done(task, answer)
            for number, following in waiting:
                self._submit(number, following, running)
                break

    def _submit(self, number: int, task: Task, running: dict[int, Task]) -> None:
        running[number] = task
        kernel, specialization = task.kernel.to_json(), task.specialization.to_json()
        self._child.send({"id": number, "kernel": kernel, "specialization": specialization})

    def _receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        try:
            return self._child.receive(timeout_s)
        except ChildDiedError as death:
            raise BuildError(
                f"compile: the server ended with {death.how}; wanted it to go on", reasons=self._child.log_tail()
            ) from death


def _check(answer: Mapping[str, Any]) -> None:
    if answer["outcome"] == "toolchain":
        raise BuildError(
            f"compile: {answer['detail']}; wanted an assembler that knows the gpu target",
            hint="set TRITON_PTXAS_PATH (TRITON_PTXAS_BLACKWELL_PATH from sm_100 on) to a newer ptxas",
        )
    if answer["outcome"] == "disk":
        raise InputError(
            f"compile: code cannot be kept ({answer['detail']}); wanted room beside the output",
            hint="free some room and build again: the build goes on from its journal",
        )
    if answer["outcome"] == "interrupted":
        raise KeyboardInterrupt
