"""The one file that knows Triton's internals, and in which Triton 3.6 to 3.9 differ.

Everything else speaks of kernels, keys, configs and specializations (``kernelbake.keys``); this file translates between
those values and Triton's live objects, under the compiler and under the interpreter alike. Nothing here keeps state
between calls or launches anything.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernelbake import digest
from kernelbake.errors import UnsupportedError
from kernelbake.keys import AutotuneKey, Config, Kernel, Parameter, Specialization, Symbol, Value
from kernelbake.plan import KernelFacts

SUPPORTED_MIN, SUPPORTED_END = (3, 6), (3, 10)

OPTION_NAMES = ("num_warps", "num_stages", "num_ctas", "maxnreg")

_IMPLIED_OPTIONS = frozenset({"debug", "instrumentation_mode", "fpsan_homomorphic_casts"})
"""Options that ``JITFunction.run`` adds by itself on every launch; they follow from the environment."""


def version() -> tuple[int, int]:
    """Major and minor version of the Triton in this process."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def check_supported() -> None:
    """Refuses a Triton whose internals this file was not written for.

    Raises:
        UnsupportedError: with the supported range.
    """
    if not SUPPORTED_MIN <= version() < SUPPORTED_END:
        raise UnsupportedError(
            f"triton: version `{triton.__version__}`; wanted 3.6 to 3.9",
            hint="install one of the supported versions; a bundle is bound to the version it was built with",
        )


# ---------------------------------------------------------------------------------------------- live objects


def innermost(launchable: Any) -> Any:
    """The ``JITFunction`` or ``InterpretedFunction`` under an autotuner and heuristics."""
    while isinstance(launchable, Autotuner | Heuristics):
        launchable = launchable.fn
    return launchable


def python_function(launchable: Any) -> Callable[..., Any]:
    """The decorated Python function."""
    function: Callable[..., Any] = innermost(launchable).fn
    return function


def is_interpreted(launchable: Any) -> bool:
    """Whether the kernel was decorated under ``TRITON_INTERPRET=1``."""
    return isinstance(innermost(launchable), InterpretedFunction)


def wrappers(launchable: Any) -> tuple[str, ...]:
    """Which kinds of object lie around the function, outermost first; subclasses by the name of Triton's class."""
    kinds = []
    while isinstance(launchable, Autotuner | Heuristics):
        kinds.append("Autotuner" if isinstance(launchable, Autotuner) else "Heuristics")
        launchable = launchable.fn
    return (*kinds, "JITFunction")


def autotuner_of(launchable: Any) -> Autotuner | None:
    """The autotuner in the chain of wrappers, or None."""
    while isinstance(launchable, Autotuner | Heuristics):
        if isinstance(launchable, Autotuner):
            return launchable
        launchable = launchable.fn
    return None


def kernel_of(launchable: Any) -> Kernel:
    """The name of the kernel under any wrapper."""
    function = python_function(launchable)
    return Kernel(function.__module__, function.__qualname__)


def find(kernel: Kernel) -> Any:
    """The outermost live object of a kernel.

    Raises:
        LookupError: the module cannot be imported, or holds no such kernel under that name.
    """
    try:
        found: Any = importlib.import_module(kernel.module)
        for part in kernel.qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"kernel {kernel.name}: not found ({error})") from error
    if not isinstance(innermost(found), JITFunction | InterpretedFunction) or kernel_of(found) != kernel:
        raise LookupError(f"kernel {kernel.name}: the name is bound to something else (`{type(found).__name__}`)")
    return found


# ---------------------------------------------------------------------------------------------- values


def to_value(item: Any) -> Value:
    """The value of a constexpr, a key's argument or a part of a specialization.

    Raises:
        TypeError: the item cannot stand in a key; known only by its address, say.
    """
    if isinstance(item, tl.constexpr):
        return to_value(item.value)
    if item is None or type(item) in (bool, int, float, str):
        return item  # type: ignore[no-any-return]
    if isinstance(item, tl.dtype):
        return Symbol("dtype", item.name)
    if isinstance(item, JITFunction | InterpretedFunction):
        return Symbol("jit", f"{item.fn.__module__}:{item.fn.__qualname__}")
    if isinstance(item, tuple | list):
        return tuple(to_value(part) for part in item)
    if isinstance(item, int):  # IntEnum, numpy integers registered as int
        return int(item)
    raise TypeError(f"`{item!r:.80}` of type `{type(item).__name__}` cannot stand in a key")


