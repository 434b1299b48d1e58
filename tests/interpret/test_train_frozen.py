"""The main job through the commands: a bundle, a frozen run, a run that it does not cover, a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import dflashspec
import pytest
from ruamel.yaml import YAML

ENV = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")}
ENV["HF_HUB_OFFLINE"] = "1"


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", *arguments], {**ENV, **variables}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundle of one case."""
    folder = tmp_path_factory.mktemp("baked")
    section = dflashspec.changed("axes.buckets", [32])
    section["axes"]["anchors"] = [4]
    section["drafter"]["num_layers"] = 1
    manifest = {
        "format": 1,
        "name": "tiny",
        "gpu": {"profile": "interpreter"},
        "workload": {"plugin": "dflash", **section},
        "measure": {"rounds": 1, "min_samples": 1, "max_samples": 1},
    }
    with (folder / "tiny.yaml").open("w") as file:
        YAML(typ="safe").dump(manifest, file)
    done = run("kernelbake", "build", "--manifest", "tiny.yaml", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_covered_run_trains_without_any_work_at_run_time(baked: Path) -> None:
    """Its bucket is not in the manifest; every launch of it is in the bundle all the same, and the run says so.

    It says, too, which bundle all pairs launch from, and that another library's lookup of configs is overruled.
    """
    options = ("--frozen-cache", "bundle.tar", "--buckets", "64", "--steps", "3", "--output", "run")
    watched = ("--record", "--profile", "--profile-trace", "run/trace.json", "--tensorboard")
    done = run("dflash", "train", *options, *watched, folder=baked, FLA_CACHE_MODE="full")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "run/drafter"
    assert "case bucket=64 anchors=4 batch=1 layout=padded dtype=float32 is not named" in done.stderr
    summary = json.loads((baked / "run" / "summary.json").read_text())
    assert f"freeze: bundle `tiny`, {summary['bundle']}\n`FLA_CACHE_MODE=full` has no effect: every" in done.stderr
    assert summary["steps"] == 3
    assert summary["frozen"]["hits"] > 20
    assert summary["frozen"]["misses"] == summary["frozen"]["refusals"] == 0
    assert summary["proof"] == {"compilations": 0, "benchmarks": 0, "subprocesses": 0}
    for what in ("compilations", "benchmarks", "subprocesses"):
        assert f"{what} at run time: 0\n" in done.stderr
    assert 0 < done.stderr.index("memory: `cpu`: peak beside weights") < done.stderr.index("step 1/3")
    [memory] = summary["memory"]
    assert (memory["device"], memory["measured_bytes"]) == ("cpu", None)
    assert 10_000 < memory["predicted_bytes"] < 100_000_000
    assert "at bucket=64 anchors=4 " in memory["largest"]


def test_whoever_watches_a_run_sees_it_and_makes_no_work(baked: Path) -> None:
    """Of the run above: recorded launches, times of parts, a trace and event files, and still nothing at run time."""
    summary = json.loads((baked / "run" / "summary.json").read_text())
    assert summary["recorded"]["unplanned"] == summary["recorded"]["unmet"] == []
    assert summary["recorded"]["common"] > 5
    [pair] = summary["profile"]["pairs"]
    parts = {name: times["device_ms"] for name, times in pair["parts"].items()}
    assert list(parts) == ["target", "drafter", "head and loss", "backward pass", "optimizer"]
    assert all(time > 0 for time in parts.values())
    assert sum(parts.values()) <= summary["profile"]["step_ms"] * 1.01
    assert json.loads((baked / "run" / "trace.json").read_text())["traceEvents"]
    [events] = (baked / "run" / "tensorboard").iterdir()
    assert b"train/acceptance_length" in events.read_bytes()


def test_two_pairs_are_two_ranks_to_the_bit_and_launch_from_the_bundle_alone(baked: Path) -> None:
    """Threads of one process, then ``torchrun``: rank 0 tells, and both are frozen on the same bundle."""
    options = ("--frozen-cache", "bundle.tar", "--steps", "2", "--checkpoint-every", "1")
    pairs = run("dflash", "train", *options, "--dp-pairs", "2", "--output", "pairs", folder=baked)
    assert pairs.returncode == 0, pairs.stderr
    assert "2 pairs; target: " in pairs.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)
    ranks = run(*torchrun, "-m", "dflash", "train", *options, "--output", "ranks", folder=baked)
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout.strip() == "ranks/drafter"
    assert ranks.stderr.count("preflight: bundle covers this run") == 1
    found = [json.loads((baked / name / "summary.json").read_text()) for name in ("pairs", "ranks")]
    for summary in found:
        assert summary["frozen"]["misses"] == summary["frozen"]["refusals"] == 0
        assert summary["proof"] == {"compilations": 0, "benchmarks": 0, "subprocesses": 0}
    assert found[0]["losses"] == found[1]["losses"]
    assert len(found[0]["losses"]) == 2
    assert found[0]["frozen"]["hits"] == 2 * found[1]["frozen"]["hits"]


