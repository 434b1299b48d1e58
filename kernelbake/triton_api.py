"""The one file that knows Triton's internals, and in which Triton 3.6 to 3.9 differ.

Everything else speaks of kernels, keys, configs and specializations (``kernelbake.keys``); this file translates between
those values and Triton's live objects, under the compiler and under the interpreter alike. Nothing here keeps state
between calls or launches anything.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import make_backend
from triton.compiler.compiler import AsmDict, CompiledKernel
from triton.runtime import _allocation
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import (
    ConstexprFunction,
    JITFunction,
    KernelInterface,
    create_function_from_signature,
    native_specialize_impl,
)

from kernelbake import digest
from kernelbake.errors import BuildError, UnsupportedError
from kernelbake.keys import AutotuneKey, Config, Kernel, Parameter, Specialization, Symbol, Value
from kernelbake.plan import KernelFacts, Launch, sources_of
from kernelbake.words import counted

SUPPORTED_MIN, SUPPORTED_END = (3, 6), (3, 10)

OPTION_NAMES = ("num_warps", "num_stages", "num_ctas", "maxnreg")

_IMPLIED_OPTIONS = frozenset({"debug", "instrumentation_mode", "fpsan_homomorphic_casts"})
"""Options that ``JITFunction.run`` adds by itself on every launch; they follow from the environment."""


def version() -> tuple[int, int]:
    """Major and minor version of the Triton in this process."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def full_version() -> str:
    """Version of the Triton in this process, ``3.7.1``."""
    return str(triton.__version__)


def own_files() -> tuple[dict[str, bytes], Path]:
    """What Triton's compiler, dispatch and launchers are made of: sources by relative path, and the native library.

    The folders are those over which Triton's own cache key goes, with the dispatch and the helpers' C sources added.
    """
    root = Path(triton.__file__).parent
    found = {}
    for folder in ("backends", "compiler", "language", "runtime"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".c"):
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    return found, root / "_C" / "libtriton.so"


def ptxas_version(arch: int) -> str | None:
    """Version of the assembler for a gpu target, ``12.8.93``; runs it. None if it does not start."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    try:
        text = str(get_ptxas_version(arch))
    except (OSError, subprocess.SubprocessError, RuntimeError):
        return None
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return match[1] if match else text.strip()


def invalidating_environment() -> dict[str, str]:
    """The environment variables that are set and for which Triton compiles again."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return dict(get_cache_invalidating_env_vars())


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


def levels(launchable: Any) -> Iterator[Any]:
    """The object and what it wraps, outermost first."""
    yield launchable
    while isinstance(launchable, Autotuner | Heuristics):
        launchable = launchable.fn
        yield launchable


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
        raise LookupError(f"kernel `{kernel.name}`: not found ({error})") from error
    if not isinstance(innermost(found), JITFunction | InterpretedFunction) or kernel_of(found) != kernel:
        raise LookupError(f"kernel `{kernel.name}`: the name is bound to something else (`{type(found).__name__}`)")
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


def live_configs(autotuner: Autotuner) -> dict[Config, triton.Config]:
    """The autotuner's own configs by value; they carry the ``pre_hook``. Of equal ones, the first."""
    return {config_of(config): config for config in reversed(autotuner.configs)}


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


def asks_for_assertions(launchable: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call, or its kernel's decorator, wants code with device assertions (``debug=True``)."""
    return bool(kwargs.get("debug", getattr(innermost(launchable), "debug", False)))


def looked_up(function: JITFunction[Any], entry: Sequence[Any]) -> list[Specialization]:
    """Everything that a kernel was looked up with on one device, compiled or not; from an entry of ``device_caches``.

    Its second part maps what the binder returned, options in printed form, to the key of the compiled kernel.
    """
    names = [parameter.name for parameter in function.params]
    return [specialization(names, items, ast.literal_eval(options)) for items, options in list(entry[1])]


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
        raise LookupError(f"kernel `{kernel_of(launchable).name}`: its parameters changed to {names}")
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


# ---------------------------------------------------------------------------------------------- building


def use_cache_folder(folder: Path) -> None:
    """Makes this process compile into a folder of its own, and keep no intermediate code there."""
    knobs.cache.dir = str(folder)
    knobs.compilation.store_binary_only = True
    knobs.compilation.always_compile = False


def launch(kernel: LoadedKernel, grid: tuple[int, int, int], stream: int, bound: Sequence[Any]) -> None:
    """Launches a loaded kernel with every bound argument in order, no hooks around it."""
    kernel._run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *bound)


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


