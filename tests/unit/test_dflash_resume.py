"""Where epochs end, runs stop and signals come: going on is the unbroken run, and a watched run is the same run.

The target is a table and the loss has no kernel, as nothing here depends on them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dflashspec
import pytest
import stubpair
import torch

from dflash import checkpoint, config, target, trainer
from dflash.errors import InterruptedRunError, ResumeError, TrainingStoppedError
from dflash.pairs import Pair
from dflash.profiling import Profiler
from dflash.spec import Spec
from dflash.stop import Stop
from dflash.trainer import Job, StepReport
from kernelbake.errors import InputError


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "load_target", lambda *args, **options: stubpair.TableTarget(stubpair.spec()))
    monkeypatch.setattr(Pair, "loss", stubpair.cheap_loss)


def job(output: Path, samples: int, buckets: tuple[int, ...] = (32,), **options: Any) -> Job:
    """A run over so many samples, each of another text, of 6 to 24 tokens."""
    path = output.parent / f"{samples}.jsonl"
    rows = [{"text": f"{number}: " + "abc" * (number % 7 + 1)} for number in range(samples)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = dflashspec.changed("axes.buckets", list(buckets))
    section["axes"]["anchors"] = [4]
    section["drafter"]["num_layers"] = 1
    options = {"output": str(output), "data.source": str(path), "optimizer.lr": 3e-3, **options}
    run = config.load(None, (), {name.replace("__", "."): value for name, value in options.items()})
    return Job(run, config.apply(run, Spec.parse(section)), bundle="sha256:b", interpreted=True)


def steps(of: Job) -> list[StepReport]:
    return list(trainer.train(trainer.build(of), Stop()))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_run_goes_on_wherever_it_stopped_also_where_an_epoch_ends(tmp_path: Path) -> None:
    """Three epochs of ten steps, stopped before, at and behind the end of an epoch and at the end of the run."""
    whole = steps(job(tmp_path / "whole", 10, steps=30, checkpoint_every=1))
    assert len({round(report.loss, 6) for report in whole}) == 30
    state, tensors = checkpoint.load(tmp_path / "whole" / "step-00000030")
    for stopped in (9, 10, 11, 20, 29, 30):
        output = tmp_path / f"from {stopped}"
        left = tmp_path / "whole" / f"step-{stopped:08d}"
        rest = steps(job(output, 10, steps=30, resume=str(left)))
        assert [report.step for report in rest] == list(range(stopped + 1, 31))
        assert [report.loss for report in rest] == [report.loss for report in whole[stopped:]]
        found, weights = checkpoint.load(output / "step-00000030")
        assert (found.step, found.loader) == (30, state.loader)
        assert same(weights, tensors)


def test_a_run_of_two_pairs_and_two_lengths_goes_on_wherever_it_stopped(tmp_path: Path) -> None:
    """Steps have one bucket, but for those where an epoch of 11 samples ends."""
    options: dict[str, Any] = {"steps": 12, "dp_pairs": 2, "buckets": (16, 32)}
    whole = steps(job(tmp_path / "whole", 11, checkpoint_every=1, **options))
    kinds = [sorted({shape.bucket for shape in report.shapes}) for report in whole]
    assert [16] in kinds
    assert [32] in kinds
    assert 0 < kinds.count([16, 32]) < 4
    state, tensors = checkpoint.load(tmp_path / "whole" / "step-00000012")
    for stopped in (1, 4, 5, 6, 11):
        output = tmp_path / f"from {stopped}"
        rest = steps(job(output, 11, resume=str(tmp_path / "whole" / f"step-{stopped:08d}"), **options))
        assert [report.loss for report in rest] == [report.loss for report in whole[stopped:]]
        found, weights = checkpoint.load(output / "step-00000012")
        assert found.loader == state.loader
        assert same(weights, tensors)


@pytest.mark.parametrize(("samples", "pairs", "steps_made"), [(5, 2, 5), (7, 4, 7), (1, 2, 3), (3, 3, 2)])
def test_an_epoch_that_pairs_cannot_share_evenly_goes_on_into_the_next(
    samples: int, pairs: int, steps_made: int, tmp_path: Path
) -> None:
    """No sample is dropped, none is seen twice in an epoch, and every pair takes part in every step."""
    made = trainer.build(job(tmp_path / "run", samples, steps=steps_made, dp_pairs=pairs))
    seen: list[tuple[int, int]] = []
    place = made.loader.make

    def make(planned: Any) -> Any:
        batch = place(planned)
        seen.extend(batch.visits)
        return batch

    made.loader.make = make  # type: ignore[method-assign]
    reports = list(trainer.train(made, Stop()))
    assert [report.step for report in reports] == list(range(1, steps_made + 1))
    assert [pair.updates for pair in made.pairs] == [steps_made] * pairs
    assert len(seen) == steps_made * pairs
    for epoch in range(math.ceil(len(seen) / samples)):
        visits = [index for number, index in seen if number == epoch]
        assert len(set(visits)) == len(visits) == min(samples, len(seen) - epoch * samples)


def test_a_watched_run_has_the_numbers_of_one_that_is_not(tmp_path: Path) -> None:
    plain = steps(job(tmp_path / "plain", 10, steps=4, dp_pairs=2))
    made = trainer.build(job(tmp_path / "watched", 10, steps=4, dp_pairs=2))
    told: list[dict[str, Any]] = []
    made.profiler, made.sinks = Profiler(made.pairs), [SimpleNamespace(write=told.append)]
    watched = list(trainer.train(made, Stop()))
    assert [report.loss for report in watched] == [report.loss for report in plain]
    logged = (tmp_path / "watched" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(json.dumps(told)) == [json.loads(line) for line in logged]
    found = made.profiler.profile([report.seconds for report in watched])
    assert [pair.pair for pair in found.pairs] == [0, 1]
    for pair in found.pairs:
        assert pair.steps == 3
        assert {"target", "drafter", "backward pass", "exchange of gradients", "optimizer"} <= set(pair.parts)


def logged(output: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.parametrize("torn", ["", '{"step": 7, "los', '{"step": 7}', "\n\n", "\x00" * 40])
def test_the_log_of_a_resumed_run_is_that_of_the_unbroken_one(torn: str, tmp_path: Path) -> None:
    """A run that was killed has logged steps that are made again, and may have left half a line."""
    whole = tmp_path / "whole"
    steps(job(whole, 10, steps=8))
    steps(job(tmp_path / "killed", 10, steps=6, optimizer__schedule="constant", checkpoint_every=4))
    options = {"steps": 8, "resume": str(tmp_path / "killed" / "step-00000004")}
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write(torn)
    steps(job(tmp_path / "killed", 10, optimizer__schedule="constant", **options))
    assert [step for step, _ in logged(tmp_path / "killed")] == [step for step, _ in logged(whole)]


def test_a_run_that_only_validates_leaves_one_validation_of_its_step(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    steps(job(tmp_path / "run", 10, steps=3, data__held_out=4))
    before = path.read_text()
    for _ in range(2):
        assert not steps(job(tmp_path / "run", 10, steps=3, data__held_out=4, resume="latest"))
    assert path.read_text() == before
    steps(job(tmp_path / "run", 10, steps=5, data__held_out=4, resume="latest", checkpoint_every=1))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if "validation" in line] == [3, 4, 5]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]


def test_other_samples_under_the_same_name_are_refused(tmp_path: Path) -> None:
    """As many as before, and as long."""
    steps(job(tmp_path / "run", 10, steps=1))
    data, resume = tmp_path / "10.jsonl", str(tmp_path / "run" / "step-00000001")
    of = job(tmp_path / "run", 10, steps=2, resume=resume)
    data.write_text(data.read_text().replace("abc", "abd"))
    with pytest.raises(ResumeError) as caught:
        trainer.build(of)
    [reason] = caught.value.reasons
    assert reason.startswith(f"samples of `{data}`: `")
    assert reason.endswith("`, other contents")
    assert trainer.build(job(tmp_path / "run", 10, steps=2, resume=resume)).done == 1
    moved = data.rename(tmp_path / "moved.jsonl")
    settings = of.run.to_json()
    spec = dataclasses.replace(of.spec, data=dataclasses.replace(of.spec.data, source=str(moved)))
    assert settings["data"]["source"] == str(data)
    assert trainer.build(dataclasses.replace(of, spec=spec)).done == 1


def test_a_resumed_run_says_what_it_does_otherwise_and_has_steps_left(tmp_path: Path) -> None:
    buckets = {"batch.buckets": [32]}  # a list in the checkpoint, too, and a tuple in the run
    steps(job(tmp_path / "run", 10, steps=3, **buckets))
    same = trainer.build(job(tmp_path / "run", 10, steps=3, resume="latest", watchdog_seconds=5, **buckets))
    assert not any(note.startswith("resume: ") for note in same.notes)
    options = {"loss.weights": "d-pace", "data.shuffle_labels": True, **buckets}
    other = trainer.build(job(tmp_path / "run", 10, steps=4, resume="latest", **options))
    [note] = [note for note in other.notes if note.startswith("resume: ")]
    told = ("steps `3`, now `4`", "loss.weights `decay`, now `d-pace`", "loss.alpha `None`, now `0.5`")
    assert note == f"resume: not the run that it was: {'; '.join(told)}; data.shuffle_labels `False`, now `True`"
    with pytest.raises(InputError, match=r"steps: found `2`; wanted at least `3`, where the checkpoint is"):
        trainer.build(job(tmp_path / "run", 10, steps=2, resume="latest"))


def test_a_log_that_cannot_be_written_loses_no_step(tmp_path: Path) -> None:
    """As when somebody removes the output folder: the state is saved in a new one."""
    training = trainer.train(trainer.build(job(tmp_path / "run", 10, steps=9)), Stop())
    next(training)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(TrainingStoppedError, match=r"metrics\.jsonl` cannot be written") as caught:
        list(training)
    [saved] = (tmp_path / "run").glob("step-*")
    assert caught.value.hint == f"the last whole step, {int(saved.name[-8:])}, is saved in `{saved}`"
    rest = steps(job(tmp_path / "run", 10, steps=9, resume="latest"))
    whole = steps(job(tmp_path / "whole", 10, steps=9))
    assert [report.loss for report in rest] == [report.loss for report in whole[-len(rest) :]]


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_a_drafter_that_cannot_be_written_is_written_by_a_resumed_run(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    made = trainer.build(job(tmp_path / "run", 10, steps=2))
    save = checkpoint.save_file
    with monkeypatch.context() as patch:
        if broken == "config.json":
            patch.setattr(checkpoint, "served_config", full)
        else:
            patch.setattr(checkpoint, "save_file", lambda *args, **more: full() if more else save(*args))
        with pytest.raises(TrainingStoppedError, match=r"drafter: .* No space left") as caught:
            list(trainer.train(made, Stop()))
    assert caught.value.exit_code == 8
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "step-00000002"]
    assert not steps(job(tmp_path / "run", 10, steps=2, resume="latest"))
    assert (tmp_path / "run" / "drafter" / "config.json").is_file()


def test_an_update_that_leaves_no_finite_weights_is_not_what_a_run_goes_on_from(tmp_path: Path) -> None:
    """As a learning rate far too high makes them: the step before the one that shows it is lost already."""
    made = trainer.build(job(tmp_path / "run", 10, steps=9))
    training = trainer.train(made, Stop())
    assert next(training).step == 1
    with torch.no_grad():
        made.pair.optimizer.masters[0].view(-1)[0] = math.inf
    with pytest.raises(TrainingStoppedError, match="step 4: loss `nan`") as caught:
        list(training)
    said = "no weight was changed by it; checkpoint: step 3 left 1 of "
    assert str(caught.value.hint).startswith(said), caught.value.hint
    assert "; no checkpoint was saved before; " in str(caught.value.hint)
    assert not list((tmp_path / "run").glob("step-*"))


def test_other_files_in_the_drafters_folder_are_not_removed(tmp_path: Path) -> None:
    made, drafter = trainer.build(job(tmp_path / "run", 10, steps=2)), tmp_path / "run" / "drafter"
    drafter.mkdir(parents=True)
    (drafter / "README.md").write_text("mine")
    with pytest.raises(TrainingStoppedError, match=r"holds `README\.md`, which no exported drafter has") as caught:
        list(trainer.train(made, Stop()))
    assert str(caught.value.hint).startswith("all steps are saved; move it away")
    (drafter / "README.md").rename(tmp_path / "README.md")
    assert not steps(job(tmp_path / "run", 10, steps=2, resume="latest"))
    assert (drafter / "config.json").is_file()


# ---------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(("every", "said"), [(None, "all 6 steps are saved in"), (4, "step 4 of 6 is saved in")])
def test_a_signal_during_validation_ends_the_run_with_its_state(every: int | None, said: str, tmp_path: Path) -> None:
    stop = Stop()
    of = job(tmp_path / "run", 10, steps=6, checkpoint_every=every, data__held_out=4)
    made = trainer.build(of)
    assert made.held_out is not None
    read, made.held_out.read = made.held_out.read, lambda number: (setattr(stop, "number", 15), read(number))[1]  # type: ignore[method-assign]
    with pytest.raises(InterruptedRunError, match=said) as caught:
        list(trainer.train(made, stop))
    assert caught.value.exit_code == 143
    assert made.validation is None
    assert not (tmp_path / "run" / "drafter").exists()
    rest = steps(job(tmp_path / "run", 10, steps=6, resume="latest", data__held_out=4))
    assert len(rest) == (2 if every else 0)


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Signals as a program finds them that nobody started with ``nohup``; afterwards as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_while_a_checkpoint_is_written_lets_it_be_written(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, wrote = Stop(), Path.write_text

    def interrupted(path: Path, *args: Any, **options: Any) -> int:
        if path.name == "state.json" and stop.number is None:
            signal.raise_signal(number)
        return wrote(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", interrupted)
    made = trainer.build(job(tmp_path / "run", 10, steps=30, checkpoint_every=4))
    stop.install()
    with pytest.raises(InterruptedRunError, match=signal.Signals(number).name) as caught:
        list(trainer.train(made, stop))
    assert caught.value.exit_code == code
    saved = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert saved[0] == "step-00000004"
    for name in saved:
        assert checkpoint.load(tmp_path / "run" / name)[0].step == int(name[-8:])


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=["nohup", "background-job"])
def test_a_signal_of_the_terminal_that_is_ignored_stays_so(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    stop = Stop()
    stop.install()
    signal.raise_signal(number)
    assert stop.number is None


def test_a_second_signal_while_a_checkpoint_is_written_leaves_the_old_one(tmp_path: Path) -> None:
    """The process ends at once, in the middle of the file; what was whole before is found."""
    program = (
        "import pathlib, signal, sys, torch\n"
        "from dflash import checkpoint\n"
        "from dflash.stop import Stop\n"
        "stop = Stop()\n"
        "stop.install()\n"
        "stop.armed = True\n"
        "output, write = pathlib.Path(sys.argv[1]), pathlib.Path.write_text\n"
        "state = lambda step: checkpoint.State(step, 0, {'epoch': 0, 'next': 0, 'waiting': {}}, {}, {}, None)\n"
        "checkpoint.save(output, state(1), {'a': torch.ones(3)})\n"
        "def half(path, text):\n"
        "    write(path, text[:10])\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "pathlib.Path.write_text = half\n"
        "checkpoint.save(output, state(2), {'a': torch.ones(3)})\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert checkpoint.find(tmp_path, "latest").name == "step-00000001"
    assert checkpoint.load(checkpoint.find(tmp_path, "latest"))[0].step == 1
