"""Counts what a frozen run must not do: compile, benchmark, start processes. The same counters run in a stock run.

They sit inside Triton and Python: Triton's listener on compilations, the method that benchmarks a candidate, and
Python's audit events of new processes. Loads Triton when it starts.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import Any

_PROCESS_EVENTS = frozenset(("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "os.system"))


@dataclasses.dataclass
class Proof:
    """The counts since ``start``; any thread may count.

    Args:
        compilations: kernels that Triton compiled.
        benchmarks: candidates that an autotuner timed.
        subprocesses: processes that Python started: compilers, linkers, assemblers among them.
    """

    compilations: int = 0
    benchmarks: int = 0
    subprocesses: int = 0

    def lines(self) -> list[str]:
        """One line for each count."""
        return [
            f"compilations at run time: {self.compilations}",
            f"benchmarks at run time: {self.benchmarks}",
            f"subprocesses at run time: {self.subprocesses}",
        ]


def start() -> Proof:
    """Counts from now to the end of the process; call it once, after everything allowed to start processes has."""
    import triton
    from triton.runtime.autotuner import Autotuner

    proof, lock = Proof(), threading.Lock()

    def count(name: str) -> None:
        with lock:
            setattr(proof, name, getattr(proof, name) + 1)

    previous = triton.knobs.compilation.listener

    def listener(*args: Any, **kwargs: Any) -> None:
        if not kwargs.get("cache_hit", False):
            count("compilations")
        if previous is not None:
            previous(*args, **kwargs)

    triton.knobs.compilation.listener = listener
    benchmark = Autotuner._bench

    def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        count("benchmarks")
        return benchmark(self, *args, **kwargs)

    Autotuner._bench = bench

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _PROCESS_EVENTS:
            count("subprocesses")

    sys.addaudithook(hook)
    return proof
