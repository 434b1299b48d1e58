"""Nothing in a target's forward pass is beyond a CUDA graph: seen on fake tensors of a GPU, operation by operation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "capturechecks.py"]
    done = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_no_operation_waits_for_the_device_or_copies_to_it(found: dict[str, Any], architecture: str) -> None:
    """With experts, what happens inside torch's grouped product is not seen: it is captured on demand alone."""
    assert found[architecture]["operations"] > 500
    assert found[architecture]["forbidden"] == []


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("reads a number", "aten._local_scalar_dense.default"),
        ("brings a table", "aten._to_copy.default"),
        ("selects by mask", "aten.index.Tensor"),
    ],
)
def test_an_operation_that_does_would_be_noticed(found: dict[str, Any], name: str, operation: str) -> None:
    assert found[name]["forbidden"] == [operation]
