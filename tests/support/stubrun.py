"""Freezes and launches through Triton's real CUDA driver, on a stand-in for the driver's library; prints what arrived.

Arguments: the stand-in, then the libraries of the bundle. No program may be started: there is no compiler and no PATH.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any


def forbid(event: str, args: Any) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        raise RuntimeError(f"a program was started: {args}")


class Launch(ctypes.Structure):
    """One launch, as the stand-in records it."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("grid", ctypes.c_uint64 * 3),
        ("block", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("params", ctypes.c_uint64 * 16),
    )


def use_stand_in(path: str) -> ctypes.CDLL:
    """Loads it under the driver library's name, and makes torch and Triton believe in it."""
    import torch
    import triton
    from triton.backends.nvidia import driver as nvidia

    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    library.kb_launch_at.restype = ctypes.POINTER(Launch)
    for backend in triton.backends.backends.values():
        active = backend.driver is nvidia.CudaDriver
        backend.driver.is_active = staticmethod(lambda active=active: active)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.init = torch.cuda.synchronize = lambda *args: None
    torch._C._cuda_getDevice = lambda: 0
    functions = {
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 7,
        "set_current_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
    }
    nvidia.GPUDriver.__init__ = lambda self: vars(self).update(functions)
    return library


def main() -> None:
    os.environ["PATH"], os.environ["CC"] = "", "/bin/false"
    sys.addaudithook(forbid)
    import contextlib

    import frozenkernels as kernels
    import frozenlab as lab
    import pytest
    import torch
    from frozenlab import call

    from kernelbake import digest, triton_api
    from kernelbake.bundle import Entry

    class Located(torch.Tensor):
        """A tensor that says that it lies on device 0."""

        def get_device(self) -> int:
            return 0

    stand_in = use_stand_in(sys.argv[1])
    torch.cuda.device = lambda device: contextlib.nullcontext()
    x, y = (torch.zeros(64).as_subclass(Located) for _ in range(2))
    calls = [
        call(kernels.tuned, x, y, 2.0, 64),
        call(kernels.restoring, x, y, 3.0, 64),
        call(kernels.hooked, x, y, 4.0, 64),
    ]
    bundle = lab.bake(calls)
    bundle.libs = {digest.of_bytes(content): content for content in (Path(path).read_bytes() for path in sys.argv[2:])}
    launchers = [one for one, data in bundle.libs.items() if triton_api.library_name(data) == triton_api.LAUNCHER]
    launcher = launchers[0] if launchers else None
    bundle.entries = {
        identity: Entry(entry.kernel, entry.specialization, entry.metadata, entry.binary, launcher)
        for identity, entry in bundle.entries.items()
    }
    with pytest.MonkeyPatch.context() as patch, lab.frozen(bundle, patch, devices=[0]) as frozen:
        print(json.dumps(sorted(frozen.unfused)))
        for one in calls:
            one.launchable[(5, 2)](*one.args, **one.kwargs)
        kernels.tuned[(6,)](y=y, x=x, n=64, alpha=2.0)
        assert frozen.counters.hits == 4
    for index in range(stand_in.kb_launches()):
        launch = stand_in.kb_launch_at(index).contents
        alpha = ctypes.c_float.from_buffer_copy(bytes(launch.params)[16:20]).value
        pointers = [launch.params[0] == x.data_ptr(), launch.params[1] == y.data_ptr()]
        print(json.dumps([list(launch.grid), launch.block, launch.stream, *pointers, alpha, launch.params[3]]))


if __name__ == "__main__":
    main()
