"""What a call of a kernel becomes under a config, by the rules of Triton's ``run`` methods, without making it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton.runtime.autotuner import Autotuner, Heuristics

from kernelbake import triton_api
from kernelbake.keys import Config, Specialization


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a kernel as the step makes it.

    Args:
        launchable: the outermost object whose ``run`` was called.
        args, kwargs: without grid and warmup.
        grid: as given, a tuple or a function of the bound arguments.
    """

    launchable: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grid: Any


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A call with one config filled in.

    Args:
        kwargs: with the config's and the heuristics' values.
        config: Triton's config, whose hook runs before each launch; None without an autotuner.
        bound: every parameter's value, in the kernel's order.
        specialization: what the call is compiled for.
        grid: three sizes.
    """

    kwargs: Mapping[str, Any]
    config: Any
    bound: Mapping[str, Any]
    specialization: Specialization
    grid: tuple[int, int, int]


class Resolver:
    """Works out what a call becomes under a config, by the rules of Triton's ``run`` methods.

    Args:
        target: Triton's target.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._binders: dict[int, tuple[Any, triton_api.Binder]] = {}
        self._configs: dict[int, tuple[Any, dict[str, Any]]] = {}

    def key(self, call: Call) -> tuple[str, str]:
        """The id of the planned launch that the call belongs to."""
        kwargs = dict(call.kwargs)
        name = triton_api.kernel_of(call.launchable).name
        for wrapper in _chain(call.launchable):
            if isinstance(wrapper, Heuristics):
                kwargs.update(_heuristics(wrapper, call.args, kwargs))
            elif triton_api.is_tuned(wrapper):
                return name, triton_api.autotune_key(wrapper, call.args, kwargs).token
        return name, ""

    def resolve(self, call: Call, config: Config) -> Resolved:
        """The call under a config.

        Raises:
            LookupError: the kernel does not offer the config.
        """
        kwargs, live = dict(call.kwargs), None
        for wrapper in _chain(call.launchable):
            if isinstance(wrapper, Heuristics):
                kwargs.update(_heuristics(wrapper, call.args, kwargs))
            else:
                live = self._live(wrapper, config, call, kwargs)
                kwargs.update(live.all_kwargs())
        bound, specialization = self._binder(call.launchable)(call.args, kwargs)
        return Resolved(kwargs, live, bound, specialization, _three(call.grid, bound))

    def _binder(self, launchable: Any) -> triton_api.Binder:
        function = triton_api.innermost(launchable)
        if id(function) not in self._binders:
            self._binders[id(function)] = (function, triton_api.Binder(function, self._target))
        return self._binders[id(function)][1]

    def _live(self, autotuner: Any, config: Config, call: Call, kwargs: Mapping[str, Any]) -> Any:
        """The autotuner's own object of a config, or the one that its pruning makes."""
        _, known = self._configs.setdefault(id(autotuner), (autotuner, {}))
        if config.token not in known:
            offered = [*triton_api.pruned_configs(autotuner, call.args, kwargs), *autotuner.configs]
            for live in offered:
                known.setdefault(triton_api.config_of(live).token, live)
        if config.token not in known:
            raise LookupError(f"config `{config}` is not among the kernel's own")
        return known[config.token]


def _chain(launchable: Any) -> Iterator[Any]:
    while isinstance(launchable, Autotuner | Heuristics):
        yield launchable
        launchable = launchable.fn


def _heuristics(wrapper: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    result = {**dict(zip(wrapper.arg_names, args, strict=False)), **kwargs}
    found = {}
    for name, heuristic in wrapper.values.items():
        found[name] = result[name] = heuristic(dict(result))
    return found


def _three(grid: Any, bound: Mapping[str, Any]) -> tuple[int, int, int]:
    shape = grid(dict(bound)) if callable(grid) else grid
    sizes = [int(size) for size in shape]
    x, y, z = [*sizes, 1, 1][:3]
    return x, y, z
