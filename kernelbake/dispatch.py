"""The frozen launch path: what takes the place of ``run`` on Triton's autotuners, heuristics and functions.

A kernel of the bundle has two ways. The *fused* one (``kernelbake.fused``) is written for its planned launches and
recognises them; the *general* one below walks through the wrappers as Triton does, with Triton's own binder, and
decides about every call that the fused one leaves to it: another form of a planned call, a hook to be run, a miss.
Everything that belongs to a call stays in the call; what a freeze made is read only.

A launch behaves as a launch with all autotune keys cached does: a config's ``pre_hook`` runs on every call with a dict
of its own, while ``reset_to_zero``, ``restore_value`` and the autotuner's own hooks belong to benchmarks and do not.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelInterface

from kernelbake import fused, lookup, patterns, triton_api
from kernelbake.errors import FrozenMissError
from kernelbake.guards import Patches
from kernelbake.loading import load_entry
from kernelbake.lookup import Counter, Held, Typed

__all__ = ["Dispatcher", "FrozenKernel", "load_entry"]

LAUNCH = "_kernelbake_launch"
"""The attribute under which a kernel of the bundle has its launch function."""

_PLAIN = frozenset({bool, int, str, types.NoneType})
_CONTROL = ("grid", "warmup")
_IMPLIED = triton_api.implied_options()


_DTYPES = {dtype: str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""The texts of torch's dtypes, which take a while to make."""


def typed_live(item: Any) -> tuple[type, Any]:
    """The typed form of a live value, as ``lookup.typed`` gives it for the value in a bundle.

    Raises:
        TypeError: it cannot stand in a key, so that no bundle holds it.
    """
    kind = type(item)
    return (kind, item) if kind in _PLAIN else lookup.typed(triton_api.to_value(item))


def typed_items(items: Sequence[tuple[Any, Any]], options: Mapping[str, Any]) -> Typed:
    """The typed form of what Triton's binder returned, as ``lookup.typed_specialization`` gives it."""
    parameters: list[Any] = []
    for type_, key in items:
        kind = type(key)
        parameters += (type_, kind, key) if kind in _PLAIN else (type_, *lookup.typed(triton_api.to_value(key)))
    given = [
        (name, *typed_live(value)) for name, value in options.items() if value is not None and name not in _IMPLIED
    ]
    return tuple(parameters), frozenset(given)


@dataclasses.dataclass
class FrozenKernel:
    """One kernel of the bundle in this process; nothing in it changes after the freeze.

    Args:
        held: what the bundle holds for it.
        launchable: its outermost live object.
        function: the function under the wrappers.
        bind: Triton's binder of the function.
        configs: choice → the autotuner's own config of its winner.
        entries: device → typed specialization → loaded kernel; empty under the interpreter.
        functions: the device functions that are values of constexprs in the bundle.
        hits: launches made.
        fused: the namespace of the fused function; None without one, with the reason in ``unfused``.
    """

    held: Held
    launchable: Any
    function: Any
    bind: Callable[..., tuple[dict[str, Any], list[Any], dict[str, Any]]]
    configs: dict[tuple[str, str], Any]
    entries: Mapping[int, Mapping[Typed, Any]]
    functions: Sequence[Any] = ()
    hits: Counter = dataclasses.field(default_factory=Counter)
    fused: dict[str, Any] | None = None
    unfused: str = ""

    def __post_init__(self) -> None:
        self.names: list[str] = list(self.function.arg_names)
        self.autotuner = triton_api.autotuner_of(self.launchable)
        self.key_names = sorted(self.autotuner.keys) if self.autotuner is not None else []
        self.arg_names = sorted(self.names)
        self.metas: dict[tuple[str, str], dict[str, Any]] = {
            identity: config.all_kwargs() for identity, config in self.configs.items()
        }


