"""The GPU as the driver sees it from outside: who else uses it, how warm it is, how fast it is clocked.

Asked through nvidia-ml-py where it is installed (extra ``gpu``), else through ``nvidia-smi``, else not at all. No CUDA
context is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelbake import journal
from kernelbake.errors import BuildError
from kernelbake.words import counted
from kernelbake.worker import Child, ChildDiedError

_PROBE_LIMIT_S = 300.0

_IDLE_BYTES = 2 << 30
"""More memory than a driver keeps for itself on an idle GPU (0.6 GB on an H200), less than any training run uses."""

_THROTTLE_BITS = {
    0x2: "applications clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Of ``nvmlClocksEventReasons``; idle and display clocks are no throttling of a measurement."""


@dataclasses.dataclass(frozen=True)
class Process:
    """Another process that computes on the GPU."""

    pid: int
    used_bytes: int | None

    def __str__(self) -> str:
        used = f", {self.used_bytes} bytes" if self.used_bytes is not None else ""
        return f"process {self.pid}{used}"


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Under which something was measured.

    Args:
        source: ``nvml``, ``nvidia-smi`` or ``not recorded``.
        sm_clock_mhz, memory_clock_mhz, temperature_c: at that moment.
        throttle: what holds the clocks down.
        other_processes: the number of other processes on the GPU; None where it cannot be told.
    """

    source: str
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()
    other_processes: int | None = None

    def to_json(self) -> dict[str, Any]:
        data = {**dataclasses.asdict(self), "throttle": list(self.throttle)}
        return {name: value for name, value in data.items() if value is not None}


def shown(conditions: Mapping[str, Any]) -> str:
    """Conditions in words."""
    if conditions["source"] == "not recorded":
        return "clocks and temperature are not recorded (install the extra `gpu`)"
    throttled = f", held down by {', '.join(conditions['throttle'])}" if conditions.get("throttle") else ""
    clocks = f"{conditions.get('sm_clock_mhz')} MHz, memory {conditions.get('memory_clock_mhz')} MHz"
    return f"{clocks}, {conditions.get('temperature_c')} °C{throttled}"


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The names of the bits that mean throttling."""
    return tuple(name for bit, name in _THROTTLE_BITS.items() if bits & bit)


class Monitor:
    """Asks about one GPU.

    Args:
        uuid: as the driver writes it, ``GPU-…``.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._nvml: Any = _nvml()
        self._handle: Any = None
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    @property
    def cheap(self) -> bool:
        """Whether asking takes microseconds, so that every decision can be accompanied."""
        return self._handle is not None

    def processes(self) -> list[Process] | None:
        """The processes that compute on it; None where that cannot be told."""
        if self._handle is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
                return [Process(item.pid, item.usedGpuMemory) for item in found]
            return None
        lines = _smi("--query-compute-apps=pid,used_memory", self.uuid)
        if lines is None:
            return None
        return [Process(int(pid), _mebibytes(used)) for pid, used in lines]

    def used_bytes(self) -> int | None:
        """Its memory in use, the driver's own included; None where that cannot be told."""
        if self._handle is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        lines = _smi("--query-gpu=memory.used", self.uuid)
        return _mebibytes(lines[0][0]) if lines else None

    def conditions(self, own: int = 0) -> Conditions:
        """How it is now.

        Args:
            own: how many of its processes are ours.
        """
        processes = self.processes()
        others = None if processes is None else max(0, len(processes) - own)
        if self._handle is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                nvml, handle = self._nvml, self._handle
                return Conditions(
                    "nvml",
                    nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                    throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
                    others,
                )
        names = "clocks.sm,clocks.mem,temperature.gpu,clocks_throttle_reasons.active"
        lines = _smi(f"--query-gpu={names}", self.uuid)
        if not lines or len(lines[0]) != 4:
            return Conditions("not recorded", other_processes=others)
        sm, memory, temperature, bits = lines[0]
        reasons = throttle_reasons(int(bits, 16)) if bits.startswith("0x") else ()
        return Conditions("nvidia-smi", _number(sm), _number(memory), _number(temperature), reasons, others)


