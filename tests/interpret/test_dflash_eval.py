"""``dflash eval`` from a run's folder to its table, on the CPU, with the modeling module that training uses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinytarget
import torch

from dflash import checkpoint, cli, evaluation
from dflash.evaluation import Request
from dflash.placement import Devices
from dflash.spec import Spec
from kernelbake.errors import InputError


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_folder(folder: Path, *, held_out: int = 4) -> Path:
    """The output of a run that made no step: a checkpoint's state and the exported drafter."""
    rows = [
        {"input_ids": [(7 * number + place) % 60 for place in range(20)], "loss_mask": [0] * 8 + [1] * 12}
        for number in range(20)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = tinytarget.spec()
    data = dataclasses.replace(made.data, source=str(folder / "rows.jsonl"), held_out=held_out)
    made = dataclasses.replace(made, data=data)
    state = checkpoint.State(3, 5, {"epoch": 0, "next": 0, "waiting": {}}, made.to_json(), {}, None)
    checkpoint.save(folder / "run", state, {"x": torch.zeros(1)})
    checkpoint.export(folder / "run" / "drafter", tinytarget.build_drafter(made, dtype=torch.float32), made)
    assert Spec.parse(made.to_json()) == made
    return folder / "run"


def called(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def test_the_held_out_samples_of_a_run_are_answered(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    code, out, err = called("eval", str(folder), "--cpu", "--max-new-tokens", "9", "--prompts", "3")
    assert code == 0, err
    report = json.loads(out)
    assert report["prompts"] == 3
    assert report["device"] == "CPU"
    assert report["source"].endswith("rows.jsonl, held out")
    assert report["settings"]["block_size"] == 5
    names = [item["name"] for item in report["measured"]]
    assert names == ["target alone", "drafter", "untrained drafter", "copied n-grams"]
    for item in report["measured"]:
        assert item["tokens"] == 3 * 8
        assert item["acceptance_length"] >= 1
        assert item["speedup"] > 0
        assert all(difference["margin"] < 1e-3 for difference in item["differences"])
    assert "acceptance length" in err
    assert "copied n-grams" in err
    assert "causal_conv1d" not in err  # what transformers recommends would change what is measured


def test_other_samples_and_an_exported_drafter_alone(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, held_out=0)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}))
    report = evaluation.run(
        evaluation.open_(Request(folder, data=str(other), max_new_tokens=6, temperature=1.0)), lambda done, total: None
    )
    assert report.prompts == 1
    assert [item.tokens for item in report.measured] == [5] * 4
    opened = evaluation.open_(Request(folder, data=str(other), dtype="bfloat16"))
    assert opened.target.head_VE.dtype == torch.bfloat16
    model = tmp_path / "model"
    opened.target.model.save_pretrained(model)
    alone = evaluation.open_(Request(folder / "drafter", target=str(model), data=str(other), dtype="bfloat16"))
    assert torch.equal(alone.target.head_VE, opened.target.head_VE)
    assert alone.prompts == opened.prompts


def refusal(request: Any) -> str:
    with pytest.raises(InputError) as caught:
        evaluation.open_(request)
    return str(caught.value)


def test_what_cannot_be_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path, held_out=0)
    data = str(tmp_path / "rows.jsonl")
    assert "the run held no samples out of its data; wanted --data" in refusal(Request(folder))
    assert "is no run's output folder; wanted one, or --target" in refusal(Request(folder / "drafter", data=data))
    assert "nothing says its shape" in refusal(Request(folder / "drafter", target="random", data=data))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "wanted a CUDA GPU" in refusal(Request(folder, data=data, devices=Devices(0, 0)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "wanted the numbers of 2 CUDA GPUs here" in refusal(Request(folder, data=data, devices=Devices(0, 2)))
    config = json.loads((folder / "drafter" / "config.json").read_text())
    config["vocab_size"] = 62
    (folder / "drafter" / "config.json").write_text(json.dumps(config))
    assert "made for another target" in refusal(Request(folder, data=data))
    code, _, err = called("eval", str(tmp_path / "absent"), "--cpu")
    assert code == 2
    assert "absent` is no folder; wanted a run's output folder or an exported drafter" in err
    shutil.copytree(folder / "step-00000003", tmp_path / "unfinished" / "step-00000003")
    assert "holds checkpoints and no drafter" in refusal(Request(tmp_path / "unfinished", data=data))
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(Request(tmp_path / "empty", data=data))
    code, _, err = called("eval", str(folder), "--devices", "x")
    assert code == 2
    assert "wanted `T` or `T:D`" in err
    (folder / "step-00000003" / "state.json").write_text("{")
    assert "is broken" in refusal(Request(folder, data=data))
