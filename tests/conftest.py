"""What all kinds of tests share: how many examples property tests take, and what a missing GPU means."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

LONG = bool(os.environ.get("KERNELBAKE_LONG"))
"""Whether long tests run whole (``make test-long``); else a fixed tenth of them does."""

REQUIRE_GPU = bool(os.environ.get("KERNELBAKE_REQUIRE_GPU"))
"""Whether a missing GPU is a failure (``make test-gpu``)."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Tensors of tests are small, and sums depend on how many threads share them: ``torchrun`` gives its ranks one."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job: tests and children shall hear it
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("tenth", derandomize=True, max_examples=30, deadline=None, database=None)
hypothesis.settings.register_profile("whole", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("whole" if LONG else "tenth")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a GPU where there is none, unless one is required."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing or REQUIRE_GPU:
        return
    from kernelbake import levels

    if levels.gpu_count() == 0:
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine; `make test-gpu` requires one"))
