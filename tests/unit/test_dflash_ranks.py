"""One process for each pair, under ``torchrun`` with gloo: the numbers of threads, and one end for all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rankrun
import stubpair

from dflash import checkpoint, config, launch, target, trainer
from dflash.errors import ExitCode
from dflash.pairs import Pair
from dflash.ranks import Ranks, from_environment
from dflash.stop import Stop
from kernelbake.errors import InputError

STEPS = 5

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stubpair.verses(tmp_path_factory.mktemp("data"))


def torchrun(folder: Path, text: Path, *faults: str, world: int = 2) -> dict[str, Said]:
    """What each rank says of each run, in the order of the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(Path(rankrun.__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(world),
        "--master-port",
        str(port),
    ]
    done = subprocess.run(
        [*command, str(rankrun.__file__), str(folder), str(text), str(STEPS), *faults],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode != 0) == (faults[-1] in rankrun.LAST), done.stderr[-4000:]
    return {
        fault: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{fault}.*.json"))] for fault in faults
    }


def threads(folder: Path, text: Path, pairs: int) -> tuple[list[float], trainer.Trainer]:
    """The same run in this process, with a thread for each pair."""
    options: dict[str, Any] = {"steps": STEPS, "output": str(folder / "threads"), "data.source": str(text)}
    options |= {"optimizer.lr": 3e-3, "checkpoint_every": 2, "dp_pairs": pairs}
    alone = rankrun.job(folder, str(text), STEPS, "none", Ranks())
    job = trainer.Job(config.load(None, (), options), alone.spec, alone.bundle, interpreted=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "load_target", lambda *args, **options: stubpair.TableTarget(stubpair.spec()))
        patch.setattr(Pair, "loss", stubpair.cheap_loss)
        made = trainer.build(job)
        return [report.loss for report in trainer.train(made, Stop())], made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, list[float], trainer.Trainer]:
    """Two threads, and the folder of their run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *threads(folder, text, 2)


@pytest.fixture(scope="module")
def ranked(whole: tuple[Path, list[float], trainer.Trainer], text: Path) -> dict[str, Said]:
    """Two ranks, through runs that leave them able to make another."""
    return torchrun(whole[0], text, "none", "resume", "signal", "digest", "config")


def test_two_ranks_are_two_threads_to_the_bit(
    whole: tuple[Path, list[float], trainer.Trainer], ranked: dict[str, Said]
) -> None:
    folder, losses, made = whole
    for rank in ranked["none"]:
        assert rank["losses"] == losses
        assert rank["weights"] == [float(master.detach().double().sum()) for master in made.pair.optimizer.masters]
    (one, tensors), (other, others) = (
        checkpoint.load(checkpoint.folder(folder / name, STEPS)) for name in ("none", "threads")
    )
    assert one.loader == other.loader
    assert one.step_batches == other.step_batches == 2
    assert all(tensor.equal(others[name]) for name, tensor in tensors.items())
    lines = [json.loads(line) for line in (folder / "none" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "one rank writes"
    assert (folder / "none" / "drafter" / "model.safetensors").is_file()


def test_ranks_go_on_from_what_threads_left(
    whole: tuple[Path, list[float], trainer.Trainer], ranked: dict[str, Said]
) -> None:
    for rank in ranked["resume"]:
        assert rank["steps"] == list(range(3, STEPS + 1))
        assert rank["losses"] == whole[1][2:]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("digest", "bundle: rank 0 `sha256:b`; rank 1 `sha256:other`"),
        ("config", "optimizer.lr: rank 0 `0.003`; rank 1 `0.001`"),
    ],
)
def test_ranks_that_differ_refuse_before_a_step_and_name_the_rank(
    fault: str, reason: str, whole: tuple[Path, list[float], trainer.Trainer], ranked: dict[str, Said]
) -> None:
    for rank in ranked[fault]:
        assert rank["reasons"] == [reason]
        assert rank["code"] == ExitCode.MISFIT
        assert rank["losses"] == []
    assert not (whole[0] / fault).exists()


def test_a_signal_to_one_rank_ends_all_after_the_same_step(
    whole: tuple[Path, list[float], trainer.Trainer], ranked: dict[str, Said]
) -> None:
    said = ranked["signal"]
    assert [(rank["kind"], rank["code"]) for rank in said] == [("InterruptedRunError", ExitCode.TERMINATED)] * 2
    assert said[0]["steps"] == said[1]["steps"]
    last = said[0]["steps"][-1]
    assert last < STEPS
    assert f"step {last} of {STEPS} is saved in `{checkpoint.folder(whole[0] / 'signal', last)}`" in said[0]["message"]
    assert checkpoint.load(checkpoint.folder(whole[0] / "signal", last))[0].step == last


def test_three_ranks_are_three_threads_to_the_bit(text: Path, tmp_path: Path) -> None:
    losses, _ = threads(tmp_path, text, 3)
    assert [rank["losses"] for rank in torchrun(tmp_path, text, "none", world=3)["none"]] == [losses] * 3


def test_a_rank_that_fails_ends_the_others_with_its_words(text: Path, tmp_path: Path) -> None:
    said = torchrun(tmp_path, text, "step")["step"]
    assert [rank["code"] for rank in said] == [ExitCode.STOPPED] * len(said)
    found = {rank["kind"]: rank for rank in said}
    assert "pair 1 (`cpu`) failed in the" in found["PairError"]["message"]
    assert any("RuntimeError: the device fell off" in line for line in found["PairError"]["reasons"])
    if "RankLostError" in found:
        assert found["RankLostError"]["message"].startswith("rank 1: pair 1 (`cpu`) failed in the")


def test_a_rank_that_hangs_is_named(text: Path, tmp_path: Path) -> None:
    said = torchrun(tmp_path, text, "hang")["hang"]
    assert [rank["code"] for rank in said] == [ExitCode.STOPPED] * len(said)
    messages = [rank["message"] for rank in said]
    assert any("pair 1 (`cpu`) hangs in the" in message for message in messages), messages


# ---------------------------------------------------------------------------------------------- what torchrun says


def placed(ranks: Ranks, **options: Any) -> str:
    return ",".join(map(str, launch.placed(config.load(None, (), options), ranks).pairs))


def test_each_rank_takes_the_pair_of_its_local_rank() -> None:
    assert placed(Ranks()) == "0:0"
    assert placed(Ranks(5, 8, 1, 4)) == "1:1"
    assert placed(Ranks(5, 8, 1, 2), devices="0:2,1:3") == "1:3"
    assert placed(Ranks(1, 2, 1, 2), dp_pairs=2) == "1:1"
    assert placed(Ranks(), dp_pairs=2) == "0:0,1:1"


@pytest.mark.parametrize("options", [{"devices": "0"}, {"devices": "0:1,2:3,4"}, {"dp_pairs": 4}])
def test_as_many_pairs_as_processes_on_a_host(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`2` processes on this host for `[134]` pairs; wanted one each"):
        placed(Ranks(1, 2, 1, 2), **options)


def test_the_environment_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert from_environment().world == 1
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = from_environment()
    assert (found.rank, found.world, found.local_rank, found.local_world) == (3, 4, 1, 2)
    assert not found.leads
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(InputError, match="no `LOCAL_RANK` in the environment"):
        from_environment()
