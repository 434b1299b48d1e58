"""The command line of dflash, the demonstration and acceptance, as far as they go without training anything."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash import accept, cli, demo
from dflash.demo import DemoError, Outcome
from dflash.errors import ForeignPackageError
from kernelbake import manifest
from kernelbake.errors import ExitCode, InputError

ROOT = Path(__file__).parents[2]


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", code) if code else ("-m", "dflash")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# ---------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("--version",), ("preflight", "--help")])
def test_help_comes_at_once_and_loads_no_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom dflash import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "assert not {'torch', 'triton', 'fla', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    begin = time.process_time()
    done = run(*arguments, code=code)
    assert done.returncode == 0, done.stderr
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_standard_streams_ends_with_its_code(closed: str) -> None:
    script = f'exec "{sys.executable}" -m dflash train --steps 0 {closed}'
    assert subprocess.run(["bash", "-c", script], capture_output=True, check=False).returncode == ExitCode.INPUT


TALKS = (
    "from dflash import cli\nfrom kernelbake.terminal import line, note\n"
    "cli.run(lambda: [note('a step'), note('b'), line('drafter')])"
)


def test_a_terminal_that_went_away_ends_no_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-c", TALKS], stdout=subprocess.PIPE, stderr=writing, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stdout) == (0, b"drafter\n")


def test_a_full_device_behind_stdout_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", TALKS], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == ExitCode.INPUT
    assert "error: stdout: No space left on device; wanted to write all of the output" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train",), "wanted --frozen-cache"),
        (("train", "--steps", "many"), "not a valid integer"),
        (("train", "--frozen"), "No such option"),
        (("train", "--config", "nowhere.yaml"), "is no file"),
        (("fly",), "No such command"),
        (("preflight", "--set", "steps=0", "--set", "x"), "2 faults"),
    ],
)
def test_input_errors_have_code_2_and_say_what_was_wanted(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == ExitCode.INPUT
    assert said in done.stderr
    assert not done.stdout
    assert "Traceback" not in done.stderr


def test_the_bare_command_is_its_help_and_cuts_no_line_of_it_at_80_columns() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (ExitCode.INPUT, "")
    assert done.stderr.startswith("Usage: dflash [OPTIONS] COMMAND [ARGS]...\n")
    assert "error" not in done.stderr
    commands = done.stderr.partition("Commands:")[2]
    assert "  train " in commands
    assert "..." not in commands


@pytest.mark.parametrize(
    ("command", "number", "code", "said"),
    [
        ("train", "SIGTERM", ExitCode.TERMINATED, "train: stopped by SIGTERM; no step was made yet"),
        ("train", "SIGINT", ExitCode.INTERRUPTED, "train: stopped by SIGINT; no step was made yet"),
        ("preflight", "SIGTERM", ExitCode.TERMINATED, "terminated"),
        ("preflight", "SIGINT", ExitCode.INTERRUPTED, "interrupted"),
    ],
)
def test_a_signal_while_the_bundle_is_read_ends_the_command_with_its_code(
    command: str, number: str, code: ExitCode, said: str
) -> None:
    program = (
        "import signal, sys\nfrom dflash import cli, launch\n"
        f"launch.settle = lambda run, **options: signal.raise_signal(signal.{number})\n"
        "cli.main(sys.argv[1:])\n"
    )
    done = run(command, code=program)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise InputError('preflight: faulty; wanted none')", ExitCode.INPUT, "error: preflight: faulty; wanted none"),
        ("signal.raise_signal(signal.SIGTERM)", ExitCode.TERMINATED, "error: train: stopped by SIGTERM"),
        ("raise ValueError('unexpected')", ExitCode.FAULT, "ValueError: unexpected"),
    ],
)
def test_an_import_that_hangs_beside_the_preflight_keeps_no_refusal_and_no_signal(
    ending: str, code: ExitCode, said: str
) -> None:
    program = (
        "import contextlib, signal, time\nfrom types import SimpleNamespace as Any\n"
        "from dflash import cli, launch\nfrom dflash.stop import Stop\nfrom kernelbake.errors import InputError\n"
        "launch._import_all = lambda architecture: time.sleep(600)\n"
        "plan = Any(interpreted=False, spec=Any(target=Any(architecture='qwen3_5')))\n"
        "def work():\n"
        "    Stop().install()\n"
        "    with launch.importing(plan):\n"
        f"        {ending}\n"
        "cli.run(work)\n"
    )
    done = run(code=program)
    assert done.returncode == code
    assert said in done.stderr


def test_imports_run_beside_the_preflight_and_are_over_before_the_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails is told by whoever needs it: here nobody does."""
    from dflash import launch

    plan = SimpleNamespace(interpreted=False, spec=SimpleNamespace(target=SimpleNamespace(architecture="qwen3_5")))
    began, may_end, over = threading.Event(), threading.Event(), threading.Event()

    def slow(module: str) -> None:
        began.set()
        may_end.wait(30)
        over.set()
        raise ImportError(module)

    monkeypatch.setattr(importlib, "import_module", slow)
    with launch.importing(plan):  # type: ignore[arg-type]
        assert began.wait(30)
        assert not over.is_set()
        may_end.set()
    assert over.is_set()
    assert "imports" not in {thread.name for thread in threading.enumerate()}


