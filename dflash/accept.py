"""Acceptance on a card of yours: ``python -m dflash.accept`` builds, verifies, trains 50 steps and stresses threads.

Everything that was measured goes into one results file, which you can send to us; it holds no path, no user name and no
text of yours. Shapes are those of the packaged full manifest, with as many target layers as the card's memory holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

from dflash import render
from dflash.errors import AcceptanceError
from kernelbake import terminal
from kernelbake.errors import InputError

STEPS = 50
THREADS, ROUNDS = 4, 25
OUTPUT = Path("accept-out")

_MANIFESTS = {9: "sm90.yaml", 12: "sm120.yaml"}
_LAYER_CHOICES = (64, 16, 4)
_LAYER_BYTES = 800_000_000
_OTHER_BYTES = 45_000_000_000
"""Of a 27B-wide target in bf16: one layer; and embedding, head, the drafter with its optimizer, and activations."""

_ASK = """
import json, torch
from kernelbake import host
if not torch.cuda.is_available():
    raise SystemExit("no CUDA GPU that torch can use")
facts = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": facts.name, "gpus": torch.cuda.device_count(), "driver": host.driver_version(),
                  "capability": [facts.major, facts.minor], "memory_bytes": facts.total_memory}))
"""


@dataclasses.dataclass
class Results:
    """What goes into the file, filled stage by stage so that a failure leaves what was found before it."""

    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    raw: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, path: Path, commit: str) -> None:
        """Writes the file in the form of the recorded figures."""
        names = {"torch": "torch", "triton": "triton", "fla": "fla-core", "transformers": "transformers"}
        versions = {"python": platform.python_version(), **{key: _version(name) for key, name in names.items()}}
        data = {
            "name": path.stem,
            "script": "dflash/accept.py",
            "commit": commit,
            "machine": self.machine,
            "versions": versions,
            "figures": self.figures,
            "raw": self.raw,
        }
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Runs every stage and writes the results file, also when a stage fails.

    Raises:
        AcceptanceError: a stage failed.
        InputError: the machine has no GPU for which there is a manifest.
    """
    parser = argparse.ArgumentParser(prog="python -m dflash.accept", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commit", help="full hash of this code, where it has no git history")
    parser.add_argument("--layers", type=int, help="layers of the target, a multiple of 4; default: what fits")
    parser.add_argument("--stress", type=Path, metavar="BUNDLE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stress is not None:
        terminal.line(json.dumps(stress(given.stress)))
        return
    results = Results()
    results.machine = ask()
    slug = re.sub(r"[^a-z0-9]+", "_", results.machine["gpu"].lower()).strip("_")
    path = Path(f"accept_{slug}.json")
    try:
        _stages(results, given.layers)
    finally:
        results.figures["passed"] = "failed" not in results.raw and "stress_wrong" in results.figures
        results.write(path, _commit(given.commit))
        terminal.line(str(path))
    if not results.figures["passed"]:
        raise AcceptanceError(f"accept: not all is as it should be; `{path}` has the figures")


def ask() -> dict[str, Any]:
    """Facts about this machine, asked in a child process.

    Raises:
        InputError: there is no GPU.
    """
    with render.doing("look at the GPU"):
        done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"accept: {done.stderr.strip().splitlines()[-1]}; wanted a CUDA GPU")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "cpu_count": len(os.sched_getaffinity(0))}


def _stages(results: Results, layers: int | None) -> None:
    OUTPUT.mkdir(exist_ok=True)
    manifest = OUTPUT / "manifest.yaml"
    manifest.write_text(manifest_text(results.machine, layers))
    bundle, figures = OUTPUT / "bundle.tar", results.figures
    figures["build_s"], _ = _stage(results, "build", "kernelbake", "build", "-m", str(manifest), "-o", str(bundle))
    figures["verify_s"], _ = _stage(results, "verify", "kernelbake", "verify", str(bundle), "--on-device")
    _, shown = _stage(results, "show", "kernelbake", "show", str(bundle), "--json")
    held = json.loads(shown)
    figures |= {f"num_{name}": held["counts"][name] for name in ("keys", "candidates", "entries")}
    figures |= {"rejected": sum(held["rejected"].values()), "bundle_bytes": held["size_bytes"]}
    run = OUTPUT / "run"
    shutil.rmtree(run, ignore_errors=True)  # of an acceptance before
    options = ("--target", "random", "--steps", str(STEPS), "--output", str(run))
    figures["train_s"], _ = _stage(results, "train", "dflash", "train", "--frozen-cache", str(bundle), *options)
    summary = json.loads((run / "summary.json").read_text())
    figures |= {f"{name}_at_runtime": count for name, count in summary["proof"].items()}
    figures |= {f"frozen_{name}": count for name, count in summary["frozen"].items()}
    figures["steps"] = summary["steps"]
    results.raw |= {"losses": summary["losses"], "rejected": held["rejected"], "steps": _steps(run)}
    _, said = _stage(results, "stress", "dflash.accept", "--stress", str(bundle))
    figures |= json.loads(said.splitlines()[-1])
    _check(results)


