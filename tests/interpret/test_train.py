"""The training loop: twenty steps to the digit, resuming, stopping, and what is on disk whenever it ends."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dflashspec
import interpreted
import pytest
import stubpair
import torch
from safetensors.torch import load_file, save_file

from dflash import checkpoint, config, export, target, trainer
from dflash.errors import DataError, ExitCode, InterruptedRunError, ResumeError, TrainingStoppedError
from dflash.spec import Spec
from dflash.stop import Interrupted, Stop
from dflash.trainer import Job, StepReport
from kernelbake.errors import InputError

GOLDEN = Path(__file__).parents[1] / "golden" / "files" / "dflash-losses.json"


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted.last_configs():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty samples that do not change with Python: verses of numbers."""
    path = tmp_path_factory.mktemp("data") / "verses.jsonl"
    rows = [" ".join(str(n * k) for n in range(1, 9 + k % 3))[:31] for k in range(1, 41)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def job(output: Path, text: Path, **options: Any) -> Job:
    section = dflashspec.changed("axes.buckets", [32])
    section["axes"]["anchors"] = [4]
    section["drafter"]["num_layers"] = 1
    options = {"steps": 20, "output": str(output), "data.source": str(text), "optimizer.lr": 3e-3, **options}
    run = config.load(None, (), {name.replace("__", "."): value for name, value in options.items()})
    return Job(run, config.apply(run, Spec.parse(section)), bundle="sha256:b", interpreted=True)


def steps(of: Job, stop: Stop | None = None) -> list[StepReport]:
    return list(trainer.train(trainer.build(of), stop or Stop()))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, list[StepReport]]:
    """Twenty steps with the real target, saved at 10 and 20."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, steps(job(output, text, checkpoint_every=10))


# ---------------------------------------------------------------------------------------------- whole runs


def test_twenty_steps_have_the_losses_on_record(unbroken: tuple[Path, list[StepReport]]) -> None:
    """A change of data order, anchors, loss, drafter or optimizer shows here; rounding of another CPU does not."""
    losses = [report.loss for report in unbroken[1]]
    if os.environ.get("KERNELBAKE_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-3)
    assert losses[-1] < 0.9 * losses[0]


def test_every_step_is_reported_and_logged(unbroken: tuple[Path, list[StepReport]]) -> None:
    output, reports = unbroken
    assert [report.step for report in reports] == list(range(1, 21))
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in logged] == [report.loss for report in reports]
    assert all(report.scores.acceptance_length >= 1 and report.seconds > 0 for report in reports)
    assert len(reports[0].scores.accuracy_by_position) == 3


def test_the_run_leaves_checkpoints_and_a_drafter_that_loads(unbroken: tuple[Path, list[StepReport]]) -> None:
    """A block of four positions speculates three tokens: the first is given."""
    output, _ = unbroken
    assert sorted(path.name for path in output.iterdir()) == [
        "drafter",
        "metrics.jsonl",
        "step-00000010",
        "step-00000020",
    ]
    served = export.load(output / "drafter")
    written = json.loads((output / "drafter" / "config.json").read_text())
    assert (written["block_size"], written["dflash_config"]["block_size"], written["num_speculative_tokens"]) == (
        4,
        4,
        3,
    )
    state, tensors = checkpoint.load(output / "step-00000020")
    assert state.step == 20
    for name, tensor in served.tensors.items():
        assert torch.equal(tensor, tensors[f"master.{name}"].bfloat16())


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(
    unbroken: tuple[Path, list[StepReport]], text: Path, tmp_path: Path
) -> None:
    output, reports = unbroken
    resumed = steps(job(tmp_path, text, resume=str(output / "step-00000010")))
    assert [report.step for report in resumed] == list(range(11, 21))
    assert [report.loss for report in resumed] == [report.loss for report in reports[10:]]
    one, other = (checkpoint.load(folder / "step-00000020") for folder in (output, tmp_path))
    assert one[0].loader == other[0].loader
    assert set(one[1]) == set(other[1])
    assert all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


# ---------------------------------------------------------------------------------------------- with a table as target


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that costs nothing."""
    table = stubpair.TableTarget(stubpair.spec())
    monkeypatch.setattr(target, "load_target", lambda *args, **options: table)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_signal_ends_the_run_after_its_step_and_nothing_is_lost(text: Path, tmp_path: Path, stop_at: int) -> None:
    whole = steps(job(tmp_path / "whole", text, steps=6))
    stop = Stop()
    part = []

    def until_stopped() -> None:
        for report in trainer.train(trainer.build(job(tmp_path / "part", text, steps=6)), stop):
            part.append(report)
            if report.step == stop_at:
                stop.number = 15

    with pytest.raises(InterruptedRunError, match=r"stopped by SIGTERM; step \d of 6 is saved") as caught:
        until_stopped()
    assert caught.value.exit_code == ExitCode.TERMINATED
    assert part[-1].step > stop_at  # the next step was under way
    rest = steps(job(tmp_path / "part", text, steps=6, resume="latest"))
    assert [report.loss for report in part + rest] == [report.loss for report in whole]


