"""Runs the dflash plug-in's kernels in Triton's interpreter without a bundle: each autotuner takes its last config.

What a frozen run chooses decides nothing about results, so the trainer's mathematics may be tested without baking.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def last_configs() -> Iterator[None]:
    """Within it, every autotuner runs its last config, which has the largest tiles, and times nothing."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "this kind of test runs with TRITON_INTERPRET=1"
    from dflash.workload import WORKLOAD

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and others, when they are imported
        for name in ("fla", "transformers.models.qwen3_5.modeling_qwen3_5"):
            importlib.import_module(name)
    with WORKLOAD.prepare(interpreted=True), pytest.MonkeyPatch.context() as patch:
        from fla.ops.utils.cache import CachedAutotuner
        from triton.runtime.autotuner import Autotuner

        def run(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
            return self.fn.run(*args, **kwargs, **self.configs[-1].all_kwargs())

        patch.setattr(Autotuner, "run", run)
        patch.setattr(CachedAutotuner, "run", run)
        yield
