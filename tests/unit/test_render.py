"""Progress of both commands on a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest

from dflash import render as dflash_render
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
