"""A build that is stopped by a signal in each of its phases: it ends at once with its code, and nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from stoppedbuild import Stopped
from test_build import _build, _choices, _path_of_workers, unbroken  # noqa: F401

from kernelbake import bundle
from kernelbake.progress import Event

INT = (signal.SIGINT, 130, "interrupted\n")
TERM = (signal.SIGTERM, 143, "terminated\n")
KILL = (signal.SIGKILL, -9, "")
BEFORE = b"an older bundle"


def _check_stopped(stopped: Stopped, output: Path, number: signal.Signals, code: int, said: str) -> None:
    assert stopped.end(number) == (code, said)
    assert stopped.wait_for(lambda found: not found) == [], "no process is left"
    assert output.read_bytes() == BEFORE


@pytest.mark.parametrize(("number", "code", "said"), [TERM, KILL], ids=["term", "kill"])
def test_while_it_plans(tmp_path: Path, number: signal.Signals, code: int, said: str) -> None:
    output = tmp_path / "bundle.tar"
    output.write_bytes(BEFORE)
    stopped = Stopped("whole", output)
    planning = stopped.wait_for(lambda found: any("kernelbake.shadow" in command for command in found))
    assert any("kernelbake.shadow" in command for command in planning)
    _check_stopped(stopped, output, number, code, said)


@pytest.mark.parametrize(
    ("phase", "decided", "number", "code", "said"),
    [
        ("measure", 1, *INT),
        ("measure", 1, *TERM),
        ("measure", 1, *KILL),
        ("pack", 3, *INT),
        ("pack", 3, *KILL),
        ("self-check", 3, *TERM),
        ("self-check", 3, *KILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else None,
)
def test_later(
    tmp_path: Path,
    phase: str,
    decided: int,
    number: signal.Signals,
    code: int,
    said: str,
    unbroken: bytes,  # noqa: F811
) -> None:
    output = tmp_path / "bundle.tar"
    output.write_bytes(BEFORE)
    stopped = Stopped("scripted", output, phase)
    wanted = "progress" if phase == "measure" else "phase"
    stopped.until(lambda event: (event["kind"], event["phase"]) == (wanted, phase))
    _check_stopped(stopped, output, number, code, said)
    events: list[Event] = []
    _build(output, events=events)
    assert any("going on from a journal" in event.message for event in events)
    measured = [event.done for event in events if event.kind == "progress" and event.phase == "measure"]
    assert measured == list(range(decided + 1, 4)), "what was decided before is not measured again"
    assert _choices(bundle.read(output)) == unbroken
