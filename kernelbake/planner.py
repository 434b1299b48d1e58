"""Plans a workload in a child process with a clean environment; loads neither torch nor Triton here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import kernelbake
from kernelbake.bounds import Limits
from kernelbake.errors import InputError, KernelbakeError, PlanError, UnsupportedError
from kernelbake.plan import Plan
from kernelbake.profiles import DeviceProfile
from kernelbake.workload import Footprint

OnProgress = Callable[[int, int, str], None]
"""Called with cases done, cases in all, and what is being done."""

PACKAGE = Path(kernelbake.__file__).parent
"""Where this process has kernelbake from."""

_DROPPED = ("TRITON_", "CUDA_", "TORCH", "PYTORCH_", "NVIDIA_", "LD_PRELOAD", "FLA_CACHE_", "FLA_CONFIG_", "FLA_GPU_")
"""Prefixes of variables that a plan must not depend on. Other ``FLA_`` variables choose implementations: kept."""

_FIXED = {
    "CUDA_VISIBLE_DEVICES": "",
    "FLA_CACHE_RESULTS": "0",
    "FLA_CACHE_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(PACKAGE),  # torch makes the folder when it decorates: it is there
}

_ERRORS: dict[str, type[KernelbakeError]] = {
    "InputError": InputError,
    "FaultsError": InputError,
    "UnsupportedError": UnsupportedError,
}


def plan(
    plugin: str,
    section: Mapping[str, Any],
    profile: DeviceProfile,
    *,
    interpreted: bool,
    on_progress: OnProgress | None = None,
    paths: Sequence[Path | str] = (),
    limits: Limits | None = None,
) -> Plan:
    """Enumerates every launch of a workload, without its GPU.

    Args:
        plugin: name of an installed workload plug-in, or ``module:attribute`` of one that is not installed.
        section: the plug-in's section of the manifest.
        profile: the device profile to plan for.
        interpreted: plan for Triton's interpreter instead of a GPU.
        on_progress: called as the child goes on.
        paths: folders in which the child also looks for modules, before its own.
        limits: what the plan may grow to.

    Raises:
        PlanError: the workload cannot be planned, with the reason that the workload or a kernel library gave.
        InputError: there is no such plug-in, or it refuses its section.
        UnsupportedError: this Triton or torch is not supported.
    """
    with started(interpreted=interpreted) as child:
        return child.plan(plugin, section, profile, on_progress=on_progress, paths=paths, limits=limits)


@contextlib.contextmanager
def started(*, interpreted: bool) -> Iterator[Child]:
    """A planning process that loads torch and Triton while the caller does something else; ended with the block.

    Raises:
        InputError: no folder for temporary files can be written to.
    """
    with _temporary_file() as errors:
        process = subprocess.Popen(
            command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(os.environ, interpreted=interpreted),
        )
        try:
            yield Child(process, errors, interpreted)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]


def _temporary_file() -> IO[bytes]:
    """A file without a name.

    Raises:
        InputError: there is nowhere to make one.
    """
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise InputError(
            f"temporary files: {error.strerror}; wanted a folder that can be written to, since torch does not load "
            "without one",
            hint="point TMPDIR at one, in memory say",
        ) from error


def command() -> list[str]:
    """How the planning process is started: without the current folder among the places to find modules."""
    return [sys.executable, "-P", "-m", "kernelbake.shadow"]


def environment(inherited: Mapping[str, str], *, interpreted: bool) -> dict[str, str]:
    """The child's environment: what is inherited, less what a plan must not depend on, plus what it needs."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_DROPPED)}
    if sys.flags.ignore_environment:  # this process looks for modules without them, and so shall the child
        kept = {name: value for name, value in kept.items() if not name.startswith("PYTHON")}
    own_folder = str(PACKAGE.parent)
    folders = [folder for folder in kept.get("PYTHONPATH", "").split(os.pathsep) if folder]
    kept["PYTHONPATH"] = os.pathsep.join([*folders, own_folder])
    return {**kept, **_FIXED, **({"TRITON_INTERPRET": "1"} if interpreted else {})}


class Child:
    """A planning process. It makes one plan.

    Attributes:
        footprints: of each case's step, once the plan is made.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], interpreted: bool) -> None:
        self._process = process
        self._errors = errors
        self._interpreted = interpreted
        self.footprints: tuple[Footprint, ...] = ()

    def plan(
        self,
        plugin: str,
        section: Mapping[str, Any],
        profile: DeviceProfile,
        *,
        on_progress: OnProgress | None = None,
        paths: Sequence[Path | str] = (),
        limits: Limits | None = None,
    ) -> Plan:
        """As ``planner.plan``."""
        request = {
            "plugin": plugin,
            "section": section,
            "profile": profile.to_json(),
            "interpreted": self._interpreted,
            "paths": [str(Path(path).absolute()) for path in paths],
            "limits": dataclasses.asdict(limits or Limits()),
        }
        result = self._converse(request, on_progress)
        if result is None:
            raise self._death()
        if result.get("package") != str(PACKAGE.resolve()):
            raise InputError(
                f"plan: the planning process found kernelbake in `{result.get('package')}`; wanted the one of this "
                f"process, in `{PACKAGE}`",
                hint="take the other one out of PYTHONPATH",
            )
        self.footprints = tuple(map(Footprint.from_json, result["footprints"]))
        return Plan.from_json(result["plan"])

    def _converse(self, request: Mapping[str, Any], on_progress: OnProgress | None) -> Any:
        """Sends the request and follows the child's events; None when it ends without a plan or a refusal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "progress":
                if on_progress is not None:
                    on_progress(event["done"], event["total"], event["message"])
            elif event["event"] == "refused":
                kind = _ERRORS.get(event["kind"], PlanError)
                raise kind(event["message"], hint=event["hint"], reasons=event["reasons"])
            else:
                return event
        return None

    def _death(self) -> PlanError:
        self._process.wait()
        self._errors.seek(0)
        tail = self._errors.read()[-8000:].decode(errors="replace").strip().splitlines()[-12:]
        status = self._process.returncode
        return PlanError(f"plan: the planning process ended with status {status}; wanted a plan", reasons=tail)
