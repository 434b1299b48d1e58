"""Progress of both commands on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys

import pytest

from dflash import render as dflash_render
from dflash.metrics import Scores
from dflash.reports import StepReport
from kernelbake import render as kernelbake_render

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
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with planning() as on_progress:  # type: ignore[operator]
        on_progress(3, 40, LONG)
    assert " 3/40 " in terminal.shown()
    assert "end" in terminal.shown()


def test_a_terminal_that_is_closed_while_a_bar_moves_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the bar, a summary and the exit code, is that of the run."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with dflash_render.training(5, "log"):
            os.close(ours)
            with pytest.raises(OSError, match="Input/output error"):
                os.write(theirs, b"x")
        dflash_render.note("still there")


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
