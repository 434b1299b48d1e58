"""Results files: one form for every recorded figure, written by the benchmark that measured it.

A figure is worth something only beside the code that gave it. So a file names the commit that ran, and a tree whose
files differ from any commit is refused.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_DISTRIBUTIONS = {"torch": "torch", "triton": "triton", "fla": "fla-core", "transformers": "transformers"}


_begin = time.perf_counter()


def say(text: str) -> None:
    """A line of progress with the seconds since the start."""
    print(f"{time.perf_counter() - _begin:6.1f} s  {text}", flush=True)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has: ``--commit`` and ``--results``."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--commit", help="the code's full commit, where it runs without its history")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder for the results file")
    return made


class Recorder:
    """Collects the figures of one benchmark and writes its results file.

    Making one before the measuring starts refuses a dirty tree at once, not after an hour.

    Args:
        name: of the results file, without ``.json``.
        script: the benchmark's own path, ``__file__``.
        commit: of ``--commit``; None where the tree has its history.
        folder: where the file is written.

    Attributes:
        raw: what stands behind the figures, as JSON.
    """

    def __init__(self, name: str, script: str, commit: str | None = None, folder: Path = RESULTS) -> None:
        self.name = name
        self.script = Path(script).resolve().relative_to(ROOT).as_posix()
        self.commit = commit_of(ROOT, commit)
        self.folder = folder
        self.figures: dict[str, bool | int | float | str] = {}
        self.raw: dict[str, Any] = {}

    def add(self, figure: str, value: bool | int | float | str) -> None:
        """Adds a figure.

        Raises:
            ValueError: it is there already, or is no finite number, truth value or text.
        """
        if figure in self.figures:
            raise ValueError(f"figure `{figure}` was added before")
        if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"figure `{figure}` is `{value}`; wanted a finite number, a truth value or a text")
        self.figures[figure] = value

    def write(self) -> Path:
        """Writes the results file and gives its path.

        Raises:
            ValueError: there is no figure.
        """
        if not self.figures:
            raise ValueError(f"results `{self.name}`: no figure was added")
        result = {
            "name": self.name,
            "script": self.script,
            "commit": self.commit,
            "machine": machine(),
            "versions": versions(),
            "figures": self.figures,
            "raw": self.raw,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.name}.json"
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        temporary = path.with_suffix(".partial")
        temporary.write_text(text)
        os.replace(temporary, path)
        return path


def commit_of(root: Path, given: str | None) -> str:
    """The full hash of the commit whose files these are.

    Args:
        root: the tree.
        given: the hash, for a tree without history.

    Raises:
        SystemExit: the tree is dirty, or it has no history and none was given.
    """
    if not (root / ".git").exists():
        if given is None or not re.fullmatch("[0-9a-f]{40}", given):
            sys.exit("benchmark: this tree has no history; wanted `--commit` with the full hash of its code")
        return given
    head = _git(root, "rev-parse", "HEAD").strip()
    if given not in (None, head):
        sys.exit(f"benchmark: `--commit {given}`; wanted `{head}`, the commit of this tree")
    changed = [line for line in _git(root, "status", "--porcelain").splitlines() if "benchmarks/results/" not in line]
    if changed:
        sys.exit("benchmark: the tree differs from its commit; wanted a clean one\n" + "\n".join(changed[:20]))
    return head


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


def machine() -> dict[str, Any]:
    """The GPUs that this process used, if it loaded torch and there are any, and the number of CPUs."""
    torch = sys.modules.get("torch")
    count = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name(0) if torch is not None and count else None
    cpus = len(os.sched_getaffinity(0))
    return {"gpu": name, "gpus": count, "driver": _driver() if count else None, "cpu_count": cpus}


def _driver() -> str | None:
    from kernelbake import host

    return host.driver_version()


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that the figures depend on; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
