"""The main job on one GPU: build, verify, train frozen, by the three commands of the README, one after the other.

Every kernel of the manifest's workload at full shapes, all layers of the target with random weights. Then the same
training without a bundle in force, by stock Triton with empty caches, whose counters show that the counters count; and
the runs that must be refused before a weight is loaded. Writes ``main_job_h200.json``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

STEPS = 20
STOCK_STEPS = 5

REFUSALS: dict[str, tuple[int, list[str]]] = {
    "a batch size": (5, ["--batch-size", "2"]),
    "a length beyond an NB step": (5, ["--buckets", "8192"]),
    "packed instead of padded": (5, ["--layout", "packed"]),
    "another dtype": (5, ["--dtype", "float32"]),
    "another head dim": (5, ["--target", "narrow"]),
    "one flipped byte": (3, ["--frozen-cache", "flipped.tar"]),
}
"""What differs → exit code and options of a run that must not start."""


def command(name: str, *arguments: str) -> list[str]:
    """The console script, or its module where scripts are not on the path."""
    script = shutil.which(name)
    return [*([script] if script else [sys.executable, "-m", name]), *arguments]


def run(folder: Path, line: list[str], **environment: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Runs a command line in the folder; seconds and what came of it."""
    print("$", " ".join(line), flush=True)
    start = time.perf_counter()
    done = subprocess.run(line, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    print(f"  exit {done.returncode} after {seconds:.1f} s", flush=True)
    return seconds, done


def must(folder: Path, line: list[str], **environment: str) -> tuple[float, str]:
    """``run`` for what has to succeed; seconds and stderr."""
    seconds, done = run(folder, line, **environment)
    if done.returncode:
        sys.exit(f"{' '.join(line)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return seconds, done.stderr


def train(*arguments: str) -> list[str]:
    """``dflash train`` from the built bundle; later options win."""
    return command("dflash", "train", "--frozen-cache", "bundle.tar", "--target", "random", *arguments)


def summary(folder: Path, name: str) -> dict[str, Any]:
    """What a run wrote of itself."""
    found: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return found


def prepare_refusals(folder: Path) -> None:
    """A bundle with one flipped byte, and a target whose recurrent layers have narrower heads."""
    from kernelbake import bundle

    data = bytearray((folder / "bundle.tar").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "flipped.tar").write_bytes(data)
    target = bundle.read(folder / "bundle.tar").manifest_resolved["workload"]["section"]["target"]
    config = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": target["num_layers"],
        "num_attention_heads": target["num_heads"],
        "num_key_value_heads": target["num_kv_heads"],
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    kept = ("hidden_size", "intermediate_size", "vocab_size", "head_dim", "full_attention_interval")
    linear = ("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim")
    config |= {name: target[name] for name in (*kept, *linear)}
    (folder / "narrow").mkdir()
    (folder / "narrow" / "config.json").write_text(json.dumps(config))


def refuse(folder: Path, name: str) -> dict[str, Any]:
    """One run that must not start: its code, and all that it said."""
    code, options = REFUSALS[name]
    _, done = run(folder, train("--steps", "1", "--output", "refused", *options))
    reasons = [text.strip() for text in done.stderr.splitlines() if text.startswith("  ")]
    return {"wanted": code, "code": done.returncode, "reasons": reasons, "said": done.stderr[-3000:]}


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--manifest", default="sm90.yaml")
    given = options.parse_args()
    import torch

    recorder = common.Recorder("main_job_h200", __file__, given.commit, given.results)
    folder = Path(tempfile.mkdtemp(prefix="main-job-"))
    try:
        measure(folder, given.manifest, recorder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(torch.cuda.get_device_name(0))
    for name, value in recorder.figures.items():
        print(f"{name:28} {value}")
    print(recorder.write())


def measure(folder: Path, manifest: str, recorder: common.Recorder) -> None:
    """The three commands, the same steps by stock Triton, and the refusals."""
    from kernelbake import bundle

    build_s, said = must(folder, command("kernelbake", "build", "--manifest", manifest))
    recorder.raw["build"] = said.splitlines()[-12:]
    verify_s, said = must(folder, command("kernelbake", "verify"))
    recorder.raw["verify"] = said.splitlines()
    train_s, said = must(folder, train("--steps", str(STEPS), "--output", "frozen"))
    recorder.raw["train"] = said.splitlines()
    frozen = summary(folder, "frozen")
    held = bundle.read(folder / "bundle.tar")
    counts = {"build_s": round(build_s, 1), "verify_s": round(verify_s, 2), "train_s": round(train_s, 1)}
    target = held.manifest_resolved["workload"]["section"]["target"]
    counts |= {"steps": frozen["steps"], "layers": target["num_layers"]}
    counts |= {"keys": held.plan.num_keys, "candidates": held.plan.num_candidates}
    counts |= {"rejected": sum(line["outcome"] != "ok" for line in held.record), "bundle_bytes": held.size_bytes}
    counts |= {"kernels_loaded": frozen["frozen"]["loads"]}
    counts |= {f"{name}_at_runtime": count for name, count in proof(frozen).items()}
    empty = {"TRITON_CACHE_DIR": str(folder / "empty-cache"), "FLA_CACHE_RESULTS": "0"}
    _, said = must(folder, train("--stock", "--steps", str(STOCK_STEPS), "--output", "stock"), **empty)
    recorder.raw["stock"] = said.splitlines()
    counts |= {f"{name}_stock": count for name, count in proof(summary(folder, "stock")).items()}
    for name, value in counts.items():
        recorder.add(name, value)
    recorder.raw["losses"] = frozen["losses"]
    prepare_refusals(folder)
    with ThreadPoolExecutor(len(REFUSALS)) as pool:
        refused = dict(zip(REFUSALS, pool.map(lambda name: refuse(folder, name), REFUSALS), strict=True))
    recorder.raw["refusals"] = refused
    for name, found in refused.items():
        print(f"{name:28} code {found['code']} (wanted {found['wanted']}), {len(found['reasons'])} reasons")
    wrong = [name for name, found in refused.items() if found["code"] != found["wanted"] or not found["said"]]
    if wrong:
        sys.exit(
            f"not refused as it should be: {wrong}\n{json.dumps({name: refused[name] for name in wrong}, indent=1)}"
        )


def proof(found: dict[str, Any]) -> dict[str, int]:
    """The three counters, by the names of the figures."""
    names = {"compiles": "compilations", "benchmarks": "benchmarks", "subprocesses": "subprocesses"}
    return {name: found["proof"][counter] for name, counter in names.items()}


if __name__ == "__main__":
    main()
