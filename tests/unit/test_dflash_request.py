"""What `dflash eval` refuses before it loads torch: all at once, and in the time of a command."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinytarget
import torch

from dflash import checkpoint, request
from dflash.request import Request
from dflash.spec import STDLIB
from kernelbake.errors import ExitCode, InputError

PROGRAM = (
    "import sys\nfrom dflash import cli\n"
    "try:\n    cli.main(sys.argv[1:])\n"
    "except SystemExit as end:\n"
    "    assert not {'torch', 'triton', 'transformers'} & set(sys.modules)\n"
    "    raise\n"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run: a checkpoint's state and the exported drafter."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}) + "\n")
    spec = tinytarget.spec()
    data = dataclasses.replace(spec.data, source=str(folder / "rows.jsonl"), held_out=1)
    spec = dataclasses.replace(spec, data=data)
    state = checkpoint.State(3, 5, {"epoch": 0, "next": 0, "waiting": {}}, spec.to_json(), {}, None)
    checkpoint.save(folder / "run", state, {"x": torch.zeros(1)})
    checkpoint.export(folder / "run" / "drafter", tinytarget.build_drafter(spec, dtype=torch.float32), spec)
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_a_request_and_its_folder_are_put_together(run: Path) -> None:
    settled = request.settle(Request(run))
    assert (settled.folder, settled.seed, settled.spec.data.held_out) == (run / "drafter", 5, 1)
    other = request.settle(Request(run, data=STDLIB, dtype="bfloat16")).spec
    assert (other.data.source, other.axes.dtype, other.drafter) == (STDLIB, "bfloat16", settled.spec.drafter)


def test_every_fault_of_a_request_is_told_at_once_without_torch(run: Path, tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.jsonl"
    faulty.write_text("{")
    config = json.loads((run / "drafter" / "config.json").read_text())
    (run / "drafter" / "config.json").write_text(json.dumps({**config, "vocab_size": 62}))
    told = {
        ("absent", "absent.jsonl"): ("`absent` is no folder", "`absent.jsonl` is no file"),
        (str(run), str(faulty)): ("made for another target", "line 1: the file ends inside it"),
    }
    for (folder, data), parts in told.items():
        command = [sys.executable, "-c", PROGRAM, "eval", folder, "--data", data]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == ExitCode.INPUT, done.stderr
        assert done.stderr.startswith("error: input: 2 faults"), done.stderr
        assert all(part in done.stderr for part in parts), done.stderr


def refused(asked: Request) -> str:
    with pytest.raises(InputError) as caught:
        request.settle(asked)
    return str(caught.value)


def test_what_the_folder_lacks_is_told(run: Path, tmp_path: Path) -> None:
    (run / "drafter" / "model.safetensors").write_bytes(b"{")
    (run / "step-00000003" / "state.json").write_text("{")
    told = refused(Request(run))
    assert told.startswith("input: 2 faults")
    assert "cannot be read" in told
    assert "run: `" in told
    shutil.rmtree(run / "drafter")
    assert "holds checkpoints and no drafter" in refused(Request(run, data=STDLIB))
    told = refused(Request(tmp_path / "absent", target=str(tmp_path / "model"), data=str(tmp_path / "absent.jsonl")))
    assert told.startswith("input: 3 faults")


def test_what_belongs_to_another_target_or_holds_other_tensors(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(change: dict[str, Any]) -> str:
        path = run / "drafter" / "config.json"
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), **change}))
        told = refused(Request(run))
        path.write_text(before)
        return told

    assert "vocab_size: `62`; the target has `61`" in changed({"vocab_size": 62})
    assert "`model.safetensors`: `fc.weight` is bfloat16; wanted `float32`" in changed({"dtype": "float32"})
    assert "is missing" in changed({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