def from_value(value: Value) -> Any:
    """The live object of a value.

    Raises:
        LookupError: a device function that is no longer there.
    """
    if isinstance(value, Symbol):
        if value.kind == "dtype":
            return tl.dtype(value.text)
        return innermost(find(Kernel.from_json(value.text)))
    if isinstance(value, tuple):
        return tuple(from_value(item) for item in value)
    return value


def config_of(config: triton.Config) -> Config:
    """The value of one of Triton's configs.

    Raises:
        TypeError: it holds a meta-parameter that cannot stand in a key, or an IR override.
    """
    if getattr(config, "ir_override", None):
        raise TypeError("a config with `ir_override` replaces the kernel's code and cannot be baked")
    meta = tuple((name, to_value(value)) for name, value in config.kwargs.items())
    return Config(meta, config.num_warps, config.num_stages, config.num_ctas, config.maxnreg)


def live_config(autotuner: Autotuner, config: Config) -> triton.Config:
    """The autotuner's own config of that value, which carries its ``pre_hook``.

    Raises:
        LookupError: the kernel no longer offers it, as a config or through its pruning.
    """
    for candidate in autotuner.configs:
        if config_of(candidate) == config:
            return candidate
    raise LookupError(f"{kernel_of(autotuner).name}: config `{config}` is not among the kernel's own")


# ---------------------------------------------------------------------------------------------- autotune keys


def is_tuned(autotuner: Autotuner | None) -> bool:
    """Whether the autotuner chooses at all; with a single config it looks up nothing."""
    return autotuner is not None and len(autotuner.configs) > 1


def autotune_key(autotuner: Autotuner, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AutotuneKey:
    """The key of ``Autotuner.run`` for this call, computed without touching the shared object.

    Raises:
        TypeError: a ``key=`` argument whose value cannot stand in a key.
    """
    call = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs}
    call = {name: value for name, value in call.items() if name in autotuner.arg_names}
    values = tuple((name, to_value(call[name])) for name in autotuner.keys if name in call)
    dtypes = tuple((name, str(value.dtype)) for name, value in call.items() if hasattr(value, "dtype"))
    return AutotuneKey(values, dtypes)


def pruned_configs(autotuner: Autotuner, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[triton.Config]:
    """The candidates of this call. Writes Triton's shared ``nargs`` meanwhile: planning is single-threaded."""
    if not is_tuned(autotuner):
        return list(autotuner.configs)
    autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
    try:
        return list(autotuner.prune_configs(dict(kwargs)))
    finally:
        autotuner.nargs = None


# ---------------------------------------------------------------------------------------------- specialization


def gpu_target(capability: int, warp_size: int = 32) -> GPUTarget:
    """Triton's target of a compute capability written without a dot: 90, 100, 120."""
    return GPUTarget("cuda", capability, warp_size)


def compiled_function(launchable: Any) -> JITFunction[Any]:
    """The kernel as the compiler sees it; under the interpreter, one made from the same function and options."""
    function = innermost(launchable)
    if isinstance(function, InterpretedFunction):
        return JITFunction(function.fn, **function.kwargs)
    return function


class Binder:
    """Triton's own binder of one kernel for one target: a call's arguments → bound arguments and specialization.

    Args:
        launchable: the kernel.
        target: the gpu target.
    """

    def __init__(self, launchable: Any, target: GPUTarget) -> None:
        function = compiled_function(launchable)
        self._names = [parameter.name for parameter in function.params]
        self._bind = create_function_from_signature(function.signature, function.params, make_backend(target))

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Specialization]:
        """Binds a call.

        Args:
            args, kwargs: the arguments, meta-parameters and options; a tensor needs ``dtype``, ``data_ptr()`` and
                ``ptr_range()`` only, so a stand-in serves for a fake one.

        Raises:
            TypeError: a constexpr whose value cannot stand in a key.
        """
        bound, items, options = self._bind(*args, **kwargs)
        return bound, specialization(self._names, items, options)


def specialization(names: Sequence[str], items: Sequence[Any], options: Mapping[str, Any]) -> Specialization:
    """The value of what Triton's binder returned."""
    parameters = tuple(
        Parameter(name, to_value(item[0]), to_value(item[1])) for name, item in zip(names, items, strict=True)
    )
    given = sorted((name, to_value(value)) for name, value in options.items() if name not in _IMPLIED_OPTIONS)
    return Specialization(parameters, tuple((name, value) for name, value in given if value is not None))


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """What ``triton.compile`` needs: a source and the options' keyword arguments."""

    source: Any
    options: dict[str, Any]