def test_what_the_bundle_lacks_is_listed_before_anything_is_loaded(baked: Path) -> None:
    done = run("dflash", "train", "--frozen-cache", "bundle.tar", "--layout", "packed", folder=baked)
    assert done.returncode == 5, done.stderr
    assert "load target" not in done.stderr
    missing = re.findall(r"^  (?:key|kernel|specialization) (\S+):", done.stderr, re.MULTILINE)
    assert any("causal_conv1d" in name for name in missing)
    assert any("chunk_fwd_kernel_o" in name for name in missing)
    assert len(missing) >= 6


def test_a_loss_that_the_manifest_does_not_name_is_refused_with_its_launch(baked: Path) -> None:
    done = run("dflash", "preflight", "--frozen-cache", "bundle.tar", "--loss", "mix", folder=baked)
    assert done.returncode == 5, done.stderr
    missing = re.findall(r"^  (?:key|kernel|specialization) (\S+):", done.stderr, re.MULTILINE)
    assert missing == ["dflash.losses.block_loss_kernel"], done.stderr
    assert "hint: this loss has launches of its own: add `kl` to `loss.terms` of the manifest" in done.stderr


def test_a_signal_saves_the_state_and_says_where(baked: Path) -> None:
    command = [sys.executable, "-m", "dflash", "train", "--frozen-cache", "bundle.tar", "--output", "stopped"]
    process = subprocess.Popen(command, cwd=baked, env=ENV, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("step 1/"):
            process.send_signal(signal.SIGINT)
            break
    begin = time.monotonic()
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, "".join(lines) + rest
    assert time.monotonic() - begin < 60
    [saved] = (baked / "stopped").glob("step-*")
    assert f"is saved in `stopped/{saved.name}`" in rest
    assert json.loads((saved / "state.json").read_text())["step"] >= 2


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "wanted --frozen-cache"),
        (("--frozen-cache", "bundle.tar", "--compile"), 2, "torch.compile makes kernels at run time"),
        (("--frozen-cache", "none.tar"), 2, "none.tar"),
        (("--frozen-cache", "tiny.yaml"), 3, "tiny.yaml"),
        (("--frozen-cache", "bundle.tar", "--target", "no/such-folder"), 2, "wanted `random`, a folder"),
        (("--frozen-cache", "bundle.tar", "--devices", "0:1"), 2, "the interpreter, which has one device"),
        (("--frozen-cache", "bundle.tar", "--graphs"), 2, "kernels run in Triton's interpreter"),
        (("--frozen-cache", "bundle.tar", "--devices", "0,0"), 2, "GPU `0` in pairs `0` and `1`"),
        (("--frozen-cache", "bundle.tar", "--devices", "0,1", "--dp-pairs", "3"), 2, "found `3` with `2` pairs"),
        (("--frozen-cache", "bundle.tar", "--steps", "0"), 2, "steps: found `0`"),
        (("--frozen-cache", "bundle.tar", "--set", "lr=1"), 2, "lr: unknown key"),
        (("--frozen-cache", "bundle.tar", "--batch-size", "2", "--layout", "packed"), 2, "a packed batch is one row"),
    ],
)
def test_input_errors_come_at_once_with_their_code(
    baked: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = run("dflash", "train", *arguments, folder=baked)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_flipped_byte_is_found_first(baked: Path) -> None:
    data = bytearray((baked / "bundle.tar").read_bytes())
    data[len(data) // 2] ^= 1
    (baked / "flipped.tar").write_bytes(data)
    done = run("dflash", "train", "--frozen-cache", "flipped.tar", folder=baked)
    assert done.returncode == 3, done.stderr
