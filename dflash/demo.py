"""The demonstration, ``python -m dflash.demo``: the main job on this machine, start to end, through the commands.

Plan, build, verify, preflight, frozen training steps; then the same steps on shuffled labels, which must learn nothing.
With a CUDA GPU everything is measured on it; without one, Triton's interpreter runs the same path on tiny shapes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

from dflash import render
from kernelbake import terminal
from kernelbake.errors import ExitCode, InputError, KernelbakeError

OUTPUT = Path("demo-out")
STEPS = 24
ENDS = 5
FALLS_TO = 0.9
"""The mean loss of the last ``ENDS`` steps over that of the first must be at most this, and more on shuffled labels."""

_MARKER = ".dflash-demo"
_MANIFESTS = {9: "demo-sm90.yaml", 12: "demo-sm120.yaml"}
_INTERPRETED = "cpu.yaml"
_LEARNING = ("--set", "optimizer.lr=1e-3", "--set", "optimizer.schedule=constant")


class DemoError(KernelbakeError):
    """A command of the demonstration failed, or its result is not what was promised."""

    def __init__(self, message: str, code: int = ExitCode.FAULT) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.FAULT


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the demonstration came to.

    Args:
        bundle: ``kernelbake show --json`` of the bundle.
        run: ``summary.json`` of the frozen run.
        control: the same of the run on shuffled labels.
        seconds: of everything.
    """

    bundle: dict[str, Any]
    run: dict[str, Any]
    control: dict[str, Any]
    seconds: float

    def lines(self) -> list[str]:
        """One line for each figure."""
        counts, proof, frozen = self.bundle["counts"], self.run["proof"], self.run["frozen"]
        rejected = sum(self.bundle["rejected"].values())
        interpreted = " (the interpreter runs the chosen configs)" if self.bundle["made"] == "interpreted" else ""
        return [
            f"gpu: {self.bundle['made']}, {_field(self.bundle, 'gpu.device')}",
            f"keys planned: {counts['keys']}",
            f"candidates tried: {counts['tried']}",
            f"rejected: {rejected}",
            f"bundle size: {self.bundle['size_bytes']:,} bytes",
            f"kernels loaded: {frozen['loads']}{interpreted}",
            f"launches from the bundle: {frozen['hits']}, refused: {frozen['misses']}",
            f"compilations at run time: {proof['compilations']}",
            f"benchmarks at run time: {proof['benchmarks']}",
            f"subprocesses at run time: {proof['subprocesses']}",
            f"loss: {_fall(self.run):.3f} of its start after {self.run['steps']} steps, {_ends(self.run)}",
            f"loss on shuffled labels: {_fall(self.control):.3f} of its start, {_ends(self.control)}",
            f"seconds: {self.seconds:.0f}",
        ]

    def check(self) -> None:
        """Refuses a result that is not what was promised.

        Raises:
            DemoError: with everything that is wrong.
        """
        wrong = [f"{count} {what} at run time" for what, count in self.run["proof"].items() if count]
        if self.run["frozen"]["misses"] or not self.run["frozen"]["hits"]:
            wrong.append(f"frozen launches {self.run['frozen']}")
        if _fall(self.run) > FALLS_TO:
            wrong.append(f"the loss fell to {_fall(self.run):.3f} of its start")
        if _fall(self.control) <= FALLS_TO:
            wrong.append(f"the loss fell to {_fall(self.control):.3f} of its start on shuffled labels")
        if wrong:
            wanted = f"wanted no work at run time, and a loss of at most {FALLS_TO} with true labels only"
            raise DemoError(f"demo: {'; '.join(wrong)}; {wanted}")


def _field(bundle: dict[str, Any], name: str) -> Any:
    return next((item["value"] for item in bundle["fingerprint"] if item["field"] == name), "unknown device")


def _fall(run: dict[str, Any]) -> float:
    losses = run["losses"]
    return float(statistics.mean(losses[-ENDS:]) / statistics.mean(losses[:ENDS]))