def test_signals_have_their_codes_and_an_idle_run_ends_at_once() -> None:
    assert InterruptedRunError(2, "").exit_code == ExitCode.INTERRUPTED
    stop = Stop()
    with pytest.raises(Interrupted, match="nothing is lost"):
        stop._on(2, None)
    armed = Stop()
    armed.armed = True
    armed._on(15, None)
    assert armed.number == 15


@pytest.mark.usefixtures("quick")
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer.build(job(tmp_path, text, steps=6))
    true_loss, count = made.pair.loss, 0

    def loss(*args: Any) -> Any:
        nonlocal count
        count += 1
        value, correct = true_loss(*args)
        return (value * math.nan if count == 3 else value), correct

    monkeypatch.setattr(made.pair, "loss", loss)
    reports = []
    with pytest.raises(TrainingStoppedError, match="step 3: loss `nan`") as caught:
        reports.extend(trainer.train(made, Stop()))
    assert caught.value.exit_code == ExitCode.STOPPED
    assert any("sample" in reason for reason in caught.value.reasons)
    saved = tmp_path / "step-00000002"
    assert [path.name for path in tmp_path.glob("step-*")] == [saved.name]
    assert str(saved) in str(caught.value.hint)
    unbroken = steps(job(tmp_path / "unbroken", text, steps=6))
    resumed = steps(job(tmp_path, text, steps=6, resume="latest"))
    assert [report.loss for report in resumed] == [report.loss for report in unbroken[2:]]


@pytest.mark.usefixtures("quick")
def test_a_first_step_that_is_not_finite_leaves_no_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer.build(job(tmp_path, text, steps=6))
    true_loss = made.pair.loss
    monkeypatch.setattr(made.pair, "loss", lambda *args: (true_loss(*args)[0] * math.inf, true_loss(*args)[1]))
    with pytest.raises(TrainingStoppedError, match="step 1: loss") as caught:
        list(trainer.train(made, Stop()))
    assert "nothing is lost; the target's weights may hold such numbers" in str(caught.value.hint)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("after", ["nothing", "half a file", "no JSON", "gone"])
def test_data_that_changes_during_a_run_ends_it_with_the_state_saved(after: str, text: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data.jsonl"
    copy.write_bytes(text.read_bytes())
    training = trainer.train(trainer.build(job(tmp_path / "run", copy, steps=50)), Stop())
    first = next(training)
    if after == "gone":
        copy.unlink()
    else:
        contents = {"nothing": b"", "half a file": text.read_bytes()[:30], "no JSON": b"\xff" * 3000}
        copy.write_bytes(contents[after])
    reports = [first]
    with pytest.raises(DataError, match="has changed while it was in use"):
        reports.extend(training)
    assert (tmp_path / "run" / f"step-{reports[-1].step:08d}" / "state.json").is_file()


@pytest.mark.usefixtures("quick")
def test_a_log_that_cannot_be_written_stops_the_run(text: Path, tmp_path: Path) -> None:
    made = trainer.build(job(tmp_path, text, steps=3))
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingStoppedError, match=r"metrics\.jsonl` cannot be written"):
        list(trainer.train(made, Stop()))


