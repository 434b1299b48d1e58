"""What a run will take: from footprints to needs, refusals with what to lower, and the measured peak beside them."""

from __future__ import annotations

from collections.abc import Sequence

import dflashspec
import pytest
import torch

from dflash import devices, graphs, memory
from dflash.buckets import Shape
from dflash.errors import ExitCode
from dflash.memory import Meter, Need
from dflash.spec import Spec
from kernelbake.errors import InputError
from kernelbake.workload import Footprint, PartPeak

GIB = 2**30
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
SPEC = Spec.parse(dflashspec.TINY)
CASES = SPEC.axes.cases().planned
HIDDEN = 64 * 64 * 4
"""A hidden state of the longest bucket: 64 tokens of 64 numbers in fp32."""
PASS = (3 * GIB, -1, GIB)
"""What a pass allocates and frees."""


def footprints(*, target: int = 3 * GIB, backward: int = 8 * GIB) -> list[Footprint]:
    """Of all cases; the last has the highest peaks."""
    last = len(CASES) - 1
    return [
        Footprint(
            case,
            (
                PartPeak("pause between steps", 0, 10),
                PartPeak("target", 10, target - last + number, PASS),
                PartPeak("drafter", GIB, 6 * GIB),
                PartPeak("head and loss", 5 * GIB, 7 * GIB),
                PartPeak("backward pass", 6 * GIB, backward - last + number),
                PartPeak("optimizer", 10, 20),
            ),
        )
        for number, case in enumerate(CASES)
    ]


def by_device(needs: Sequence[Need]) -> dict[torch.device, int]:
    assert all(need.of_step for need in needs)
    found: dict[torch.device, int] = {}
    for need in needs:
        found[need.device] = found.get(need.device, 0) + need.num_bytes
    return found


def test_on_one_device_the_largest_part_counts_and_is_named() -> None:
    needs = memory.step_needs(footprints(), SPEC, FIRST, FIRST, graphed=False)
    assert by_device(needs) == {FIRST: 8 * GIB + memory.LIBRARY_BYTES}
    assert f"a step, at most in the backward pass at {CASES[-1].id}" in [need.what for need in needs]


def test_the_targets_pass_counts_with_the_input_of_a_layer_that_is_not_the_first() -> None:
    needs = memory.step_needs(footprints(target=9 * GIB), SPEC, FIRST, FIRST, graphed=False)
    assert by_device(needs) == {FIRST: 9 * GIB + HIDDEN + memory.LIBRARY_BYTES}
    assert any("in the target at" in need.what for need in needs)


def test_on_two_devices_each_holds_its_own_and_the_drafters_the_next_batch_too() -> None:
    needs = memory.step_needs(footprints(), SPEC, FIRST, SECOND, graphed=False)
    assert by_device(needs) == {
        FIRST: 3 * GIB + HIDDEN + memory.LIBRARY_BYTES,
        SECOND: (8 + 1) * GIB + memory.LIBRARY_BYTES,
    }


def test_graphs_hold_the_targets_pass_between_steps() -> None:
    (one,) = by_device(memory.step_needs(footprints(), SPEC, FIRST, FIRST, graphed=True)).values()
    largest = max(Shape.of(case).batch * Shape.of(case).bucket for case in CASES)
    buffers = largest * (2 * 8 + 2 * 64 * 4)
    first_block = 3 * GIB * 17 // 16 + 2 * 2**20  # with a hidden state, in whole 2 MiB
    small_block = 2 * 2**20
    held = buffers + first_block + small_block + graphs.WORK_SPACE_BYTES
    assert one == 8 * GIB + memory.LIBRARY_BYTES + held
    two = by_device(memory.step_needs(footprints(), SPEC, FIRST, SECOND, graphed=True))
    assert two[SECOND] == (8 + 1) * GIB + memory.LIBRARY_BYTES
    assert two[FIRST] == one - 8 * GIB + GIB


def test_without_a_preflight_nothing_is_predicted() -> None:
    assert memory.step_needs([], SPEC, FIRST, FIRST, graphed=True) == []