def test_a_second_sigterm_ends_a_command_at_once() -> None:
    program = (
        "import signal\nfrom dflash import cli\n"
        "def stubborn():\n"
        "    try:\n        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n        signal.raise_signal(signal.SIGTERM)\n        print('not reached')\n"
        "cli.run(stubborn)\n"
    )
    done = run(code=program)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_an_environment_with_the_foreign_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        version = "0.1.0"

    found = importlib.metadata.distribution

    def distribution(name: str) -> Any:
        return Foreign() if name == "dflash" else found(name)

    cli.check_not_foreign()
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(ForeignPackageError, match=r"`dflash` 0\.1\.0 is installed, z-lab's package"):
        cli.check_not_foreign()


@pytest.mark.parametrize("metadata", [None, b"", b"\xff\xfe\0", b"Name: dflash\n"])
def test_a_foreign_package_with_damaged_metadata_is_refused(metadata: bytes | None, tmp_path: Path) -> None:
    folder = tmp_path / "dflash-0.9.dist-info"
    folder.mkdir()
    if metadata is not None:
        (folder / "METADATA").write_bytes(metadata)
    done = run(
        code=f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom dflash import cli\ncli.main(['--version'])"
    )
    assert done.returncode == ExitCode.INPUT, done.stderr
    assert "is installed, z-lab's package" in done.stderr


@pytest.mark.parametrize("editable", [True, False])
def test_a_foreign_package_that_shadows_ours_is_refused(tmp_path: Path, editable: bool) -> None:
    """Another package of the import name comes first: kernelbake names it instead of failing somewhere in it."""
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / "__init__.py").write_text("")
    code = "from kernelbake import cli; cli.main(['plan', '--manifest', 'cpu.yaml'])"
    if not editable:  # setuptools' finder for editable installations would find our modules in their package
        code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]; " + code
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f".:{ROOT}"},
    )
    assert done.returncode == ExitCode.INPUT, done.stderr
    assert "its plug-in does not import" in done.stderr
    assert str(tmp_path / "dflash" / "__init__.py") in done.stderr


# ---------------------------------------------------------------------------------------------- the demonstration


def outcome(losses: list[float], control: list[float], **proof: int) -> Outcome:
    counts = {"keys": 3, "tried": 9}
    bundle = {"made": "measured", "counts": counts, "rejected": {"timeout": 1}, "size_bytes": 5, "fingerprint": []}
    proof = {"compilations": 0, "benchmarks": 0, "subprocesses": 0, **proof}
    frozen = {"hits": 7, "misses": 0, "loads": 2, "refusals": 0}
    made = {"proof": proof, "frozen": frozen, "steps": len(losses), "losses": losses}
    return Outcome(bundle, made, {**made, "losses": control}, 1.0)


