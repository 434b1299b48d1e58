"""The output folder of a run: one run at a time, refused before anything is loaded, written whole or not at all."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dflashspec
import pytest

from dflash import config, folder, launch
from dflash.errors import TrainingStoppedError
from dflash.metrics import Scores
from dflash.proof import Proof
from dflash.reports import Log, Made, StepReport
from dflash.spec import Spec
from kernelbake.errors import BundleError, ExitCode, InputError, LockedError

HOLD = (
    "import sys, pathlib\nfrom dflash import launch\n"
    "with launch.holding(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


def test_a_second_run_is_refused_until_the_first_has_ended_however(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match="another run holds") as caught, launch.holding(output):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert caught.value.exit_code == ExitCode.LOCKED
    for _ in range(2):
        with launch.holding(output):
            assert output.is_dir()


def test_a_folder_that_safetensors_could_not_read_from_is_refused_before_the_run(tmp_path: Path) -> None:
    output = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    with pytest.raises(InputError, match="is no name in UTF-8; wanted one"):
        folder.check(config.load(None, (), {"output": output}))
    folder.check(config.load(None, (), {"output": str(tmp_path / "é")}))


def test_a_new_run_is_refused_where_another_left_checkpoints(tmp_path: Path) -> None:
    def configured(**options: object) -> config.RunConfig:
        return config.load(None, (), {"output": str(tmp_path), **options})

    (tmp_path / "step-00000003").mkdir()
    folder.check(configured())  # nobody goes on from what has no state
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    with pytest.raises(InputError, match="holds the run that saved `step-00000003`") as caught:
        folder.check(configured())
    assert "--resume latest" in str(caught.value.hint)
    folder.check(configured(resume="latest"))


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_takes_time(tmp_path: Path) -> None:
    options = {"output": str(tmp_path)}
    with pytest.raises(InputError, match="holds no checkpoint; wanted one to go on from"):
        folder.check(config.load(None, (), {**options, "resume": "latest"}))
    with pytest.raises(InputError, match="is no checkpoint; wanted a folder with `state.json`, or `latest`"):
        folder.check(config.load(None, (), {**options, "resume": str(tmp_path / "step-00000001")}))


def test_a_checkpoint_that_was_being_replaced_counts_and_a_name_that_no_path_can_have_is_none(tmp_path: Path) -> None:
    """As it does when a run loads it: the run was killed between two renames."""
    checkpoints(tmp_path, 3)
    (tmp_path / "step-00000003").rename(tmp_path / ".step-00000003.old")
    options = {"output": str(tmp_path)}
    folder.check(config.load(None, (), {**options, "resume": "latest"}))
    with pytest.raises(InputError, match="holds the run that saved `step-00000003`"):
        folder.check(config.load(None, (), options))
    with pytest.raises(InputError, match="is no checkpoint; wanted a folder with `state.json`"):
        folder.check(config.load(None, (), {**options, "resume": "x" * 5000}))


def test_what_the_interpreter_cannot_do_is_refused() -> None:
    section = Spec.parse(dflashspec.changed("axes.dtype", "bfloat16"))
    run = config.load(None, (), {"bundle": "bundle.tar"})
    with pytest.raises(InputError, match="batch.dtype: `bfloat16` with a bundle that was made by the interpreter"):
        launch._check_interpreter(run, section)
    held = SimpleNamespace(made="interpreted")
    with pytest.raises(InputError, match="--stock with a bundle that was made by the interpreter"):
        launch.check_stock(launch.Plan(run, section, held))
    held.made = "measured"
    launch.check_stock(launch.Plan(run, section, held))


def checkpoints(output: Path, *steps: int) -> None:
    for step in steps:
        (output / f"step-{step:08d}").mkdir(parents=True)
        (output / f"step-{step:08d}" / "state.json").write_text(json.dumps({"step": step}))


def test_going_back_is_refused_while_later_checkpoints_stand_there(tmp_path: Path) -> None:
    """``latest`` would mean them from then on, and the log would have a gap."""
    output, other = tmp_path / "run", tmp_path / "other"
    checkpoints(output, 2, 4, 6)
    checkpoints(other, 1)

    def resuming(folder_: Path, output: Path = output) -> config.RunConfig:
        return config.load(None, (), {"output": str(output), "resume": str(folder_)})

    with pytest.raises(InputError, match="`latest` would mean `step-00000006`") as caught:
        folder.check(resuming(output / "step-00000002"))
    assert caught.value.reasons == ("step-00000004", "step-00000006")
    (output / "step-00000002").rename(output / "good")
    with pytest.raises(InputError, match="wanted none behind `.*good`"):
        folder.check(resuming(output / "good"))
    folder.check(resuming(output / "step-00000006"))
    folder.check(resuming(output / "good", tmp_path / "new"))
    with pytest.raises(InputError, match="`latest` would mean `step-00000001`"):  # of another run, though earlier
        folder.check(resuming(output / "step-00000006", other))


def test_what_is_not_a_runs_is_not_written_over(tmp_path: Path) -> None:
    run = config.load(None, (), {"output": str(tmp_path)})
    (tmp_path / "drafter").mkdir()
    for name in folder.EXPORTED:
        (tmp_path / "drafter" / name).write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    folder.check(run)
    (tmp_path / "drafter" / "README.md").write_text("mine")
    with pytest.raises(InputError, match="wanted nothing in the way") as caught:
        folder.check(run)
    assert caught.value.reasons == ("`drafter` holds `README.md`, which is not of an exported drafter",)
    os.mkfifo(tmp_path / ".summary.json.partial")
    (tmp_path / "summary.json").mkdir()
    (tmp_path / "step-00000002").symlink_to(tmp_path / "drafter")
    (tmp_path / "drafter").rename(tmp_path / "elsewhere")
    (tmp_path / "drafter").write_text("mine")
    with pytest.raises(InputError) as caught:
        folder.check(run)
    names = ("`summary.json` is no file", "`.summary.json.partial` is no file")
    assert caught.value.reasons == (*names, "`drafter` is no folder", "`step-00000002` is no folder")


@pytest.mark.parametrize("wrong", ["a file", "below a file", "too long", "a link"])
def test_an_output_that_cannot_be_is_refused(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / "file")
    places = {"a file": "file", "below a file": "file/run", "too long": "x" * 300, "a link": "linked"}
    with pytest.raises(InputError, match="output: .* cannot be written to"), launch.holding(tmp_path / places[wrong]):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_a_bundle_that_was_replaced_while_the_run_started_is_refused() -> None:
    plan: Any = SimpleNamespace(run=SimpleNamespace(bundle="b.tar"), held=SimpleNamespace(digest="sha256:a"))
    launch._check_same_bundle(plan, "sha256:a")
    with pytest.raises(BundleError, match="`sha256:b`; wanted `sha256:a`"):
        launch._check_same_bundle(plan, "sha256:b")


def summed_up(output: Path) -> None:
    launch.write_summary(output, launch.Started(None, Proof()), [0.5])


def test_a_summary_is_whole_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed_up(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["losses"] == [0.5]

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(TrainingStoppedError, match="No space left on device"):
        summed_up(tmp_path)
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_run_keeps_a_few_bytes_of_a_step(tmp_path: Path) -> None:
    """A report has more than a kilobyte, and a run may make millions of steps."""
    made, count = Made(), 20_000
    gc.collect()
    tracemalloc.start()
    for number in range(count):
        made.add(
            StepReport(
                step=number,
                steps=count,
                loss=number / 7,
                norm=number / 3,
                lr=number / 11,
                scores=Scores.of([float(number + place) for place in range(1, 33)]),
                shapes=(),
                num_tokens=number,
                seconds=number / 13,
                epoch=number / 17,
                peak_bytes=None,
            )
        )
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 40 * count
    launch.write_summary(tmp_path, launch.Started(None, Proof()), made.losses)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["steps"], written["losses"]) == (count, [number / 7 for number in range(count)])


def test_a_long_log_is_shortened_line_by_line(tmp_path: Path) -> None:
    path, lines = tmp_path / "metrics.jsonl", [json.dumps({"step": step, "x": "y" * 900}) for step in range(1, 8001)]
    path.write_text("\n".join(lines) + "\n" + '{"step": 3')
    tracemalloc.start()
    Log(tmp_path).go_on_from(7000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4
    assert path.read_text().splitlines() == lines[:7000]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
