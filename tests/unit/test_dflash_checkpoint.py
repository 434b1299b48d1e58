"""Checkpoints on disk: a run killed at any moment of a replacement leaves one that is found, and none is lost later."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import checkpoint
from dflash.errors import TrainingStoppedError
from kernelbake.errors import InputError

LOADER = {"epoch": 0, "next": 0, "waiting": {}}


def save(output: Path, step: int, value: float) -> Path:
    return checkpoint.save(output, checkpoint.State(step, 5, LOADER, {}, {}, None), {"x": torch.tensor([value])})


def value(folder: Path) -> float:
    return float(checkpoint.load(folder)[1]["x"])


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output whose step 7 was being written anew when its run died between the two renames."""
    save(tmp_path, 6, 6.0)
    save(tmp_path, 7, 7.0)
    rename, calls = Path.rename, iter((False, True))

    def dying(self: Path, target: Any) -> Path:
        if next(calls):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 7, 7.5)
    assert not (tmp_path / "step-00000007").exists()
    return tmp_path


def test_a_replaced_checkpoint_is_found(killed: Path) -> None:
    found = checkpoint.find(killed, checkpoint.LATEST)
    assert value(found) == 7.0
    state = checkpoint.newest_state(killed)
    assert state is not None
    assert state.step == 7


def test_the_next_checkpoint_loses_none(killed: Path) -> None:
    save(killed, 8, 8.0)
    assert [path.name for path in sorted(killed.iterdir())] == ["step-00000006", "step-00000007", "step-00000008"]
    assert [value(path) for path in sorted(killed.iterdir())] == [6.0, 7.0, 8.0]


def test_the_replaced_one_can_be_replaced_again(killed: Path) -> None:
    save(killed, 7, 7.5)
    assert [path.name for path in sorted(killed.iterdir())] == ["step-00000006", "step-00000007"]
    assert value(checkpoint.find(killed, checkpoint.LATEST)) == 7.5


# ---------------------------------------------------------------------------------------------- damage


def test_any_changed_bit_of_any_tensor_is_found_and_named(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5), "b": torch.randn(2**19 + 3), "c": torch.tensor(7.0), "d": torch.zeros(0)}
    folder = checkpoint.save(tmp_path, checkpoint.State(1, 5, LOADER, {}, {}, None), tensors)
    path = folder / "optimizer.safetensors"
    whole = path.read_bytes()
    begin = len(whole) - sum(tensor.numel() * 4 for tensor in tensors.values())
    for place in (begin, begin + 17, begin + 23, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"is damaged: 1 of 4 tensors") as caught:
            checkpoint.load(folder)
        assert len(caught.value.reasons) == 1
    path.write_bytes(whole[: begin + 40])
    with pytest.raises(InputError, match="is broken"):
        checkpoint.load(folder)
    path.write_bytes(whole)
    assert checkpoint.load(folder)[1]["b"].equal(tensors["b"])


def test_pieces_of_a_tensor_that_changed_places_are_found(tmp_path: Path) -> None:
    tensor = torch.arange(2**19, dtype=torch.float32)
    folder = checkpoint.save(tmp_path, checkpoint.State(1, 5, LOADER, {}, {}, None), {"x": tensor})
    save_file({"x": torch.cat(tensor.chunk(2)[::-1])}, folder / "optimizer.safetensors")
    with pytest.raises(InputError, match="is damaged"):
        checkpoint.load(folder)


def test_tensors_of_another_step_are_found(tmp_path: Path) -> None:
    one, two = save(tmp_path, 1, 1.0), save(tmp_path, 2, 2.0)
    (one / "optimizer.safetensors").write_bytes((two / "optimizer.safetensors").read_bytes())
    with pytest.raises(InputError, match="is damaged"):
        checkpoint.load(one)
    assert load_file(two / "optimizer.safetensors")["x"] == 2.0


def test_a_tensor_of_which_nothing_is_said_is_found(tmp_path: Path) -> None:
    """Only a checkpoint of an older release has no digest at all."""
    folder = checkpoint.save(
        tmp_path, checkpoint.State(1, 5, LOADER, {}, {}, None), {"a": torch.ones(2), "b": torch.ones(3)}
    )
    state = json.loads((folder / "state.json").read_text())
    del state["digests"]["b"], state["digests"]["state.json"]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"is damaged: 1 of 2 tensors") as caught:
        checkpoint.load(folder)
    assert caught.value.reasons == ("`b`",)


def test_no_changed_byte_of_the_state_goes_unseen(tmp_path: Path) -> None:
    """A place in the data or a setting that is another one would make another run of it, and nobody would know."""
    loader = {"epoch": 1, "next": 6, "waiting": {"64": [[1, 7], [1, 2]]}, "begun": []}
    state = checkpoint.State(
        6, 5, loader, {"data": {"source": "a.jsonl"}}, {"steps": 9, "lr": 6e-4}, "sha256:b", 1, "c"
    )
    folder = checkpoint.save(tmp_path, state, {"x": torch.ones(2)})
    path = folder / "state.json"
    whole, wanted = path.read_bytes(), checkpoint.load(folder)[0].to_json()
    del wanted["digests"]
    refused = 0
    for place, bit in ((place, 1 << place % 7) for place in range(len(whole))):
        changed = bytearray(whole)
        changed[place] ^= bit
        path.write_bytes(changed)
        try:
            found = checkpoint.load(folder)[0].to_json()
        except InputError:
            refused += 1
        else:  # a blank that became another one, or the name of a digest
            del found["digests"]
            assert found == wanted
    assert refused > len(whole) / 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_state_that_is_not_finite_is_not_saved(bad: float, tmp_path: Path) -> None:
    """Nobody could go on from it; the one before stays."""
    before = save(tmp_path, 1, 1.0)
    tensors = {"x": torch.tensor([0.0, bad, 1.0]), "y": torch.ones(3), "n": torch.tensor(7), "z": torch.zeros(0)}
    with pytest.raises(TrainingStoppedError, match="step 2 left 1 of 4 tensors with numbers that are not") as caught:
        checkpoint.save(tmp_path, checkpoint.State(2, 5, LOADER, {}, {}, None), tensors)
    assert caught.value.reasons == ("`x`",)
    assert str(caught.value.hint).startswith(f"--resume latest goes on from `{before}`")
    assert [path.name for path in tmp_path.iterdir()] == [before.name]


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """``latest`` would mean it forever, or never."""
    for name in ("step-00000009", "step-abc"):
        folder = save(tmp_path, 6, 6.0).rename(tmp_path / name)
        with pytest.raises(InputError, match="holds step `6`; wanted it to be called `step-00000006`"):
            checkpoint.load(folder)
    assert value(folder.rename(tmp_path / "good")) == 6.0


def test_a_name_that_no_path_can_have_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no checkpoint; wanted a folder with `state.json`"):
        checkpoint.find(tmp_path, "x" * 5000)


def test_what_remains_of_a_run_is_said(tmp_path: Path) -> None:
    assert checkpoint.remains(tmp_path) == "no checkpoint was saved before"
    save(tmp_path, 1, 1.0)
    newest = save(tmp_path, 2, 2.0)
    assert checkpoint.remains(tmp_path) == f"--resume latest goes on from `{newest}`"
