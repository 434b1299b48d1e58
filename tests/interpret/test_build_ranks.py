"""Two ranks build one bundle, under the interpreter: divided, gathered, and refused where they differ."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rankbuild

from kernelbake import bundle
from kernelbake.ranks import Ranks

SUPPORT = Path(rankbuild.__file__).parent


def _torchrun(folder: Path, fault: str = "none") -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [*command, str(SUPPORT / "rankbuild.py"), str(folder / "bundle.tar"), fault],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode == 0) == (fault == "none"), done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("said.*"))]


def test_two_ranks_make_one_bundle(tmp_path: Path) -> None:
    first, second = _torchrun(tmp_path)
    held = bundle.read(tmp_path / "bundle.tar")
    assert first["digest"] == second["digest"] == held.digest
    assert first["told"] > 0
    assert second["told"] == 0, "one rank tells"
    assert {choice.id for choice in held.choices} == {launch.id for launch in held.plan.launches}
    fates = {(line["kernel"], str(line["config"]["meta"])): line for line in held.record}
    assert all("median_ms" in line for line in fates.values() if line["outcome"] == "ok"), "each was timed by its rank"
    assert [line["outcome"] for line in fates.values()].count("wrong-result") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.tar", "said.0", "said.1"]


def test_ranks_with_other_fingerprints_refuse(tmp_path: Path) -> None:
    said = _torchrun(tmp_path, "environment")
    assert said, "at least one rank says why before it is ended"
    for answer in said:
        assert answer["message"] == "torchrun: the ranks differ in their fingerprint; wanted equal machines"
        [reason] = answer["reasons"]
        assert reason.startswith("triton.environment: rank 0 `{}`; rank 1 `{'FLA_EXAMPLE': '1'}`")
    assert not (tmp_path / "bundle.tar").exists()


_GONE = """
import os, signal, sys
from kernelbake.errors import BuildError
from kernelbake.ranks import joined
with joined() as ranks:
    assert ranks.gather(ranks.rank) == [0, 1]
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.together(lambda: None)
    except BuildError as error:
        print(error.message, flush=True)
        os._exit(error.exit_code)
"""


def test_a_rank_that_is_gone_ends_the_others_by_name() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _GONE],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [6, -9]
    assert said == ["torchrun: rank 0 has lost another rank; wanted all 2\n", ""]


def test_work_is_divided_evenly_and_all_of_it() -> None:
    weights = [25, 25, 1, 9, 4, 3, 3, 12]
    parts = [Ranks(rank, 3).mine(weights) for rank in range(3)]
    assert sorted(place for part in parts for place in part) == list(range(len(weights)))
    loads = [sum(weights[place] for place in part) for part in parts]
    assert max(loads) - min(loads) <= 4
    assert Ranks().mine(weights) == list(range(len(weights)))


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [(None, ["0", "1", "2"]), ("4,6,7", ["4", "6", "7"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b", ""])],
)
def test_each_rank_sees_its_gpu(monkeypatch: pytest.MonkeyPatch, visible: str | None, wanted: list[str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = [Ranks(rank, 3, rank, 3).device_variables()["CUDA_VISIBLE_DEVICES"] for rank in range(3)]
    assert found == wanted
    assert Ranks().device_variables() == {}
