"""Facts of this machine and process: the GPU, Triton, the versions, as a device profile and as a fingerprint.

Loads torch and Triton only when asked. No program is started but the assembler's version query, and that only for a
build.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kernelbake import digest, profiles
from kernelbake.errors import InputError, UnsupportedError
from kernelbake.fingerprint import FieldValue, Fingerprint, capability, sources_digest
from kernelbake.plan import KernelFacts
from kernelbake.profiles import INTERPRETER, DeviceProfile
from kernelbake.words import counted

_DISTRIBUTIONS = {"torch": ("torch",), "fla": ("fla-core", "flash-linear-attention"), "transformers": ("transformers",)}

OVERRULED = ("FLA_CACHE_MODE", "FLA_CACHE_RESULTS", "FLA_CONFIG_DIR", "FLA_GPU_NAME")
"""Variables of flash-linear-attention's own lookup of configs; a frozen process takes every config from the bundle."""

_KERNEL_PREFIXES = ("FLA_", "WALL_ATTN_", "ATK_")
"""Variables by which flash-linear-attention chooses among kernels and functions while it is imported."""

_BUILD_VARIABLES = ("PTXAS_OPTIONS", "TRITON_F32_DEFAULT", "TRITON_LIBDEVICE_PATH", "TRITON_OVERRIDE_ARCH")
"""Variables that change code but are not among those for which Triton recompiles."""

_BUILD_FLAGS = ("TRITON_DISABLE_LINE_INFO", "TRITON_DEFAULT_FP_FUSION")
"""Variables for which the fingerprint has fields of their own."""


def check_platform() -> None:
    """Refuses systems, interpreters and builds of torch for which nothing here was made.

    Raises:
        UnsupportedError: with every reason.
    """
    reasons = []
    if sys.platform != "linux":
        reasons.append(f"operating system: `{sys.platform}`; wanted Linux, the only one that Triton supports with CUDA")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        reasons.append("python: a free-threaded build; wanted one with the global lock, on which launches rely")
    if sys.flags.optimize > 1:
        reasons.append("python: `-OO` drops the docstrings that transformers reads on import; wanted at most `-O`")
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.version, "hip", None):
        reasons.append(f"torch: built for ROCm `{torch.version.hip}`; wanted a build for CUDA")
    if reasons:
        raise UnsupportedError("platform: not supported", reasons=reasons)


def running_profile(device: int = 0) -> DeviceProfile:
    """The profile of a GPU of this machine, as the driver reports it.

    Args:
        device: index among the visible devices.

    Raises:
        UnsupportedError: another kind of accelerator.
        InputError: no such device.
    """
    import torch

    check_platform()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= device < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f" (`CUDA_VISIBLE_DEVICES={visible}`)" if visible is not None else ""
        seen = counted(count, "CUDA GPU") if count else "no CUDA GPU"
        raise InputError(f"GPU: device {device} is not there; this process sees {seen}{shown}")
    facts = torch.cuda.get_device_properties(device)
    return DeviceProfile(
        id=re.sub(r"[^a-z0-9]+", "-", facts.name.lower()).strip("-"),
        name=facts.name,
        backend="cuda",
        capability=(facts.major, facts.minor),
        sm_count=facts.multi_processor_count,
        shared_memory_bytes=facts.shared_memory_per_block_optin,
        shared_memory_per_sm_bytes=facts.shared_memory_per_multiprocessor,
        total_memory_bytes=facts.total_memory,
        l2_bytes=facts.L2_cache_size,
        warp_size=facts.warp_size,
        source="read off the card",
    )


def fingerprint(
    place: DeviceProfile | int,
    kernels: Iterable[KernelFacts],
    *,
    build: bool,
    line_info: bool = False,
    fp_fusion: bool = True,
) -> Fingerprint:
    """The fingerprint of this process on a GPU.

    Args:
        place: a device profile, or the index of a device here.
        kernels: the kernels' facts.
        build: whether the facts of a build belong to it; they are not needed, and not asked for, at run time.
        line_info, fp_fusion: the build's compile options.

    Raises:
        UnsupportedError: the platform or this version of Triton.
        InputError: no such device.
    """
    from kernelbake import triton_api

    check_platform()
    triton_api.check_supported()
    profile = running_profile(place) if isinstance(place, int) else place
    values: dict[str, FieldValue] = {
        **gpu_fields(profile),
        "triton.version": triton_api.full_version(),
        "triton.key": triton_key(),
        "triton.environment": kernel_environment(os.environ),
        "kernel.sources": sources_digest(kernels),
        **{f"{name}.version": _version_of(names) for name, names in _DISTRIBUTIONS.items()},
    }
    if profile.backend != INTERPRETER:
        values["driver.version"] = driver_version()
        values["python.abi"] = sysconfig.get_config_var("SOABI")
    if build:
        values |= {
            "build.ptxas": None if profile.backend == INTERPRETER else triton_api.ptxas_version(profile.arch),
            "build.line_info": line_info,
            "build.fp_fusion": fp_fusion,
            "build.environment": _build_environment(triton_api.invalidating_environment()),
        }
    return Fingerprint.of(values)