def _nvml() -> types.ModuleType | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # absent, or no driver: there is a second way to ask
        return None
    module: types.ModuleType = pynvml
    return module


def _smi(query: str, uuid: str) -> list[list[str]] | None:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number << 20


def check_free(monitor: Monitor) -> None:
    """Refuses a GPU that somebody else uses.

    In a container the driver may not show the processes of others; the memory that they hold shows all the same.

    Raises:
        BuildError: naming the processes, or the memory in use.
    """
    processes, used = monitor.processes(), monitor.used_bytes()
    hint = "wait for them, or measure all the same with `--allow-busy-gpu`"
    if processes:
        others = counted(len(processes), "other process uses", "other processes use")
        raise BuildError(
            f"GPU `{monitor.uuid}`: {others} it; wanted it free, or times mean little",
            reasons=map(str, processes),
            hint=hint,
        )
    if used is not None and used > _IDLE_BYTES:
        raise BuildError(
            f"GPU `{monitor.uuid}`: {used:,} bytes of its memory are in use; wanted it free, or times mean little",
            hint=hint,
        )


@contextlib.contextmanager
def reserved(uuid: str) -> Iterator[None]:
    """Keeps every other measuring worker of this user off the GPU.

    Raises:
        LockedError: another build measures on it.
    """
    path = Path(tempfile.gettempdir()) / f"kernelbake-{os.getuid()}-{uuid}.lock"
    with journal.lock(path, f"GPU `{uuid}`"):
        yield


# ---------------------------------------------------------------------------------------------- the probe


class Probe:
    """Asks a short-lived process what GPU this machine has; started early, read when the answer is needed.

    Args:
        environment: of the process.
        log: file for what it prints.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._child = Child(["-P", "-m", "kernelbake.probe"], environment=environment, log=log)

    def answer(self) -> dict[str, Any]:
        """``profile`` (a device profile's data) and ``uuid``.

        Raises:
            BuildError: there is no GPU that can be used.
        """
        try:
            found = self._child.receive(_PROBE_LIMIT_S)
        except ChildDiedError as death:
            reasons = self._child.log_tail()
            raise BuildError(f"GPU: asking for it ended with {death.how}; wanted an answer", reasons=reasons) from death
        if found is None:
            raise BuildError(f"GPU: no answer in {_PROBE_LIMIT_S:.0f} s; wanted one", hint="its driver may hang")
        if "message" in found:
            raise BuildError(
                found["message"],
                reasons=found["reasons"],
                hint="measure on a machine with that GPU; to compile for it here, add `--compile-only`",
            )
        return found

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


def wanted(profile: Mapping[str, Any], environment: Mapping[str, str], log: Path, *, allow_busy: bool) -> Monitor:
    """The GPU of this machine, which has to be the one of a device profile, and free.

    Args:
        profile: the device profile's data.
        environment, log: of the process that looks.
        allow_busy: take it although other processes use it.

    Raises:
        BuildError: there is none, it is another one, or somebody else uses it.
    """
    probe = Probe(environment, log)
    try:
        found = probe.answer()
    finally:
        probe.close()
    check_wanted(found["profile"], profile)
    monitor = Monitor(found["uuid"])
    if not allow_busy:
        check_free(monitor)
    return monitor


def check_wanted(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses to measure on another GPU than the plan is for.

    Args:
        found, wanted: data of device profiles.

    Raises:
        BuildError: with every difference.
    """
    names = ("backend", "name", "capability", "sm_count", "shared_memory_bytes")
    reasons = [
        f"{name}: `{found[name]}`; wanted `{wanted[name]}`"
        for name in names
        if _plain(found[name]) != _plain(wanted[name])
    ]
    if reasons:
        raise BuildError(
            f"GPU: this machine has `{found['name']}`; wanted `{wanted['name']}`, which the manifest is for",
            reasons=reasons,
            hint="to compile for the manifest's GPU here, add `--compile-only`; to bake for this one, change `gpu`",
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