def facts_of(launches: Iterable[Launch]) -> dict[str, KernelFacts]:
    """The facts of all that the code of these launches is made from, by name.

    Raises:
        TypeError: a config cannot be baked.
        LookupError: a kernel or a device function cannot be found by its name, or its source cannot be read.
    """
    return {kernel.name: facts(find(kernel)) for kernel in sources_of(launches)}


def source_digest(launchable: Any) -> str:
    """Digest of everything that the kernel's code can depend on.

    Whole files are taken rather than functions: the file of the kernel (with its heuristics, pruning and hooks) and of
    every module from which a device function, or one that runs at compile time, could be reached through its globals,
    by any spelling. The values of captured global constants are added, since some follow from the device. No path
    enters.

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
        spaces = _spaces(function)
        for where, space in spaces.items():
            constants.update(_constants(where, space, _names_in(function)))
        if function.__module__ not in modules:
            modules[function.__module__] = _source_of(function.__module__)
            waiting += [found for space in spaces.values() for found in _device_functions(space)]
    parts = [*modules.items(), *((name, text.encode()) for name, text in constants.items())]
    return digest.of_tree(parts)


def _names_in(function: Callable[..., Any]) -> set[str]:
    return {*function.__code__.co_names, *function.__code__.co_freevars}


def _spaces(function: Callable[..., Any]) -> dict[str, Mapping[str, Any]]:
    """Where a function finds what it names: its globals, and modules that it names there or within one another."""
    spaces: dict[str, Mapping[str, Any]] = {
        function.__module__: {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    }
    names, waiting = _names_in(function), list(spaces.values())
    while waiting:
        space = waiting.pop()
        for name in names & space.keys():
            item = space[name]
            if isinstance(item, types.ModuleType) and item.__name__ not in spaces and not _is_tritons(item.__name__):
                spaces[item.__name__] = vars(item)
                waiting.append(vars(item))
    return spaces


def _constants(where: str, space: Mapping[str, Any], names: set[str]) -> Iterator[tuple[str, str]]:
    """The values that stand in a space under these names, with the place of each."""
    for name in names & space.keys():
        item = space[name]
        if isinstance(item, bool | int | float | str | tl.constexpr | tl.dtype):
            yield f"{where}.{name}", repr(to_value(item))
        elif isinstance(item, tuple):
            with contextlib.suppress(TypeError):  # of other things than values: no kernel can use it
                yield f"{where}.{name}", repr(to_value(item))


def _source_of(module: str) -> bytes:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise LookupError(f"module `{module}`: its source file is not known")
    return Path(file).read_bytes()


_COMPILED = (JITFunction, InterpretedFunction, ConstexprFunction)
"""What a kernel can call: functions for the device, and such as run while it is compiled."""


def _device_functions(scope: Mapping[str, Any]) -> list[Callable[..., Any]]:
    """Functions that kernels can call and that a scope can reach: by name, in a collection, or in a module."""
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
            if isinstance(function, _COMPILED) and not _is_tritons(function.fn.__module__):
                found.append(function.fn)
    return found


def _is_tritons(module: str) -> bool:
    return module == "triton" or module.startswith("triton.")


# ---------------------------------------------------------------------------------------------- the frozen runtime


_LAUNCHER_CALL = ("gridX", "gridY", "gridZ", "stream", "function")
_HOOKED = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


def interfaces() -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
    """What the frozen runtime calls or replaces in Triton: name → live function, and the parameters it should have."""
    from triton.runtime import build, cache

    compile_ = ("self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup")
    hooked = () if version() == (3, 6) else _HOOKED
    return {
        "Autotuner.run": (Autotuner.run, ("self", "args", "kwargs")),
        "Autotuner._bench": (Autotuner._bench, ("self", "args", "config", "meta")),
        "Autotuner.warmup": (Autotuner.warmup, ("self", "args", "kwargs")),
        "Config.all_kwargs": (triton.Config.all_kwargs, ("self",)),
        "Heuristics.run": (Heuristics.run, ("self", "args", "kwargs")),
        "InterpretedFunction.run": (InterpretedFunction.run, ("self", "args", "grid", "warmup", "kwargs")),
        "JITFunction.run": (JITFunction.run, ("self", "args", "grid", "warmup", "kwargs")),
        "JITFunction.preload": (JITFunction.preload, ("self", "specialization_data")),
        "JITFunction._do_compile": (JITFunction._do_compile, compile_),
        "KernelInterface.__getitem__": (KernelInterface.__getitem__, ("self", "grid")),
        "KernelInterface.warmup": (KernelInterface.warmup, ("self", "args", "grid", "kwargs")),
        "CompiledKernel.__init__": (CompiledKernel.__init__, ("self", "src", "metadata_group", "hash")),
        "CompiledKernel._init_handles": (CompiledKernel._init_handles, ("self",)),
        "CompiledKernel.launch_metadata": (CompiledKernel.launch_metadata, ("self", "grid", "stream", "args")),
        "CudaLauncher.__init__": (nvidia.CudaLauncher.__init__, ("self", "src", "metadata")),
        "CudaLauncher.__call__": (nvidia.CudaLauncher.__call__, ("self", *_LAUNCHER_CALL, *hooked, "args")),
        "create_function_from_signature": (create_function_from_signature, ("sig", "kparams", "backend")),
        "get_cache_manager": (cache.get_cache_manager, ("key",)),
        "build.platform_key": (build.platform_key, ()),
    }


def check_interfaces(found: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] | None = None) -> None:
    """Refuses a Triton, or a patch upon it, whose functions no longer take what the frozen runtime gives.

    Raises:
        UnsupportedError: the version is not supported, or with every function that differs.
    """
    check_supported()
    drift = []
    for name, (function, wanted) in (interfaces() if found is None else found).items():
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != wanted:
            drift.append(f"`{name}` takes ({', '.join(parameters)}); wanted ({', '.join(wanted)})")
    if drift:
        functions = counted(len(drift), "function differs", "functions differ")
        raise UnsupportedError(
            f"triton: in `{triton.__version__}` {functions} from those of 3.6 to 3.9",
            reasons=drift,
            hint="something replaced them in this process, or this is a changed build of Triton",
        )


def live_binder(function: Any, target: GPUTarget) -> Callable[..., tuple[dict[str, Any], list[Any], dict[str, Any]]]:
    """Triton's own binder of a function: (bound arguments, specialization, options) of a call."""
    function = compiled_function(function)
    return create_function_from_signature(  # type: ignore[no-any-return]
        function.signature, function.params, make_backend(target)
    )


