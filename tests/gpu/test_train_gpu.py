"""Training on a GPU: frozen runs that do no work at run time, repeat to the bit, and keep packed documents apart."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pairsrun
import pytest
import torch

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU here; this takes two")
four_gpus = pytest.mark.skipif("torch.cuda.device_count() < 4", reason="this takes four GPUs")

STEPS = "12"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle for this GPU: the demonstration's models, padded and packed."""
    folder = tmp_path_factory.mktemp("baked")
    text = (resources.files("kernelbake.manifests") / "demo-sm90.yaml").read_text()
    for pattern, new in (
        (r"(?m)^(  profile:) .*$", r"\1 running"),
        (r"(?m)^(    layouts:) .*$", r"\1 [padded, packed]"),
        (r"(?m)^(    batch_sizes:) .*$", r"\1 [1]"),
    ):
        text, count = re.subn(pattern, new, text)
        assert count == 1
    (folder / "here.yaml").write_text(text)
    done = run("kernelbake", "build", "--manifest", "here.yaml", "--allow-busy-gpu", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def train(folder: Path, output: str, *options: str) -> dict[str, Any]:
    arguments = ("--frozen-cache", "bundle.tar", "--steps", STEPS, "--output", output, *options)
    done = run("dflash", "train", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads((folder / output / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_frozen_run_does_no_work_at_run_time_and_repeats_to_the_bit(baked: Path, layout: str) -> None:
    """Packed rows hold a new number of documents of new lengths in every step; the bundle covers them all."""
    one, other = (train(baked, f"{layout}-{number}", "--layout", layout) for number in range(2))
    assert one["proof"] == {"compilations": 0, "benchmarks": 0, "subprocesses": 0}
    assert one["frozen"]["misses"] == one["frozen"]["refusals"] == 0
    assert one["frozen"]["hits"] > 100
    assert all(math.isfinite(loss) for loss in one["losses"])
    assert one["losses"] == other["losses"]


def test_a_stock_run_shows_that_the_counters_count(
    baked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLA_CACHE_RESULTS", "0")
    stock = train(baked, "stock", "--stock")
    assert stock["frozen"] is None
    assert all(count > 0 for count in stock["proof"].values())


def test_resuming_is_the_unbroken_run_to_the_bit(baked: Path) -> None:
    whole = train(baked, "whole", "--checkpoint-every", "5")
    rest = train(baked, "rest", "--resume", "whole/step-00000005")
    assert rest["losses"] == whole["losses"][5:]


def test_graphs_change_no_bit_and_no_checkpoint(baked: Path) -> None:
    """Replays launch through the driver alone, so fewer launches are counted; a run goes on with or without them."""
    replayed = train(baked, "replayed", "--graphs", "--checkpoint-every", "5")
    eager = train(baked, "eager", "--no-graphs", "--checkpoint-every", "5")
    assert replayed["losses"] == eager["losses"]
    assert replayed["proof"] == {"compilations": 0, "benchmarks": 0, "subprocesses": 0}
    assert replayed["frozen"]["misses"] == replayed["frozen"]["refusals"] == 0
    assert 0 < replayed["frozen"]["hits"] < eager["frozen"]["hits"]
    for start, options in (("eager", ("--graphs",)), ("replayed", ("--no-graphs",))):
        rest = train(baked, f"from-{start}", "--resume", f"{start}/step-00000005", *options)
        assert rest["losses"] == eager["losses"][5:]


def test_what_graphs_do_is_said_once(baked: Path) -> None:
    options = ("--frozen-cache", "bundle.tar", "--steps", "1", "--output")
    for number, (more, text) in enumerate(
        (
            ((), "graphs: the target's forward pass is captured on `cuda:0` for 1 × "),
            (("--no-graphs",), "graphs: off, the target runs eagerly\n"),
            (("--layout", "packed"), "graphs: none, the target runs eagerly: packed batches hold"),
        )
    ):
        done = run("dflash", "train", *options, f"said-{number}", *more, folder=baked)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("graphs: ") == 1
        assert text in done.stderr
    refused = run("dflash", "train", *options, "refused", "--graphs", "--layout", "packed", folder=baked)
    assert refused.returncode == 2
    assert "load target" not in refused.stderr


@two_gpus
def test_target_and_drafter_may_live_on_two_gpus(baked: Path) -> None:
    """The same steps as on one GPU, up to nothing: no reduction depends on where a tensor lies."""
    one, two = train(baked, "one"), train(baked, "two", "--devices", "0:1")
    assert two["losses"] == one["losses"]
    assert two["proof"] == {"compilations": 0, "benchmarks": 0, "subprocesses": 0}
    away = train(baked, "away", "--devices", "1:1")
    assert away["losses"] == one["losses"]


# ---------------------------------------------------------------------------------------------- several pairs


def pairs(folder: Path, output: str, *settings: str, fault: str = "none", steps: int = 12) -> dict[str, Any]:
    """What ``pairsrun`` says of two pairs."""
    script = str(Path(pairsrun.__file__))
    command = [sys.executable, script, "bundle.tar", output, str(steps), fault, *settings]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads((folder / f"{output}.json").read_text())
    return said


@two_gpus
def test_two_pairs_keep_equal_bits_and_make_the_steps_of_one_pair_with_twice_the_batches(baked: Path) -> None:
    """The first step, before any rounding of a sum of gradients, has the loss of one pair to the bit."""
    found = pairs(baked, "pairs", "dp_pairs=2")
    assert found["equal"]
    assert found["weights_equal"]
    assert found["misses"] == 0
    assert found["peaks"] == ["cuda:0", "cuda:1"]
    assert pairs(baked, "again", "devices=0,1")["losses"] == found["losses"]
    alone = train(baked, "alone", "--accumulate", "2")
    assert found["losses"][0] == alone["losses"][0]
    assert found["losses"] == pytest.approx(alone["losses"], rel=2e-2)


@two_gpus
def test_two_pairs_through_the_command_do_no_work_at_run_time(baked: Path) -> None:
    """And two ranks under ``torchrun``, which exchange through NCCL, are the two threads to the bit."""
    threads = train(baked, "threads", "--dp-pairs", "2")
    assert threads["proof"] == {"compilations": 0, "benchmarks": 0, "subprocesses": 0}
    arguments = ("--frozen-cache", "bundle.tar", "--steps", STEPS, "--output", "ranks")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*torchrun, "-m", "dflash", "train", *arguments, folder=baked)
    assert done.returncode == 0, done.stderr
    ranks = json.loads((baked / "ranks" / "summary.json").read_text())
    assert ranks["losses"] == threads["losses"]


@two_gpus
def test_a_failure_in_pair_1_stops_the_run_with_its_traceback(baked: Path) -> None:
    found = pairs(baked, "failed", "dp_pairs=2", fault="step", steps=50)
    assert re.search(r"pair 1 \(`cuda:1`\) failed in the .*: RuntimeError: the device fell off", found["message"])
    assert any("in loss" in line for line in found["reasons"])
    assert len(found["losses"]) == 2
    assert "the last whole step, 2, is saved in `failed/step-00000002`" in found["hint"]


@four_gpus
def test_the_next_batch_ahead_changes_no_bit(baked: Path) -> None:
    """Target and drafter of each pair on two GPUs: the target works ahead, copies run on a stream of their own."""
    found = pairs(baked, "apart", "devices=0:2,1:3")
    assert found["equal"]
    assert found["losses"] == pairs(baked, "together", "dp_pairs=2")["losses"]


def test_packed_features_are_those_of_each_document_alone() -> None:
    """Stock Triton and bf16: documents that are no multiple of a chunk, convolution, recurrence and attention alike."""
    import dflashspec

    from dflash import target
    from dflash.anchors import Drafting
    from dflash.buckets import Sample, Shape, assemble
    from dflash.spec import Spec

    section = dflashspec.changed("target.hidden_size", 256)
    section["target"] |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 128}
    spec = Spec.parse(section)
    device = torch.device("cuda", 0)
    model = target.random_target(spec.target, (0, 1), device, torch.bfloat16, seed=0)
    lengths = [130, 64, 1, 200, 77]
    samples = [
        Sample(0, n, np.random.default_rng(n).integers(0, 256, length), np.ones(length, np.bool_))
        for n, length in enumerate(lengths)
    ]
    drafting = Drafting(4, 256)
    batch = assemble([samples], Shape(512, 4, 1, "packed", "bfloat16"), drafting, 0).on(device)
    packed = model.features(batch)
    joined = model.features(dataclasses.replace(batch, doc_ids_BS=None, cu_seqlens_D=None))
    begin, mixed = 0, []
    for item, length in zip(samples, lengths, strict=True):
        alone = assemble([[item]], Shape(512, 4, 1, "padded", "bfloat16"), drafting, 0).on(device)
        wanted = model.features(alone)[:, :length].float()
        own = slice(begin, begin + length)
        assert difference(packed[:, own], wanted) <= 3e-2  # bf16, and products of other sizes
        mixed.append(difference(joined[:, own], wanted))
        begin += length
    assert min(mixed[1:]) > 0.1, "documents that see the one before differ by more"


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def test_a_target_that_does_not_fit_is_refused_before_it_is_made(baked: Path) -> None:
    """A thousand layers of 27B width: both figures, and not a byte of the GPU is touched."""
    from dflash import target
    from dflash.spec import Spec
    from kernelbake import manifest
    from kernelbake.errors import InputError

    wanted = Spec.parse(manifest.load(manifest.find("sm90.yaml")).section).target
    huge = dataclasses.replace(wanted, model="random", num_layers=1024)
    before = torch.cuda.memory_allocated()
    with pytest.raises(InputError, match=r"its weights take [\d,]+ bytes .* has [\d,]+ bytes .* free"):
        target.load_target(huge, (0,), torch.device("cuda", 0), torch.bfloat16, seed=0)
    assert torch.cuda.memory_allocated() == before
