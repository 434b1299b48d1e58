"""The GPU seen from outside: busy, wrong, absent, throttled; with a driver library, its command, or neither."""

from __future__ import annotations

import os
import stat
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kernelbake import gpu, profiles
from kernelbake.errors import BuildError, LockedError
from kernelbake.gpu import Conditions, Monitor, Process

UUID = "GPU-0000"


class FakeError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """What ``gpu`` asks of nvidia-ml-py."""

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, processes: list[tuple[int, int | None]], used: int = 0, throttle: int = 0) -> None:
        super().__init__("pynvml")
        self._processes, self._used, self._throttle = processes, used, throttle

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise FakeError
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._processes]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return types.SimpleNamespace(used=self._used)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self._throttle


def _monitor(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **named: Any) -> Monitor:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*arguments, **named))
    return Monitor(UUID)


def _without_nvml(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str | None) -> Monitor:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(folder))
    if script is not None:
        command = folder / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return Monitor(UUID)


def test_a_free_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.check_free(_monitor(monkeypatch, [], used=600 << 20))


def test_a_busy_gpu_is_refused_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="2 other processes use it") as caught:
        gpu.check_free(_monitor(monkeypatch, [(11, 5 << 30), (12, None)]))
    assert caught.value.reasons == ("process 11, 5368709120 bytes", "process 12")
    assert caught.value.exit_code == 6
    assert "--allow-busy-gpu" in str(caught.value.hint)


def test_processes_that_a_container_hides_show_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="6,442,450,944 bytes of its memory are in use"):
        gpu.check_free(_monitor(monkeypatch, [], used=6 << 30))


def test_conditions_from_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _monitor(monkeypatch, [(1, 1), (2, 2)], throttle=0x1 | 0x4 | 0x40).conditions(own=1)
    assert found == Conditions("nvml", 1980, 3201, 41, ("power cap", "thermal (hardware)"), 1)
    assert gpu.shown(found.to_json()) == "1980 MHz, memory 3201 MHz, 41 °C, held down by power cap, thermal (hardware)"


def test_conditions_from_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = (
        'case "$1" in *compute-apps*) echo "7, 512";; *memory.used*) echo 700;; *) echo "1500, 2600, 60, 0x8";; esac'
    )
    monitor = _without_nvml(monkeypatch, tmp_path, script)
    assert not monitor.cheap
    assert monitor.processes() == [Process(7, 512 << 20)]
    assert monitor.used_bytes() == 700 << 20
    assert monitor.conditions() == Conditions("nvidia-smi", 1500, 2600, 60, ("hardware slowdown",), 1)


@pytest.mark.parametrize("script", [None, "exit 9"])
def test_without_either_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None
) -> None:
    monitor = _without_nvml(monkeypatch, tmp_path, script)
    assert monitor.conditions() == Conditions("not recorded")
    assert monitor.conditions().to_json() == {"source": "not recorded", "throttle": []}
    gpu.check_free(monitor)
    assert "not recorded" in gpu.shown(monitor.conditions().to_json())


def test_another_gpu_is_refused_with_every_difference() -> None:
    wanted = profiles.load("rtx-pro-6000-blackwell").to_json()
    with pytest.raises(BuildError, match="this machine has `NVIDIA H200`; wanted `NVIDIA RTX PRO 6000") as caught:
        gpu.check_wanted(profiles.load("h200").to_json(), wanted)
    assert [reason.split(":")[0] for reason in caught.value.reasons] == [
        "name",
        "capability",
        "sm_count",
        "shared_memory_bytes",
    ]
    gpu.check_wanted(profiles.load("h200").to_json(), profiles.load("h200").to_json())


def test_a_machine_without_a_gpu_is_refused_with_a_way_out(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\nversion = None\n")
    probe = gpu.Probe(environment, tmp_path / "log")
    with pytest.raises(BuildError, match="GPU: device 0 is not there") as caught:
        probe.answer()
    probe.close()
    assert "--compile-only" in str(caught.value.hint)


def test_one_worker_for_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with gpu.reserved(UUID):
        with gpu.reserved("GPU-1111"):
            pass
        with pytest.raises(LockedError, match="GPU `GPU-0000`: another process holds its lock"), gpu.reserved(UUID):
            pytest.fail("two hold it")