def implied_options() -> frozenset[str]:
    """Options that ``JITFunction.run`` adds by itself on every launch."""
    return _IMPLIED_OPTIONS


@functools.cache
def _metadata_class(fields: tuple[str, ...]) -> Any:
    """One class for all kernels with the same metadata; making it costs more than loading a small cubin."""
    return collections.namedtuple("KernelMetadata", fields)


class LoadedKernel(CompiledKernel):
    """One entry as Triton's compiled kernel, made from memory: no file is read and nothing is compiled.

    Args:
        source: Triton's source object of the kernel and specialization.
        metadata: Triton's launch metadata, as data.
        binary: the cubin.
    """

    def __init__(self, source: Any, metadata: Mapping[str, Any], binary: bytes) -> None:
        target = metadata["target"]
        fields = {**metadata, "target": GPUTarget(target["backend"], target["arch"], target["warp_size"])}
        self.metadata = _metadata_class(tuple(sorted(fields)))(**fields)
        backend = make_backend(self.metadata.target)
        self.packed_metadata = backend.pack_metadata(self.metadata)
        self.src = source
        self.hash = metadata["hash"]
        self.name = metadata["name"]
        self.asm = AsmDict({backend.binary_ext: binary})
        self.metadata_group: dict[str, str] = {}
        self.kernel = binary
        self.module = None
        self._module_pid: int | None = None
        self.function = None
        self._run: Any = None

    def prepare(self, library: types.ModuleType | None = None) -> None:
        """Makes the launcher, which is the same for every device.

        Args:
            library: the launcher library where the bundle brings one; else Triton makes its own, without a compiler
                from 3.7 on.
        """
        if library is not None:
            self._run = LibraryLauncher(library, self.src, self.metadata)
        else:
            self._run = triton.runtime.driver.active.launcher_cls(self.src, self.metadata)

    def load(self, device: int) -> None:
        """Loads the module on the current device, which must be ``device``; on an error the object stays unloaded.

        Raises:
            UnsupportedError: the device lacks the shared memory, tensor memory or threads that the kernel needs.
        """
        active = triton.runtime.driver.active
        if self._run is None:
            self.prepare()
        limit = active.utils.get_device_properties(device)["max_shared_mem"]
        if self.metadata.shared > limit:
            shared = f"{self.metadata.shared} bytes of shared memory"
            raise UnsupportedError(f"kernel `{self.name}`: needs {shared}; device {device} has {limit}")
        runtime = triton.knobs.runtime
        if runtime.kernel_load_start_hook is not None:
            runtime.kernel_load_start_hook(None, None, self.name, self.metadata_group, self.hash)
        module, function, self.n_regs, self.n_spills, self.n_max_threads = active.utils.load_binary(
            self.name, self.kernel, self.metadata.shared, device
        )
        threads = self.metadata.num_warps * self.metadata.target.warp_size
        if threads > self.n_max_threads:
            limit = self.n_max_threads
            raise UnsupportedError(f"kernel `{self.name}`: needs {threads} threads; device {device} allows {limit}")
        self.function, self._module_pid, self.module = function, os.getpid(), module
        if runtime.kernel_load_end_hook is not None:
            runtime.kernel_load_end_hook(module, function, self.name, self.metadata_group, self.hash)

    def __del__(self) -> None:
        """Leaves the module where it is: launches may be in flight, and captured graphs hold its functions."""