def compile_request(launchable: Any, wanted: Specialization) -> CompileRequest:
    """Turns a specialization back into what the compiler takes, as ``JITFunction._pack_args`` does.

    Raises:
        LookupError: the kernel's parameters are not those of the specialization.
    """
    from triton.compiler import ASTSource

    function = compiled_function(launchable)
    names = [parameter.name for parameter in function.params]
    if names != [parameter.name for parameter in wanted.parameters]:
        raise LookupError(f"kernel {kernel_of(launchable).name}: its parameters changed to {names}")
    backend = make_backend(gpu_target(90))  # parse_attr is the same for every capability
    signature = {parameter.name: parameter.type for parameter in wanted.parameters}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(wanted.parameters):
        for path, type_, key in _leaves((index,), parameter.type, parameter.key):
            if type_ == "constexpr":
                constants[path] = from_value(key)
            elif isinstance(key, str):
                attributes[path] = backend.parse_attr(key)
    source = ASTSource(function, signature, constants, attributes)
    return CompileRequest(source, {name: from_value(value) for name, value in wanted.options})


def _leaves(path: tuple[int, ...], type_: Value, key: Value) -> Iterator[tuple[tuple[int, ...], Value, Value]]:
    if isinstance(type_, tuple):
        keys = key if isinstance(key, tuple) else (None,) * len(type_)
        for index, (inner, inner_key) in enumerate(zip(type_, keys, strict=True)):
            yield from _leaves((*path, index), inner, inner_key)
    else:
        yield path, type_, key


# ---------------------------------------------------------------------------------------------- facts and sources


def facts(launchable: Any) -> KernelFacts:
    """The facts by which a kernel is recognised again.

    Raises:
        TypeError: one of its configs cannot be baked.
    """
    autotuner = autotuner_of(launchable)
    configs = [config_of(config) for config in autotuner.configs] if autotuner is not None else []
    hooks = []
    mutated: list[str] = []
    if autotuner is not None:
        if any(config.pre_hook is not None for config in autotuner.configs):
            hooks.append("pre_hook")
        for name in ("reset_to_zero", "restore_value"):
            if getattr(autotuner, name):
                hooks.append(name)
                mutated += getattr(autotuner, name)
    return KernelFacts(
        kernel=kernel_of(launchable),
        wrappers=wrappers(launchable),
        parameters=tuple(innermost(launchable).arg_names),
        key_names=tuple(autotuner.keys) if autotuner is not None else (),
        source_digest=source_digest(launchable),
        configs_digest=digest.of_bytes(digest.canonical_json([c.to_json() for c in configs])) if configs else None,
        num_configs=len(configs),
        hooks=tuple(hooks),
        mutated=tuple(dict.fromkeys(mutated)),
    )


def source_digest(launchable: Any) -> str:
    """Digest of everything that the kernel's code can depend on.

    Whole files are taken rather than functions: the file of the kernel (with its heuristics, pruning and hooks) and of
    every module from which a device function could be reached through its globals, by any spelling. The values of
    captured global constants are added, since some follow from the device. No path enters.

    Raises:
        LookupError: the source of a module cannot be read.
    """
    modules: dict[str, bytes] = {}
    constants: dict[str, str] = {}
    waiting = [python_function(launchable)]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        for name in _names_in(function):
            if isinstance(scope.get(name), bool | int | float | str | tl.constexpr):
                constants[f"{function.__module__}.{name}"] = repr(to_value(scope[name]))
        if function.__module__ not in modules:
            modules[function.__module__] = _source_of(function.__module__)
            waiting += _device_functions(scope)
    parts = [*modules.items(), *((name, text.encode()) for name, text in constants.items())]
    return digest.of_tree(parts)


def _names_in(function: Callable[..., Any]) -> set[str]:
    return {*function.__code__.co_names, *function.__code__.co_freevars}


def _source_of(module: str) -> bytes:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise LookupError(f"module `{module}`: its source file is not known")
    return Path(file).read_bytes()


def _device_functions(scope: Mapping[str, Any]) -> list[Callable[..., Any]]:
    """Functions decorated for the device that a scope can reach: by name, in a collection, or in a module."""
    found: list[Callable[..., Any]] = []
    for item in list(scope.values()):
        if isinstance(item, types.ModuleType):
            candidates = [] if _is_tritons(item.__name__) else list(vars(item).values())
        elif isinstance(item, dict):
            candidates = list(item.values())
        elif isinstance(item, list | tuple):
            candidates = list(item)
        else:
            candidates = [item]
        for candidate in candidates:
            function = innermost(candidate)
            if isinstance(function, JITFunction | InterpretedFunction) and not _is_tritons(function.fn.__module__):
                found.append(function.fn)
    return found


def _is_tritons(module: str) -> bool:
    return module == "triton" or module.startswith("triton.")
