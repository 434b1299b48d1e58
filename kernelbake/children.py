"""How the children of a build are started: their environments, and the compile server's job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kernelbake import planner
from kernelbake.compiling import CompileServer
from kernelbake.errors import MisfitError
from kernelbake.fingerprint import Fingerprint, compare
from kernelbake.plan import Plan
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.bundle import Bundle
    from kernelbake.manifest import Manifest

_COMPILE_LIMIT_FACTOR = 10
"""A compilation may take this many times as long as the measuring of a candidate."""

_PASSED = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
"""Variables of Triton that a build obeys: which assembler it uses. All others would change code behind its back."""


def worker_environment(manifest: Manifest, folder: Path) -> dict[str, str]:
    """The machine's own, since a driver may need any of it, without what would change Triton or FLA.

    Args:
        manifest: what is built.
        folder: for what the child keeps.
    """
    dropped = ("TRITON_", "FLA_CACHE_", "FLA_CONFIG_", "FLA_GPU_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    planned = planner.environment(os.environ, interpreted=manifest.interpreted)
    fixed = {name: planned[name] for name in ("PYTHONPATH", "FLA_CACHE_RESULTS", "FLA_CACHE_MODE")}
    interpreter = {"TRITON_INTERPRET": "1"} if manifest.interpreted else {}
    return {**kept, **fixed, **interpreter, "TRITON_CACHE_DIR": str(folder / "triton")}


def _compiler_environment(manifest: Manifest, folder: Path) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return {
        **planner.environment(os.environ, interpreted=manifest.interpreted),
        **passed,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_DEFAULT_FP_FUSION": "1" if manifest.compile.fp_fusion else "0",
        **({} if manifest.compile.line_info else {"TRITON_DISABLE_LINE_INFO": "1"}),
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }


def compile_server(manifest: Manifest, plan: Plan, code: Path, folder: Path, jobs: int) -> CompileServer:
    """What compiles a plan's kernels.

    Args:
        manifest: how to compile.
        plan: the kernels and the device profile.
        code: folder for the code.
        folder: for everything else that the children keep.
        jobs: the number of compiling processes.
    """
    job = {
        "profile": dict(plan.profile),
        "kernels": [facts.to_json() for facts in plan.kernels.values()],
        "folder": str(code),
        "jobs": jobs,
        "time_limit_s": _COMPILE_LIMIT_FACTOR * manifest.measure.time_limit_s,
        "interpreted": manifest.interpreted,
        "line_info": manifest.compile.line_info,
        "fp_fusion": manifest.compile.fp_fusion,
    }
    return CompileServer(job, _compiler_environment(manifest, folder), folder / "compile.log")


def check_fits(source: Bundle, here: Fingerprint, where: str) -> None:
    """Refuses code that was compiled by something else than what is here.

    Raises:
        MisfitError: with every difference.
    """
    found = [difference for difference in compare(source.fingerprint, here) if difference.refuses]
    if found:
        fields = counted(len(found), "field differs", "fields differ")
        raise MisfitError(f"{where}: it was compiled for something else; {fields}", reasons=map(str, found))
