"""Triton's own C code, out of a bundle: built ahead, loaded from memory, launched through, with no compiler around.

The driver is a stand-in made of C that records launches; everything between a call and it is real.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import frozenkernels as kernels
import frozenlab as lab
import pytest
import torch
from frozenlab import call

from kernelbake import loading, triton_api
from kernelbake.errors import BuildError, UnsupportedError

SUPPORT = Path(__file__).parents[1] / "support"
needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")), reason="no C compiler to build with"
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a build makes ahead: the helper library, and the stand-in for the driver."""
    folder = tmp_path_factory.mktemp("libraries")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    assert compiler
    command = [compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(SUPPORT / "stubcuda.c")], check=True)
    (folder / "utilities.so").write_bytes(triton_api.build_library(triton_api.UTILITIES, triton_api.utilities_source()))
    return folder


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(SUPPORT), *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-m", "stubrun", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@needs_compiler
def test_launches_go_through_tritons_c_code_without_a_compiler(libraries: Path) -> None:
    """Loading, both paths of the launch, and Triton's launcher; with an empty PATH, and nothing started."""
    made = [libraries / "utilities.so"]
    if triton_api.version() == (3, 6):
        x, y = torch.zeros(64), torch.zeros(64)
        [launch] = lab.plan_of([call(kernels.tuned, x, y, 2.0, 64)]).launches
        source = triton_api.launcher_source(kernels.tuned, launch.variants[0].specializations[0], {})
        assert source is not None
        made.append(libraries / "launcher.so")
        made[1].write_bytes(triton_api.build_library(triton_api.LAUNCHER, source))
    done = run(str(libraries / "libcuda.so.1"), *map(str, made))
    assert done.returncode == 0, done.stderr
    unfused, *launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert unfused == ["frozenkernels.hooked"]
    assert launches == [
        [[5, 2, 1], 256, 7, True, True, 2.0, 64],
        [[5, 2, 1], 256, 7, True, True, 3.0, 64],
        [[5, 2, 1], 256, 7, True, True, 4.0, 64],
        [[6, 1, 1], 256, 7, True, True, 2.0, 64],
    ]


@needs_compiler
def test_the_same_source_gives_the_same_bytes_with_no_path_in_them(libraries: Path) -> None:
    again = triton_api.build_library(triton_api.UTILITIES, triton_api.utilities_source())
    assert again == (libraries / "utilities.so").read_bytes()
    assert triton_api.library_name(again) == triton_api.UTILITIES
    for path in (str(Path.home()), os.environ.get("TMPDIR", "/tmp")):
        assert path.encode() not in again


@needs_compiler
def test_a_compiler_that_fails_is_reported_with_what_it_said() -> None:
    with pytest.raises(BuildError) as caught:
        triton_api.build_library(triton_api.UTILITIES, "#error out of order\n")
    assert any("out of order" in reason for reason in caught.value.reasons)


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/cc"])
def test_a_compiler_that_is_none_is_reported(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(BuildError, match="launcher library"):
        triton_api.build_library(triton_api.UTILITIES, "")


def test_a_library_that_is_none_of_tritons_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="neither of the two helpers"):
        triton_api.library_name(b"\x7fELF" + bytes(100))


def test_a_library_that_does_not_load_is_refused() -> None:
    content = b"\x7fELF" + bytes(64) + b"PyInit_cuda_utils\0"
    with pytest.raises(UnsupportedError, match="does not load"):
        loading.Libraries({"sha256:bad": content}).module("sha256:bad")


@needs_compiler
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "folder"])
def test_a_library_is_loaded_from_memory_or_a_private_folder(
    memory: bool, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if not memory:
        monkeypatch.delattr(os, "memfd_create")
    path, done = loading.library_path("cuda_utils", (libraries / "libcuda.so.1").read_bytes())
    if not memory:
        folder = Path(path).parent
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert ctypes.CDLL(path).cuInit(0) == 0
    done()
    assert list(tmp_path.iterdir()) == []


def test_paths_are_never_used_twice() -> None:
    """The system's loader would give the first library back for the second."""
    first, _ = loading.library_path("cuda_utils", b"one")
    second, _ = loading.library_path("cuda_utils", b"two")
    assert first != second
    assert Path(first).read_bytes() == b"one"


def test_no_place_is_refused_with_every_place_that_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> str:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(UnsupportedError) as caught:
        loading.library_path("cuda_utils", b"content")
    assert len(caught.value.reasons) >= 2
    assert all("No space left" in reason for reason in caught.value.reasons[1:])
    assert "TMPDIR" in str(caught.value.hint)