def _ends(run: dict[str, Any]) -> str:
    losses = run["losses"]
    return f"{statistics.mean(losses[:ENDS]):.3f} to {statistics.mean(losses[-ENDS:]):.3f}"


def main() -> None:
    """Runs the demonstration in ``./demo-out``.

    Raises:
        DemoError: a command failed or the result is not what was promised.
    """
    begin = time.monotonic()
    output = fresh(OUTPUT)
    manifest = choose_manifest(output)
    terminal.note(f"demo: manifest `{manifest}`, everything goes to `{output}`")
    bundle = output / "bundle.tar"
    terminal.note(command("kernelbake", "plan", "--manifest", manifest))
    command("kernelbake", "build", "--manifest", manifest, "-o", str(bundle))
    terminal.note(command("kernelbake", "verify", str(bundle)))
    run = _train(bundle, output / "run")
    control = _train(bundle, output / "control", "--set", "data.shuffle_labels=true")
    shown = json.loads(command("kernelbake", "show", str(bundle), "--json"))
    outcome = Outcome(shown, run, control, time.monotonic() - begin)
    for text in outcome.lines():
        terminal.line(text)
    outcome.check()
    terminal.note(f"demo: as promised; look into the bundle with `kernelbake show {bundle}`")


def _train(bundle: Path, output: Path, *more: str) -> dict[str, Any]:
    options = ("--target", "random", "--steps", str(STEPS), "--output", str(output), *_LEARNING, *more)
    command("dflash", "train", "--frozen-cache", str(bundle), *options)
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def fresh(folder: Path) -> Path:
    """An empty folder for the demonstration; one that an earlier demonstration made is emptied.

    Raises:
        InputError: the folder exists and is not one of ours.
    """
    if folder.exists():
        if not (folder / _MARKER).is_file():
            raise InputError(
                f"demo: `{folder}` exists and was not made by a demonstration; wanted another folder's name"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARKER).touch()
    return folder


def choose_manifest(output: Path) -> str:
    """The packaged manifest for this machine's GPU, made out to the very card; that of the interpreter without a GPU.

    Raises:
        InputError: there is a GPU for which there is no manifest.
    """
    capability = gpu_capability()
    if capability is None:
        return _INTERPRETED
    name = _MANIFESTS.get(capability[0])
    if name is None:
        found = f"compute capability {capability[0]}.{capability[1]}"
        wanted = " or ".join(f"{major}.x" for major in _MANIFESTS)
        raise InputError(
            f"demo: the GPU has {found}; wanted {wanted}",
            hint="CUDA_VISIBLE_DEVICES= make demo runs it in Triton's interpreter, on the CPU",
        )
    return str(for_running_gpu(name, output))


def for_running_gpu(name: str, output: Path) -> Path:
    """A copy of a packaged manifest whose device profile is that of the GPU in this machine."""
    text = (resources.files("kernelbake.manifests") / name).read_text()
    made, count = re.subn(r"(?m)^(  profile:) .*$", r"\1 running", text)
    if count != 1:
        raise DemoError(f"demo: the packaged manifest `{name}` has {count} device profiles; wanted one")
    path = output / name
    path.write_text(made)
    return path


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU, asked in a child process; None without a GPU."""
    program = (
        "import json, torch\n"
        "print(json.dumps(torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None))"
    )
    with render.doing("look for a GPU"):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(f"demo: torch does not start: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return (found[0], found[1]) if found else None


def command(*arguments: str) -> str:
    """Runs one of the two commands; its progress goes to the terminal.

    Returns:
        what it wrote to stdout.

    Raises:
        DemoError: it failed; with its exit code.
    """
    terminal.note(f"\n$ {' '.join(arguments)}")
    program, *rest = arguments
    done = subprocess.run([sys.executable, "-m", program, *rest], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise DemoError(f"demo: `{' '.join(arguments[:2])}` ended with code {done.returncode}", done.returncode)
    return done.stdout


if __name__ == "__main__":
    from dflash import cli

    cli.run(main)
