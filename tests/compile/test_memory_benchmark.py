"""The formulas behind MFU: what they say of a step's matrix products is what torch counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kernelbake import planner

SUPPORT = Path(__file__).parents[1] / "support"


def test_the_formulas_count_every_matrix_product_once() -> None:
    """Nothing that a backward pass computes again is a matrix product of torch, so the two agree to the last one."""
    environment = planner.environment(os.environ, interpreted=False)
    command = [sys.executable, "countflops.py"]
    done = subprocess.run(command, cwd=SUPPORT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert all(flops > 0 for flops in (*found["formula"].values(), *found["blind"].values()))
    assert found["counted"]["aten.mm"] == sum(found["formula"].values()) - sum(found["blind"].values())
