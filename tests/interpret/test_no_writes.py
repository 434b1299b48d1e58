"""Fifty frozen steps write nothing but the run's output, and start no process: seen from inside and from outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dflashspec
import onlookers
import pytest
import watchedrun
from onlookers import PROCESS, Deed

from kernelbake import bundle, host, planner, profiles
from kernelbake.bundle import Contents
from kernelbake.manifest import CompileOptions, Manifest, MeasurePolicy
from kernelbake.plan import Choice, Launch, Plan

STEPS = 50
SUPPORT = Path(watchedrun.__file__).parent
OUTSIDE = shutil.which("strace")


def bake(path: Path) -> None:
    """A bundle for the smallest case, whose choices nobody measured: the last candidate of each launch."""
    section = dflashspec.changed("axes", {"buckets": [16], "anchors": [2], "dtype": "float32", "layouts": ["padded"]})
    section["drafter"]["num_layers"] = 1
    profile = profiles.load("interpreter")
    text = b"format: 1\nname: watched\n"
    manifest = Manifest(1, "watched", profile, "dflash", section, MeasurePolicy(), CompileOptions(), text, "watched")
    plan = planner.plan("dflash", section, profile, interpreted=True)
    contents = Contents(
        name="watched",
        made="interpreted",
        manifest_text=text,
        manifest_resolved=manifest.resolved(),
        fingerprint=host.fingerprint(profile, plan.kernels.values(), build=False),
        plan=plan,
        choices=tuple(map(_last, plan.launches)),
        record=tuple(_record(plan)),
        entries={},
    )
    bundle.write(path, contents)


def _last(launch: Launch) -> Choice:
    tokens: dict[str, str | None] = {variant.specializations[-1].token: None for variant in launch.variants}
    return Choice(launch.kernel, launch.key, launch.candidates[-1], tokens)


def _record(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "kernel": launch.kernel.to_json(),
            "key": launch.key.to_json() if launch.key else None,
            "config": config.to_json(),
            "outcome": "ok",
        }
        for launch in plan.launches
        for config in launch.candidates
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run has been, with what the onlookers noted; home and temporary files have folders of their own."""
    folder = tmp_path_factory.mktemp("watched").resolve()
    bake(folder / "bundle.tar")
    rows = [" ".join(str(n * k) for n in range(1, 4 + k % 3))[:15] for k in range(1, 41)]
    (folder / "verses.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    for name in ("home", "temporary", "here"):
        (folder / name).mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_CACHE", "XDG_"))}
    environment = {
        **own,
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "temporary"),
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), own.get("PYTHONPATH", "")]),
    }
    run = [sys.executable, str(SUPPORT / "watchedrun.py"), str(folder), str(folder / "verses.jsonl"), str(STEPS)]
    watched = [*onlookers.STRACE, "-o", str(folder / "strace.log"), *run] if OUTSIDE else run
    done = subprocess.run(watched, cwd=folder / "here", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "deeds.json").read_text())
    return found


def elsewhere(deeds: Sequence[Deed], folder: Path) -> list[Deed]:
    """What was done anywhere but in the run's output, and all processes."""
    output = str(folder / "run")
    return [(what, path) for what, path in deeds if what == PROCESS or not f"{path}/".startswith(f"{output}/")]


def check(steps: Sequence[Deed], control: Sequence[Deed], folder: Path) -> None:
    """Nothing in the steps; all kinds of deeds in the control, and the run's own output in the steps."""
    assert elsewhere(steps, folder) == []
    assert any(what == "open" and path.startswith(str(folder / "run")) for what, path in steps)
    cache = str(folder / "home" / ".triton")
    kinds = {what.removesuffix("at") for what, path in control if path.startswith(cache) or what == PROCESS}
    assert {"mkdir", "open", "rename", PROCESS} <= kinds
    assert kinds & {"remove", "rmdir", "unlink"}


def test_python_opens_nothing_for_writing_and_starts_nothing(folder: Path) -> None:
    found = facts(folder)
    assert found["steps"] == STEPS
    assert found["hits"] > 10 * STEPS
    check(*([(what, path) for what, path in found[part]] for part in ("found", "control")), folder)


@pytest.mark.skipif(OUTSIDE is None, reason="strace is not installed; the audit hook has seen the same run")
def test_the_system_is_asked_for_no_write_and_no_process(folder: Path) -> None:
    """All threads and libraries, whatever language they are written in."""
    log = folder / "strace.log"
    steps = onlookers.seen_by_strace(log, "first-step", "last-step", folder / "here")
    control = onlookers.seen_by_strace(log, "control", "end", folder / "here")
    check(steps, control, folder)


def test_nothing_is_left_at_home_among_temporary_files_or_here(folder: Path) -> None:
    assert [path for name in ("home", "temporary", "here") for path in (folder / name).rglob("*")] == []
    assert (folder / "run" / "step-00000050").is_dir()
