"""Random workloads: the planned set equals the set that Triton's own launch path reaches. 20 of them; 200 when long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernelbake import planner

SUPPORT = Path(__file__).parents[1] / "support"
LONG = bool(os.environ.get("KERNELBAKE_LONG"))


@pytest.mark.long
def test_the_planned_set_is_the_reached_set() -> None:
    examples = 200 if LONG else 20
    seed = int.from_bytes(os.urandom(4), "big") if LONG else 1
    done = subprocess.run(
        [sys.executable, "planproperty.py", str(examples), str(seed)],
        cwd=SUPPORT,
        env=planner.environment(os.environ, interpreted=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr[-6000:]}"
    tried = re.fullmatch(r"(\d+) workloads\n", done.stdout)
    assert tried is not None
    assert int(tried[1]) >= examples
