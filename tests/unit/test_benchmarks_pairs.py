"""What the benchmarks of pairs make of their measurements: rates, ratios, verdicts, overlap and its picture."""

from __future__ import annotations

import argparse
import copy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

MODULES = ("common", "main_job", "trainers", "timeline", "pairs", "four_gpus")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts, by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return argparse.Namespace(**{name: __import__(name) for name in MODULES})


FAST = {"threads": [1.0, 1.0, 2.0], "alone": [[1.0, 1.0, 1.0], [1.0, 2.0, 2.0]]}
"""Six batches in 4 s side by side, six in 8 s in turn."""


def test_a_rate_counts_the_batches_of_all_pairs(benchmarks: Any) -> None:
    assert benchmarks.trainers.rates([FAST], "threads") == [1.5]
    assert benchmarks.trainers.rates([FAST], "alone") == [0.75]


def test_a_speedup_is_the_median_of_the_rounds(benchmarks: Any) -> None:
    slow = {"threads": [8.0, 8.0], "alone": [[1.0, 1.0], [1.0, 1.0]]}
    assert benchmarks.trainers.speedup([FAST, slow, FAST]) == 2.0
    assert benchmarks.pairs.over_seed([FAST, FAST], [{"alone": [[4.0], [4.0]]}]) == 6.0


def test_speedups_over_one_pair_alone_and_over_all_in_turn(benchmarks: Any) -> None:
    assert benchmarks.four_gpus.speedups([FAST]) == {"over_pair_0": 1.5, "over_in_turn": 2.0}


EQUAL = {"digests": [{"weight": "a", "master": "b"}] * 2, "moved": True, "updates": [50, 50]}


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({}, True),
        ({"digests": [{"weight": "a", "master": "b"}, {"weight": "a", "master": "c"}]}, False),
        ({"digests": EQUAL["digests"][:1]}, False),  # type: ignore[index]
        ({"moved": False}, False),
        ({"updates": [50, 49]}, False),
    ],
)
def test_equal_weights_are_those_of_several_pairs_that_trained(
    benchmarks: Any, change: dict[str, Any], equal: bool
) -> None:
    assert benchmarks.pairs.is_equal({**EQUAL, **change}, 50) is equal


def test_digests_see_one_bit_of_one_tensor(benchmarks: Any) -> None:
    import stubpair

    one, other = stubpair.pair(), stubpair.pair()
    assert benchmarks.pairs.digests_of(one) == benchmarks.pairs.digests_of(other)
    moments = other.optimizer.state()["exp_avg.fc.weight"]
    moments.view(-1)[3] = -0.0
    other.optimizer.restore({**other.optimizer.state(), "exp_avg.fc.weight": moments})
    found, wanted = benchmarks.pairs.digests_of(other), benchmarks.pairs.digests_of(one)
    assert [kind for kind in wanted if found[kind] != wanted[kind]] == ["exp_avg"]
    assert set(wanted) == {"weight", "master", "step", "exp_avg", "exp_avg_sq"}
    assert len(benchmarks.pairs.digest_of(torch.zeros((), dtype=torch.bfloat16))) == 64


def test_a_failure_is_named_by_pair_device_and_traceback(benchmarks: Any) -> None:
    injected = benchmarks.pairs.INJECTED
    told = ["Traceback (most recent call last):", "in failing_forward", f"RuntimeError: {injected}"]
    good = {
        "error": "PairError",
        "message": f"pair 1 (`cuda:1`) failed in the drafter: RuntimeError: {injected}",
        "reasons": told,
        "pair": 1,
        "device": "cuda:1",
        "steps": 2,
    }
    assert benchmarks.pairs.is_named(good, 3)
    for name, bad in (
        ("error", None),
        ("error", "HangError"),
        ("message", good["message"].replace("pair 1", "pair 0")),  # type: ignore[attr-defined]
        ("message", good["message"].replace("cuda:1", "cuda:0")),  # type: ignore[attr-defined]
        ("reasons", told[:1]),
        ("steps", 5),
    ):
        assert not benchmarks.pairs.is_named({**copy.deepcopy(good), name: bad}, 3), name


FACTS = {"interpreted": False, "gpu": "NVIDIA H200", "buckets": [512, 4096]}


@pytest.mark.parametrize(
    ("facts", "options"),
    [
        ({"interpreted": True}, {}),
        ({"gpu": "NVIDIA H100"}, {}),
        ({"buckets": [64, 128]}, {}),
        ({}, {"devices": "0"}),
        ({}, {"equal_steps": 8}),
        ({}, {"rounds": 2}),
    ],
)
def test_tries_are_not_recorded_under_the_agreed_name(
    benchmarks: Any, facts: dict[str, Any], options: dict[str, Any]
) -> None:
    agreed = {"devices": "0,1", "equal_steps": 50, "rounds": 5}
    assert benchmarks.pairs.name_of(FACTS, argparse.Namespace(**agreed)) == "pairs_h200x2"
    assert benchmarks.pairs.name_of({**FACTS, **facts}, argparse.Namespace(**{**agreed, **options})) == "pairs_tried"


