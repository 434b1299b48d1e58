"""The run's configuration: YAML, ``--set`` and options, every fault at once, and what the manifest leaves to it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import dflashspec
import pytest

from dflash import config
from dflash.config import OptimizerConfig, RunConfig
from dflash.placement import Devices, numbered
from dflash.spec import Spec
from kernelbake.errors import InputError


def load(text: str = "", sets: tuple[str, ...] = (), tmp_path: Path | None = None, **options: Any) -> RunConfig:
    path = None
    if tmp_path is not None:
        path = tmp_path / "run.yaml"
        path.write_text(text)
    return config.load(path, sets, {name.replace("__", "."): value for name, value in options.items()})


@pytest.mark.parametrize("text", ["6e-4", "6.0e-4", "0.0006", "1e-4"])
def test_numbers_are_numbers_in_every_spelling(text: str, tmp_path: Path) -> None:
    assert load(f"optimizer: {{lr: {text}}}", tmp_path=tmp_path).optimizer.lr == float(text)
    assert load(sets=(f"optimizer.lr={text}",)).optimizer.lr == float(text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("optimizer: {lr: '6e-4'}", "optimizer.lr: found `'6e-4'`; it is text, so leave the quotes away"),
        ("steps: 1e5", "steps: found `100000.0`; wanted a whole number of at least 1"),
        ("steps: '10'", "steps: "),
        ("steps: yes", "steps: "),
        ("optimizer: {lr: -1}", "optimizer.lr: "),
        ("optimizer: {warmup: 2}", "optimizer.warmup: "),
        ("optimizer: {schedule: linear}", "optimizer.schedule: "),
        ("optimizer: {clip: 0}", "optimizer.clip: "),
        ("devices: 0,0", "devices: "),
        ("devices: a:b", "devices: "),
        ("batch: {buckets: [64, 32]}", "batch.buckets.1: "),
        ("batch: {size: 0}", "batch.size: "),
        ("batch: 4", "batch: "),
        ("lr: 1", "lr: unknown key"),
        (
            "seed: 9223372036854775808",
            "seed: found `9223372036854775808`; wanted a whole number of at least 0 and at most",
        ),
        ("batch: {buckets: [9223372036854775808]}", "batch.buckets.0: "),
        ("optimizer: {lr: 1" + "0" * 400 + "}", "optimizer.lr: "),
        ("optimizer: {lr: 1.0e+39}", "optimizer.lr: "),
        ("optimizer: {beta2: 1.0}", "optimizer.beta2: "),
        ("optimizer: {eps: 0}", "optimizer.eps: "),
        ('output: "a\\0b"', "output: found `'a\\x00b'`; wanted text without characters that no path can have"),
        ('target: "\\ud800"', "target: "),
        ("data: {template_options: {a: .nan}}", "data.template_options: "),
        ("[1, 2]", ": found `[1, 2]`; wanted a mapping"),
        ("loss: {kind: jsd}", "loss.kind: found `'jsd'`; wanted one of `ce`, `kl`, `mix`"),
        ("loss: {kl_share: 0.5}", "loss.kl_share: given with `kind: ce`; wanted it with `kind: mix` only"),
        ("loss: {kind: mix, kl_share: 1}", "loss.kl_share: "),
        ("loss: {alpha: 0.5}", "loss.alpha: given with `weights: decay`; wanted it with `weights: d-pace` only"),
        ("loss: {weights: d-pace, alpha: 1.5}", "loss.alpha: "),
        ("loss: {weights: d-pace}\ngamma: 4", "gamma: given with `loss.weights: d-pace`"),
        ("loss: {gamma: 4}", "loss.gamma: unknown key"),
    ],
)
def test_a_fault_names_its_field(text: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(text, tmp_path=tmp_path)
    assert [reason for reason in caught.value.reasons if reason.startswith(path)] == list(caught.value.reasons)
    assert len(caught.value.reasons) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000,
        "{a: " * 2000,
        "steps: 1" + "0" * 5000,
        "steps: 2020-13-45",
        "steps: !!int x",
        "steps: !!float x",
        "a: &a [1]\nb: *a\n",
        "&a [*a]",
        "steps: 1\nsteps: 2\n",
        "a: 1\n---\nb: 2\n",
    ],
)
def test_what_yaml_cannot_say_plainly_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="configuration `"):
        load(text, tmp_path=tmp_path)
    with pytest.raises(InputError, match="configuration `--set steps`"):
        load(sets=(f"steps={text}",))


def test_aliases_that_multiply_are_refused_before_they_are_built(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
    with pytest.raises(InputError, match=r"line 2: `\*a0`; wanted no aliases"):
        load("\n".join([*rows, "steps: *a11"]), tmp_path=tmp_path)


@pytest.mark.parametrize("name", [".", "missing.yaml", "x" * 5000])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wanted a YAML file"):
        config.load(tmp_path / name, (), {})


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="4 faults") as caught:
        load("steps: 0\nbatch: {layout: ragged}\n", ("optimizer.lr=fast", "nothing"), tmp_path)
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == [
        "--set nothing",
        "steps",
        "batch.layout",
        "optimizer.lr",
    ]


@pytest.mark.parametrize(
    ("text", "share", "alpha", "term"),
    [
        ("", 0.0, None, "ce"),
        ("loss: {kind: kl}", 1.0, None, "kl"),
        ("loss: {kind: mix}", 0.5, None, "kl"),
        ("loss: {kind: mix, kl_share: 0.9, weights: d-pace}", 0.9, 0.5, "kl"),
        ("loss: {weights: d-pace, alpha: 0}", 0.0, 0.0, "ce"),
    ],
)
def test_a_loss_says_what_it_mixes_and_which_launches_it_needs(
    text: str, share: float, alpha: float | None, term: str, tmp_path: Path
) -> None:
    run = load(text, tmp_path=tmp_path)
    assert (run.loss.kl_share, run.loss.alpha) == (share, alpha)
    assert config.apply(run, spec()).loss.terms == (term,)


def test_options_win_over_set_and_set_over_the_file(tmp_path: Path) -> None:
    text = "steps: 1\nseed: 1\nbatch: {size: 1}\n"
    run = load(text, ("steps=2", "batch.size=2"), tmp_path, batch__size=3, steps=None)
    assert (run.steps, run.seed, run.batch.size) == (2, 1, 3)


def test_set_may_give_zero_false_and_nothing() -> None:
    run = load(sets=("optimizer.min_lr=0", "other_bundle=false", "target=null"))
    assert (run.optimizer.min_lr, run.other_bundle, run.target) == (0.0, False, None)


def test_duplicate_keys_and_broken_yaml_are_refused(tmp_path: Path) -> None:
    for text in ("steps: 1\nsteps: 2\n", "steps: [", "a: b: c"):
        with pytest.raises(InputError, match="no YAML"):
            load(text, tmp_path=tmp_path)
    with pytest.raises(InputError, match="is no file"):
        config.load(tmp_path / "none.yaml", (), {})


def test_devices() -> None:
    assert Devices.parse("1") == Devices(1, 1)
    assert Devices.parse("0:1") == Devices(0, 1)
    assert load(sets=("devices=2",)).pairs == (Devices(2, 2),)
    assert load().pairs == (Devices(0, 0),)
    assert load().devices is None
    assert load(sets=("devices=0:2,1:3",)).pairs == (Devices(0, 2), Devices(1, 3))
    assert load(sets=("devices=[0:2, 1:3]", "dp_pairs=2")).pairs == (Devices(0, 2), Devices(1, 3))
    assert load(sets=("dp_pairs=3",)).pairs == numbered(3)


def test_all_that_is_wrong_with_devices_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        load(sets=("devices=0:1,1:2,2", "dp_pairs=2", "watchdog_seconds=0"))
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == [
        "devices",
        "devices",
        "dp_pairs",
        "watchdog_seconds",
    ]
    assert "GPU `1` in pairs `0` and `1`" in caught.value.reasons[0]
    assert "GPU `2` in pairs `1` and `2`" in caught.value.reasons[1]
    assert "found `2` with `3` pairs" in caught.value.reasons[2]
    with pytest.raises(InputError) as caught:
        load(sets=("devices=0:1,x,1:0,0:1:2",))
    assert [reason.partition(";")[0] for reason in caught.value.reasons] == [
        "devices: found `x`",
        "devices: found `0:1:2`",
        "devices: found GPU `0` in pairs `0` and `2`",
        "devices: found GPU `1` in pairs `0` and `2`",
    ]


def test_the_schedule_rises_and_falls() -> None:
    settings = OptimizerConfig(lr=1.0, warmup=0.1, min_lr=0.1)
    rates = [settings.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[10] == 1.0
    assert all(later < sooner for sooner, later in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert OptimizerConfig(schedule="constant", warmup=0.0, lr=2.0).rate(99, 100) == 2.0


def spec() -> Spec:
    return Spec.parse(dflashspec.TINY)


def test_a_run_without_wishes_has_the_largest_slots_of_every_bucket() -> None:
    cases = config.apply(load(), spec()).axes.cases()
    assert [(case["bucket"], case["anchors"]) for case in cases.planned] == [(32, 8), (64, 8)]


def test_a_cap_between_planned_counts_is_a_case_of_its_own() -> None:
    applied = config.apply(load(batch__max_anchors=20), Spec.parse(dflashspec.changed("axes.anchors", [4, 8, 32])))
    assert [(case["bucket"], case["anchors"]) for case in applied.axes.cases().planned] == [(32, 8), (64, 20)]


def test_what_the_run_says_replaces_the_manifest() -> None:
    run = load(sets=("batch.buckets=[128]", "batch.size=3", "batch.dtype=bfloat16", "data.source=a.jsonl"))
    applied = config.apply(run, spec())
    assert [case.id for case in applied.axes.cases().planned] == [
        "bucket=128 anchors=8 batch=3 layout=padded dtype=bfloat16"
    ]
    assert applied.data.source == "a.jsonl"
    assert applied.data.too_long == spec().data.too_long


def test_a_bucket_without_room_for_anchors_is_refused() -> None:
    with pytest.raises(InputError, match="`6` with at least `4` anchors"):
        config.apply(load(sets=("batch.buckets=[6, 64]",)), spec())


def test_several_packed_rows_are_refused() -> None:
    with pytest.raises(InputError, match="a packed batch is one row"):
        config.apply(load(sets=("batch.layout=packed", "batch.size=2")), spec())