def loaded_kernel(launchable: Any, wanted: Specialization, metadata: Mapping[str, Any], binary: bytes) -> LoadedKernel:
    """The kernel of an entry, not yet loaded on a device."""
    return LoadedKernel(compile_request(launchable, wanted).source, metadata, binary)


# ---------------------------------------------------------------------------------------------- launcher libraries
#
# Triton builds C helpers with the machine's compiler at first use: `cuda_utils` in every version, and in 3.6 one
# launcher for each signature as well. A build makes them ahead with `build_library`, the bundle carries them all, and
# `load_library` brings them into a process. They are linked against a stand-in for the driver's library that has its
# name and no symbols, so that neither a driver nor its development files are needed to build them.

UTILITIES, LAUNCHER = "cuda_utils", "__triton_launcher"


def utilities_source() -> str:
    """C source of the helper through which Triton loads modules; ``build_library(UTILITIES, …)`` compiles it."""
    return (Path(nvidia.__file__).parent / "driver.c").read_text()


def launcher_source(launchable: Any, wanted: Specialization, metadata: Mapping[str, Any]) -> str | None:
    """C source of an entry's launcher, for ``build_library(LAUNCHER, …)``; None from Triton 3.7 on.

    The launcher takes no declared constexprs and does not tell pointers apart by what they point to, so that a few
    launchers serve all entries: build one for each distinct source.
    """
    if version() != (3, 6):
        return None
    passed = _passed(compile_request(launchable, wanted).source)
    text: str = nvidia.make_launcher(
        {}, {i: _without_pointee(type_) for i, (_, type_) in enumerate(passed)}, metadata.get("tensordesc_meta")
    )
    return text


def _passed(source: Any) -> list[tuple[int, Any]]:
    """Position and type of the arguments that a launcher is given: all but the declared constexprs."""
    declared = [parameter.is_constexpr for parameter in source.fn.params]
    return [(i, type_) for i, type_ in enumerate(source.signature.values()) if not declared[i]]


def _without_pointee(type_: Any) -> Any:
    if isinstance(type_, tuple):
        return tuple(_without_pointee(part) for part in type_)
    return "*i8" if isinstance(type_, str) and type_.startswith("*") else type_


