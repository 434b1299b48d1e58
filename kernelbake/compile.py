"""Compiles candidates without a GPU: kernel and specialization in, machine code and launch metadata out.

``python -m kernelbake.compile`` is the *compile server* of a build. It imports the kernels once, under the device
profile of the gpu target and with every real GPU hidden, and forks one process per job; never threads, which abort
inside the compiler. Whatever happens to one of them, an exception of any type, an abort, a compilation that does not
end, costs the one candidate that it was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelbake import digest
from kernelbake.errors import KernelbakeError
from kernelbake.keys import Kernel, Specialization
from kernelbake.outcome import OK, Code, Files, Reason, Rejected, one_line, shape_of
from kernelbake.plan import KernelFacts
from kernelbake.profiles import DeviceProfile
from kernelbake.worker import Channel, Lines, describe_status, die_with_parent, end_helpers_too, write_line

_LACKS_ARCH = ("is not defined for option 'gpu-name'", "Unsupported gpu architecture", "Cannot find ptxas")


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class ToolchainError(Exception):
    """No candidate can be compiled here: the assembler is missing or does not know the gpu target."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The code of one specialization.

    Args:
        binary: the cubin.
        metadata: Triton's launch metadata, without paths of this machine.
        launcher: the compiled launcher library, where this version of Triton needs one for each signature.
    """

    binary: bytes
    metadata: dict[str, Any]
    launcher: bytes | None = None


def compile_one(
    kernel: Kernel, specialization: Specialization, arch: int, *, shared_limit: int, folder: Path
) -> Compiled | Rejected:
    """Compiles one specialization of a kernel in this process. No GPU and no driver is needed.

    Args:
        kernel: where it is found.
        specialization: what to compile it for, options included.
        arch: compute capability without the dot, 120.
        shared_limit: shared memory of a block in bytes; code that needs more is rejected.
        folder: the build's folder of code, where launcher libraries are kept too.

    Raises:
        ToolchainError: the assembler cannot work for this gpu target at all.
        OSError: the disk is full.
        KeyboardInterrupt: a person stops the build.
    """
    import triton

    from kernelbake import triton_api

    try:
        request = triton_api.compile_request(triton_api.find(kernel), specialization)
        compiled = triton.compile(request.source, target=triton_api.gpu_target(arch), options=request.options)
        metadata = _portable(json.loads(_metadata_text(compiled)))
        launcher = _launcher(triton_api.launcher_source(triton_api.find(kernel), specialization, metadata), folder)
        binary = bytes(compiled.kernel)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a candidate may fail in any way; none of them may end the build
        return _rejection(error)
    need = int(metadata["shared"])
    if need > shared_limit:
        return Rejected(
            Reason.SHARED_MEMORY,
            f"needs {need} bytes of shared memory; the GPU has {shared_limit}",
            need_bytes=need,
            limit_bytes=shared_limit,
        )
    return Compiled(binary, metadata, launcher)


def _metadata_text(compiled: Any) -> str:
    [path] = [path for name, path in compiled.metadata_group.items() if name.endswith(".json")]
    return Path(path).read_text()


def _launcher(source: str | None, folder: Path) -> bytes | None:
    """The compiled launcher library of a source; one compilation serves all processes, whoever is first."""
    from kernelbake import triton_api

    if source is None:
        return None
    built = folder / f"launcher.{digest.of_text(source).removeprefix(digest.PREFIX)}"
    if not built.exists():
        temporary = built.with_name(f"{built.name}.{os.getpid()}")
        temporary.write_bytes(triton_api.build_library(triton_api.LAUNCHER, source))
        temporary.replace(built)
    return built.read_bytes()


def _portable(metadata: dict[str, Any]) -> dict[str, Any]:
    """Without the folder in which Triton is installed: nobody reads it at load, and bytes must not depend on it."""
    libraries = metadata.get("extern_libs") or []
    return {**metadata, "extern_libs": [[name, Path(path).name] for name, path in libraries]}


def _rejection(error: BaseException) -> Rejected:
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        raise error
    text = str(error)
    if any(mark in text for mark in _LACKS_ARCH):
        raise ToolchainError(_assembler_fault(text)) from error
    if type(error).__name__ == "OutOfResources":
        return Rejected(Reason.SHARED_MEMORY, one_line(error))
    return Rejected(Reason.COMPILE_ERROR, one_line(error))


def _assembler_fault(text: str) -> str:
    """One line out of the report about a failed ptxas: which one it was, its version, and what it said."""
    said = next((line.strip() for line in text.splitlines() if any(mark in line for mark in _LACKS_ARCH)), text)
    command = next((line for line in text.splitlines() if line.startswith("Repro command:")), "")
    if not command:
        return said
    path = command.removeprefix("Repro command:").split()[0]
    asked = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"V\d+(\.\d+)+", asked.stdout)
    return f"{path} {version[0] if version else '(unknown version)'}: {said}"


# ---------------------------------------------------------------------------------------------- the server


@dataclasses.dataclass
class _Slot:
    """One forked process and what it works on."""

    pid: int
    socket: socket.socket
    lines: Lines
    task: dict[str, Any] | None = None
    deadline: float = 0.0


class Server:
    """Hands tasks to forked processes and their outcomes back, in whatever order they finish.

    Args:
        channel: to the builder. Tasks come as ``{"id", "kernel", "specialization"}``; answers are the task's ``id``
            with ``outcome`` and, if ok, ``code``.
        folder: where code goes, by digest.
        arch, shared_limit: of the gpu target.
        jobs: the number of processes.
        time_limit_s: for one compilation.
    """

    def __init__(
        self, channel: Channel, folder: Path, *, arch: int, shared_limit: int, jobs: int, time_limit_s: float
    ) -> None:
        self._channel = channel
        self._folder = folder
        self._arch, self._shared_limit = arch, shared_limit
        self._time_limit_s = time_limit_s
        self._tasks: deque[dict[str, Any]] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, None)
        for left in folder.glob("tmp.*"):  # by a server that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._slots = [self._fork() for _ in range(jobs)]

    def serve(self) -> None:
        """Works until the builder is gone."""
        while not self._channel.lines.ended:
            busy = [slot.deadline for slot in self._slots if slot.task is not None]
            wait = max(0.0, min(busy) - time.monotonic()) if busy else None
            for key, _ in self._selector.select(wait):
                if key.data is None:
                    self._channel.lines.fill()
                    self._tasks += self._channel.lines.waiting
                    self._channel.lines.waiting.clear()
                else:
                    self._read(key.data)
            self._expire()
            self._assign()

    def _assign(self) -> None:
        for slot in self._slots:
            if not self._tasks:
                return
            if slot.task is None:
                slot.task = self._tasks.popleft()
                slot.deadline = time.monotonic() + self._time_limit_s
                write_line(slot.socket.fileno(), slot.task)

    def _read(self, slot: _Slot) -> None:
        slot.lines.fill()
        if slot.lines.waiting:
            answer = slot.lines.waiting.popleft()
            slot.task = None
            self._channel.send(answer)
        elif slot.lines.ended:
            _, status = os.waitpid(slot.pid, 0)
            how = describe_status(os.waitstatus_to_exitcode(status))
            self._replace(slot, Rejected(Reason.CRASH, f"the compiler ended with {how}"))

    def _expire(self) -> None:
        now = time.monotonic()
        for slot in list(self._slots):
            if slot.task is not None and now >= slot.deadline:
                os.killpg(slot.pid, signal.SIGKILL)
                os.waitpid(slot.pid, 0)
                limit = f"{self._time_limit_s:g} s"
                self._replace(slot, Rejected(Reason.TIMEOUT, f"the compilation took longer than {limit}"))

    def _replace(self, slot: _Slot, outcome: Rejected) -> None:
        """Answers for a process that is gone and forks another in its place."""
        self._selector.unregister(slot.socket)
        slot.socket.close()
        shutil.rmtree(_private(self._folder, slot.pid), ignore_errors=True)
        if slot.task is not None:
            self._channel.send({"id": slot.task["id"], **outcome.to_json()})
        self._slots[self._slots.index(slot)] = self._fork()

    def _fork(self) -> _Slot:
        mine, theirs = socket.socketpair()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                mine.close()
                self._channel.close()
                os.setpgid(0, 0)
                die_with_parent(server)
                _work(theirs.fileno(), self._folder, self._arch, self._shared_limit)
            finally:
                os._exit(1)
        theirs.close()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # on both sides, so that neither has to wait for the other
        slot = _Slot(pid, mine, Lines(mine.fileno()))
        self._selector.register(mine, selectors.EVENT_READ, slot)
        return slot


def _private(folder: Path, pid: int) -> Path:
    """A compiling process's own cache and temporary files."""
    return folder / f"tmp.{pid}"