@pytest.mark.parametrize("change", [{"devices": "0:1"}, {"steps": 20}, {"rounds": 1}])
def test_two_gpus_are_not_recorded_as_four(benchmarks: Any, change: dict[str, Any]) -> None:
    agreed = {"devices": "0:2,1:3", "steps": 200, "rounds": 5}
    assert benchmarks.four_gpus.name_of(FACTS, argparse.Namespace(**agreed)) == "four_gpus_h200x4"
    assert benchmarks.four_gpus.name_of(FACTS, argparse.Namespace(**{**agreed, **change})) == "four_gpus_tried"


def test_the_exchanges_share_is_of_the_step(benchmarks: Any) -> None:
    parts = {"drafter": {"device_ms": 5.0}, "exchange of gradients": {"device_ms": 2.0}}
    profile = {"step_ms": 20.0, "pairs": [{"parts": parts}, {"parts": {"drafter": {"device_ms": 5.0}}}]}
    assert benchmarks.trainers.exchange_shares(profile) == [0.1, 0.0]


def spans(benchmarks: Any, shift: float) -> list[Any]:
    """Three steps of 10 ms; the target's pass of the next batch begins ``shift`` ms into the step, and takes 4 ms."""
    found = []
    for step in range(3):
        begin = 10.0 * step
        if step < 2:
            found.append(benchmarks.timeline.Span(0, "cuda:0", "target", begin + shift, begin + shift + 4))
        for part, start, end in (
            ("drafter", 0, 3),
            ("backward pass", 3, 6),
            ("exchange of gradients", 6, 8),
            ("optimizer", 8, 9),
        ):
            found.append(benchmarks.timeline.Span(0, "cuda:2", part, begin + start, begin + end))
    return found


def test_overlap_is_what_of_the_shorter_is_hidden(benchmarks: Any) -> None:
    """Waiting for the exchange hides nothing; the first step and the last do not count."""
    share = benchmarks.timeline.overlap_share
    assert share(spans(benchmarks, 1.0)) == 1.0
    assert share(spans(benchmarks, 4.0)) == 0.5
    with pytest.raises(ValueError, match="has 2 steps"):
        share([span for span in spans(benchmarks, 0.0) if span.begin < 20])


def test_intervals_are_counted_once(benchmarks: Any) -> None:
    given = [(0.0, 2.0), (5.0, 6.0), (1.0, 3.0), (3.0, 4.0)]
    assert benchmarks.timeline.merged(given) == [(0.0, 4.0), (5.0, 6.0)]
    assert benchmarks.timeline.both(given, [(3.5, 5.5)]) == [(3.5, 4.0), (5.0, 5.5)]
    assert benchmarks.timeline.length(given) == 5.0


def test_the_picture_has_a_row_for_each_device_and_a_bar_for_each_span(benchmarks: Any) -> None:
    given = spans(benchmarks, 1.0)
    picture = ElementTree.fromstring(benchmarks.timeline.svg(given, "2 < 3 & more"))
    names = {"svg": "http://www.w3.org/2000/svg"}
    texts = [text.text for text in picture.findall("svg:text", names)]
    assert "2 < 3 & more" in texts
    assert "pair 0, target, cuda:0" in texts
    assert "pair 0, drafter, cuda:2" in texts
    bars = [bar for bar in picture.findall("svg:rect", names) if bar.find("svg:title", names) is not None]
    assert len(bars) == len(given)
    assert all(float(bar.get("width", "0")) > 0 for bar in bars)


def test_a_manifest_is_made_out_to_lengths_and_layers(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is built here: the manifest is what matters."""
    from kernelbake import manifest

    monkeypatch.setattr(benchmarks.main_job, "must", lambda folder, line: (0.0, ""))
    assert benchmarks.trainers.bake(tmp_path, "sm90.yaml", [512, 4096], 16) == tmp_path / "bundle.tar"
    section, found = (manifest.load(path).section for path in (manifest.find("sm90.yaml"), tmp_path / "manifest.yaml"))
    assert found["axes"]["buckets"] == [512, 4096]
    assert found["target"] == {**section["target"], "num_layers": 16}
    assert found["drafter"] == {**section["drafter"], "target_layer_ids": found["drafter"]["target_layer_ids"]}