def build_library(name: str, source: str) -> bytes:
    """Compiles a helper with the machine's C compiler (`CC`, else gcc, else clang); same source, same bytes.

    Args:
        name: ``UTILITIES`` or ``LAUNCHER``.
        source: C source.

    Raises:
        BuildError: there is no compiler, Python's headers are missing, or it fails; with what it said.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise BuildError("launcher library: no C compiler found; wanted gcc, clang or one named by `CC`")
    includes = [*nvidia.include_dirs, sysconfig.get_paths()["include"]]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "empty.c").write_text("")
        Path(folder, f"{name}.c").write_text(source)
        stand_in = [compiler, "empty.c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1"]
        real = [compiler, f"{name}.c", "-O3", "-shared", "-fPIC", "-s", "-Wno-psabi", "-o", f"{name}.so"]
        real += ["-L.", "-Wl,--no-as-needed", "-l:libcuda.so.1", *(f"-I{path}" for path in includes)]
        real += [f"-fmacro-prefix-map={path}=include" for path in includes]  # asserts in headers name their file
        for command in (stand_in, real):
            try:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            except OSError as error:
                raise BuildError(f"launcher library: `{compiler}` does not start: {error}") from error
            if done.returncode:
                raise BuildError(
                    f"launcher library `{name}`: `{compiler}` failed with status {done.returncode}",
                    reasons=done.stderr.strip().splitlines()[-8:],
                )
        return Path(folder, f"{name}.so").read_bytes()


def library_name(library: bytes) -> str:
    """Which helper a library is: ``UTILITIES`` or ``LAUNCHER``.

    Raises:
        UnsupportedError: it is neither.
    """
    for name in (UTILITIES, LAUNCHER):
        if f"PyInit_{name}\0".encode() in library:
            return name
    raise UnsupportedError("launcher library: it exports neither of the two helpers that Triton has")


def load_library(name: str, path: str) -> types.ModuleType:
    """Imports a helper from a path that no other library of this process ever had.

    Raises:
        ImportError: it does not load, with the loader's reason.
    """
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.machinery.ModuleSpec(name, loader, origin=path)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def has_driver() -> bool:
    """Whether Triton's driver object exists already in this process."""
    config = triton.runtime.driver
    return config._active is not None or config._default is not None


def make_driver(utilities: types.ModuleType) -> None:
    """Creates Triton's CUDA driver around a helper from the bundle: no compiler, no subprocess."""
    compile_ = "compile_module_from_src" if hasattr(nvidia, "compile_module_from_src") else "compile_module_from_file"
    stock = {name: getattr(nvidia, name) for name in (compile_, "library_dirs")}
    setattr(nvidia, compile_, lambda *args, **kwargs: utilities)
    nvidia.library_dirs = list  # the stock function runs ldconfig to find what only a compiler needs
    try:
        _ = triton.runtime.driver.active
    finally:
        for name, function in stock.items():
            setattr(nvidia, name, function)


class LibraryLauncher(nvidia.CudaLauncher):
    """Triton 3.6's launcher around a library of the bundle, called as the stock one is."""

    def __init__(self, library: types.ModuleType, source: Any, metadata: Any) -> None:
        passed = _passed(source)
        self.positions = [position for position, _ in passed]
        signature = dict(enumerate(type_ for _, type_ in passed))
        descriptors = getattr(metadata, "tensordesc_meta", None)
        self.num_ctas = getattr(metadata, "num_ctas", 1)
        self.launch = nvidia.wrap_handle_tensordesc(library.launch, signature, descriptors)
        for name in ("global_scratch", "profile_scratch"):
            for fact in ("size", "align"):
                setattr(self, f"{name}_{fact}", getattr(metadata, f"{name}_{fact}"))
        self.launch_cooperative_grid = metadata.launch_cooperative_grid
        self.launch_pdl = metadata.launch_pdl

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:
        hooked, kernel_args = args[:4], args[4:]
        super().__call__(gridX, gridY, gridZ, stream, function, *hooked, *(kernel_args[i] for i in self.positions))


# ---------------------------------------------------------------------------------------------- the direct launch


@dataclasses.dataclass(frozen=True)
class DirectLaunch:
    """What a call of the C launcher needs besides grid, stream, function and arguments.

    Args:
        launch: the C function.
        fixed: the values of ``DIRECT_NAMES``, in order.
    """

    launch: Callable[..., None]
    fixed: tuple[Any, ...]


DIRECT_NAMES = ("kb_cooperative", "kb_pdl", "kb_packed", "kb_annotations", "kb_signature")


def direct_launch(kernel: LoadedKernel) -> DirectLaunch | None:
    """How to launch a loaded kernel through the C launcher alone, with pointers as numbers; None where that cannot be.

    It cannot where memory has to be allocated for the launch, or arguments have to be taken apart in Python. Declared
    constexprs are not passed.
    """
    launcher, types_ = kernel._run, list(kernel.src.signature.values())
    flat = all(isinstance(type_, str) and not type_.startswith("tensordesc") for type_ in types_)
    if not flat or not isinstance(launcher, nvidia.CudaLauncher) or getattr(launcher, "gsan_enabled", False):
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    annotations = signature = None
    if version() == (3, 6):
        if not isinstance(launcher, LibraryLauncher):
            return None  # the stock launcher of this signature takes the constexprs too
    else:
        passed = [type_ for _, type_ in _passed(kernel.src)]
        annotations, signature = nvidia.annotate_arguments(passed), nvidia.make_kernel_signature(passed)
    fixed = (launcher.launch_cooperative_grid, launcher.launch_pdl, kernel.packed_metadata, annotations, signature)
    return DirectLaunch(launcher.launch, fixed)