class Dispatcher:
    """The launch path of one bundle.

    Args:
        kernels: by name.
        interpreted: whether the interpreter runs them.
        devices: indices that the kernels were loaded for.
        refused_devices: index → why this device is not among them.
    """

    def __init__(
        self,
        kernels: Mapping[str, FrozenKernel],
        *,
        interpreted: bool,
        devices: Sequence[int],
        refused_devices: Mapping[int, str],
    ) -> None:
        self.kernels = kernels
        self.interpreted = interpreted
        self.devices = tuple(devices)
        self.misses = Counter()
        self.refusals = Counter()
        self._refused_devices = refused_devices
        self._by_function = {id(kernel.function): kernel for kernel in kernels.values()}
        self._access = None if interpreted else triton_api.device_access()
        self._allocator = None if interpreted else triton_api.current_allocator()
        self._interpreter = threading.RLock()
        self._interpret = InterpretedFunction.run
        self._forked = False

    # ------------------------------------------------------------------------------------------ the general path

    def launch(self, launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Launches through an object and the wrappers below it, as its ``run`` would.

        Args:
            launchable: an autotuner, heuristics or function.
            args, kwargs: those of ``run``: the kernel's, with ``grid`` and ``warmup``.

        Raises:
            FrozenMissError: the bundle does not hold what the call needs.
        """
        kernel = self._by_function.get(id(triton_api.innermost(launchable)))
        if kernel is None:
            raise self._miss(self._unknown(launchable))
        return self._launch(kernel, launchable, args, dict(kwargs))

    def _launch(self, kernel: FrozenKernel, launchable: Any, args: Sequence[Any], call: dict[str, Any]) -> Any:
        """The same, for a known kernel and a dict that may be changed."""
        if call["warmup"]:
            raise self.refuse_warmup(kernel.held.kernel.name)
        if self._forked and not self.interpreted:
            raise self._miss(_forked(kernel.held.kernel.name))
        config = None
        while launchable is not kernel.function:
            if isinstance(launchable, Autotuner):
                config = self._decide(kernel, launchable, args, call)
            else:
                for name, heuristic in launchable.values.items():
                    call[name] = heuristic({**dict(zip(launchable.arg_names, args, strict=False)), **call})
            launchable = launchable.fn
        if self.interpreted:
            return self._run_interpreted(kernel, args, call, config)
        return self._run(kernel, args, call, config)

    def _decide(self, kernel: FrozenKernel, autotuner: Any, args: Sequence[Any], call: dict[str, Any]) -> Any:
        """The config of a call, with which the call is extended."""
        if kernel.autotuner is None or autotuner is not kernel.autotuner:
            raise self._miss(lookup.unknown_kernel(f"{kernel.held.kernel.name} (autotuned again)", (), redefined=True))
        given = dict(zip(autotuner.arg_names, args, strict=False))
        if triton_api.is_tuned(autotuner):
            identity = self._chosen(kernel, args, call, {**given, **call})
            config, meta = kernel.configs[identity], kernel.metas[identity]
        else:
            config = autotuner.configs[0]
            meta = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**given, **call, **meta})
        if not meta.keys().isdisjoint(call):
            twice = ", ".join(f"'{name}'" for name in meta if name in call)
            raise TypeError(f"{kernel.held.kernel.qualname}() got multiple values for arguments: {twice}")
        call.update(meta)
        return config

    def _chosen(
        self, kernel: FrozenKernel, args: Sequence[Any], call: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[str, str]:
        """The id of the choice for a call; ``given`` holds all its arguments by name."""
        values: list[Any] = []
        dtypes: list[str] = []
        try:
            for name in kernel.key_names:
                if name in given:
                    values += (name, *typed_live(given[name]))
            for name in kernel.arg_names:
                dtype = getattr(given.get(name), "dtype", None)
                if dtype is not None:
                    dtypes += (name, _DTYPES.get(dtype) or str(dtype))
            choices = kernel.held.winners.get((tuple(values), tuple(dtypes)), ())
        except TypeError as error:
            raise self._miss(_unkeyable(kernel, error)) from error
        if len(choices) == 1:
            return choices[0].id
        assert kernel.autotuner is not None
        if not choices:
            _check_complete(kernel, given)
        key = triton_api.autotune_key(kernel.autotuner, args, call)
        if not choices:
            raise self._miss(lookup.missed_key(kernel.held, key))
        return next((choice.id for choice in choices if choice.key == key), choices[0].id)

    def _run(self, kernel: FrozenKernel, args: Sequence[Any], call: dict[str, Any], config: Any) -> Any:
        """Binds, finds the loaded kernel, and launches it on the device of its tensors."""
        grid = call.pop("grid")
        del call["warmup"]
        triton_api.add_implied(kernel.function, call)
        for hook in list(kernel.function.pre_run_hooks):
            hook(*args, **call)
        bound, items, options = kernel.bind(*args, **call)
        assert self._access is not None
        device = self._device_of(kernel, bound)
        loaded = self._find(kernel, device, items, options, config)
        if device == self._access.current():
            self._start(loaded, grid, bound, device)
        else:
            with self._access.switch(device):
                self._start(loaded, grid, bound, device)
        kernel.hits.add()
        return loaded

    def _find(
        self, kernel: FrozenKernel, device: int, items: list[Any], options: Mapping[str, Any], config: Any
    ) -> Any:
        try:
            found = kernel.entries[device].get(typed_items(items, options)) if device in kernel.entries else None
            changed = [name for name in _IMPLIED if options.get(name)]
            if found is not None and not changed and (not kernel.functions or _same_functions(kernel, items)):
                return found
            if changed:
                raise self._miss(_other_code(kernel, changed[0]))
            wanted = triton_api.specialization(kernel.names, items, options)
        except TypeError as error:
            raise self._miss(_unkeyable(kernel, error)) from error
        if device not in self.devices:
            raise self._miss(self._foreign_device(kernel, device))
        raise self._miss(lookup.missed_specialization(kernel.held, wanted, config and triton_api.config_of(config)))

    def _device_of(self, kernel: FrozenKernel, bound: Mapping[str, Any]) -> int:
        """The one device of all tensors; the current one where no tensor says."""
        assert self._access is not None
        found: dict[int, str] = {}
        if self._access.on_tensors:
            for name, value in bound.items():
                if isinstance(value, torch.Tensor) and value.get_device() >= 0:
                    found.setdefault(value.get_device(), name)
        if len(found) > 1:
            raise self._miss(
                FrozenMissError(
                    f"kernel `{kernel.held.kernel.name}`: tensors on {len(found)} devices; wanted all on one",
                    reasons=[f"`{name}` is on device {device}" for device, name in sorted(found.items())],
                )
            )
        return next(iter(found), self._access.current())

    def _start(self, loaded: Any, grid: Any, bound: dict[str, Any], device: int) -> None:
        assert self._access is not None
        if callable(grid):
            grid = grid(bound)
        size = len(grid)
        x, y, z = grid[0], grid[1] if size > 1 else 1, grid[2] if size > 2 else 1
        stream = self._access.stream(device)
        hooks = triton_api.launch_hooks()
        arguments = bound.values()
        metadata = loaded.launch_metadata(grid, stream, *arguments) if hooks is not None else None
        if triton_api.needs_allocator(loaded):
            triton_api.ensure_allocator(self._allocator)
        enter, leave = hooks or (None, None)
        loaded.run(x, y, z, stream, loaded.function, loaded.packed_metadata, metadata, enter, leave, *arguments)

    def _run_interpreted(self, kernel: FrozenKernel, args: Sequence[Any], call: dict[str, Any], config: Any) -> Any:
        """Checks the specialization and lets the interpreter run the kernel, one at a time.

        The interpreter replaces functions of ``triton.language`` and keeps the position in the grid in one place for
        the whole process while it runs, so that two launches at once would mix.
        """
        given = {name: value for name, value in call.items() if name not in _CONTROL}
        _, items, options = kernel.bind(*args, **given)
        try:
            if typed_items(items, options) not in kernel.held.specializations:
                wanted = triton_api.specialization(kernel.names, items, options)
                chosen = config and triton_api.config_of(config)
                raise self._miss(lookup.missed_specialization(kernel.held, wanted, chosen))
        except TypeError as error:
            raise self._miss(_unkeyable(kernel, error)) from error
        with self._interpreter:
            result = self._interpret(kernel.function, *args, **{**given, "grid": call["grid"], "warmup": False})
        kernel.hits.add()
        return result

    # ------------------------------------------------------------------------------------------ refusals

    def _miss(self, error: FrozenMissError) -> FrozenMissError:
        self.misses.add()
        return error

    def _unknown(self, launchable: Any) -> FrozenMissError:
        name = triton_api.kernel_of(launchable).name
        return lookup.unknown_kernel(name, self.kernels, redefined=name in self.kernels)

    def _foreign_device(self, kernel: FrozenKernel, device: int) -> FrozenMissError:
        reason = self._refused_devices.get(device, "it was not among the devices of the freeze")
        loaded = ", ".join(map(str, self.devices))
        return FrozenMissError(
            f"kernel `{kernel.held.kernel.name}`: device {device} has no kernels ({reason}); wanted one of {loaded}",
            hint="name every device that launches in `freeze(…, devices=…)`",
        )

    def after_fork(self) -> None:
        """Called in a forked child: its launches are refused, since it cannot use the parent's CUDA context."""
        self._forked = True
        self._interpreter = threading.RLock()  # whoever held it is not in this process
        for kernel in self.kernels.values():
            if kernel.fused is not None:
                kernel.fused["kb_tables"] = {}

    # ------------------------------------------------------------------------------------------ the fused path

    def launcher(self, kernel: FrozenKernel) -> Callable[..., Any]:
        """The function that the kernel's outermost object launches with: ``(grid, *args, **kwargs)``."""
        general = self.general(kernel.launchable)
        if self._access is None or not kernel.held.choices:  # a function that others get as a value, say
            return general
        names = {
            "kb_current": self._access.current,
            "kb_switch": self._access.switch,
            "kb_stream_of": self._access.stream,
            "kb_hit": kernel.hits.add,
            "kb_general": lambda grid, given, more: general(
                grid, **{name: value for name, value in given.items() if value is not fused.UNSET}, **more
            ),
        }
        try:
            function, kernel.fused = patterns.fuse(kernel, self._access.on_tensors, names)
        except fused.UnsupportedShapeError as reason:
            kernel.unfused = str(reason)
            return general
        return function

    def general(self, launchable: Any) -> Callable[..., Any]:
        """A function that launches through an object on the general path: ``(grid, *args, **kwargs)``."""

        kernel = self._by_function.get(id(triton_api.innermost(launchable)))

        def launch(grid: Any, /, *args: Any, **kwargs: Any) -> Any:
            if kernel is None:
                raise self._miss(self._unknown(launchable))
            if not kwargs.keys().isdisjoint(_CONTROL):
                twice = ", ".join(f"'{name}'" for name in _CONTROL if name in kwargs)
                raise TypeError(f"{kernel.held.kernel.qualname}() got multiple values for keyword arguments: {twice}")
            kwargs["grid"], kwargs["warmup"] = grid, False
            return self._launch(kernel, launchable, args, kwargs)

        return launch

    # ------------------------------------------------------------------------------------------ installation

    def install(self, patches: Patches) -> None:
        """Puts the launch path in place, for the kernels of the bundle and for all others."""
        dispatcher = self

        def run(launchable: Any, *args: Any, **kwargs: Any) -> Any:
            return dispatcher.launch(launchable, args, {"warmup": False, **kwargs})

        def warmup(launchable: Any, *args: Any, **kwargs: Any) -> Any:
            raise dispatcher.refuse_warmup(triton_api.kernel_of(launchable).name)

        def getitem(launchable: Any, grid: Any) -> Any:
            try:
                return functools.partial(getattr(launchable, LAUNCH), grid)
            except AttributeError:
                return functools.partial(dispatcher.general(launchable), grid)

        for kernel in self.kernels.values():
            launch = self.launcher(kernel)
            for level in triton_api.levels(kernel.launchable):
                one = launch if level is kernel.launchable else self.general(level)
                patches.set(level, LAUNCH, one)
                patches.set(level, "run", _run_of(kernel, one, self))
        for kind in (Autotuner, Heuristics, JITFunction, InterpretedFunction):
            patches.set(kind, "run", run)
        patches.set(KernelInterface, "__getitem__", getitem)
        for kind in (Autotuner, KernelInterface):
            patches.set(kind, "warmup", warmup)

    def refuse_warmup(self, name: str) -> FrozenMissError:
        """The refusal of a call that would only compile."""
        self.refusals.add()
        return FrozenMissError(
            f"kernel `{name}`: `warmup` would compile; wanted launches only",
            hint="a frozen process has all its code loaded; leave the warm-up out",
        )


def _run_of(kernel: FrozenKernel, launch: Callable[..., Any], dispatcher: Dispatcher) -> Callable[..., Any]:
    """A ``run`` for one object; it stands before those of the object's class, whatever subclass that is."""

    def run(*args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if warmup:
            raise dispatcher.refuse_warmup(kernel.held.kernel.name)
        return launch(grid, *args, **kwargs)

    return run


def _same_functions(kernel: FrozenKernel, items: Sequence[tuple[Any, Any]]) -> bool:
    """Whether device functions among the constexprs are those of the freeze, and not newer ones of the same name."""
    given = [item[1] for item in items]
    while given:
        value = given.pop()
        if isinstance(value, tuple):
            given += value
        elif isinstance(value, JITFunction | InterpretedFunction) and all(
            value is not function for function in kernel.functions
        ):
            return False
    return True


def _check_complete(kernel: FrozenKernel, given: Mapping[str, Any]) -> None:
    """Raises the ``TypeError`` of a call that lacks an argument, which Triton too would find before it launches."""
    supplied = {name for level in triton_api.levels(kernel.launchable) for name in getattr(level, "values", {})}
    supplied |= {name for meta in kernel.metas.values() for name in meta}
    parameters = inspect.signature(kernel.function.fn).parameters.values()
    required = [one.name for one in parameters if one.default is one.empty and one.kind != one.VAR_POSITIONAL]
    missing = [name for name in required if name not in given and name not in supplied]
    if missing:
        raise TypeError(f"{kernel.held.kernel.qualname}() misses arguments: {', '.join(map(repr, missing))}")


def _other_code(kernel: FrozenKernel, option: str) -> FrozenMissError:
    return FrozenMissError(
        f"kernel `{kernel.held.kernel.name}`: option `{option}` is on, which needs other code; wanted it off"
    )


def _unkeyable(kernel: FrozenKernel, error: TypeError) -> FrozenMissError:
    return FrozenMissError(f"kernel `{kernel.held.kernel.name}`: {error}, so that no bundle holds it")


def _forked(name: str) -> FrozenMissError:
    return FrozenMissError(
        f"kernel `{name}`: launched in a forked child of the frozen process; wanted a process of its own",
        hint="start workers that launch kernels with the `spawn` method, and freeze in each of them",
    )