FALLING, FLAT = [5.0] * 5 + [4.0] * 5, [5.0] * 10


def test_what_was_promised_passes_and_is_shown() -> None:
    good = outcome(FALLING, FLAT)
    good.check()
    text = "\n".join(good.lines())
    for line in (
        "keys planned: 3",
        "candidates tried: 9",
        "rejected: 1",
        "kernels loaded: 2",
        "benchmarks at run time: 0",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (outcome(FLAT, FLAT), "the loss fell to 1.000 of its start"),
        (outcome(FALLING, FALLING), "0.800 of its start on shuffled labels"),
        (outcome(FALLING, FLAT, compilations=2), "2 compilations at run time"),
        (outcome(FALLING, FLAT, benchmarks=1), "1 benchmarks at run time"),
    ],
)
def test_what_was_not_promised_fails(wrong: Outcome, said: str) -> None:
    with pytest.raises(DemoError, match=said):
        wrong.check()


def test_the_demonstration_empties_its_own_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (demo.fresh(folder) / "old").touch()
    assert not (demo.fresh(folder) / "old").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="was not made by a demonstration"):
        demo.fresh(tmp_path / "mine")


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "demo-sm90.yaml"), ((12, 0), "demo-sm120.yaml")])
def test_the_manifest_follows_the_gpu(
    capability: tuple[int, int], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "gpu_capability", lambda: capability)
    path = demo.choose_manifest(tmp_path)
    assert path == str(tmp_path / name)
    assert "  profile: running\n" in Path(path).read_text()


def test_other_gpus_are_refused_and_none_means_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "gpu_capability", lambda: (8, 6))
    with pytest.raises(InputError, match=r"compute capability 8\.6; wanted 9\.x or 12\.x"):
        demo.choose_manifest(tmp_path)
    monkeypatch.setattr(demo, "gpu_capability", lambda: None)
    assert demo.choose_manifest(tmp_path) == "cpu.yaml"


def test_a_command_that_fails_ends_the_demonstration_with_its_code() -> None:
    with pytest.raises(DemoError, match="`dflash train` ended with code 2") as caught:
        demo.command("dflash", "train")
    assert caught.value.exit_code == ExitCode.INPUT


# ---------------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize(("memory", "layers"), [(150e9, 64), (102e9, 64), (80e9, 16), (33e9, 4)])
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_acceptance_takes_as_many_layers_as_fit(capability: tuple[int, int], memory: float, layers: int) -> None:
    text = accept.manifest_text({"capability": capability, "memory_bytes": memory}, None)
    known = text.replace("profile: running", "profile: h200")
    section = manifest.parse(known.encode(), "accept.yaml").section
    assert section["target"]["num_layers"] == layers
    assert max(section["drafter"]["target_layer_ids"]) < layers
    assert section["drafter"]["num_layers"] == 5


def test_acceptance_refuses_cards_without_a_manifest() -> None:
    with pytest.raises(InputError, match=r"compute capability 8\.0"):
        accept.manifest_text({"capability": [8, 0], "memory_bytes": 80e9}, None)


def test_results_have_the_form_of_recorded_figures(tmp_path: Path) -> None:
    results = accept.Results(machine={"gpu": "X"}, figures={"steps": 50})
    results.write(tmp_path / "accept_x.json", "c" * 40)
    written = json.loads((tmp_path / "accept_x.json").read_text())
    assert set(written) == {"name", "script", "commit", "machine", "versions", "figures", "raw"}
    assert written["name"] == "accept_x"
    assert written["versions"]["torch"]


def test_a_count_that_must_be_zero_fails_acceptance() -> None:
    results = accept.Results(figures={"compilations_at_runtime": 0, "frozen_misses": 0, "frozen_refusals": 0})
    results.figures["stress_wrong"] = 0
    accept._check(results)
    assert "failed" not in results.raw
    results.figures["stress_wrong"] = 3
    accept._check(results)
    assert "stress_wrong" in results.raw["failed"]
