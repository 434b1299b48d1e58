"""The candidates of the attention kernels compile without a GPU, fit shared memory, and use the matrix unit.

All of sm_120 are compiled always, as no GPU of that kind measured them; of sm_90 the first of each kernel. Head dim 256
takes the most memory. A long run compiles all, for more forms of calls.
"""

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
WRITE = bool(os.environ.get("KERNELBAKE_WRITE_GOLDEN"))

FIRST_OF_SM_90 = {name: offline.label(config) for name, config in reversed(offline.configs(90))}
USUAL = [
    (capability, name, config)
    for capability in GPUS
    for name, config in offline.configs(capability)
    if LONG or WRITE or capability == 120 or (capability == 90 and offline.label(config) == FIRST_OF_SM_90[name])
]

OTHER_FORMS = [
    Form(head_dim=256, group=8, bounded=True),
    Form(head_dim=256, dtype="fp32"),
    Form(head_dim=96, group=3, block_size=10, causal=True, bounded=True),
    Form(head_dim=64, group=1),
    Form(dtype="fp32", bounded=True),
]
OTHERS = [
    (capability, name, config, form)
    for form in OTHER_FORMS
    for capability in GPUS
    for name, config in offline.configs(capability)
    if LONG
    or (form == OTHER_FORMS[0] and (capability, name) == (120, "backward"))
    or (form == OTHER_FORMS[0] and capability == 90 and offline.label(config) == FIRST_OF_SM_90["forward"])
]

_built: dict[tuple[int, str, str], Built] = {}


def _usual(capability: int, name: str, config: triton.Config) -> Built:
    """A candidate for the drafters' form: bf16, head dim 128, groups of 4, blocks of 16; compiled once."""
    key = (capability, name, offline.label(config))
    if key not in _built:
        _built[key] = offline.build(name, config, capability, Form())
    return _built[key]


def _all_usual() -> dict[tuple[int, str, str], Built]:
    return {(gpu, name, offline.label(config)): _usual(gpu, name, config) for gpu, name, config in USUAL}


def _label(value: object) -> str | None:
    return offline.label(value) if isinstance(value, triton.Config) else str(value)


@pytest.mark.long
@pytest.mark.parametrize(("capability", "name", "config"), USUAL, ids=_label)
def test_a_candidate_fits_and_uses_the_matrix_unit(capability: int, name: str, config: triton.Config) -> None:
    """On sm_90 that is wgmma alone, in its PTX too: nothing falls back to the older unit."""
    built = _usual(capability, name, config)
    assert 0 < built.shared_bytes <= SHARED_LIMIT[capability]
    assert MATRIX_UNIT[capability] in built.matrix
    if capability == 90:
        assert "wgmma.mma_async" in built.ptx
        assert built.matrix == ("HGMMA",)


def test_candidates_do_not_spill_in_loops() -> None:
    """None does where no GPU measured them; on sm_90, where an H200 did, one of each kernel does not."""
    spilling = {key for key, built in _all_usual().items() if built.loop_spills}
    assert not {key for key in spilling if key[0] != 90}
    for kernel in ("forward", "backward"):
        assert {key for key in _built if key[:2] == (90, kernel)} - spilling


def test_the_documented_table_is_what_compiles() -> None:
    """Rewritten with ``KERNELBAKE_WRITE_GOLDEN=1``; another Triton gives other figures and is not compared."""
    found = _all_usual()
    text = DOCUMENT.read_text()
    if WRITE:
        block = f"<!-- table: Triton {triton.__version__} -->\n\n{offline.table(found)}\n\n<!-- end of table -->"
        text = re.sub(r"<!-- table: .*<!-- end of table -->", lambda _: block, text, flags=re.DOTALL)
        DOCUMENT.write_text(text)
    version = re.search(r"<!-- table: Triton (\S+) -->", text)
    assert version is not None
    assert text.count("| sm_") == sum(len(offline.configs(capability)) for capability in GPUS)
    for key, built in found.items():
        row = offline.row(key, built)
        start = row if version[1] == triton.__version__ else offline.row_start(key)
        assert f"\n{start}" in text


@pytest.mark.long
@pytest.mark.parametrize(("capability", "name", "config", "form"), OTHERS, ids=_label)
def test_other_forms_fit_too(capability: int, name: str, config: triton.Config, form: Form) -> None:
    built = offline.build(name, config, capability, form)
    assert 0 < built.shared_bytes <= SHARED_LIMIT[capability]
