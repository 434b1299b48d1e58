"""Runs killed at random moments, as by power or the kernel: nothing with a final name is half, and no step is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import killedrun
import pytest

STEPS, KILLS = 20, 8


@pytest.mark.parametrize("pairs", [1, 2])
def test_a_run_that_was_killed_again_and_again_is_the_unbroken_one(pairs: int, tmp_path: Path) -> None:
    """To the bit: weights, moments and position, and the log line by line."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n}: " + "abc" * (n % 7 + 1)}) + "\n" for n in range(11)))
    script = str(Path(killedrun.__file__))
    command = [sys.executable, script, str(tmp_path), str(data), str(pairs), str(STEPS), str(KILLS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    unbroken, killed = map(Path, done.stdout.split())
    stood = [int(step) for step in (killed / "kills").read_text().split()]
    assert stood == sorted(stood)
    assert len({*stood, STEPS}) > 3, "killed after other steps than the first and the last, too"
    last = f"step-{STEPS:08d}"
    for name in (f"{last}/optimizer.safetensors", "drafter/model.safetensors", "drafter/config.json"):
        assert (killed / name).read_bytes() == (unbroken / name).read_bytes()
    states = [json.loads((output / last / "state.json").read_text()) for output in (unbroken, killed)]
    assert states[0]["loader"] == states[1]["loader"]
    logs = [(output / "metrics.jsonl").read_text().splitlines() for output in (unbroken, killed)]
    told = [[(line["step"], line["loss"], line["norm"]) for line in map(json.loads, log)] for log in logs]
    assert told[0] == told[1]
    assert not [path.name for path in killed.iterdir() if path.name.startswith(".")]