def _steps(run: Path) -> list[dict[str, Any]]:
    """Shape, seconds and peak memory of every step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-STEPS:]
    return [{name: line[name] for name in ("shapes", "num_tokens", "seconds", "peak_bytes")} for line in lines]


def _check(results: Results) -> None:
    zero = [name for name in results.figures if name.endswith("_at_runtime")]
    zero += ["frozen_misses", "frozen_refusals", "stress_wrong"]
    wrong = {name: results.figures[name] for name in zero if results.figures[name]}
    if wrong:
        results.raw["failed"] = f"{wrong}; wanted 0"


def _stage(results: Results, name: str, *arguments: str) -> tuple[float, str]:
    """Runs a command, its progress on the terminal; seconds and what it wrote to stdout."""
    terminal.note(f"\n$ {' '.join(arguments)}")
    begin = time.monotonic()
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = round(time.monotonic() - begin, 1)
    if done.returncode:
        results.raw["failed"] = f"{name}: code {done.returncode}"
        raise AcceptanceError(f"accept: `{' '.join(arguments[:2])}` ended with code {done.returncode}")
    return seconds, done.stdout


def manifest_text(machine: dict[str, Any], layers: int | None) -> str:
    """The packaged full manifest, made out to the card that is here, with as many target layers as it holds.

    Raises:
        InputError: there is no manifest for this kind of card.
    """
    major, minor = machine["capability"]
    if major not in _MANIFESTS:
        wanted = " or ".join(f"{known}.x" for known in _MANIFESTS)
        raise InputError(f"accept: the GPU has compute capability {major}.{minor}; wanted {wanted}")
    room = machine["memory_bytes"] - _OTHER_BYTES
    chosen = layers or next((count for count in _LAYER_CHOICES if count * _LAYER_BYTES <= room), _LAYER_CHOICES[-1])
    text = (resources.files("kernelbake.manifests") / _MANIFESTS[major]).read_text()
    text = re.sub(r"(?m)^(  profile:) .*$", r"\1 running", text)
    text = re.sub(r"(?m)^(    num_layers:) 64\b.*$", rf"\1 {chosen}", text)
    if chosen < 8:  # too few to spread five feature layers over
        text = re.sub(r"(?m)^(    mask_token_id: .*)$", rf"\1\n    target_layer_ids: {list(range(chosen))}", text)
    return text


def stress(path: Path) -> dict[str, Any]:
    """Threads that run the target at every bucket at once, from a frozen bundle, against the bits of one thread.

    The target has one layer of each kind; the threads start together at keys that none of them has used before.

    Returns:
        ``stress_launches`` and ``stress_wrong``, the number of forwards whose bits differ.
    """
    from dflash import config, launch

    plan = launch.settle(config.load(None, (), {"bundle": str(path), "target": "random"}))
    with launch.started(plan, stock=False) as started:
        import torch

        from dflash import devices, synthetic, target
        from dflash.buckets import Shape

        spec, where = plan.spec, torch.device("cuda", 0)
        layer_ids = target.representative_layer_ids(spec.drafter.target_layer_ids)
        small = target.representative(spec.target)
        model = target.random_target(small, layer_ids, where, devices.DTYPES[spec.axes.dtype], seed=0)
        shapes = [Shape.of(case) for case in spec.axes.cases().planned]
        batches = [synthetic.batch(shape, spec, 0).on(where) for shape in shapes]

        def work(thread: int) -> list[tuple[int, torch.Tensor]]:
            found = []
            with torch.cuda.device(where), torch.cuda.stream(torch.cuda.Stream(where)):
                for turn in range(ROUNDS):
                    number = (thread + turn) % len(batches)
                    found.append((number, model.features(batches[number]).float().sum(dim=-1).cpu()))
            return found

        with ThreadPoolExecutor(THREADS) as pool:
            results = [pair for found in pool.map(work, range(THREADS)) for pair in found]
        wanted = [model.features(batch).float().sum(dim=-1).cpu() for batch in batches]
        wrong = sum(not torch.equal(features, wanted[number]) for number, features in results)
        assert started.frozen is not None
        return {"stress_launches": started.frozen.counters.hits, "stress_wrong": wrong}


def _commit(given: str | None) -> str:
    if given is not None:
        return given
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    from dflash import cli

    cli.run(main)
