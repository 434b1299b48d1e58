"""A GPU that is not there: a Triton driver and the queries of ``torch.cuda``, answered from a device profile.

Kernel libraries ask for hardware facts when they are imported (which configs to offer, which tile fits), so
``install`` comes before the first import of one, in a process of its own: nothing here can be undone. Nothing is
launched or allocated. What a caller asks for that no profile can answer raises instead of guessing.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from pathlib import Path
from typing import Any

import torch
import triton

from kernelbake import triton_api
from kernelbake.errors import UnsupportedError
from kernelbake.profiles import DeviceProfile

_REGISTERS_PER_SM = 65536
"""Of every NVIDIA GPU from compute capability 5.0 on."""

_WHOLE_ON_CUDA = ("silu_backward", "_fused_rms_norm")
"""Operations that builds without CUDA compose of others, and builds with it have a kernel for: in one piece they hold
less memory."""

_CUDA, _META = 1, 14
_GUARD_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::DeviceType`` numbers and the table of device guards, which torch builds without CUDA leave empty for CUDA."""


def install(profile: DeviceProfile) -> None:
    """Makes Triton and ``torch.cuda`` in this process answer as if the profile's GPU were device 0.

    Raises:
        UnsupportedError: this torch or Triton cannot be made to.
    """
    triton_api.check_supported()
    triton.runtime.driver.set_active(FakeDriver(profile))
    _clear_shared_memory_memo()
    for name, value in _cuda_queries(profile).items():
        setattr(torch.cuda, name, value)
    torch.cuda._lazy_init = lambda: None
    torch.Generator = _generator_class()
    _fill_guard_table()
    _enter_kernels()


_KERNELS = torch.library.Library("aten", "IMPL")
"""Holds the entries of ``_enter_kernels`` as long as the process lives."""


class FakeDriver:
    """What Triton asks of its active driver before and at a launch; a launch itself is refused."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._target = triton_api.gpu_target(profile.arch, profile.warp_size)
        self.utils = types.SimpleNamespace(get_device_properties=self._properties)
        self.binary_ext = "cubin"

    def _properties(self, device: int) -> dict[str, int]:
        profile = self._profile
        return {
            "max_shared_mem": profile.shared_memory_bytes,
            "max_num_regs": _REGISTERS_PER_SM,
            "multiprocessor_count": profile.sm_count,
            "warpSize": profile.warp_size,
        }

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one device only."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return self._profile.capability

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        return _no_benchmark

    def map_python_to_cpp_type(self, type_: str) -> str:
        return type_


def _no_benchmark(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a fake device was asked to time a kernel")


def _clear_shared_memory_memo() -> None:
    from triton.compiler import compiler

    compiler.max_shared_mem.cache_clear()


class _NoContext(contextlib.nullcontext[None]):
    """``torch.cuda.device`` and its relatives: takes any argument and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class FakeStream(_NoContext):
    """A stream or an event: ordering has no meaning where nothing runs."""

    cuda_stream = 0
    device_index = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeStream) -> float:
        return 0.0

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    synchronize = record = wait = wait_event = wait_stream = _nothing

    def record_event(self, event: FakeStream | None = None) -> FakeStream:
        return event or FakeStream()


def _cuda_queries(profile: DeviceProfile) -> dict[str, Any]:
    """``torch.cuda``'s functions that a training step may call, by name."""
    properties = types.SimpleNamespace(
        name=profile.name,
        major=profile.capability[0],
        minor=profile.capability[1],
        multi_processor_count=profile.sm_count,
        total_memory=profile.total_memory_bytes,
        shared_memory_per_block_optin=profile.shared_memory_bytes,
        shared_memory_per_multiprocessor=profile.shared_memory_per_sm_bytes,
        L2_cache_size=profile.l2_bytes,
        warp_size=profile.warp_size,
        regs_per_multiprocessor=_REGISTERS_PER_SM,
        is_integrated=0,
    )
    stream = FakeStream()
    constants: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,  # else fake tensors would touch the CUDA runtime
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": profile.name,
        "get_device_capability": profile.capability,
        "get_device_properties": properties,
        "get_arch_list": [profile.gpu_target],
        "is_current_stream_capturing": False,
        "current_stream": stream,
        "default_stream": stream,
        "set_device": None,
        "set_stream": None,
        "synchronize": None,
        "init": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "set_rng_state": None,
        "memory_stats": {},
        "mem_get_info": (profile.total_memory_bytes, profile.total_memory_bytes),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
    }
    classes = {"device": _NoContext, "device_of": _NoContext, "stream": _NoContext, "Stream": FakeStream}
    made = {"Event": FakeStream, "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8)}
    return {**{name: _constant(value) for name, value in constants.items()}, **classes, **made}


def _constant(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _generator_class() -> type[torch._C.Generator]:
    class Generator(torch._C.Generator):
        """A generator of any device. What a GPU's would draw is not known, so a fake one's draws stay unknown too."""

        on_device: bool

        def __new__(cls, device: Any = "cpu") -> Generator:
            self: Generator = super().__new__(cls)
            self.on_device = torch.device(device).type != "cpu"
            return self

    return Generator


def _fill_guard_table() -> None:
    """Gives CUDA the device guard that does nothing, without which torch aborts the process at the first fake tensor.

    Builds with CUDA have a function for it; builds without need Meta's guard entered in their table.
    """
    torch._C._ensureCUDADeviceGuardSet()
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        table = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARD_REGISTRY)
    except ValueError as error:
        raise UnsupportedError(f"torch: version `{torch.__version__}` has no table of device guards") from error
    if not table[_CUDA]:
        table[_CUDA] = table[_META]


def _enter_kernels() -> None:
    """Lets operations reach the fake tensors whole that a build with CUDA would not take apart. Nothing runs them."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in _WHOLE_ON_CUDA:
        if not has_kernel(f"aten::{name}", "CUDA"):
            _KERNELS.impl(name, _never_run, "CUDA")


def _never_run(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a fake device was asked to run a kernel")
