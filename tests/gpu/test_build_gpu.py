"""Builds on a real GPU: bad candidates, honest times, code from elsewhere, and choices that repeat."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toyworkload

from kernelbake import build, bundle, elf, host, levels
from kernelbake.bundle import Bundle
from kernelbake.errors import BuildError
from kernelbake.levels import Outcome, Request
from kernelbake.manifest import CompileOptions, Manifest, MeasurePolicy
from kernelbake.profiles import DeviceProfile
from kernelbake.progress import BuildResult, Event

pytestmark = pytest.mark.gpu

SUPPORT = Path(toyworkload.__file__).parent


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    """The GPU of this machine, asked for in a process of its own, so that this one holds none of it."""
    program = "import json; from kernelbake import host; print(json.dumps(host.running_profile().to_json()))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    return DeviceProfile.from_json(json.loads(done.stdout))


@pytest.fixture(autouse=True)
def _path_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


def _manifest(profile: DeviceProfile, plugin: str, section: dict[str, Any], **policy: Any) -> Manifest:
    return Manifest(
        format=1,
        name="gpu-test",
        profile=profile,
        plugin=plugin,
        section=section,
        measure=MeasurePolicy(**{"time_limit_s": 10.0, **policy}),
        compile=CompileOptions(),
        text=b"name: gpu-test\n",
        source="gpu.yaml",
    )


def _build(
    profile: DeviceProfile, output: Path, plugin: str, section: dict[str, Any], **options: Any
) -> tuple[BuildResult, Bundle, list[Event]]:
    """Builds beside whatever else the tests of this process keep on the GPU, unless told otherwise."""
    events: list[Event] = []
    chosen = {"allow_busy_gpu": True, **options}
    result = build.build(_manifest(profile, plugin, section), output, on_event=events.append, **chosen)
    return result, bundle.read(output), events


@contextlib.contextmanager
def _holding(program: str) -> Iterator[None]:
    """Another process on the GPU, from the moment it says `held` until the end of the context."""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        try:
            assert child.stdout.readline() == b"held\n"
            yield
        finally:
            child.stdin.close()


def _fates(held: Bundle, kernel: str) -> dict[int, tuple[str, str]]:
    return {
        dict(line["config"]["meta"])["BLOCK"]: (line["outcome"], line.get("detail", ""))
        for line in held.record
        if line["kernel"].endswith(f":{kernel}")
    }


@pytest.fixture(scope="module")
def bad(profile: DeviceProfile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BuildResult, Bundle]]:
    """One build of all kernels with a bad config."""
    kernels = ["hangs_at_128", "crashes_at_32", "wavers_at_128", "touches_little"]
    section = {"kernels": kernels, "pool_bytes": 1 << 30}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        output = tmp_path_factory.mktemp("bad") / "bundle.tar"
        result, held, _ = _build(profile, output, "gpuworkload:WORKLOAD", section)
        yield result, held


def test_a_hanging_candidate_costs_itself(bad: tuple[BuildResult, Bundle]) -> None:
    fates = _fates(bad[1], "hangs_at_128")
    assert fates == {32: ("ok", ""), 64: ("ok", ""), 128: ("timeout", "it took longer than 10 s")}


def test_an_illegal_access_is_not_blamed_on_the_others(bad: tuple[BuildResult, Bundle]) -> None:
    fates = _fates(bad[1], "crashes_at_32")
    assert fates[32][0] == "crash"
    assert {block: outcome for block, (outcome, _) in fates.items() if block != 32} == dict.fromkeys(
        (16, 64, 128, 256), "ok"
    )
    times = [
        line["median_ms"]
        for line in bad[1].record
        if line["kernel"].endswith(":crashes_at_32") and line["outcome"] == "ok"
    ]
    assert all(0 < time < 1 for time in times)


def test_a_wavering_candidate_is_not_chosen(bad: tuple[BuildResult, Bundle]) -> None:
    fates = _fates(bad[1], "wavers_at_128")
    assert fates[128][0] in ("not-repeatable", "wrong-result")
    [choice] = [choice for choice in bad[1].choices if choice.kernel.qualname == "wavers_at_128"]
    assert dict(choice.winner.meta)["BLOCK"] != 128


def test_restoring_is_not_timed(bad: tuple[BuildResult, Bundle]) -> None:
    """A copy of 1 GiB takes half a millisecond, the kernel a few microseconds."""
    [choice] = [choice for choice in bad[1].choices if choice.kernel.qualname == "touches_little"]
    assert choice.times["median_ms"] < 0.1


def test_the_machine_code_is_this_gpus(bad: tuple[BuildResult, Bundle], profile: DeviceProfile) -> None:
    result, held = bad
    assert result.made == "measured"
    assert {elf.read(entry.binary).arch for entry in held.entries.values()} == {profile.arch}
    assert held.fingerprint["gpu.device"] == profile.name
    assert held.fingerprint["driver.version"] == host.driver_version()


_HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - (15 << 30), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def test_too_little_memory_is_refused_with_numbers(profile: DeviceProfile, tmp_path: Path) -> None:
    """Another process leaves 15 GiB; the pool takes 7.5 GiB, and so does each of its copies."""
    section = {"kernels": ["touches_little"], "pool_bytes": 15 << 29}
    with (
        _holding(_HOG),
        pytest.raises(BuildError, match=r"needs \d+ bytes for copies of its arguments; the GPU has \d+ free"),
    ):
        _build(profile, tmp_path / "bundle.tar", "gpuworkload:WORKLOAD", section)


def test_the_trainers_tensors_are_untouched_and_the_winner_runs_on_them(profile: DeviceProfile, tmp_path: Path) -> None:
    section = {"sizes": [100, 4096], "kernels": []}
    result, _, _ = _build(profile, tmp_path / "bundle.tar", "toyworkload:WATCHFUL", section)
    assert result.made == "measured"


KERNELS = ["scale", "shift", "accumulate", "wrong_at_128", "strays_at_64", "leaves_gaps_at_64"]


def test_code_from_elsewhere_gives_the_choices_of_a_whole_build(profile: DeviceProfile, tmp_path: Path) -> None:
    section = {"sizes": [100, 1 << 20], "kernels": KERNELS}
    plugin = "toyworkload:WORKLOAD"
    compiled, _, _ = _build(profile, tmp_path / "compiled.tar", plugin, section, compile_only=True)
    assert compiled.made == "compiled-only"
    first, held, events = _build(profile, tmp_path / "first.tar", plugin, section, compiled_from=compiled.path)
    assert first.made == "measured"
    compiling = [event for event in events if event.phase == "compile" and event.kind == "progress"]
    assert [event.done for event in compiling] == [compiling[0].total], "nothing is compiled"
    for kernel, block in (("wrong_at_128", 128), ("strays_at_64", 64), ("leaves_gaps_at_64", 64)):
        assert "wrong-result" in {
            line["outcome"]
            for line in held.record
            if line["kernel"].endswith(f":{kernel}") and dict(line["config"]["meta"])["BLOCK"] == block
        }
    second, again, _ = _build(profile, tmp_path / "second.tar", plugin, section)
    assert [choice.winner for choice in held.choices] == [choice.winner for choice in again.choices]
    assert {entry.digest for entry in held.entries.values()} == {entry.digest for entry in again.entries.values()}
    conditions = [choice.times["conditions"] for choice in held.choices]
    assert all(found["source"] in ("nvml", "nvidia-smi", "not recorded") for found in conditions)
    assert second.device_busy_share is not None


def test_a_bundle_does_here_what_it_did_when_it_was_built(profile: DeviceProfile, tmp_path: Path) -> None:
    """Outputs that a launch fills in part, truth values among them, hold something else in every process."""
    section = {"sizes": [100, 1 << 16], "kernels": ["scale", "shift", "accumulate", "mark"]}
    result, _, _ = _build(profile, tmp_path / "bundle.tar", "toyworkload:WORKLOAD", section)
    assert set(result.measuring) >= {"check", "copies", "decide", "load", "outputs", "sample", "step", "warm"}
    report = levels.verify(result.path, Request(on_device=True))
    level = next(level for level in report.levels if level.name == "device")
    assert level.outcome is Outcome.PROVED, level
    assert {(one["verdict"], one["same_inputs"]) for one in level.findings} == {("same bits", True)}


_OCCUPANT = """
import sys, torch
held = torch.zeros(6 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_busy_gpu_is_refused(profile: DeviceProfile, tmp_path: Path) -> None:
    with _holding(_OCCUPANT):
        section = {"sizes": [100], "kernels": ["shift"]}
        with pytest.raises(BuildError, match="wanted it free") as caught:
            _build(profile, tmp_path / "bundle.tar", "toyworkload:WORKLOAD", section, allow_busy_gpu=False)
        assert caught.value.exit_code == 6
        assert "--allow-busy-gpu" in str(caught.value.hint)
        _build(profile, tmp_path / "bundle.tar", "toyworkload:WORKLOAD", section)
