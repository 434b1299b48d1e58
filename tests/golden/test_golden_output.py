"""What commands print, word for word. ``make golden`` writes the files anew; read the difference before committing."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
import samples

from kernelbake import bundle, cli, levels, manifest, planner, terminal
from kernelbake.bundle import Contents
from kernelbake.keys import Case
from kernelbake.plan import Unbounded

FILES = Path(__file__).parent / "files"
COMMANDS = ("plan", "build", "verify", "show", "coverage", "explain", "diff", "sign", "merge")


def compare(name: str, text: str) -> None:
    """Compares with a golden file, or writes it where that was asked for. Digests and sizes of a file are left out."""
    text = re.sub(r"sha256:[0-9a-f]{64}", "sha256:<digest>", text)
    text = re.sub(r"(?<=sha256:)(\s*[0-9a-f]){64}", lambda found: re.sub(r"[0-9a-f]", "0", found[0]), text)  # folded
    text = re.sub(r"each of [0-9,]+ bytes", "each of <size> bytes", text)
    text = re.sub(r'(size  +|"size_bytes": )[0-9.]+( kB)?', r"\1<size>", text)
    path = FILES / f"{name}.txt"
    if os.environ.get("KERNELBAKE_WRITE_GOLDEN"):
        FILES.mkdir(exist_ok=True)
        path.write_text(text)
    if text != (golden := path.read_text()):
        lines = difflib.unified_diff(golden.splitlines(), text.splitlines(), path.name, "now", lineterm="", n=1)
        pytest.fail("\n".join([*lines, "`make golden` writes it anew"]), pytrace=False)


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(levels, "gpu_count", lambda: 0)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def contents() -> Contents:
    made = samples.contents()
    timed = [{**line, "median_ms": 0.5 + number / 16} for number, line in enumerate(made.record)]
    first = {**made.choices[0].times, "runner_up": "BLOCK=128", "told_apart": False, "repeatable": False}
    choices = (dataclasses.replace(made.choices[0], times=first), *made.choices[1:])
    rejected = {**made.record[1], "outcome": "timeout", "detail": "no answer in 30 s"}
    skipped = ((Case((("bucket", 512), ("batch", 9))), "more rows than the batch"),)
    plan = dataclasses.replace(
        made.plan,
        skipped=skipped,
        unbounded=(Unbounded(made.plan.launches[0].kernel, "T", (512, 1024), "bucket"),),
    )
    return dataclasses.replace(made, record=(timed[0], rejected, *timed[2:]), plan=plan, choices=choices)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The command, its exit code, and both its streams."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments])
    out, err = capsys.readouterr()
    command = " ".join(("kernelbake", *arguments))
    return f"$ {command}\n{out}--- stderr\n{err}--- exit code {ended.value.code}\n"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    compare(f"help-{command or 'kernelbake'}", output(capsys, *filter(None, (command, "--help"))))


def test_every_command_has_its_golden_help() -> None:
    assert isinstance(cli.cli, click.Group)
    assert set(cli.cli.commands) == set(COMMANDS)


OUTPUTS = {
    "show": ["show"],
    "show-json": ["show", "--json"],
    "show-kernel": ["show", "--kernel", "kernel1"],
    "explain": ["explain", "kernel0", "--key", "n=512"],
    "verify": ["verify"],
    "verify-json": ["verify", "--json"],
    "verify-for": ["verify", "--for", "sm_90", "--device", "NVIDIA H200"],
    "verify-misfit": ["verify", "--for", "sm_120", "--device", "NVIDIA H200 NVL"],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_is_said_of_a_sound_bundle(capsys: pytest.CaptureFixture[str], contents: Contents, name: str) -> None:
    bundle.write("bundle.tar", contents)
    compare(name, output(capsys, *OUTPUTS[name]))


@pytest.mark.parametrize("name", ["show", "explain", "verify-for"])
@pytest.mark.parametrize("columns", [80, 120])
def test_what_is_said_of_a_sound_bundle_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, contents: Contents, name: str, columns: int
) -> None:
    bundle.write("bundle.tar", contents)
    monkeypatch.setattr(terminal, "width", lambda stream=None: columns)
    compare(f"{name}-{columns}", output(capsys, *OUTPUTS[name]))


@pytest.mark.parametrize("name", ["show", "verify", "explain"])
def test_what_is_said_of_a_bundle_of_the_interpreter(capsys: pytest.CaptureFixture[str], name: str) -> None:
    bundle.write("bundle.tar", samples.contents(made="interpreted"))
    compare(
        f"{name}-interpreted", output(capsys, *(["verify", "--for", "sm_90"] if name == "verify" else OUTPUTS[name]))
    )


@pytest.mark.parametrize("command", ["coverage", "verify"])
def test_what_is_said_of_a_gap(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, contents: Contents, command: str
) -> None:
    """The bundle holds two keys of each kernel, and the plan made anew wants three."""
    resolved = manifest.load(manifest.find("sm90.yaml")).resolved()
    bundle.write("bundle.tar", samples.changed(contents, manifest_resolved=resolved))
    monkeypatch.setattr(planner, "plan", lambda *_, **__: samples.contents(keys_each=3).plan)
    arguments = ["coverage"] if command == "coverage" else ["verify", "--replan"]
    compare(f"{command}-gap", output(capsys, *arguments))


def test_what_is_said_of_two_bundles(capsys: pytest.CaptureFixture[str], contents: Contents) -> None:
    bundle.write("bundle.tar", contents)
    bundle.write("other.tar", samples.contents(keys_each=1))
    compare("diff", output(capsys, "diff", "bundle.tar", "other.tar"))
    compare("diff-same", output(capsys, "diff", "bundle.tar", "bundle.tar"))


@pytest.mark.parametrize("by", ["kernel", "case"])
def test_what_is_said_of_a_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, contents: Contents, by: str
) -> None:
    def plan(*_: Any, **__: Any) -> Any:
        return contents.plan

    monkeypatch.setattr(planner, "plan", plan)
    compare(f"plan-by-{by}", output(capsys, "plan", "--manifest", "cpu.yaml", "--by", by))
    monkeypatch.setattr(terminal, "width", lambda stream=None: 80)
    compare(f"plan-by-{by}-80", output(capsys, "plan", "--manifest", "cpu.yaml", "--by", by))


def test_what_is_said_of_a_plan_for_the_interpreter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "plan", lambda *_, **__: samples.contents(made="interpreted").plan)
    compare("plan-interpreted", output(capsys, "plan", "--manifest", "cpu.yaml"))
