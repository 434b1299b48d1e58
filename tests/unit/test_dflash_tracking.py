"""Who is told of a run beside its log: event files and Weights & Biases, absent, resumed, failed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dflash import config, errors, launch, tracking
from dflash.config import RunConfig
from kernelbake.errors import InputError

LINE = {
    "step": 7,
    "steps": 20,
    "loss": 2.5,
    "norm": 1.0,
    "lr": 1e-3,
    "scores": {"accuracy": 0.5, "accuracy_by_position": (0.75, 0.25), "acceptance_length": 2.0},
    "num_tokens": 100,
    "seconds": 0.5,
    "epoch": 0.1,
    "peak_bytes_by_device": {"cuda:1": 2**30},
}


def run(output: Path, **options: Any) -> RunConfig:
    return config.load(None, (), {"output": str(output), **{k.replace("__", "."): v for k, v in options.items()}})


class FakeRun:
    """What ``wandb.init`` gives."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.exit_code: int | None = None

    def define_metric(self, *args: Any, **options: Any) -> None:
        pass

    def log(self, figures: dict[str, Any]) -> None:
        self.logged.append(figures)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb(types.ModuleType):
    """The package, which starts a process when a run begins."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.asked: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []

    def init(self, **options: Any) -> FakeRun:
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
        self.asked.append(options)
        self.runs.append(FakeRun())
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_nobody_is_told_unless_asked(tmp_path: Path) -> None:
    with tracking.opened(run(tmp_path)) as sinks:
        assert sinks == ()
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_refused_with_its_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at once, and before anything else is done with the bundle."""
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    asked = run(tmp_path, tracking__wandb="drafters", tracking__tensorboard=True)
    with pytest.raises(InputError, match="`tensorboard` and `wandb` cannot be imported") as caught:
        tracking.check(asked.tracking)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("pip install 'kernelbake[tensorboard,wandb]'")


def test_settling_a_run_looks_for_them_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    held = types.SimpleNamespace(plugin="dflash", section={}, made="interpreted")
    monkeypatch.setattr(launch, "workload_of", lambda *args, **options: held)

    def of_run(*args: Any) -> Any:
        raise InputError("no target")

    monkeypatch.setattr(launch.section, "of_run", of_run)
    with pytest.raises(InputError, match="input: 2 faults") as caught:
        launch.settle(run(tmp_path, bundle="some.tar", tracking__wandb="drafters"))
    assert "`wandb` cannot be imported" in caught.value.reasons[0]
    assert caught.value.reasons[-1] == "no target"


def test_a_run_is_told_line_by_line(tmp_path: Path, wandb: FakeWandb) -> None:
    asked = run(tmp_path, tracking__wandb="drafters", tracking__wandb_name="first")
    validation = {"step": 8, "validation": {"loss": 2.0, "scores": LINE["scores"], "num_samples": 3}}
    with tracking.opened(asked) as (sink,):
        sink.write(LINE)
        sink.write(validation)
    [given], [made] = wandb.asked, wandb.runs
    assert (given["project"], given["name"], given["dir"]) == ("drafters", "first", str(tmp_path))
    assert given["config"]["optimizer"]["lr"] == 6e-4
    first, second = made.logged
    assert (first["step"], first["train/loss"], first["train/tokens_per_s"]) == (7, 2.5, 200.0)
    assert first["train/peak_gib/cuda:1"] == 1.0
    assert (first["train/accuracy_at/01"], first["train/accuracy_at/02"]) == (0.75, 0.25)
    assert (second["step"], second["validation/loss"], second["validation/acceptance_length"]) == (8, 2.0, 2.0)
    assert made.exit_code == 0


def test_a_resumed_run_goes_on_with_its_id_and_a_new_one_has_another(tmp_path: Path, wandb: FakeWandb) -> None:
    for resume in (None, "latest", None):
        with tracking.opened(run(tmp_path, tracking__wandb="drafters", resume=resume)):
            pass
    first, resumed, anew = (given["id"] for given in wandb.asked)
    assert first == resumed != anew


def test_a_run_that_fails_is_marked_so(tmp_path: Path, wandb: FakeWandb) -> None:
    with (
        pytest.raises(errors.TrainingStoppedError),
        tracking.opened(run(tmp_path, tracking__wandb="drafters")),
    ):
        raise errors.TrainingStoppedError("stopped")
    assert wandb.runs[0].exit_code == 1


def test_a_run_that_cannot_begin_is_refused_with_the_way_out(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> Any:
        raise RuntimeError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with (
        pytest.raises(InputError, match="cannot begin a run \\(no API key\\)") as caught,
        tracking.opened(run(tmp_path, tracking__wandb="drafters")),
    ):
        pass
    assert "WANDB_MODE=offline" in str(caught.value.hint)


def test_processes_of_a_tracker_begin_before_the_count_does(tmp_path: Path) -> None:
    """In a process of its own, as a count lasts as long as its process; the one of the sink is not in it."""
    program = (
        "import contextlib, sys, subprocess, pathlib, types\n"
        "import test_dflash_tracking as tests\n"
        "from dflash import launch\n"
        "sys.modules['wandb'] = tests.FakeWandb()\n"
        "launch.WORKLOAD = types.SimpleNamespace(prepare=lambda interpreted: contextlib.nullcontext())\n"
        f"run = tests.run(pathlib.Path({str(tmp_path)!r}), bundle='b.tar', tracking__wandb='drafters')\n"
        "plan = types.SimpleNamespace(run=run, interpreted=True)\n"
        "with launch.started(plan, stock=True) as started:\n"
        "    started.sinks[0].write(tests.LINE)\n"
        "    assert started.proof.subprocesses == 0, started.proof\n"
        "    subprocess.run([sys.executable, '-S', '-c', ''])\n"
        "    assert started.proof.subprocesses > 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_event_files_of_a_resumed_run_replace_what_stood_at_its_steps(tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            made.append({"folder": folder, "purge_step": purge_step})

        def add_scalar(self, name: str, value: float, step: int) -> None:
            made[-1][name] = (value, step)

        def close(self) -> None:
            made[-1]["closed"] = True

    board = tracking.TensorBoard(types.SimpleNamespace(SummaryWriter=Writer), tmp_path)
    board.write(LINE)
    board.close()
    assert made[0]["purge_step"] == 7
    assert made[0]["train/loss"] == (2.5, 7)
    assert made[0]["closed"]
    full = types.SimpleNamespace(SummaryWriter=lambda *args, **options: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(errors.TrainingStoppedError, match="cannot be written"):
        tracking.TensorBoard(full, tmp_path).write(LINE)


def test_launches_outside_the_plan_are_a_fault_of_ours() -> None:
    launch.Recorded(3, (), ("a key",)).check()
    with pytest.raises(errors.UnplannedError, match="2 launches outside the plan") as caught:
        launch.Recorded(3, ("one", "two"), ()).check()
    assert caught.value.reasons == ("one", "two")
    assert caught.value.exit_code == errors.ExitCode.FAULT


def test_lines_of_the_log_have_what_is_told() -> None:
    """The line above is one of the trainer's."""
    from dflash.trainer import StepReport

    assert set(LINE) <= {field.name for field in dataclasses.fields(StepReport)}
