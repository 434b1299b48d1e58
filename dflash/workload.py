"""The plug-in through which kernelbake plans and bakes a dflash run. Loads no torch at import.

A session runs the trainer's own functions on a target of one layer of each kind: every layer of a kind launches the
same kernels with the same arguments' shapes, so two layers launch what sixty-four do.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dflash
from dflash.spec import Spec
from kernelbake.errors import PlanError
from kernelbake.keys import Case
from kernelbake.workload import Cases, Oracle

if TYPE_CHECKING:
    from dflash.pairs import Pair

if Path(dflash.__file__ or "").parent != Path(__file__).parent:
    raise ImportError(
        f"the import name `dflash` belongs to `{dflash.__file__}`, another package than this one: z-lab publishes "
        "one of that name, and the two need an environment each"
    )


class DflashWorkload:
    """Implements ``kernelbake.workload.Workload``."""

    name = "dflash"

    def parse(self, section: Mapping[str, Any]) -> Spec:
        return Spec.parse(section)

    def resolve(self, spec: Spec) -> dict[str, Any]:
        return spec.to_json()

    def of_run(self, path: Path, section: Mapping[str, Any]) -> Spec:
        from dflash import config
        from dflash import section as sections

        return sections.of_run(config.load(path, (), {}), section)

    def cases(self, spec: Spec) -> Cases:
        return spec.axes.cases()

    def open(self, spec: Spec, *, device: str, seed: int) -> DflashSession:
        if device == "cpu" and spec.axes.dtype != "float32":
            raise PlanError(
                f"workload: dtype `{spec.axes.dtype}` on the CPU; wanted `float32`",
                hint="Triton's interpreter computes bfloat16 wrongly in the Gated-DeltaNet kernels",
            )
        return DflashSession(spec, device, seed)

    def implementations(self, spec: Spec) -> dict[str, str]:
        from dflash import implementations

        return implementations.of(spec.target)

    def oracles(self, spec: Spec) -> Mapping[str, Oracle]:
        return {}

    def prepare(self, *, interpreted: bool) -> contextlib.AbstractContextManager[None]:
        return _interpreting() if interpreted else contextlib.nullcontext()


class DflashSession:
    """A representative pair; ``step`` is one training step of a case with seeded inputs.

    The learning rate is 0, so that every step of a case starts from the same weights.
    """

    def __init__(self, spec: Spec, device: str, seed: int) -> None:
        self._spec = spec
        self._seed = seed
        self._pair = _representative_pair(spec, device, seed)

    @property
    def part(self) -> str:
        """What the step is at work on."""
        return self._pair.part

    def step(self, case: Case) -> None:
        from dflash import recipe, synthetic
        from dflash.buckets import Shape
        from dflash.objective import Objective

        batch = synthetic.batch(Shape.of(case), self._spec, self._seed)
        try:
            for term in self._spec.loss.terms:
                self._pair.train_with(Objective(kl_share=float(term == recipe.KL)))
                self._pair.step([batch], lr=0.0)
        except RuntimeError as error:
            if self._spec.target.frozen or not _raised_by_fla(error):
                raise
            raise PlanError(f"target: a backward pass through Gated DeltaNet was asked for; {error}") from error


def _representative_pair(spec: Spec, device: str, seed: int) -> Pair:
    import torch

    from dflash import devices, drafter, target
    from dflash.config import OptimizerConfig
    from dflash.optimizer import Optimizer
    from dflash.pairs import Pair

    where, dtype = torch.device(device), devices.DTYPES[spec.axes.dtype]
    small = target.random_target(
        target.representative(spec.target),
        target.representative_layer_ids(spec.drafter.target_layer_ids),
        where,
        dtype,
        seed=seed,
    )
    network = drafter.build(spec.drafter, spec.target.hidden_size, where, dtype)
    return Pair(0, small, network, Optimizer(network, OptimizerConfig()))


def _raised_by_fla(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/fla/" in frames[-1].filename.replace("\\", "/")


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """What steps need under the interpreter."""
    with _one_at_a_time(), _tensor_ranges():
        yield


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Lets one thread interpret a kernel at a time.

    The interpreter keeps the position in the grid in one place for the whole process and replaces functions of
    ``triton.language`` while it runs. A frozen process has a lock for that; this one is for stock runs.
    """
    from triton.runtime import interpreter

    executor, lock = interpreter.GridExecutor, threading.RLock()
    original = executor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return original(self, *args, **kwargs)

    executor.__call__ = call
    try:
        yield
    finally:
        executor.__call__ = original


@contextlib.contextmanager
def _tensor_ranges() -> Iterator[None]:
    """Under the interpreter, lets FLA's recurrence call tensor methods on its loop index.

    Compiled, the index of a kernel's ``range`` is a tensor; interpreted, it is Python's integer, which has no ``to``.
    NumPy's warnings about lanes that a kernel masks afterwards are silenced.
    """
    import numpy as np
    from triton.language import core

    from dflash import devices

    with devices.importing_fla():
        import fla.ops.common.chunk_delta_h as module

    def tensor_range(*bounds: Any) -> Iterator[Any]:
        for index in range(*(int(bound) for bound in bounds)):
            yield core.full((), index, core.int32)

    vars(module)["range"] = tensor_range
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    finally:
        del vars(module)["range"]


WORKLOAD = DflashWorkload()
