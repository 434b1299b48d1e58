"""Every candidate of the attention kernels compiles without a GPU, fits shared memory, and uses the matrix unit."""

from __future__ import annotations

import os
import re
from pathlib import Path

import offline_attention as offline
import pytest
import triton
from conftest import LONG
from offline_attention import GPUS, SHARED_LIMIT, Built, Form

DOCUMENT = Path(__file__).parents[2] / "docs" / "attention.md"
MATRIX_UNIT = {90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}

OTHER_FORMS = [
    Form(head_dim=256, group=8, bounded=True),
    Form(head_dim=256, dtype="fp32"),
    Form(head_dim=96, group=3, block_size=10, causal=True, bounded=True),
    Form(head_dim=64, group=1),
    Form(dtype="fp32", bounded=True),
]


@pytest.fixture(scope="module")
def usual() -> dict[tuple[int, str, str], Built]:
    """All candidates of all GPUs for the drafters' form: bf16, head dim 128, groups of 4, blocks of 16."""
    return {
        (capability, name, offline.label(config)): offline.build(name, config, capability, Form())
        for capability in GPUS
        for name, config in offline.configs(capability)
    }


def test_every_candidate_fits(usual: dict[tuple[int, str, str], Built]) -> None:
    found = {key: built.shared_bytes for key, built in usual.items() if built.shared_bytes > SHARED_LIMIT[key[0]]}
    assert not found


def test_every_candidate_uses_the_matrix_unit(usual: dict[tuple[int, str, str], Built]) -> None:
    """wgmma on sm_90, and in its PTX too; nothing falls back to an older unit in the loops."""
    lacking = [key for key, built in usual.items() if MATRIX_UNIT[key[0]] not in built.matrix]
    assert not lacking
    hopper = [built for key, built in usual.items() if key[0] == 90]
    assert all("wgmma.mma_async" in built.ptx for built in hopper)
    assert all(built.matrix == ("HGMMA",) for built in hopper)


def test_no_candidate_spills_in_a_loop(usual: dict[tuple[int, str, str], Built]) -> None:
    found = {key: built.loop_spills for key, built in usual.items() if built.loop_spills}
    assert not found


def test_the_documented_table_is_what_compiles(usual: dict[tuple[int, str, str], Built]) -> None:
    """Rewritten with ``KERNELBAKE_WRITE_GOLDEN=1``; another Triton gives other figures and is not compared."""
    text = DOCUMENT.read_text()
    if os.environ.get("KERNELBAKE_WRITE_GOLDEN"):
        block = f"<!-- table: Triton {triton.__version__} -->\n\n{offline.table(usual)}\n\n<!-- end of table -->"
        text = re.sub(r"<!-- table: .*<!-- end of table -->", lambda _: block, text, flags=re.DOTALL)
        DOCUMENT.write_text(text)
    version = re.search(r"<!-- table: Triton (\S+) -->", text)
    assert version is not None
    if version[1] == triton.__version__:
        assert offline.table(usual) in text
    else:
        assert text.count("| sm_") == len(usual)


@pytest.mark.long
@pytest.mark.parametrize("form", OTHER_FORMS if LONG else OTHER_FORMS[:1], ids=str)
@pytest.mark.parametrize("capability", GPUS if LONG else [120])
def test_other_forms_fit_too(capability: int, form: Form) -> None:
    for name, config in offline.configs(capability):
        built = offline.build(name, config, capability, form)
        assert built.shared_bytes <= SHARED_LIMIT[capability], (name, offline.label(config))
