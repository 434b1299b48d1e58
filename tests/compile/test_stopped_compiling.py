"""A build that is stopped while an assembler hangs: the assembler ends too, and what was compiled is kept."""

from __future__ import annotations

import signal
from pathlib import Path

import compilekernels
import pytest
import triton
from stoppedbuild import SUPPORT, Stopped
from test_compile import BLACKWELL, _manifest, _product

from kernelbake import build, triton_api
from kernelbake.build import Options
from kernelbake.keys import AutotuneKey, Case, Config
from kernelbake.plan import Launch, Plan, Variant
from kernelbake.progress import Event

_STAGES = (2, 3, 4)
_FACTS = triton_api.facts(compilekernels.product)
_VARIANT = Variant(tuple(_product((64, 64, 32), stages).specialization for stages in _STAGES), ("size=1",))
_CONFIGS = tuple(Config((("BM", 64),), num_warps=8, num_stages=stages) for stages in _STAGES)
MANIFEST = _manifest()
PLAN = Plan(
    profile=BLACKWELL.to_json(),
    versions={},
    implementations={},
    cases=(Case((("size", 1),)),),
    skipped=(),
    kernels={_FACTS.kernel.name: _FACTS},
    launches=(Launch(_FACTS.kernel, AutotuneKey((("M", 512),), ()), _CONFIGS, (_VARIANT,)),),
)


def _assembler(folder: Path) -> Path:
    """Does its work once, and then hangs until there is a file ``go``."""
    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    real = next(path for path in (binaries / "ptxas-blackwell", binaries / "ptxas") if path.exists())
    script = folder / "ptxas"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--version*) exec {real} "$@";; esac\n'
        f"[ -e {folder}/go ] || {{ [ -e {folder}/first ] && exec sleep 600; : > {folder}/first; }}\n"
        f'exec {real} "$@"\n'
    )
    script.chmod(0o755)
    return script


def test_an_assembler_that_hangs_ends_with_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, assembler = tmp_path / "bundle.tar", str(_assembler(tmp_path))
    variables = {"TRITON_PTXAS_PATH": assembler, "TRITON_PTXAS_BLACKWELL_PATH": assembler}
    stopped = Stopped("compiling", output, **variables)
    stopped.until(lambda event: (event["phase"], event["done"]) == ("compile", 1))
    assert "sleep 600 " in stopped.wait_for(lambda found: "sleep 600 " in found)
    assert stopped.end(signal.SIGKILL) == (-signal.SIGKILL, "")
    assert stopped.wait_for(lambda found: not found) == [], "no process is left"
    (tmp_path / "go").touch()
    for name, value in {**variables, "PYTHONPATH": str(SUPPORT)}.items():
        monkeypatch.setenv(name, value)
    events: list[Event] = []
    result = build.run(MANIFEST, output, Options(compile_only=True, jobs=1, plan=PLAN), events.append)
    assert [event.done for event in events if event.kind == "progress"] == [1, 2, 3], "one was compiled before"
    assert (result.entries, result.rejected) == (3, {})
