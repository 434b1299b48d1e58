"""Launches seen: what a call of a kernel asks of Triton, worked out without making it, and who made it.

``Observer`` is the one place where a call becomes a planned launch; the shadow run and the recorder of real launches
share it, so that a plan and what is later compared with it cannot disagree about the rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kernelbake import triton_api
from kernelbake.errors import PlanError
from kernelbake.keys import AutotuneKey, Config, Kernel, Specialization
from kernelbake.plan import Launch, Variant

_CONTROL = frozenset({"grid", "warmup"})
_LAUNCHABLE = (Autotuner, Heuristics, JITFunction, InterpretedFunction)
_UNSUPPORTED = ("TensorDescriptor", "GluonTensorDescriptor")


@dataclasses.dataclass
class Call:
    """One call on its way through the wrappers of a kernel.

    Args:
        args, kwargs: as given to ``run``, without grid and warmup.
        key: the autotune key, once an autotuner was passed that chooses.
        branches: keyword arguments and config of each candidate.
    """

    args: Sequence[Any]
    kwargs: dict[str, Any]
    key: AutotuneKey | None = None
    branches: list[tuple[dict[str, Any], Config]] = dataclasses.field(default_factory=list)


class Observer:
    """Works out planned launches from calls.

    Args:
        target: Triton's target, from ``triton_api.gpu_target``.
        view: gives what the binder shall read of a tensor; the tensor itself by default.
    """

    def __init__(self, target: Any, view: Callable[[Any], Any] = lambda tensor: tensor) -> None:
        self._target = target
        self._view = view
        self._binders: dict[int, tuple[Any, triton_api.Binder]] = {}

    def observe(self, launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
        """The planned launch of a call: key, candidates, one variant with a specialization for each candidate.

        Args:
            launchable: the object whose ``run`` was called.
            args, kwargs: the call's; ``grid`` may be among them and is evaluated for the first candidate.

        Raises:
            PlanError: the call cannot be baked, with its reason.
        """
        kernel = triton_api.kernel_of(launchable)
        try:
            return self._observe(kernel, launchable, args, kwargs)
        except (TypeError, LookupError) as error:
            raise PlanError(f"kernel {kernel.name}: {error}") from error

    def _observe(self, kernel: Kernel, launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
        call = Call(args, {name: value for name, value in kwargs.items() if name not in _CONTROL})
        _refuse_unsupported(kernel, (*args, *call.kwargs.values()))
        _unwrap(launchable, call)
        grid = kwargs.get("grid")
        grids: list[tuple[int, ...]] = []
        specializations: list[Specialization] = []
        for branch, _ in call.branches:
            bound, specialization = self._bind(launchable, args, branch)
            specializations.append(specialization)
            if grid is not None and not grids:
                grids.append(_grid(grid, bound))
        variant = Variant(tuple(specializations), (), tuple(grids))
        return Launch(kernel, call.key, tuple(config for _, config in call.branches), (variant,))

    def _bind(
        self, launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Specialization]:
        function = triton_api.innermost(launchable)
        if id(function) not in self._binders:
            self._binders[id(function)] = (function, triton_api.Binder(function, self._target))
        originals: dict[int, Any] = {}
        seen_args = [self._seen(arg, originals) for arg in args]
        seen_kwargs = {name: self._seen(value, originals) for name, value in kwargs.items()}
        bound, specialization = self._binders[id(function)][1](seen_args, seen_kwargs)
        return {name: originals.get(id(value), value) for name, value in bound.items()}, specialization

    def _seen(self, item: Any, originals: dict[int, Any]) -> Any:
        if isinstance(item, torch.Tensor):
            view = self._view(item)
            originals[id(view)] = item
            return view
        if isinstance(item, tuple | list):
            parts = [self._seen(part, originals) for part in item]
            return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
        return item


def _unwrap(launchable: Any, call: Call) -> None:
    """Walks from the outermost wrapper to the function, as the ``run`` methods do, collecting a branch per candidate.

    An autotuner's own values and a heuristic's may depend on each other in either order of the decorators.
    """
    branches: list[tuple[dict[str, Any], Config]] = [(call.kwargs, Config())]
    while isinstance(launchable, Autotuner | Heuristics):
        following: list[tuple[dict[str, Any], Config]] = []
        for kwargs, config in branches:
            if isinstance(launchable, Heuristics):
                following.append((_with_heuristics(launchable, call.args, kwargs), config))
            else:
                following += _with_configs(launchable, call, kwargs)
        branches = following
        launchable = launchable.fn
    call.branches = branches


def _with_heuristics(heuristics: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(zip(heuristics.arg_names, args, strict=False))
    result = dict(kwargs)
    for name, heuristic in heuristics.values.items():
        result[name] = heuristic({**named, **result})
    return result


def _with_configs(autotuner: Any, call: Call, kwargs: Mapping[str, Any]) -> list[tuple[dict[str, Any], Config]]:
    if call.key is not None:
        raise TypeError("two autotuners lie around one kernel; at most one can be baked")
    if triton_api.is_tuned(autotuner):
        call.key = triton_api.autotune_key(autotuner, call.args, kwargs)
    branches = []
    named = dict(zip(autotuner.arg_names, call.args, strict=False))
    for config in triton_api.pruned_configs(autotuner, call.args, kwargs):
        branch = {**kwargs, **config.all_kwargs()}
        if config.pre_hook is not None:
            config.pre_hook({**named, **branch})
        branches.append((branch, triton_api.config_of(config)))
    return branches


def _refuse_unsupported(kernel: Kernel, values: Sequence[Any]) -> None:
    for value in values:
        if type(value).__name__ in _UNSUPPORTED:
            raise PlanError(
                f"kernel {kernel.name}: an argument is a `{type(value).__name__}`; wanted pointers",
                hint="a descriptor made on the host is not supported; make it in the kernel or pass the tensor",
            )


def _grid(grid: Any, bound: dict[str, Any]) -> tuple[int, ...]:
    shape = grid(bound) if callable(grid) else grid
    return tuple(int(size) for size in shape)


# ---------------------------------------------------------------------------------------------- interception


@contextlib.contextmanager
def intercepted(on_call: Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]) -> Iterator[None]:
    """Calls a function instead of every launch, through whatever wrapper it is made, while the block runs.

    Args:
        on_call: called with the replaced ``run`` (unbound), the object whose ``run`` it is, and the call's arguments.
            Only the outermost of a kernel's wrappers is reported when the replaced ``run`` is called for it.
    """
    originals = {kind: kind.run for kind in _LAUNCHABLE}
    for kind, original in originals.items():
        kind.run = _reporting(original, on_call)
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.run = original


def _reporting(original: Any, on_call: Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]) -> Any:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup"):
            return original(self, *args, **kwargs)
        return on_call(original, self, args, kwargs)

    return run
