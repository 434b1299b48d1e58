"""A builder to be stopped in the middle: ``python -m stoppedbuild WHAT OUTPUT [PHASE]``, and what is left of it.

``WHAT`` is ``scripted`` (candidates are scripted; it waits for the signal where the phase begins), ``compiling`` (real
compilations and no other phase to speak of) or ``whole`` (the command as it is, for the packaged demonstration). All go
through the command line, whose business signals are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
_MARK = "KERNELBAKE_TEST_MARK"


class Stopped:
    """A builder in a process of its own.

    Args:
        what, output, phase: as on the command line above.
        environment: variables beside this process's own.
    """

    def __init__(self, what: str, output: Path, phase: str = "", **environment: str) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        paths = os.pathsep.join([str(SUPPORT), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stoppedbuild", what, str(output), phase],
            env={**os.environ, "PYTHONPATH": paths, name: value, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, reached: Callable[[dict[str, Any]], bool]) -> None:
        """Reads events until one of a kind has come."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if reached(json.loads(line)):
                return
        raise AssertionError(f"the builder ended: {self.end(signal.SIGKILL)}")

    def processes(self) -> list[str]:
        """The command lines of the builder and of everything that it started, directly or not, and that still runs."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # it has ended, or belongs to somebody else
        return found

    def wait_for(self, wanted: Callable[[list[str]], bool]) -> list[str]:
        """The processes as soon as they are as wanted; as they are after ten seconds if that is never."""
        deadline = time.monotonic() + 10
        while not wanted(found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Sends a signal; the exit status and what was written to stderr."""
        self._process.send_signal(number)
        _, errors = self._process.communicate(timeout=20)
        return self._process.returncode, errors


def _scripted(output: str, phase: str) -> None:
    """Blocks where the phase begins."""
    import scripted
    from test_build import PLAN

    from kernelbake import build, cli
    from kernelbake.build import Options

    def patched(manifest: Any, output: Path, *, on_event: Any, **options: Any) -> Any:
        def wait(event: Any) -> None:
            on_event(event)
            waits = event.kind == "progress" and event.done == 1 if phase == "measure" else event.kind == "phase"
            if event.phase == phase and waits:
                time.sleep(60)

        wanted = Options(engine=scripted.ENGINE, plan=PLAN, fingerprint=scripted.fingerprint(PLAN))
        return build.run(scripted.manifest(), output, wanted, wait)

    build.build = patched
    cli.main(["build", "-m", "cpu.yaml", "-o", output, "--json-events"])


def _compiling(output: str, phase: str) -> None:
    from test_stopped_compiling import MANIFEST, PLAN

    from kernelbake import build, cli
    from kernelbake.build import Options

    def patched(manifest: Any, output: Path, *, on_event: Any, **options: Any) -> Any:
        return build.run(MANIFEST, output, Options(compile_only=True, jobs=1, plan=PLAN), on_event)

    build.build = patched
    cli.main(["build", "-m", "cpu.yaml", "-o", output, "--json-events"])


def _whole(output: str, phase: str) -> None:
    from kernelbake import cli

    cli.main(["build", "-m", "cpu.yaml", "-o", output, "--json-events"])


def main(arguments: Sequence[str]) -> None:
    what, output, phase = arguments
    sys.path += [str(ROOT / "tests" / "unit"), str(ROOT / "tests" / "compile")]
    {"scripted": _scripted, "compiling": _compiling, "whole": _whole}[what](output, phase)


if __name__ == "__main__":
    main(sys.argv[1:])
