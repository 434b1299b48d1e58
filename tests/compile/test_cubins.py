"""Real machine code in a bundle: what the compiler makes for each GPU is accepted for that GPU and for no other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import samples
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernelbake import bundle, elf
from kernelbake.errors import BuildError

PROFILES = {"h200": 90, "b200": 100, "rtx-pro-6000-blackwell": 120}


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) * 2, mask=offsets < n)


def _compiled(arch: int) -> tuple[bytes, dict[str, Any]]:
    source = ASTSource(double, {"x": "*bf16", "n": "i32", "BLOCK": "constexpr"}, {(2,): 64}, {})
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    [text] = [Path(path).read_text() for name, path in kernel.metadata_group.items() if name.endswith(".json")]
    return kernel.asm["cubin"], {**json.loads(text), "extern_libs": []}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[int, tuple[bytes, dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        return {arch: _compiled(arch) for arch in (80, 89, *PROFILES.values(), 121)}


def _with_code(profile: str, binary: bytes, metadata: dict[str, Any]) -> bundle.Contents:
    """A bundle whose entries for four warps hold this code."""
    contents = samples.contents(profile=profile)
    new = {
        name: dataclasses.replace(entry, binary=binary, metadata=metadata)
        if dict(entry.specialization.options)["num_warps"] == 4
        else entry
        for name, entry in contents.entries.items()
    }
    choices = tuple(
        dataclasses.replace(
            choice, entries={token: new[name].digest for token, name in choice.entries.items() if name is not None}
        )
        for choice in contents.choices
    )
    return samples.changed(contents, choices=choices, entries={entry.digest: entry for entry in new.values()})


def test_the_architecture_stands_in_the_code(compiled):
    assert {arch: elf.read(binary).arch for arch, (binary, _) in compiled.items()} == {arch: arch for arch in compiled}


@pytest.mark.parametrize("profile", PROFILES)
def test_accepted_for_its_gpu(compiled, profile, tmp_path):
    contents = _with_code(profile, *compiled[PROFILES[profile]])
    bundle.write(tmp_path / "bundle.tar", contents)
    held = bundle.read(tmp_path / "bundle.tar")
    assert dict(held.entries) == dict(contents.entries)


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 121])
def test_refused_for_another(compiled, arch, tmp_path):
    """R016: the code of another GPU is found before any driver sees it; 120 is not 121."""
    with pytest.raises(BuildError) as refusal:
        bundle.write(tmp_path / "bundle.tar", _with_code("rtx-pro-6000-blackwell", *compiled[arch]))
    reasons = "\n".join(refusal.value.reasons)
    assert f"code for sm_{arch}; wanted sm_120, as the fingerprint says" in reasons
    assert f"a target of `cuda` `{arch}`; wanted `cuda` `120`" in reasons


def test_warps_that_warp_specialization_added_are_accepted(compiled, tmp_path):
    binary, metadata = compiled[90]
    bundle.write(tmp_path / "bundle.tar", _with_code("h200", binary, {**metadata, "num_warps": 12}))
    for wrong in (2, 6):
        with pytest.raises(BuildError, match="contradict"):
            bundle.write(tmp_path / "other.tar", _with_code("h200", binary, {**metadata, "num_warps": wrong}))


def test_a_path_of_the_compilers_machine_is_refused(compiled, tmp_path):
    """R028: what Triton says about its own libraries names the machine, and stays out."""
    binary, metadata = compiled[90]
    libraries = [["libdevice", "/somewhere/libdevice.10.bc"]]
    with pytest.raises(BuildError) as refusal:
        bundle.write(tmp_path / "bundle.tar", _with_code("h200", binary, {**metadata, "extern_libs": libraries}))
    assert "holds the path `/somewhere/libdevice.10.bc`" in refusal.value.reasons[0]
