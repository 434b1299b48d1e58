"""Reports about recorded outputs and about keys decided anew: how verdicts are reached and worded, without running."""

from __future__ import annotations

from typing import Any

import pytest
import scripted

from kernelbake.errors import BuildError, BundleError
from kernelbake.merge import _joined_line
from kernelbake.ondevice import Replayed
from kernelbake.outcome import Reason, Rejected
from kernelbake.outputs import Compared, Verdict, Wanted, compared, judge, summed
from kernelbake.rebench import Rebenched, Standing, refuse, standing
from kernelbake.state import State

DIGESTS = ["sha256:" + character * 64 for character in "012"]


def _tensor(digest: int = 0, scale: float = 1.0, **fields: Any) -> dict[str, Any]:
    numbers = {"norm": 2.0, "sum": 1.0, "not_finite": 0, "sketch": [2.0 * scale, -2.0 * scale]}
    return {
        "argument": "y",
        "at": 1,
        "dtype": "float32",
        "shape": [4],
        "digest": DIGESTS[digest],
        **numbers,
        **fields,
    }


@pytest.mark.parametrize(
    ("found", "verdict", "error", "detail"),
    [
        ([_tensor()], Verdict.SAME, 0.0, ""),
        ([_tensor(1, 1.005)], Verdict.CLOSE, 0.005, ""),
        ([_tensor(1, 1.5)], Verdict.DIFFERS, 0.5, "`y` is off by about 5.00e-01 of its norm; allowed 1e-02"),
        ([], Verdict.DIFFERS, None, "`y` is not written"),
        ([_tensor(1, shape=[2])], Verdict.DIFFERS, None, "shape of `y` is `[2]`; recorded `[4]`"),
        ([_tensor(1, not_finite=3)], Verdict.DIFFERS, None, "3 elements of `y` are not finite; recorded 0"),
        ([_tensor(1, sketch=[1.0])], Verdict.DIFFERS, None, "no tolerance applies to it"),
        ([_tensor(1, sketch=[10**400, 0])], Verdict.DIFFERS, None, "`y` is off by about inf of its norm"),
        ([_tensor(), _tensor(2, at=2)], Verdict.SAME, 0.0, ""),
    ],
)
def test_a_verdict(found: list[dict[str, Any]], verdict: Verdict, error: float | None, detail: str) -> None:
    got, size, text = judge([_tensor()], found, 0.01)
    assert got is verdict
    assert size == (pytest.approx(error) if error is not None else None)
    assert detail in text
    assert bool(text) == bool(detail)


def test_nothing_stays_nothing() -> None:
    then = [_tensor(norm=0.0, sketch=[0.0, 0.0])]
    assert judge(then, [_tensor(1, sketch=[0.0, -0.0])], 0.01)[0] is Verdict.CLOSE
    assert judge(then, [_tensor(1, sketch=[1e-9, 0.0])], 0.01)[0] is Verdict.DIFFERS


def test_integers_have_to_be_the_same() -> None:
    bare = {name: _tensor()[name] for name in ("argument", "at", "shape", "digest")} | {"dtype": "int32"}
    assert judge([bare], [bare], 0.5)[0] is Verdict.SAME
    assert judge([bare], [{**bare, "digest": DIGESTS[1]}], 0.5)[0] is Verdict.DIFFERS


@pytest.mark.parametrize(
    ("same_inputs", "flips", "verdict", "detail"),
    [
        (False, 1, Verdict.CLOSE, ""),
        (False, 3, Verdict.DIFFERS, "about 3 of 2000 elements of `y` differ; allowed 0.1%, on other inputs"),
        (True, 1, Verdict.DIFFERS, "about 1 of 2000 elements of `y` differ, on the recorded inputs"),
        (None, 1, Verdict.DIFFERS, "about 1 of 2000 elements of `y` differ"),
    ],
)
def test_few_truth_values_may_flip_on_other_inputs(
    same_inputs: bool | None, flips: int, verdict: Verdict, detail: str
) -> None:
    then = {name: _tensor()[name] for name in ("argument", "at", "digest")} | {"dtype": "bool", "shape": [2000]}
    sketches = [0.0, 0.0], [(2.0 * flips) ** 0.5, -((2.0 * flips) ** 0.5)]
    before, after = ({**then, "digest": DIGESTS[number], "sketch": sketches[number]} for number in range(2))
    got, error, text = judge([before], [after], 0.01, same_inputs=same_inputs)
    assert (got, error) == (verdict, pytest.approx(flips / 2000))
    assert text.startswith(detail)
    assert bool(text) == bool(detail)
    assert judge([before], [before], 0.01, same_inputs=same_inputs)[0] is Verdict.SAME