def direct_call(args: Sequence[str]) -> str:
    """Source text of that call, given the texts of the arguments.

    It uses the names ``kb_launch``, ``kb_x``, ``kb_y``, ``kb_z``, ``kb_stream``, ``kb_function`` and ``DIRECT_NAMES``.
    """
    head = "kb_launch(kb_x, kb_y, kb_z, kb_stream, kb_function, kb_cooperative, kb_pdl"
    listed = "".join(f"{arg}, " for arg in args)
    if version() == (3, 6):
        return f"{head}, None, None, kb_packed, None, None, None, {listed})"
    return f"{head}, kb_packed, None, None, None, None, None, kb_annotations, kb_signature, ({listed}))"


# ---------------------------------------------------------------------------------------------- devices


@dataclasses.dataclass(frozen=True)
class DeviceAccess:
    """How to ask about devices in this process, as cheaply as can be.

    Args:
        current: the thread's current device.
        stream: the thread's current stream of a device.
        switch: a context in which a device is the current one.
        ready: makes the context of the current device, which is given, and the thread's.
        on_tensors: whether a tensor says on which device it lies; else all lie on the current one.
    """

    current: Callable[[], int]
    stream: Callable[[int], int]
    switch: Callable[[int], contextlib.AbstractContextManager[Any]]
    ready: Callable[[int], None]
    on_tensors: bool


def device_access() -> DeviceAccess:
    """For the driver that is active."""
    import torch

    active = triton.runtime.driver.active
    if isinstance(active, nvidia.CudaDriver) and torch.cuda.is_available():
        torch.cuda.init()
        current, ready = torch._C._cuda_getDevice, torch.cuda.synchronize
        return DeviceAccess(current, active.get_current_stream, torch.cuda.device, ready, True)

    @contextlib.contextmanager
    def switch(device: int) -> Iterator[None]:
        before = active.get_current_device()
        active.set_current_device(device)
        try:
            yield
        finally:
            active.set_current_device(before)

    on_tensors = active.get_active_torch_device().type == "cuda"
    return DeviceAccess(active.get_current_device, active.get_current_stream, switch, lambda device: None, on_tensors)


# ---------------------------------------------------------------------------------------------- hooks and settings


def quiet_condition(names: dict[str, Any], function: str) -> str:
    """Source text of the condition that nobody watches launches; adds the objects that it names.

    Args:
        names: receives them.
        function: name under which the code finds the kernel's function.
    """
    names["kb_runtime"] = knobs.runtime
    parts = [f"not {function}.pre_run_hooks"]
    for which in ("enter", "exit"):
        hook = getattr(knobs.runtime, f"launch_{which}_hook")
        names[f"kb_{which}"] = hook
        parts.append(f"kb_runtime.launch_{which}_hook is kb_{which}")
        if isinstance(hook, knobs.HookChain):
            parts.append(f"not kb_{which}.calls")
        elif hook is not None:
            return "False"
    return " and ".join(parts)


def launch_hooks() -> tuple[Any, Any] | None:
    """The hooks around launches, or None if nobody installed one."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    watched = any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
    return hooks if watched else None


def add_implied(function: Any, kwargs: dict[str, Any]) -> None:
    """Adds the keyword arguments that ``JITFunction.run`` adds, from settings that change code."""
    kwargs["debug"] = kwargs.get("debug", function.debug) or knobs.runtime.debug
    kwargs["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    if _ADDS_FPSAN:
        kwargs["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts


_ADDS_FPSAN = version() >= (3, 9)


def specializer(target: GPUTarget) -> tuple[Callable[..., tuple[Any, Any]], Any]:
    """Triton's specializer of one argument (it takes backend, value, const, specialize, align), and the backend."""
    return native_specialize_impl, make_backend(target)


