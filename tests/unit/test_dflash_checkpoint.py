"""Checkpoints on disk: a run killed at any moment of a replacement leaves one that is found, and none is lost later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import checkpoint

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
