"""The watchdog beside a process that is stopped and goes on: time in which nothing could move is no hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dflash import watch

PROGRAM = """
import sys
from dflash.alarm import Alarm
from dflash.errors import HangError
from dflash.ranks import Ranks
from dflash.watch import Watch
from dflash import watch

class Nothing:
    def last_move(self):
        return 0.0
    def describe(self, seconds):
        return HangError("nothing moved")

watch._GRACE_S = 0.5  # the timer that needs no Python rings after 3 s without a look
alarm = Alarm()
with Watch(alarm, 1.0, Nothing(), Ranks(), lambda error: None) as watched:
    print("begins", flush=True)
    sys.stdin.readline()
    watched.moved()
    print(alarm.failure, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_a_process_that_was_stopped_goes_on(number: signal.Signals) -> None:
    """For SIGSTOP, of which a process does not hear, up to the time at which the timer rings that needs no Python."""
    pause = 1.5 if number == signal.SIGSTOP else 3.3
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        process.send_signal(number)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(pause)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate("\n", timeout=30)
    assert (process.returncode, out) == (0, "None\n")


@pytest.mark.parametrize("stopped", [0.0, 50.0])
def test_only_the_time_in_which_the_process_ran_counts(stopped: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    idle = watch._Idle(0.5)
    found = []
    for passed in (0.5, 0.6, 0.5 + stopped, 2.0, 0.5):  # the fourth look is late, as on a busy host
        now += passed
        found.append(round(idle.seconds(100.0), 6))
    assert found == [0.5, 1.1, 1.6, 3.6, 4.1] if not stopped else [0.5, 1.1, 1.1, 3.1, 3.6]
    now += 0.5
    assert idle.seconds(now - 0.2) == pytest.approx(0.2)
    now += 0.5 + stopped
    assert 0 <= idle.seconds(now - 0.1) <= 0.1
    now += 0.5
    assert idle.seconds(now - 0.6) <= 0.6