def gpu_fields(profile: DeviceProfile) -> dict[str, FieldValue]:
    """The fields of a fingerprint that are about the GPU."""
    return {
        "gpu.backend": profile.backend,
        "gpu.capability": capability(*profile.capability),
        "gpu.device": profile.name,
        "gpu.sm_count": profile.sm_count,
        "gpu.shared_memory_bytes": profile.shared_memory_bytes,
    }


@functools.cache
def triton_key() -> str:
    """Digest of the Triton that is installed: its sources, and the identity that the linker gave its native library.

    Triton's own key hashes the library's 400 MB, which would take longer than the rest of a freeze; the linker's build
    id is a hash of them too. A library without one is hashed.
    """
    from kernelbake import triton_api

    sources, library = triton_api.own_files()
    identity = build_id(library) or digest.of_file(library)
    return digest.of_tree([*sources.items(), ("library", identity.encode())])


def build_id(path: Path) -> str | None:
    """The GNU build id of a 64-bit ELF file, in hexadecimal, or None if the linker wrote none.

    Layouts: the ELF-64 header, its program headers of type ``PT_NOTE`` (4), and in them notes of name size, content
    size, type, then both padded to 4 bytes; the build id is of type 3 and by ``GNU``.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            return None
        offset, size, number = (int.from_bytes(head[a:b], "little") for a, b in ((32, 40), (54, 56), (56, 58)))
        file.seek(offset)
        table = file.read(size * number)
        for start in range(0, len(table), size):
            if int.from_bytes(table[start : start + 4], "little") == 4:
                place, length = (int.from_bytes(table[start + at : start + at + 8], "little") for at in (8, 32))
                file.seek(place)
                found = _build_id_among(file.read(length))
                if found is not None:
                    return found
    return None


def _build_id_among(notes: bytes) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        names, contents, kind = (int.from_bytes(notes[at + i : at + i + 4], "little") for i in (0, 4, 8))
        begin = at + 12 + (names + 3) // 4 * 4
        if kind == 3 and notes[at + 12 : at + 12 + names] == b"GNU\0":
            return notes[begin : begin + contents].hex()
        at = begin + (contents + 3) // 4 * 4
    return None


def kernel_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which kernels, or the functions in them, would be other ones than in another process."""
    names = (name for name in environment if name.startswith(_KERNEL_PREFIXES) and name not in OVERRULED)
    return {name: environment[name] for name in sorted(names)}


def overruled(environment: Mapping[str, str]) -> list[str]:
    """One line for every variable that asks another library to look configs up, which a frozen process does not."""
    return [
        f"`{name}={environment[name]}` has no effect: every config comes from the bundle"
        for name in OVERRULED
        if environment.get(name)
    ]


def _build_environment(invalidating: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in invalidating.items() if name not in _BUILD_FLAGS}
    found |= {name: os.environ[name] for name in _BUILD_VARIABLES if os.environ.get(name)}
    return dict(sorted(found.items()))


def _version_of(names: Iterable[str]) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def driver_version() -> str | None:
    """The NVIDIA driver's version, ``580.65.06``; None where no driver is."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if match := re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text):
            return match[1]
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        buffer = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(buffer, 96) == 0:
            return buffer.value.decode()
    return None


def interpreter_profile() -> DeviceProfile:
    """The profile under which the interpreter runs."""
    return profiles.load(INTERPRETER)


# ---------------------------------------------------------------------------------------------- folders

INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def inductor_makes_no_folder() -> Iterator[None]:
    """Lets modules be imported that decorate with ``torch.compile`` without anything being written.

    torch makes a folder for compiled code at the decoration; unless the environment names one, it is told of a folder
    that is there.
    """
    before = os.environ.get(INDUCTOR_FOLDER)
    os.environ[INDUCTOR_FOLDER] = before or str(Path(__file__).parent)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(INDUCTOR_FOLDER, None)
        else:
            os.environ[INDUCTOR_FOLDER] = before
