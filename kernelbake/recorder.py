"""Launches seen: what a call of a kernel asks of Triton, worked out without making it, and who made it.

``Observer`` is the one place where a call becomes a planned launch; the shadow run and the recording of real launches
share it, so that a plan and what is later compared with it cannot disagree about the rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelInterface

from kernelbake import triton_api
from kernelbake.errors import PlanError
from kernelbake.keys import AutotuneKey, Config, Kernel, Specialization, Value
from kernelbake.plan import Launch, Variant, collect

_CONTROL = frozenset({"grid", "warmup"})
_LAUNCHABLE = (Autotuner, Heuristics, JITFunction, InterpretedFunction)
_DESCRIPTORS = ("TensorDescriptor", "TensorDescriptorIm2Col")


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
        run_hooks: call each candidate's ``pre_hook``, as a launch would; wrong beside real launches, whose tensors a
            hook may write to.
    """

    def __init__(
        self, target: Any, view: Callable[[Any], Any] = lambda tensor: tensor, *, run_hooks: bool = False
    ) -> None:
        self._target = target
        self._view = view
        self._run_hooks = run_hooks
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
            culprits = _unkeyable(launchable, args, kwargs)
            raise PlanError(f"kernel `{kernel.name}`: {error}", reasons=culprits) from error

    def _observe(self, kernel: Kernel, launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
        call = Call(args, {name: value for name, value in kwargs.items() if name not in _CONTROL})
        _refuse_descriptors(kernel, launchable, call)
        _refuse_assertions(kernel, launchable, call)
        self._unwrap(launchable, call)
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

    # -------------------------------------------------------------------------------------- through the wrappers

    def _unwrap(self, launchable: Any, call: Call) -> None:
        """Walks from the outermost wrapper to the function, as the ``run`` methods do; a branch for each candidate.

        An autotuner's key and a heuristic's value may depend on each other in either order of the decorators.
        """
        branches: list[tuple[dict[str, Any], Config]] = [(call.kwargs, Config())]
        while isinstance(launchable, Autotuner | Heuristics):
            following: list[tuple[dict[str, Any], Config]] = []
            for kwargs, config in branches:
                if isinstance(launchable, Heuristics):
                    following.append((_with_heuristics(launchable, call.args, kwargs), config))
                else:
                    following += self._with_configs(launchable, call, kwargs)
            branches = following
            launchable = launchable.fn
        call.branches = branches

    def _with_configs(
        self, autotuner: Any, call: Call, kwargs: Mapping[str, Any]
    ) -> list[tuple[dict[str, Any], Config]]:
        if call.key is not None:
            raise TypeError("two autotuners lie around one kernel; at most one can be baked")
        if triton_api.is_tuned(autotuner):
            call.key = triton_api.autotune_key(autotuner, call.args, kwargs)
        branches = []
        given = dict(zip(autotuner.arg_names, call.args, strict=False))
        for config in triton_api.pruned_configs(autotuner, call.args, kwargs):
            branch = {**kwargs, **config.all_kwargs()}
            if self._run_hooks and config.pre_hook is not None:
                config.pre_hook({**given, **branch})
            branches.append((branch, triton_api.config_of(config)))
        return branches

    # -------------------------------------------------------------------------------------- binding

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


def _with_heuristics(heuristics: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(zip(heuristics.arg_names, args, strict=False))
    result = dict(kwargs)
    for name, heuristic in heuristics.values.items():
        result[name] = heuristic({**given, **result})
    return result


def _refuse_descriptors(kernel: Kernel, launchable: Any, call: Call) -> None:
    for name, value in named(launchable, call.args, call.kwargs).items():
        if type(value).__name__ in _DESCRIPTORS:
            raise PlanError(
                f"kernel `{kernel.name}`: argument `{name}` is a `{type(value).__name__}`; wanted a tensor",
                hint="a descriptor made on the host is not supported; make it in the kernel",
            )


def _refuse_assertions(kernel: Kernel, launchable: Any, call: Call) -> None:
    if triton_api.asks_for_assertions(launchable, call.kwargs):
        raise PlanError(
            f"kernel `{kernel.name}`: `debug` is on, for which Triton makes code with assertions; wanted it off",
            hint="leave `debug=True` out of the call or of the kernel's decorator",
        )


def named(launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by parameter name, with options and grid among them."""
    names = triton_api.innermost(launchable).arg_names
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _unkeyable(launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Which arguments have values that can stand neither in a key nor before a kernel."""
    culprits = []
    for name, value in named(launchable, args, kwargs).items():
        if name in _CONTROL or isinstance(value, torch.Tensor):
            continue
        try:
            triton_api.to_value(value)
        except TypeError:
            culprits.append(f"argument `{name}` is a `{type(value).__module__}.{type(value).__qualname__}`")
    return culprits


def _grid(grid: Any, bound: dict[str, Any]) -> tuple[int, ...]:
    shape = grid(bound) if callable(grid) else grid
    return tuple(int(size) for size in shape)


# ---------------------------------------------------------------------------------------------- equal calls


def signature(launchable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Everything about a call that its launch can depend on, grid aside; None where that cannot be told."""
    try:
        keywords = tuple((name, _part(value)) for name, value in kwargs.items() if name not in _CONTROL)
        return (id(launchable), tuple(_part(arg) for arg in args), keywords)
    except (TypeError, RuntimeError):  # an unknown kind of argument, or a tensor without plain memory
        return None


def _part(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return (item.dtype, tuple(item.shape), item.stride(), _address(item), item.untyped_storage().nbytes())
    if isinstance(item, tuple | list):
        return (type(item), *(_part(part) for part in item))
    if item is None or isinstance(item, bool | int | float | str | torch.dtype):
        return (type(item), item)
    if isinstance(item, triton.language.dtype | JITFunction | InterpretedFunction):
        return id(item)
    raise TypeError(f"`{type(item).__name__}`")


def _address(tensor: torch.Tensor) -> int:
    """What of a tensor's address may matter: all of it where the tensor is fake, its alignment where it is real."""
    return int(tensor.storage_offset() if type(tensor).__name__ == "FakeTensor" else tensor.data_ptr() % 256)


# ---------------------------------------------------------------------------------------------- interception

OnCall = Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]


@contextlib.contextmanager
def intercepted(on_call: OnCall) -> Iterator[None]:
    """Calls a function instead of every launch, through whatever wrapper it is made, while the block runs.

    Args:
        on_call: called with the replaced ``run`` (unbound), the object whose ``run`` it is, and the call's arguments.
            Calling the replaced ``run`` reports the wrappers below in the same way.
    """
    with contextlib.ExitStack() as stack:
        for kind in _LAUNCHABLE:
            _replace(stack, kind, "run", functools.partial(_reporting, on_call))
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, wrap(original))
    if own:
        stack.callback(setattr, owner, name, original)
    else:
        stack.callback(delattr, owner, name)


def _reporting(on_call: OnCall, original: Any) -> Any:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup"):
            return original(self, *args, **kwargs)
        return on_call(original, self, args, kwargs)

    return run


class Recording:
    """Real launches, recorded as planned ones would be; any number of threads may launch.

    Args:
        target: Triton's target, from ``triton_api.gpu_target``.

    Attributes:
        case: the id of the case that is running; set by whoever runs the cases.
    """

    def __init__(self, target: Any) -> None:
        self.case = ""
        self._observer = Observer(target)
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._known: dict[Any, Launch] = {}
        self._seen: dict[tuple[str, int], tuple[str, Launch]] = {}
        self._unkeyed: list[Launch] = []

    def launches(self) -> tuple[Launch, ...]:
        """Everything recorded so far, merged as a plan is.

        Raises:
            ValueError: one decision was met with two lists of candidates.
        """
        with self._lock:
            return collect(list(self._seen.values()))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records while the block runs, with stock or frozen launches; nothing else about them changes."""
        with contextlib.ExitStack() as stack:
            _replace(stack, KernelInterface, "__getitem__", self._wrap_getitem)
            for kind in _LAUNCHABLE:
                _replace(stack, kind, "run", functools.partial(_reporting, self._on_run))
            yield

    def _wrap_getitem(self, original: Any) -> Any:
        recording = self

        def getitem(launchable: Any, grid: Any) -> Any:
            launch = original(launchable, grid)

            def reported(*args: Any, **kwargs: Any) -> Any:
                with recording._noted(launchable, args, {**kwargs, "grid": grid}):
                    return launch(*args, **kwargs)

            return reported

        return getitem

    def _on_run(self, original: Any, launchable: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self._noted(launchable, args, kwargs):
            return original(launchable, *args, **kwargs)

    @contextlib.contextmanager
    def _noted(self, launchable: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[None]:
        """Notes the outermost call only: what an autotuner launches to choose is no launch of the workload."""
        if getattr(self._inside, "a_launch", False):
            yield
            return
        self._note(launchable, args, kwargs)
        self._inside.a_launch = True
        try:
            yield
        finally:
            self._inside.a_launch = False

    def _note(self, launchable: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        known = signature(launchable, args, kwargs)
        with self._lock:
            launch = self._known.get(known) if known is not None else None
            if launch is None:
                launch = self._observer.observe(launchable, args, kwargs)
                if known is not None:
                    self._known[known] = launch
                else:
                    self._unkeyed.append(launch)  # keeps its id from being used again
            self._seen.setdefault((self.case, id(launch)), (self.case, launch))


# ---------------------------------------------------------------------------------------------- stock memories


@dataclasses.dataclass(frozen=True)
class Memories:
    """What Triton itself remembers of the launches made in this process, read without having touched one.

    Args:
        keys: kernel name and autotune key, in Triton's flat form, of every decision.
        specializations: kernel name and token of everything that was looked up to be launched, benchmarks included.
    """

    keys: frozenset[tuple[str, tuple[Value, ...]]]
    specializations: frozenset[tuple[str, str]]


def read_memories() -> Memories:
    """Reads the caches of every live autotuner and kernel of this process.

    Raises:
        TypeError: a key holds something that can stand in none.
    """
    keys: set[tuple[str, tuple[Value, ...]]] = set()
    specializations: set[tuple[str, str]] = set()
    for item in gc.get_objects():
        kind = type(item)  # of lazy objects `isinstance` would ask for more
        if issubclass(kind, Autotuner):
            name = triton_api.kernel_of(item).name
            keys |= {(name, tuple(map(triton_api.to_value, key))) for key in list(item.cache)}
        elif issubclass(kind, JITFunction):
            for entry in list(item.device_caches.values()):
                found = triton_api.looked_up(item, entry)
                specializations |= {(triton_api.kernel_of(item).name, one.token) for one in found}
    return Memories(frozenset(keys), frozenset(specializations))
