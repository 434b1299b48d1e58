"""Small things about devices that several parts need. Loads torch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes new tensors of this dtype. Process-wide, so for building only, never beside running threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one of this thread, as Triton launches there whatever device its arguments are on."""
    if device.type == "cuda" and device.index is not None:
        with torch.cuda.device(device):
            yield
    else:
        yield


@contextlib.contextmanager
def importing_fla() -> Iterator[None]:
    """Silences FLA's warning, on import, that there is no GPU: under the interpreter none is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        yield


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done all its work; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int | None:
    """Memory that a new tensor could take now; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def gib(count: int) -> str:
    """A number of bytes for people: exact, and in GiB, or in MiB below one."""
    size = f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
    return f"{count:,} bytes ({size})"