def _work(descriptor: int, folder: Path, arch: int, shared_limit: int) -> None:
    """The forked process: one task after another, until the server closes its end."""
    from kernelbake import triton_api

    private = _private(folder, os.getpid())
    private.mkdir()
    tempfile.tempdir = str(private)
    tasks = Lines(descriptor)
    while True:
        while not tasks.waiting:
            if tasks.ended:
                shutil.rmtree(private, ignore_errors=True)
                return
            tasks.fill()
        task = tasks.waiting.popleft()
        triton_api.use_cache_folder(private / "cache")
        write_line(descriptor, {"id": task["id"], **_answer(task, folder, arch, shared_limit)})
        shutil.rmtree(private / "cache", ignore_errors=True)


def _answer(task: Mapping[str, Any], folder: Path, arch: int, shared_limit: int) -> dict[str, Any]:
    try:
        specialization = Specialization.from_json(task["specialization"])
        kernel = Kernel.from_json(task["kernel"])
        result = compile_one(kernel, specialization, arch, shared_limit=shared_limit, folder=folder)
    except ToolchainError as error:
        return {"outcome": "toolchain", "detail": str(error)}
    except KeyboardInterrupt:
        return {"outcome": "interrupted", "detail": f"compiling {task['kernel']}"}
    except OSError as error:
        return {"outcome": "disk", "detail": f"{error.strerror or error}"}
    if isinstance(result, Rejected):
        return result.to_json()
    try:
        return {"outcome": OK, "code": store(Files(folder), result).to_json()}
    except OSError as error:
        return {"outcome": "disk", "detail": f"{error.strerror or error}"}