NEEDS = [
    Need(FIRST, "the target's weights", 50 * GIB),
    Need(FIRST, "a step, at most in the drafter at a case", 9 * GIB, True),
    Need(SECOND, "the drafter's weights", 4 * GIB),
    Need(SECOND, "a step, at most in the backward pass at a case", 8 * GIB, True),
]


def free(monkeypatch: pytest.MonkeyPatch, first: int | None, second: int | None) -> None:
    monkeypatch.setattr(devices, "free_bytes", lambda device: {FIRST: first, SECOND: second}[device])


def test_what_fits_exactly_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 59 * GIB, None)
    memory.check(NEEDS)


def test_a_step_that_does_not_fit_is_refused_with_the_sizes_and_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 59 * GIB - 1, 10 * GIB)
    with pytest.raises(InputError, match="the models fit and a step does not") as caught:
        memory.check(NEEDS)
    text = str(caught.value)
    assert caught.value.exit_code == ExitCode.INPUT
    assert "--max-anchors" in text
    assert "--devices 0:1" in text
    for said in (
        "cuda:0: 63,350,767,616 bytes (59.0 GiB) needed",
        "cuda:0: the target's weights: 53,687,091,200 bytes (50.0 GiB)",
        "cuda:1: 12,884,901,888 bytes (12.0 GiB) needed, 10,737,418,240 bytes (10.0 GiB) free",
        "cuda:1: a step, at most in the backward pass at a case: 8,589,934,592 bytes (8.0 GiB)",
    ):
        assert any(said in reason for reason in caught.value.reasons), said


def test_models_that_do_not_fit_are_told_from_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 49 * GIB, 100 * GIB)
    with pytest.raises(InputError, match="the models do not fit") as caught:
        memory.check(NEEDS)
    assert "--max-anchors" not in str(caught.value)


@pytest.mark.parametrize(("part", "lower"), [("target", False), ("backward pass", True), ("head and loss", True)])
def test_out_of_memory_names_the_part_and_what_to_lower(
    monkeypatch: pytest.MonkeyPatch, part: str, lower: bool
) -> None:
    free(monkeypatch, 0, GIB)
    shape = Shape.of(CASES[0])
    error = Meter(NEEDS).exhausted(torch.OutOfMemoryError("no memory\nfor this"), 3, SECOND, part, shape)
    assert error.message == f"pair 3: no memory left on `cuda:1` in the {part}, at {shape}"
    assert ("--max-anchors" in str(error.hint)) == lower
    assert "--buckets" in str(error.hint)
    assert list(error.reasons) == [
        "cuda:1: 8,589,934,592 bytes (8.0 GiB) predicted for a step, beside 4,294,967,296 bytes (4.0 GiB)",
        "cuda:1: 1,073,741,824 bytes (1.0 GiB) free now",
        "no memory",
        "for this",
    ]


def test_the_measured_peak_is_what_lies_above_weights_gradients_and_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: {FIRST: 57 * GIB, SECOND: 11 * GIB}[device])
    meter = Meter(NEEDS)
    before = meter.peaks(lambda device: 0)
    assert [(peak.predicted_bytes, peak.measured_bytes) for peak in before] == [(9 * GIB, None), (8 * GIB, None)]
    assert before[0].line() == (
        "memory: `cuda:0`: peak beside weights and optimizer: 9,663,676,416 bytes (9.0 GiB) predicted "
        "(a step, at most in the drafter at a case)"
    )
    meter.start()
    assert reset == [FIRST, SECOND]
    after = meter.peaks(lambda device: GIB if device == FIRST else 0)
    assert [peak.measured_bytes for peak in after] == [8 * GIB, 7 * GIB]
    assert after[1].line() == (
        "memory: `cuda:1`: peak beside weights and optimizer: 7,516,192,768 bytes (7.0 GiB) measured, "
        "8,589,934,592 bytes (8.0 GiB) predicted"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes (0.0 MiB)"),
        (3_233_792, "3,233,792 bytes (3.1 MiB)"),
        (GIB - 1, "1,073,741,823 bytes (1024.0 MiB)"),
        (GIB, "1,073,741,824 bytes (1.0 GiB)"),
    ],
)
def test_sizes_are_told_in_a_unit_that_shows_them(count: int, text: str) -> None:
    assert devices.gib(count) == text
