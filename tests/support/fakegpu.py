"""A CUDA driver without a GPU: Triton's own launcher classes around a device that is made of Python.

It takes what Triton's C code takes, resolves pointers, and carries a launch out on the memory of CPU tensors. Devices
are numbers; each thread has a current one. Nothing is compiled for it: ``code`` makes what stands for a cubin.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

from kernelbake import triton_api

SHARED = 232448


@dataclasses.dataclass(frozen=True)
class Launched:
    """One launch as it arrived at the device.

    Args:
        name: the kernel.
        device, stream, grid: where and how.
        constants: constexprs by name.
        values: the runtime arguments: addresses and numbers.
    """

    name: str
    device: int
    stream: int
    grid: tuple[int, int, int]
    constants: str
    values: tuple[Any, ...]


def code(kernel: str, constants: dict[str, Any]) -> bytes:
    """What stands for machine code: the kernel's name and the constexprs that it was compiled for."""
    shown = {name: repr(value) for name, value in constants.items()}
    return json.dumps({"kernel": kernel, "constants": shown}, sort_keys=True).encode()


def metadata(name: str, *, arch: int = 90, num_warps: int = 4, **more: Any) -> dict[str, Any]:
    """Launch metadata as Triton writes it, as far as a launch reads it."""
    return {
        "hash": name, "name": name, "target": {"backend": "cuda", "arch": arch, "warp_size": 32},
        "num_warps": num_warps, "num_ctas": 1, "num_stages": 3, "shared": 1024, "tmem_size": 0, "warp_size": 32,
        "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
        "launch_cooperative_grid": False, "launch_pdl": False, "instrumentation_mode": "", **more,
    }  # fmt: skip


class FakeUtils:
    """What ``cuda_utils`` offers."""

    def __init__(self, owner: FakeDriver) -> None:
        self._owner = owner
        self.functions: dict[int, tuple[dict[str, Any], int]] = {}
        self.loads = 0
        self._lock = threading.Lock()

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert device == self._owner.get_current_device(), "a module is loaded on the current device"
        with self._lock:
            self.loads += 1
            handle = 1000 * self.loads + device
        self.functions[handle] = (json.loads(binary), device)
        return handle, handle, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        self.functions.pop(module, None)

    def build_signature_metadata(self, signature: list[str]) -> bytes:
        return json.dumps(signature).encode()

    def launch(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        """As in Triton 3.7 and later."""
        _, _, _, metadata_, enter, leave, _, _, annotations, signature, args = rest
        values = list(_taken(annotations, args))
        types_ = json.loads(signature)
        assert len(values) == len(types_), f"{len(values)} arguments for {types_}"
        self._run((x, y, z), stream, function, types_, values, metadata_, enter, leave)

    def launch_3_6(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        """As in the launchers of Triton 3.6: constexprs among the arguments are there and not looked at."""
        _, _, _, _, _, metadata_, enter, leave, *values = rest
        types_ = ["*i8" if hasattr(value, "data_ptr") else "any" for value in values]
        self._run((x, y, z), stream, function, types_, values, metadata_, enter, leave)

    def _run(
        self, grid: Any, stream: int, function: int, types_: Any, values: Any, metadata_: Any, enter: Any, leave: Any
    ) -> None:
        if enter is not None:
            enter(metadata_)
        loaded, device = self.functions[function]
        resolved = tuple(_resolved(value, type_) for value, type_ in zip(values, types_, strict=True))
        resolved = tuple(value for value in resolved if value is not None)
        current = self._owner.get_current_device()
        assert device == current, f"a function of device {device} launched with device {current} current"
        self._owner.started(Launched(loaded["kernel"], device, stream, grid, json.dumps(loaded["constants"]), resolved))
        if leave is not None:
            leave(metadata_)


def _taken(annotations: Any, args: Any) -> Iterator[Any]:
    for annotation, arg in zip(annotations, args, strict=True):
        if annotation.type == "tuple":
            yield from _taken(annotation.nested_tuple, arg)
        elif annotation.type == "kernel":
            yield arg


def _resolved(value: Any, type_: str) -> Any:
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    return value


class FakeDriver(DriverBase):
    """Triton's driver for the fake device.

    Args:
        on_launch: called with every launch that arrives; may carry it out.
        on_tensors: whether tensors are asked for their device, as on CUDA.
    """

    def __init__(self, on_launch: Callable[[Launched], None] | None = None, *, on_tensors: bool = False) -> None:
        self.utils = FakeUtils(self)
        self.launched: list[Launched] = []
        self.keep = True
        self.delay: Callable[[], float] = lambda: 0.0
        self._on_launch = on_launch
        self._on_tensors = on_tensors
        self._local = threading.local()
        self.launcher_cls = self._launcher

    def _launcher(self, source: Any, facts: Any) -> Any:
        if triton_api.version() == (3, 6):
            return triton_api.LibraryLauncher(types.SimpleNamespace(launch=self.utils.launch_3_6), source, facts)
        return nvidia.CudaLauncher(source, facts)

    def started(self, launch: Launched) -> None:
        if self.keep:
            self.launched.append(launch)
        if self._on_launch is not None:
            self._on_launch(launch)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_current_device(self, device: int) -> None:
        self._local.device = device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> Any:
        return triton_api.gpu_target(90)

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return 9, 0

    def map_python_to_cpp_type(self, type_: str) -> str:
        return nvidia.ty_to_cpp(type_)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", self.get_current_device()) if self._on_tensors else torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_benchmarker(self) -> Any:
        return self.bench

    def bench(self, call: Callable[[], None], quantiles: Any = None, **more: Any) -> list[float]:
        """Runs a candidate once, and takes a while over it in the threads that ``delay`` gives one."""
        call()
        time.sleep(self.delay())
        return [1.0] * len(quantiles or (0.5,))

    def get_empty_cache_for_benchmark(self) -> None:
        return None

    def clear_cache(self, cache: Any) -> None:
        pass


@contextmanager
def active(driver: FakeDriver) -> Iterator[FakeDriver]:
    """Makes the driver Triton's for a while, and lets stock Triton "compile" for it in no time."""
    config = triton.runtime.driver
    before = config._active, JITFunction._do_compile
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    names = ("PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE")
    kept = {name: getattr(nvidia, name) for name in names if hasattr(nvidia, name)}
    nvidia.PyKernelArg = types.SimpleNamespace
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL, nvidia.ARG_TUPLE = "constexpr", "kernel", "tuple"
    config.set_active(driver)
    JITFunction._do_compile = _compile
    try:
        yield driver
    finally:
        config._active, JITFunction._do_compile = before
        for name, value in kept.items():
            setattr(nvidia, name, value)
        forget()


_touched: list[Any] = []


def forget() -> None:
    """Empties the caches of the functions that stock Triton "compiled"."""
    while _touched:
        _touched.pop().device_caches.clear()


def _compile(
    self: Any, key: Any, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
) -> Any:
    cache, _, _, _, _ = self.device_caches[device]
    source = self.ASTSource(self, signature, constexprs, attrs)
    names = {self.arg_names[path[0]]: value for path, value in constexprs.items() if self.params[path[0]].is_constexpr}
    facts = metadata(self.__name__, num_warps=options.num_warps)
    kernel = triton_api.LoadedKernel(source, facts, code(self.__name__, names))
    kernel.load(device)
    cache[key] = kernel
    _touched.append(self)
    return kernel


def floats(address: int, count: int) -> Any:
    """Memory as an array of float32."""
    return (ctypes.c_float * count).from_address(address)
