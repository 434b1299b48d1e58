"""Recorded figures: every file in benchmarks/results has the one form, the agreed names, and no figure left open."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

FIGURES = {
    "main_job_h200": "build_s verify_s train_s steps layers keys candidates rejected bundle_bytes kernels_loaded "
    "compiles_at_runtime benchmarks_at_runtime subprocesses_at_runtime compiles_stock benchmarks_stock",
    "plan_vs_real_h200": "cases launch_kinds planned_not_launched launched_not_planned plan_s",
    "build_h200": "wall_ratio_to_stock total_wait_s stock_s candidates jobs device_busy_share regret_median regret_max",
    "build_kills": "kills_tried kills_bad",
    "dispatch_h200": "launch_ratio_l2norm launch_ratio_chunk frozen_us stock_us stock_jit_us gdn512_host_ratio "
    "threads4_eager_over_stock threads4_graph_over_1 stress_launches stress_wrong stock_stress_wrong",
    "startup_h200": "freeze_s kernels ratio_to_warm_stock",
    "startup_h200x2": "freeze_s kernels ratio_to_warm_stock second_gpu_s",
    "attacks": "flips flips_refused cuts cuts_refused files files_refused fuzz_cpu_s fuzz_failures "
    "integrity_speed_ratio",
    "attention_h200": "ratio_to_flex_4096_512 worst_ratio_to_flex halving_ratio peak_ratio_to_flex head_loss_ratio "
    "head_loss_peak_bytes max_rel_err_bf16 max_rel_err_fp32 roofline_share",
    "memory_h200": "peak_128_bytes peak_256_bytes peak_512_bytes predicted_512_bytes mfu_512 mfu_2048 mfu_4096 "
    "tokens_per_s_4096 target_graph_ratio_512 step_graph_ratio_512",
    "pairs_h200x2": "speedup_4096 speedup_512 over_seed_512 over_seed_4096 weights_bit_equal failure_named",
    "four_gpus_h200x4": "speedup_2_pairs overlap_share exchange_share stock_crashed",
}
"""The figures of each file, so that anyone can compare over time. ``startup_h200x2`` adds the second GPU."""

ZERO_WITH_COUNTERPART = {
    "compiles_at_runtime": "compiles_stock",
    "benchmarks_at_runtime": "benchmarks_stock",
    "stress_wrong": "stress_launches",
    "kills_bad": "kills_tried",
}
"""A counter that must read 0 means something only beside one that reads above 0 where it should."""


def _files() -> list[Path]:
    return sorted(RESULTS.glob("*.json"))


def faults(result: Any, stem: str, root: Path = ROOT) -> list[str]:
    """What is wrong with a results file; empty where nothing is."""
    if not isinstance(result, dict):
        return ["no mapping"]
    wanted = {"name", "script", "commit", "machine", "versions", "figures", "raw"}
    if set(result) != wanted:
        return [f"keys {sorted(result)}; wanted {sorted(wanted)}"]
    found = []
    if result["name"] != stem:
        found.append(f"name `{result['name']}`; wanted the file's, `{stem}`")
    script = str(result["script"])
    if not re.fullmatch(r"[a-z0-9_/]+\.py", script) or not (root / script).is_file():
        found.append(f"script `{script}`; wanted a file of this repository")
    if not re.fullmatch(r"[0-9a-f]{40}", str(result["commit"])):
        found.append(f"commit `{result['commit']}`; wanted a full hash of a clean tree")
    for part, names in (
        ("machine", ("gpu", "gpus", "driver", "cpu_count")),
        ("versions", ("python", "torch", "triton", "fla", "transformers")),
    ):
        lacking = [name for name in names if name not in result[part]]
        found += [f"{part}.{name}: missing" for name in lacking]
    return found + _faults_of_figures(result["figures"], stem)


def _faults_of_figures(figures: Any, stem: str) -> list[str]:
    if not isinstance(figures, dict) or not figures:
        return ["no figures"]
    found = []
    if stem in FIGURES:
        names = set(FIGURES[stem].split())
        found += [f"figure `{name}` is missing" for name in sorted(names - set(figures))]
    for name, value in figures.items():
        if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            found.append(f"figure `{name}` is `{value}`; wanted a finite number, a truth value or text")
    for name, counterpart in ZERO_WITH_COUNTERPART.items():
        if figures.get(name) == 0 and not figures.get(counterpart, 0) > 0:
            found.append(f"figure `{name}` is 0 and `{counterpart}` is not above 0")
    return found


def _read(path: Path) -> Any:
    def refuse(text: str) -> Any:
        raise ValueError(f"`{text}` is no strict JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_every_results_file_has_the_form() -> None:
    found = {path.stem: faults(_read(path), path.stem) for path in _files()}
    assert not {stem: lines for stem, lines in found.items() if lines}


def test_the_folder_holds_results_only() -> None:
    others = [path.name for path in RESULTS.iterdir() if path.suffix != ".json" and path.name != "README.md"]
    assert not others


def test_the_commits_are_of_this_repository() -> None:
    """A clone without history knows no commits; then the form is all that can be checked."""
    git = ["git", "-C", str(ROOT)]
    asked = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False)
    if asked.stdout.strip() != "false":
        return
    commits = {path.stem: _read(path)["commit"] for path in _files()}
    unknown = {
        stem: commit
        for stem, commit in commits.items()
        if subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False).returncode
    }
    assert not unknown


GOOD = {
    "name": "build_kills",
    "script": "tests/unit/test_results_schema.py",
    "commit": "0123456789" * 4,
    "machine": {"gpu": None, "gpus": 0, "driver": None, "cpu_count": 2},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "triton": "3.7.1", "fla": "0.6.0", "transformers": "5.17.0"},
    "figures": {"kills_tried": 50, "kills_bad": 0},
    "raw": {},
}


def test_a_good_file_has_no_fault() -> None:
    assert not faults(GOOD, "build_kills")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": "other"}, "name"),
        ({"script": "benchmarks/none.py"}, "script"),
        ({"script": "/etc/passwd.py"}, "script"),
        ({"commit": "abc"}, "commit"),
        ({"commit": "0123456789" * 4 + "-dirty"}, "commit"),
        ({"machine": {}}, "machine.gpu"),
        ({"versions": {}}, "versions.torch"),
        ({"figures": {}}, "no figures"),
        ({"figures": {"kills_tried": 50}}, "figure `kills_bad` is missing"),
        ({"figures": {"kills_tried": 50, "kills_bad": None}}, "figure `kills_bad` is `None`"),
        ({"figures": {"kills_tried": float("nan"), "kills_bad": 1}}, "figure `kills_tried` is `nan`"),
        ({"figures": {"kills_tried": 0, "kills_bad": 0}}, "figure `kills_bad` is 0 and"),
        ({"more": 1}, "keys"),
    ],
)
def test_faults_are_found(change: dict[str, Any], fault: str) -> None:
    assert any(line.startswith(fault) for line in faults({**GOOD, **change}, "build_kills"))


def test_the_readme_says_what_the_files_say() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([\d.]+) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert rows
    for name, figure, said in rows:
        value = json.loads((RESULTS / f"{name}.json").read_text())["figures"][figure]
        assert round(value, len(said.partition(".")[2])) == float(said), f"{name} {figure}: {value}"
