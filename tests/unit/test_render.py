"""What both commands say on a terminal: progress, refusals, and what happens when it goes away."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash import cli as dflash_cli
from dflash import render as dflash_render
from dflash.metrics import Scores
from dflash.reports import StepReport
from kernelbake import cli as kernelbake_cli
from kernelbake import render as kernelbake_render
from kernelbake import terminal
from kernelbake.errors import InputError
from kernelbake.progress import Event

LONG = "one two three four " * 6 + "end"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())


@pytest.mark.parametrize("planning", [dflash_render.planning, kernelbake_render.progress])
def test_a_narrow_terminal_shows_how_far_it_is_beside_a_long_message(
    monkeypatch: pytest.MonkeyPatch, planning: object
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with planning() as on_progress:  # type: ignore[operator]
        on_progress(3, 40, LONG)
    assert " 3/40 " in shown.shown()
    assert "end" in shown.shown()


@pytest.mark.parametrize(
    ("drawing", "begin"),
    [
        (lambda: dflash_render.training(5, "log"), lambda show: show(report(1))),
        (lambda: dflash_render.doing("load"), lambda show: None),
        (kernelbake_render.progress, lambda show: show(1, 2, "a case")),
        (lambda: kernelbake_render.events(as_json=False), lambda show: show(Event("phase", "compile"))),
    ],
    ids=["train", "load", "plan", "build"],
)
def test_a_terminal_that_is_closed_while_a_bar_moves_ends_no_command(
    monkeypatch: pytest.MonkeyPatch,
    drawing: Callable[[], contextlib.AbstractContextManager[Any]],
    begin: Callable[[Any], None],
) -> None:
    """What comes after the bar, a summary and the exit code, is that of the command."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with drawing() as show:
            begin(show)
            os.close(ours)
            with pytest.raises(OSError, match="Input/output error"):
                os.write(theirs, b"x")
        terminal.note("still there")


@pytest.mark.parametrize(("columns", "wanted"), [(123, 123), (7, 40), (0, 80)])
def test_the_width_is_that_of_the_terminal_it_is_asked_of(
    monkeypatch: pytest.MonkeyPatch, columns: int, wanted: int
) -> None:
    """Of stderr, while stdout goes into a file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "w"), os.fdopen(theirs, "w") as stream:
        termios.tcsetwinsize(theirs, (24, columns))
        assert terminal.width(stream) == wanted


@pytest.mark.parametrize(
    ("main", "arguments", "where"),
    [
        (kernelbake_cli.main, ["plan", "-m", "run.yaml"], "manifest `run.yaml`"),
        (dflash_cli.main, ["preflight", "--config", "run.yaml"], "configuration `run.yaml`"),
    ],
    ids=["kernelbake", "dflash"],
)
def test_reasons_of_a_refusal_are_folded_on_a_terminal_and_whole_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    main: Callable[[list[str]], object],
    arguments: list[str],
    where: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "50")
    Path("run.yaml").write_text("".join(f"a_setting_that_does_not_exist_{number}: {number}\n" for number in range(3)))
    shown = Terminal()
    with contextlib.redirect_stderr(shown), pytest.raises(SystemExit):
        main(arguments)
    with pytest.raises(SystemExit):
        main(arguments)
    whole = capsys.readouterr().err
    reasons = [line for line in whole.splitlines() if line.startswith("  ")]
    assert whole.startswith("error: ")
    assert where in whole
    assert max(map(len, reasons)) > 50
    folded = [line for line in shown.getvalue().splitlines() if line.startswith("  ")]
    assert max(map(len, folded)) <= 50
    assert "".join("".join(folded).split()) == "".join("".join(reasons).split())


def test_a_hint_is_never_folded_and_a_reason_under_a_reason_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint may be a command to copy, also that of one fault among several."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "40")
    hint = "hint: pip install 'one-package>=1.0' 'another-package>=2.0'"
    terminal.error(InputError("input: 2 faults", reasons=["one: found `1`", f"  {LONG}", f"  {hint}"], hint=hint[6:]))
    assert shown.getvalue().splitlines() == [
        "error: input: 2 faults",
        "  one: found `1`",
        "    one two three four one two three",
        "      four one two three four one two",
        "      three four one two three four one",
        "      two three four end",
        f"    {hint}",
        hint,
    ]


@pytest.mark.parametrize(("encoding", "said"), [("utf-8", '"é"'), ("ascii", '"\\u00e9"')])
def test_json_is_strict_whatever_the_encoding_of_stdout_has(
    monkeypatch: pytest.MonkeyPatch, encoding: str, said: str
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.data({"name": "é"})
    stream.seek(0)
    text = stream.read()
    assert said in text
    assert json.loads(text) == {"name": "é"}


def report(step: int) -> StepReport:
    return StepReport(step, 9, 0.5, 1.0, 1e-3, Scores(0.5, (0.5,), 1.0, 1, 1), (), 10, 0.1, 0.0, None)


@pytest.mark.parametrize(("made", "shown"), [((4, 5, 6), (4, 6)), ((8, 9), (8, 9)), ((1,), (1,)), ((1, 9), (1, 9))])
def test_steps_that_are_not_shown_are_told_of_and_the_last_one_is_shown(
    capsys: pytest.CaptureFixture[str], made: tuple[int, ...], shown: tuple[int, ...]
) -> None:
    """Also of a run that is resumed, and of one that is stopped."""
    with contextlib.suppress(KeyboardInterrupt), dflash_render.training(9, "runs/a/metrics.jsonl") as show:
        for step in made:
            show(report(step))
        raise KeyboardInterrupt
    lines = capsys.readouterr().err.splitlines()
    steps = [line.partition("/9  loss ")[0] for line in lines if line.startswith("step ")]
    assert steps == [f"step {step}" for step in shown]
    others = [line for line in lines if not line.startswith("step ")]
    told = "steps are shown here every 2 s, and the last one; all are in `runs/a/metrics.jsonl`"
    assert others == ([told] if len(made) > len(shown) else [])
