"""Where epochs end, runs stop and signals come: going on is the unbroken run, and a watched run is the same run.

The target is a table and the loss has no kernel, as nothing here depends on them.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dflashspec
import pytest
import stubpair
import torch

from dflash import checkpoint, config, target, trainer
from dflash.errors import InterruptedRunError
from dflash.pairs import Pair
from dflash.profiling import Profiler
from dflash.spec import Spec
from dflash.stop import Stop
from dflash.trainer import Job, StepReport


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
    found = made.profiler.profile(watched)
    assert [pair.pair for pair in found.pairs] == [0, 1]
    for pair in found.pairs:
        assert pair.steps == 3
        assert {"target", "drafter", "backward pass", "exchange of gradients", "optimizer"} <= set(pair.parts)


# ---------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_checkpoint_is_written_lets_it_be_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    stop, wrote = Stop(), Path.write_text

    def interrupted(path: Path, *args: Any, **options: Any) -> int:
        if path.name == "state.json" and stop.number is None:
            signal.raise_signal(number)
        return wrote(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", interrupted)
    made = trainer.build(job(tmp_path / "run", 10, steps=30, checkpoint_every=4))
    stop.install()
    try:
        with pytest.raises(InterruptedRunError) as caught:
            list(trainer.train(made, stop))
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    assert caught.value.exit_code == 128 + number
    saved = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert saved[0] == "step-00000004"
    for name in saved:
        assert checkpoint.load(tmp_path / "run" / name)[0].step == int(name[-8:])


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
