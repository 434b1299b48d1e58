"""From entries to kernels on devices: launcher libraries, Triton's driver, and the modules themselves. All from memory.

Nothing here compiles, runs a program or writes to a folder that anything else reads. A launcher library has to have a
path to be loaded from: an anonymous file in memory where the system has them, else a fresh private folder.
"""

from __future__ import annotations

import copy
import functools
import os
import queue
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelbake.errors import BundleError, UnsupportedError
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.bundle import Entry


def library_path(name: str, content: bytes) -> tuple[str, Callable[[], None]]:
    """A path under which the content can be loaded, and what to call after that.

    No other library of the process ever had the path: the system's loader knows libraries by their paths and would give
    the old one back. So the anonymous file stays open, as long as the process lives.

    Raises:
        UnsupportedError: neither memory nor a folder takes it; with every place that was tried.
    """
    tried = []
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        return f"/proc/{os.getpid()}/fd/{descriptor}", lambda: None
    except (AttributeError, OSError) as error:
        tried.append(f"memory: {error}")
    for parent in dict.fromkeys((tempfile.gettempdir(), "/dev/shm")):
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="kernelbake-", dir=parent))
            path = folder / f"{name}.so"
            path.write_bytes(content)
            return str(path), functools.partial(shutil.rmtree, folder, ignore_errors=True)
        except OSError as error:
            tried.append(f"`{parent}`: {error}")
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    raise UnsupportedError(
        f"launcher library `{name}`: no place to load its {len(content)} bytes from; wanted memory or a private folder",
        reasons=tried,
        hint="point TMPDIR at a folder with room",
    )


class Libraries:
    """The launcher libraries of a bundle, each loaded once per process when it is first needed.

    Args:
        contents: by digest.
    """

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def module(self, identity: str) -> Any:
        """The imported library.

        Raises:
            UnsupportedError: it does not load into this Python, or there is nowhere to load it from.
        """
        if identity not in _MODULES:
            from kernelbake import triton_api

            content = self._contents[identity]
            name = triton_api.library_name(content)
            path, done = library_path(name, content)
            try:
                _MODULES[identity] = triton_api.load_library(name, path)
            except ImportError as error:
                raise UnsupportedError(
                    f"launcher library `{identity:.19}`: does not load: {error}; wanted one for Python "
                    f"{sys.version_info.major}.{sys.version_info.minor} on this system"
                ) from error
            finally:
                done()
        return _MODULES[identity]

    def utilities(self) -> Any | None:
        """The helper through which Triton loads modules, or None if the bundle has none."""
        from kernelbake import triton_api

        for identity, content in self._contents.items():
            if triton_api.library_name(content) == triton_api.UTILITIES:
                return self.module(identity)
        return None


_MODULES: dict[str, Any] = {}
"""Loaded libraries by digest. A library cannot be unloaded, so they outlive a release."""


def prepare_driver(libraries: Libraries) -> None:
    """Makes Triton's driver object from the bundle's helper, unless the process has one already.

    Raises:
        UnsupportedError: the bundle has no helper, so that Triton would call a C compiler.
    """
    from kernelbake import triton_api

    if triton_api.has_driver():
        return
    utilities = libraries.utilities()
    if utilities is None:
        raise UnsupportedError(
            "launcher library: the bundle has no `cuda_utils`, and Triton's driver is not there yet; wanted either",
            hint="build the bundle again",
        )
    triton_api.make_driver(utilities)


def load_entry(entry: Entry, device: int, libraries: Libraries | None = None, launchable: Any = None) -> Any:
    """Loads one entry on a device, from memory, and gives Triton's compiled kernel back.

    Args:
        entry: of a bundle, or just compiled.
        device: its index; made the current one for the time of the call.
        libraries: the launcher libraries, where this Triton needs one for the entry.
        launchable: the kernel's live object, where it is at hand.

    Raises:
        LookupError: the kernel is not found.
        UnsupportedError: the device cannot take it.
    """
    from kernelbake import triton_api

    kernel = _prepared(entry, libraries, triton_api.find(entry.kernel) if launchable is None else launchable)
    access = triton_api.device_access()
    with access.switch(device):
        access.ready(device)
        kernel.load(device)
    return kernel


def _prepared(entry: Entry, libraries: Libraries | None, launchable: Any) -> Any:
    """An entry's kernel with its launcher, which serve every device."""
    from kernelbake import triton_api

    kernel = triton_api.loaded_kernel(launchable, entry.specialization, entry.metadata, entry.binary)
    library = libraries.module(entry.launcher) if entry.launcher is not None and libraries is not None else None
    kernel.prepare(library)
    return kernel


def load_all(
    wanted: Mapping[str, Any], entries: Mapping[str, Entry], devices: Sequence[int], libraries: Libraries
) -> dict[int, dict[str, Any]]:
    """Loads entries on devices: device → digest → kernel.

    A thread for each device loads what this one prepares: the driver's part of it needs no Python.

    Args:
        wanted: digest → live kernel of each entry.
        entries: by digest.
        devices: indices.
        libraries: the bundle's.

    Raises:
        BundleError: entries that a device does not take, all of them; the modules loaded so far are let go.
    """
    queues: dict[int, queue.SimpleQueue[tuple[str, Any] | None]] = {device: queue.SimpleQueue() for device in devices}
    with ThreadPoolExecutor(len(devices), "kernelbake-load") as pool:
        loading = {device: pool.submit(_load_on, device, waiting) for device, waiting in queues.items()}
        try:
            for identity, launchable in wanted.items():
                kernel = _prepared(entries[identity], libraries, launchable)
                for waiting in queues.values():
                    waiting.put((identity, copy.copy(kernel)))
        finally:
            for waiting in queues.values():
                waiting.put(None)
    loaded = {device: future.result() for device, future in loading.items()}
    failures = [
        f"kernel `{entries[identity].kernel.name}` on device {device}: {str(error).splitlines()[0]}"
        for device, found in loaded.items()
        for identity, error in found.items()
        if isinstance(error, Exception)
    ]
    if failures:
        failing = f"{counted(len(failures), 'binary')} of {len(wanted) * len(devices):,}"
        message = f"freeze: {failing} {'does' if len(failures) == 1 else 'do'} not load; wanted all of them"
        raise BundleError(message, reasons=failures)
    return loaded


def _load_on(device: int, waiting: queue.SimpleQueue[tuple[str, Any] | None]) -> dict[str, Any]:
    """Loads what comes until None does: digest → kernel, or the error that the device answered with."""
    from kernelbake import triton_api

    found: dict[str, Any] = {}
    access = triton_api.device_access()
    with access.switch(device):
        access.ready(device)
        while (item := waiting.get()) is not None:
            identity, kernel = item
            try:
                kernel.load(device)
                found[identity] = kernel
            except (RuntimeError, UnsupportedError) as error:
                found[identity] = error
    return found