def store(files: Files, compiled: Compiled) -> Code:
    """Puts code into the build's folder of code.

    Raises:
        OSError: the folder cannot be written.
    """
    launcher = compiled.launcher
    return Code(
        binary=files.put(compiled.binary),
        metadata=files.put(digest.canonical_json(compiled.metadata)),
        launcher=None if launcher is None else files.put(launcher),
        shape=shape_of(compiled.binary, compiled.metadata),
        shared_bytes=int(compiled.metadata["shared"]),
    )


def facts(job: Mapping[str, Any]) -> dict[str, Any]:
    """What the builder has to know of this process.

    Its fingerprint, Triton's helper library where it has one, and how long each kernel's source is, from which can be
    guessed how long it takes to compile.
    """
    from kernelbake import host, triton_api

    profile = DeviceProfile.from_json(job["profile"])
    kernels = [KernelFacts.from_json(data) for data in job["kernels"]]
    options = {"line_info": job["line_info"], "fp_fusion": job["fp_fusion"]}
    found = host.fingerprint(profile, kernels, build=True, **options).to_json()
    if job["interpreted"]:
        return {"fingerprint": found, "utilities": None, "sizes": {}}
    library = triton_api.build_library(triton_api.UTILITIES, triton_api.utilities_source())
    sizes = {}
    if job["jobs"]:
        for facts in kernels:
            function = triton_api.python_function(triton_api.find(facts.kernel))
            sizes[facts.kernel.to_json()] = len(inspect.getsource(function))
    return {"fingerprint": found, "utilities": Files(Path(job["folder"])).put(library), "sizes": sizes}


def _prepare(job: Mapping[str, Any]) -> None:
    """Imports every kernel under the device profile; forked processes then have them."""
    from kernelbake import fakedevice, triton_api

    fakedevice.install(DeviceProfile.from_json(job["profile"]))
    for data in job["kernels"]:
        triton_api.find(KernelFacts.from_json(data).kernel)


def main() -> None:
    """The compile server's process."""
    channel = Channel(sys.argv)
    end_helpers_too()
    job = channel.receive()
    try:
        if job["jobs"]:
            _prepare(job)
        found = facts(job)
    except (LookupError, KernelbakeError) as error:
        channel.send({"event": "refused", "message": str(error.args[0])})
        return
    profile = DeviceProfile.from_json(job["profile"])
    server = Server(
        channel,
        Path(job["folder"]),
        arch=profile.arch,
        shared_limit=profile.shared_memory_bytes,
        jobs=job["jobs"],
        time_limit_s=job["time_limit_s"],
    )
    channel.send({"event": "ready", **found})
    server.serve()


if __name__ == "__main__":
    main()