def test_launches_are_counted_by_verdict_and_the_differing_refused_by_name() -> None:
    one = Wanted(0, 0, 0, "size=1", DIGESTS[2], [_tensor()])
    unrecorded = Wanted(1, 0, 0, "size=1", None, None)
    run = {"tensors": [_tensor(1, 1.001)], "tolerance": 0.01, "inputs": DIGESTS[0]}
    far = {"tensors": [_tensor(1, 2.0)], "tolerance": 0.01}
    found = [
        compared(one, "a n=1", run),
        compared(one, "a n=2", None),
        compared(unrecorded, "b", run),
        compared(one, "a n=3", far),
    ]
    assert [item.verdict for item in found] == [Verdict.CLOSE, Verdict.UNMET, Verdict.UNRECORDED, Verdict.DIFFERS]
    assert summed(found) == (
        "1 stayed within tolerance (largest error 1.0e-03), 1 differs, 1 was not met, "
        "1 ran and has nothing recorded to compare with"
    )
    Replayed(tuple(found[:3]), 1, 4, 0.5).refuse("toy")
    with pytest.raises(BundleError, match="1 launch of 4 does not write what was recorded") as caught:
        Replayed(tuple(found), 1, 4, 0.5).refuse("toy")
    assert caught.value.exit_code == 3
    [reason] = caught.value.reasons
    assert reason.startswith("a n=3, entry `sha256:222222222222`, in size=1: `y` is off by about 1.00e+00")
    assert found[0].to_json()["verdict"] == "within tolerance"
    assert found[0].same_inputs is None, "the bundle does not say"
    for inputs, same in ((DIGESTS[0], True), (DIGESTS[1], False)):
        assert compared(Wanted(0, 0, 0, "size=1", None, [_tensor()], inputs), "a", run).same_inputs is same
    assert isinstance(found[0], Compared)


# ---------------------------------------------------------------------------------------------- decided anew

LAUNCH = scripted.launch("kernel", ["time=1.0", "time=2.0", "time=3.0"])


def _standing(medians: dict[int, float], held: int, *, doubt: float = 0.0, **facts: Any) -> Rebenched:
    candidates: dict[str, dict[str, Any]] = {
        str(place): {"median_ms": median, "ratio": median / min(medians.values()), "doubt": doubt}
        for place, median in medians.items()
    }
    for place, same in facts.items():
        candidates[place.removeprefix("c")]["same_code_as"] = same
    winner = min(medians, key=lambda place: (medians[place], place))
    state = State(scripted.plan([LAUNCH]))
    for place in range(3):
        if place not in medians:
            state.rejected[0][place] = Rejected(Reason.WRONG, "it lies")
    decided = {"winner": winner, "candidates": candidates, "band": 0.01}
    return standing(LAUNCH, held, {"median_ms": 0.5}, decided, state)


def test_who_wins_again() -> None:
    found = _standing({0: 1.0, 1: 2.0}, 0)
    assert (found.standing, found.slower, found.then_ms) == (Standing.WINNER, 0.0, 0.5)
    assert _standing({0: 1.0, 1: 1.0, 2: 2.0}, 1, c1=0).standing is Standing.WINNER, "the same code as the winner"


def test_who_is_beaten_and_who_is_tied() -> None:
    assert _standing({0: 1.0, 1: 1.009}, 1).standing is Standing.TIED
    found = _standing({0: 1.0, 1: 1.2}, 1)
    assert (found.standing, found.best) == (Standing.BEATEN, str(LAUNCH.candidates[0]))
    assert found.slower == pytest.approx(0.2)
    assert _standing({0: 1.0, 1: 1.2}, 1, doubt=0.25).standing is Standing.TIED, "it cannot be told"
    with pytest.raises(BuildError, match="1 of 2 winners would not win again") as caught:
        refuse((found, _standing({0: 1.0}, 0)), "toy")
    assert caught.value.exit_code == 6
    assert "1.2000 ms" in caught.value.reasons[0]
    assert "(+20.0%)" in caught.value.reasons[0]


def test_a_winner_that_is_rejected_now_is_refused_with_its_reason() -> None:
    found = _standing({0: 1.0}, 2)
    assert found.standing is Standing.REJECTED
    with pytest.raises(BuildError) as caught:
        refuse((found,), "toy")
    assert "rejected now (wrong-result: it lies)" in caught.value.reasons[0]
    refuse((_standing({0: 1.0}, 0), _standing({0: 1.0, 1: 1.001}, 1)), "toy")


# ---------------------------------------------------------------------------------------------- what is kept


def test_a_journal_and_a_merge_keep_outputs() -> None:
    state = State(scripted.plan([LAUNCH]))
    data = {"case": "size=1", "tensors": [_tensor()], "tolerance": 0.01}
    state.add({"kind": "outputs", "launch": 0, "variant": 0, "data": data})
    again = State(scripted.plan([LAUNCH]))
    for record in state.records_of(0):
        again.add(record)
    assert again.outputs == {0: {0: data}}
    line = {"kernel": "a:b", "key": None, "config": {"meta": []}, "outcome": "ok", "specializations": []}
    joined = _joined_line({**line, "outputs": {"one": data}}, {**line, "outputs": {"two": data}})
    assert joined["outputs"] == {"one": data, "two": data}