def parameter_facts(function: Any) -> Iterator[dict[str, Any]]:
    """Of every parameter: its name, whether it is a declared constexpr, and what the binder does with its argument.

    Raises:
        TypeError: a parameter takes any number of arguments.
    """
    for parameter in compiled_function(function).params:
        declared = parameter._param
        if declared.kind in (declared.VAR_POSITIONAL, declared.VAR_KEYWORD):
            raise TypeError(f"`{parameter.name}` takes any number of arguments")
        yield {
            "name": parameter.name,
            "constexpr": parameter.is_constexpr,
            "keyword_only": declared.kind == declared.KEYWORD_ONLY,
            "special": (
                parameter.is_const,
                not parameter.do_not_specialize,
                not parameter.do_not_specialize_on_alignment,
            ),
            "annotation": "" if parameter.is_constexpr else parameter.annotation_type,
            **({"default": declared.default} if declared.default is not declared.empty else {}),
        }


@functools.cache
def dtypes_by_type() -> dict[str, Any]:
    """Triton's pointer type → the torch dtype of its tensors; the plain one where there are several."""
    import torch

    class Tensor:
        def __init__(self, dtype: Any) -> None:
            self.dtype = dtype

        def data_ptr(self) -> int:
            return 0

        def ptr_range(self) -> int:
            return 0

    specialize, backend = specializer(gpu_target(90))
    found: dict[str, Any] = {}
    for dtype in (item for item in vars(torch).values() if isinstance(item, torch.dtype)):
        try:
            type_ = specialize(backend, Tensor(dtype), False, True, True)[0]
        except (KeyError, TypeError):
            continue  # Triton has no such type
        if type_ not in found or dtype is torch.bool:
            found[type_] = dtype
    return found


def current_allocator() -> Any:
    """This thread's allocator of the memory that some kernels want at launch, or None if it has none."""
    allocator = _allocation._allocator.get()
    return None if isinstance(allocator, _allocation.NullAllocator) else allocator


def ensure_allocator(default: Any) -> None:
    """Gives a thread without an allocator one: the default, or else torch's own memory on the current stream.

    Triton keeps it per thread, so that what a main thread sets is not there in a worker.
    """
    if current_allocator() is None:
        triton.set_allocator(default if default is not None else _torch_allocator)


def _torch_allocator(size: int, alignment: int, stream: int | None) -> Any:
    """Bytes from torch's pool, whose blocks lie at multiples of 512; they are freed in stream order."""
    import torch

    return torch.empty(size, dtype=torch.int8, device="cuda")


def needs_allocator(kernel: LoadedKernel) -> bool:
    """Whether launching the kernel allocates memory."""
    return bool(getattr(kernel.metadata, "global_scratch_size", 0))


def changed_knobs() -> dict[str, str]:
    """Settings of this process that ask for other code: name in the program → environment variable of it, or ""."""
    settings = {
        "runtime.debug": "TRITON_DEBUG",
        "runtime.override_arch": "TRITON_OVERRIDE_ARCH",
        "runtime.add_stages_inspection_hook": "",
        "compilation.always_compile": "TRITON_ALWAYS_COMPILE",
        "compilation.override": "TRITON_KERNEL_OVERRIDE",
        "compilation.instrumentation_mode": "TRITON_INSTRUMENTATION_MODE",
    }
    found = {}
    for name, variable in settings.items():
        group, _, attribute = name.partition(".")
        if getattr(getattr(knobs, group), attribute, None):
            found[f"triton.knobs.{name}"] = variable
    return found


def install_walls(
    patches: Any,
    *,
    compile_: Callable[..., Any],
    do_compile: Callable[..., Any],
    preload: Callable[..., Any],
    bench: Callable[..., Any],
    build: Callable[..., Any],
    cache: Callable[..., Any],
) -> None:
    """Puts refusals where Triton compiles, benchmarks, runs a C compiler, and reads or writes its cache.

    Args:
        patches: ``set(owner, name, value)`` replaces an attribute and remembers the old one.
        compile_, do_compile, preload, bench, build, cache: the refusals.
    """
    from triton import compiler
    from triton.compiler import compiler as compiling
    from triton.runtime.cache import CacheManager

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cache(*args, **kwargs)

    methods = ("get_file", "put", "get_group", "put_group")
    closed = type("ClosedCacheManager", (CacheManager,), dict.fromkeys(methods, refuse))
    for owner in (triton, compiler, compiling):
        patches.set(owner, "compile", compile_)
    patches.set(JITFunction, "_do_compile", do_compile)
    patches.set(JITFunction, "preload", preload)
    patches.set(Autotuner, "_bench", bench)
    patches.set(knobs.build, "impl", build)
    patches.set(knobs.cache, "manager_class", closed)
