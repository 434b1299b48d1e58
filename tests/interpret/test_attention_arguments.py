"""What anchor attention refuses: all faults of a call at once, before any launch; on tensors without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash.attention import api
from dflash.attention.metadata import AnchorLayout
from kernelbake.errors import InputError


def _call(**changes: Any) -> None:
    shape: dict[str, Any] = {
        "batch": 2,
        "rows": 32,
        "heads": 4,
        "kv_heads": 2,
        "dim": 64,
        "keys": 80,
        "dtype": torch.float32,
    }
    shape.update({name: changes.pop(name) for name in list(changes) if name in shape})
    queries = (shape["batch"], shape["rows"], shape["heads"], shape["dim"])
    keys = (shape["batch"], shape["keys"], shape["kv_heads"], shape["dim"])
    given: dict[str, Any] = {
        "q": torch.empty(queries, dtype=shape["dtype"], device="meta"),
        "k": torch.empty(keys, dtype=shape["dtype"], device="meta"),
        "v": torch.empty(keys, dtype=shape["dtype"], device="meta"),
        "anchors": torch.empty((2, 2), dtype=torch.int32, device="meta"),
        "block_size": 16,
        "context_length": 48,
    }
    api.anchor_attention(**{**given, **changes})


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


LAYOUT = AnchorLayout(_ints(2, 2, 2), _ints(2, 3, 4), 16, 48, 8, True)

BAD = [
    ({"rows": 31}, "q: shape"),
    ({"batch": 3}, "q: shape"),
    ({"keys": 79}, "k: shape"),
    ({"v": torch.empty((2, 80, 1, 64), device="meta")}, "v: shape"),
    ({"dim": 80}, "q: head dim 80"),
    ({"heads": 5}, "q: 5 heads for 2 kv heads"),
    ({"heads": 34}, "q: 34 heads for 2 kv heads"),
    ({"dtype": torch.float16}, "q: dtype"),
    ({"k": torch.empty((2, 80, 2, 64), device="meta", dtype=torch.bfloat16)}, "k: dtype"),
    ({"k": torch.empty((2, 80, 2, 64))}, "k: on `cpu`"),
    ({"anchors": _ints(2, 2, dtype=torch.int64)}, "anchors: dtype"),
    ({"anchors": _ints(2)}, "anchors: 1 dimensions"),
    ({"anchors": _ints(2, 0), "rows": 0, "keys": 48}, "anchors: shape"),
    ({"num_valid": _ints(3)}, "num_valid: shape"),
    ({"num_valid": _ints(2, dtype=torch.int64)}, "num_valid: dtype"),
    ({"doc_ids": _ints(2, 47)}, "doc_ids: shape"),
    ({"block_size": 0}, "block_size: 0"),
    ({"context_length": 0}, "context_length: 0"),
    ({"window": 0}, "window: 0"),
    ({"window": True}, "window: True; wanted a whole number of at least 1 or none"),
    ({"window": 3.5}, "window: 3.5"),
    ({"window": torch.tensor(3)}, "window: 3; wanted a whole number"),
    ({"block_size": 16.0}, "block_size: 16.0; wanted a whole number of at least 1"),
    ({"causal": None}, "causal: None; wanted True or False"),
    ({"scale": torch.tensor(0.5)}, "scale: 0.5"),
    ({"scale": 0.0}, "scale: 0.0"),
    ({"scale": float("nan")}, "scale: nan"),
    ({"layout": LAYOUT}, "layout: made for"),
]


@pytest.mark.parametrize(("changes", "fault"), BAD, ids=[fault for _, fault in BAD])
def test_a_fault_is_named(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError) as caught:
        _call(**changes)
    assert any(reason.startswith(fault) for reason in caught.value.reasons), caught.value


def test_all_faults_come_at_once() -> None:
    with pytest.raises(InputError) as caught:
        _call(rows=31, dim=80, dtype=torch.float16, num_valid=_ints(3))
    assert {reason.split(":")[0] for reason in caught.value.reasons} == {"q", "num_valid"}
    assert len(caught.value.reasons) == 4


@pytest.mark.parametrize(("num_blocks", "refused"), [(1 << 17, True), ((1 << 17) - 1, False)])
def test_row_numbers_that_could_wrap_are_refused(
    num_blocks: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R056: 2^29 lanes is the bound: just below is accepted, at it refused."""
    monkeypatch.setattr(api, "anchor_layout", lambda *_, **__: None)
    monkeypatch.setattr(api._AnchorAttention, "apply", lambda *_: torch.empty(0))
    rows, heads = num_blocks * 16, 128
    given = {"rows": rows, "heads": heads, "kv_heads": 8, "keys": 48 + rows, "anchors": _ints(2, num_blocks)}
    if refused:
        with pytest.raises(InputError, match="wanted below 536870912"):
            _call(**given)
    else:
        _call(**given)
