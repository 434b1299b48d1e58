"""Plans a workload in a child process with a clean environment; loads neither torch nor Triton here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import kernelbake
from kernelbake.bounds import Limits
from kernelbake.errors import InputError, KernelbakeError, PlanError, UnsupportedError
from kernelbake.plan import Plan
from kernelbake.profiles import DeviceProfile

Progress = Callable[[str, int, int], None]
"""Called with phase (``import``, ``open``, ``cases``), steps done and steps in all."""

_DROPPED = ("TRITON_", "CUDA_", "TORCH", "PYTORCH_", "NVIDIA_", "LD_PRELOAD", "FLA_CACHE_", "FLA_CONFIG_", "FLA_GPU_")
"""Prefixes of variables that a plan must not depend on. Other ``FLA_`` variables choose implementations: kept."""

_FIXED = {
    "CUDA_VISIBLE_DEVICES": "",
    "FLA_CACHE_RESULTS": "0",
    "FLA_CACHE_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}

_ERRORS = {error.__name__: error for error in (PlanError, InputError, UnsupportedError)}


def plan(
    plugin: str,
    section: Mapping[str, Any],
    profile: DeviceProfile,
    *,
    interpreted: bool,
    on_progress: Progress | None = None,
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
    request = {
        "plugin": plugin,
        "section": section,
        "profile": profile.to_json(),
        "interpreted": interpreted,
        "paths": [str(Path(path).absolute()) for path in paths],
        "limits": dataclasses.asdict(limits or Limits()),
    }
    with tempfile.TemporaryFile() as errors:
        child = _spawn(interpreted, errors)
        try:
            result = _converse(child, request, on_progress or (lambda phase, done, total: None))
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        if result is None:
            raise _died(child.returncode, errors)
    return Plan.from_json(result)


def environment(inherited: Mapping[str, str], *, interpreted: bool) -> dict[str, str]:
    """The child's environment: what is inherited, less what a plan must not depend on, plus what it needs."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_DROPPED)}
    own_folder = str(Path(kernelbake.__file__).parent.parent)
    folders = [folder for folder in kept.get("PYTHONPATH", "").split(os.pathsep) if folder]
    kept["PYTHONPATH"] = os.pathsep.join([*folders, own_folder])
    return {**kept, **_FIXED, **({"TRITON_INTERPRET": "1"} if interpreted else {})}


def _spawn(interpreted: bool, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kernelbake.shadow"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment(os.environ, interpreted=interpreted),
    )


def _converse(child: subprocess.Popen[bytes], request: Mapping[str, Any], on_progress: Progress) -> Any:
    """Sends the request and follows the child's events; None when it ends without a plan or a refusal."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    for line in child.stdout:
        event = json.loads(line)
        if event["event"] == "progress":
            on_progress(event["phase"], event["done"], event["total"])
        elif event["event"] == "refused":
            raise _refusal(event)
        else:
            return event["plan"]
    return None


def _refusal(event: Mapping[str, Any]) -> KernelbakeError:
    kind = _ERRORS.get(event["kind"], InputError if event["kind"] == "FaultsError" else PlanError)
    return kind(event["message"], hint=event["hint"], reasons=event["reasons"])


def _died(status: int, errors: IO[bytes]) -> PlanError:
    errors.seek(0)
    tail = errors.read()[-8000:].decode(errors="replace").strip().splitlines()[-12:]
    return PlanError(f"plan: the planning process ended with status {status}; wanted a plan", reasons=tail)
