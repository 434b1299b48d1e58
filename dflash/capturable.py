"""Which targets' forward passes a CUDA graph can hold. Loads no torch: refusals come before a weight is loaded.

A graph replays fixed kernels at fixed addresses. It cannot hold a pass whose shapes change from step to step, nor one
in which the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash.spec import Spec
from kernelbake.errors import InputError


def obstacles(spec: Spec, *, interpreted: bool) -> list[str]:
    """Why the forward pass of this run's target cannot be captured, one line each; empty where it can be.

    Args:
        spec: the run's.
        interpreted: whether kernels run in Triton's interpreter.
    """
    found = []
    if interpreted:
        found.append("kernels run in Triton's interpreter, on the CPU")
    if "packed" in spec.axes.layouts:
        found.append("packed batches hold another number of documents in every step; the padded layout holds one a row")
    if not spec.target.frozen:
        found.append("the target is not frozen, and a graph of the forward pass holds no backward pass")
    return found


def doubts(spec: Spec) -> list[str]:
    """Why the pass is captured only on demand: whether it can be, only a capture shows."""
    if spec.target.experts is None:
        return []
    return ["it has experts, whose products ask the host on some GPUs and dtypes; --graphs tries to capture them"]


def used(wanted: bool | None, spec: Spec, *, interpreted: bool) -> bool:
    """Whether this run captures, as far as the loaded model has nothing against it."""
    against = obstacles(spec, interpreted=interpreted) or ([] if wanted else doubts(spec))
    return wanted is not False and not against


def check(wanted: bool | None, spec: Spec, *, interpreted: bool) -> None:
    """Refuses graphs that were asked for and cannot be.

    Raises:
        InputError: with every reason.
    """
    if wanted:
        refuse(obstacles(spec, interpreted=interpreted))


def refuse(reasons: Sequence[str]) -> None:
    """Refuses graphs for these reasons, if there are any.

    Raises:
        InputError: there are.
    """
    if reasons:
        raise InputError(
            "graphs: asked for, and the target's forward pass cannot be captured; wanted one that can",
            reasons=reasons,
            hint="leave --graphs away to capture where it can be done, or give --no-graphs",
        )