@pytest.mark.usefixtures("quick")
def test_no_memory_left_names_the_part_and_what_to_lower(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer.build(job(tmp_path, text))

    def forward(*args: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    monkeypatch.setattr(made.pair.drafter, "forward", forward)
    with pytest.raises(TrainingStoppedError, match=r"pair 0: no memory left on `cpu` in the drafter") as caught:
        list(trainer.train(made, Stop()))
    assert caught.value.hint is not None
    assert "--max-anchors" in caught.value.hint


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_is_old_or_new_and_never_half(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing fails at the second part, as on a full disk: the old one stays, the half is gone, the next one works."""
    made = trainer.build(job(tmp_path, text))
    first = made.save()
    before = (first / "state.json").read_bytes()

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(TrainingStoppedError, match="No space left on device"):
            made.save()
    assert (first / "state.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    (tmp_path / ".step-00000007.99").mkdir()  # of a run that was killed
    made.save()
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def saved(text: Path, tmp_path: Path, quick: None) -> Path:
    steps(job(tmp_path / "saved", text, steps=1))
    return tmp_path / "saved" / "step-00000001"


def resume(saved: Path, text: Path, **options: Any) -> trainer.Trainer:
    return trainer.build(job(saved.parent, text, resume=str(saved), **options))


def test_a_checkpoint_without_its_moments_is_refused(saved: Path, text: Path) -> None:
    tensors = load_file(saved / "optimizer.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "exp_avg.fc.weight"}, saved / "optimizer.safetensors")
    with pytest.raises(InputError, match=r"`exp_avg\.fc\.weight` is missing"):
        resume(saved, text)


def test_a_checkpoint_in_another_dtype_is_refused(saved: Path, text: Path) -> None:
    tensors = load_file(saved / "optimizer.safetensors")
    tensors["master.fc.weight"] = tensors["master.fc.weight"].bfloat16()
    save_file(tensors, saved / "optimizer.safetensors")
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, "digests": None}))
    with pytest.raises(InputError, match=r"`master\.fc\.weight` is torch\.bfloat16; wanted torch\.float32"):
        resume(saved, text)


@pytest.mark.parametrize("lost", ["state.json", "optimizer.safetensors"])
def test_a_checkpoint_without_a_part_is_refused(saved: Path, text: Path, lost: str) -> None:
    (saved / lost).unlink()
    with pytest.raises(InputError, match="resume: "):
        resume(saved, text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1),
        ("step", "1"),
        ("seed", None),
        ("spec", []),
        ("spec", {"axes": 1}),
        ("run", 1),
        ("bundle", 1),
        ("loader", {}),
        ("loader", {"epoch": 0, "next": 10**6, "waiting": {"32": []}}),
        ("loader", {"epoch": 0, "next": 1, "waiting": {"32": [[0, 10**6]]}}),
        ("loader", {"epoch": 0, "next": 1, "waiting": {"64": []}}),
        ("loader", {"epoch": 0, "next": 1, "waiting": {"32": [1]}}),
        ("loader", {"epoch": 0, "next": 1, "waiting": []}),
        ("loader", {"epoch": 0, "next": 1, "waiting": {"32": []}, "begun": 1}),
        ("loader", {"epoch": 0, "next": 1, "waiting": {"32": []}, "begun": [[32, [1]]]}),
        ("loader", {"epoch": 0, "next": 1, "waiting": {"32": []}, "other": []}),
    ],
)
def test_a_state_of_the_wrong_kind_is_refused(saved: Path, text: Path, name: str, value: Any) -> None:
    path = saved / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "digests": None, name: value}))
    with pytest.raises(InputError, match="resume: "):
        resume(saved, text)


@pytest.mark.parametrize("content", ["", "null", "[]", "[" * 100_000, '{"format": 1}', "\udcff"])
def test_a_state_that_is_none_is_refused(saved: Path, text: Path, content: str) -> None:
    (saved / "state.json").write_text(content, errors="surrogateescape")
    with pytest.raises(InputError, match="resume: "):
        resume(saved, text)


def test_a_checkpoint_of_another_run_is_refused_with_every_difference(saved: Path, text: Path) -> None:
    with pytest.raises(ResumeError) as caught:
        resume(saved, text, seed=1, batch__max_anchors=2)
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == ["seed", "axes.anchors"]
    assert caught.value.exit_code == ExitCode.MISFIT


def test_another_bundle_is_refused_unless_it_was_allowed(saved: Path, text: Path) -> None:
    def other(**options: Any) -> Job:
        return dataclasses.replace(job(saved.parent, text, resume=str(saved), **options), bundle="sha256:c")

    with pytest.raises(ResumeError, match="belongs to another run"):
        trainer.build(other())
    assert trainer.build(other(other_bundle=True)).done == 1


def test_there_must_be_something_to_resume(text: Path, tmp_path: Path, quick: None) -> None:
    for wish in ("latest", str(tmp_path)):
        with pytest.raises(InputError, match="resume: "):
            trainer.build(job(tmp_path, text, resume=wish))
