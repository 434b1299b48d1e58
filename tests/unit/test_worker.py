"""Candidates that hang, die or lie, each in a real worker process, under a real supervisor and journal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import scripted

from kernelbake.errors import BuildError
from kernelbake.outcome import Reason, Rejected
from kernelbake.plan import Launch, Plan
from kernelbake.progress import Event
from kernelbake.state import State
from kernelbake.supervise import Supervision, Supervisor
from kernelbake.worker import Child, ChildDiedError

GOOD = ["time=2.0", "time=1.0", "time=3.0"]
SUPPORT = Path(scripted.__file__).parent
ROOT = Path(__file__).parents[2]


class Measured:
    """One build's measuring of scripted candidates."""

    def __init__(self, folder: Path, launches: Sequence[Launch], *, cases: int = 1, **policy: Any) -> None:
        self.plan: Plan = scripted.plan(launches, cases)
        self.state = State(self.plan)
        self.records: list[Mapping[str, Any]] = []
        self.events: list[Event] = []
        planned = folder / "plan.json"
        planned.write_text(json.dumps(self.plan.to_json()))
        measure = scripted.policy(**policy)
        job = {
            "engine": scripted.ENGINE,
            "plan": str(planned),
            "section": {},
            "policy": measure.to_json(),
        }
        environment = {**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}"}
        supervision = Supervision(job, environment, folder / "log", measure.time_limit_s)
        self.supervisor = Supervisor(supervision, self.state, self._write, "boot", self.events.append)

    def _write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        self.state.add(record)

    def run(self) -> Measured:
        self.supervisor.run()
        return self

    def winner(self, name: str = "k") -> int:
        [place] = [place for place, launch in enumerate(self.plan.launches) if launch.kernel.qualname == name]
        winner: int = self.state.decided[place]["winner"]
        return winner

    def fates(self, place: int = 0) -> dict[int, Rejected]:
        return self.state.fates(place)


@pytest.mark.parametrize(
    ("script", "reason", "detail", "workers"),
    [
        ("hang", Reason.TIMEOUT, "it took longer than 1 s", 2),
        ("hang-later", Reason.TIMEOUT, "it took longer than 1 s", 2),
        ("abort", Reason.CRASH, "the worker ended with signal SIGABRT", 2),
        ("segfault", Reason.CRASH, "the worker ended with signal SIGSEGV", 2),
        ("exit", Reason.CRASH, "the worker ended with exit status 3", 2),
        ("raise", Reason.CRASH, "RuntimeError: PassManager::run failed", 1),
        ("memory", Reason.MEMORY, "OutOfMemoryError: CUDA out of memory", 1),
        ("resources", Reason.SHARED_MEMORY, "OutOfResources: out of resource: shared memory, Required: 200000", 1),
        ("wrong", Reason.WRONG, "`out` is off by 5.00e-01", 1),
        ("gaps", Reason.WRONG, "`out` is off by 1.00e+00", 1),
        ("stray", Reason.WRONG, "it writes outside of its arguments", 1),
        ("random", Reason.UNREPEATABLE, "`out` is off by 5.00e-01", 1),
        ("noise", Reason.UNREPEATABLE, "two runs on equal inputs differ by 1.00e-04", 1),
        ("noise-later", Reason.UNREPEATABLE, "runs on equal inputs differ by 1.00e-04 of the norm, after it was", 1),
        ("flaky", Reason.UNREPEATABLE, "`out` is off by 5.00e-01, after it was timed", 1),
        ("inf", Reason.WRONG, "it took `inf` ms; wanted a finite time above 0", 1),
        ("nan", Reason.WRONG, "it took `nan` ms; wanted a finite time above 0", 1),
        ("zero", Reason.WRONG, "it took `0.0` ms; wanted a finite time above 0", 1),
        ("negative", Reason.WRONG, "it took `-1.0` ms; wanted a finite time above 0", 1),
        ("list", Reason.WRONG, "it took `[1.0, 2.0]` ms; wanted a finite time above 0", 1),
        ("nothing", Reason.WRONG, "its samples are `[]`; wanted a list of times in ms", 1),
    ],
)
def test_a_bad_candidate_costs_itself_only(
    tmp_path: Path, script: str, reason: Reason, detail: str, workers: int
) -> None:
    launch = scripted.launch("k", [f"{script}+time=0.1", *GOOD])
    measured = Measured(tmp_path, [launch], time_limit_s=1.0 if "hang" in script else 20.0).run()
    assert measured.winner() == 2
    [(candidate, fate)] = measured.fates().items()
    assert (candidate, fate.reason) == (0, reason)
    assert fate.detail.startswith(detail)
    assert measured.supervisor.workers == workers
    [event] = [event for event in measured.events if event.kind == "rejected"]
    assert event.data["outcome"] == reason.value
    assert "scripted_kernels.k" in event.message


def test_the_bad_are_not_blamed_for_each_other(tmp_path: Path) -> None:
    scripts = ["time=4.0", "segfault", "time=2.0", "abort", "raise", "time=1.0", "wrong"]
    measured = Measured(tmp_path, [scripted.launch("k", scripts)]).run()
    assert measured.winner() == 5
    assert set(measured.fates()) == {1, 3, 4, 6}
    assert measured.supervisor.workers == 3


def test_fast_on_the_first_call_only_does_not_win(tmp_path: Path) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", ["first+time=5.0", *GOOD])]).run()
    assert measured.winner() == 2
    assert measured.fates() == {}


def test_a_person_stops_the_build(tmp_path: Path) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", ["interrupt", *GOOD])])
    with pytest.raises(KeyboardInterrupt):
        measured.run()
    assert measured.state.decided == {}


def test_later_launches_go_on_after_a_crash(tmp_path: Path) -> None:
    launches = [
        scripted.launch(name, ["time=3.0", "time=1.0", bad]) for name, bad in [("a", "abort"), ("b", "segfault")]
    ]
    launches.append(scripted.launch("c", ["time=1.0", "time=3.0"]))
    measured = Measured(tmp_path, launches).run()
    assert [measured.winner(name) for name in "abc"] == [1, 1, 0]
    decided = [record["launch"] for record in measured.records if record["kind"] == "decided"]
    assert decided == [0, 1, 2], "each is decided once"


def test_equal_code_is_run_once_and_shares_its_fate(tmp_path: Path) -> None:
    scripts = ["same=x+time=1.0", "same=x+time=1.0", "same=y+wrong", "same=y+wrong", "time=3.0"]
    measured = Measured(tmp_path, [scripted.launch("k", scripts)]).run()
    started = [record["candidate"] for record in measured.records if record["kind"] == "start"]
    assert started == [0, 2, 4]
    assert set(measured.fates()) == {2, 3}
    assert measured.state.decided[0]["candidates"]["1"]["same_code_as"] == 0


def test_every_start_is_written_before_it_runs(tmp_path: Path) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", ["abort", *GOOD])]).run()
    kinds = [(record["kind"], record.get("candidate")) for record in measured.records]
    assert kinds[:3] == [("start", 0), ("outcome", 0), ("start", 2)]


def test_all_rejected_names_every_reason(tmp_path: Path) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", ["inf", "nan", "raise", "resources"])])
    with pytest.raises(BuildError, match=r"scripted_kernels\.k n=1 .*: all 4 candidates are rejected") as caught:
        measured.run()
    assert caught.value.exit_code == 6
    assert len(caught.value.reasons) == 4
    assert "out-of-shared-memory: OutOfResources" in caught.value.reasons[3]


def test_too_much_shared_memory_everywhere_says_need_and_limit(tmp_path: Path) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", ["resources", "resources+time=2"])])
    with pytest.raises(BuildError, match="needs 200000 bytes of shared memory; the GPU has 101376"):
        measured.run()


def test_two_answers_without_a_majority_are_not_guessed_between(tmp_path: Path) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", ["time=1.0", "wrong+time=0.5"])])
    with pytest.raises(BuildError, match="2 candidates give 2 different results") as caught:
        measured.run()
    assert len(caught.value.reasons) == 2


def test_an_unrepeatable_kernel_is_listed_when_nothing_else_is_there(tmp_path: Path) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", ["noise+time=2.0", "noise+time=1.0"])]).run()
    assert measured.winner() == 1
    assert measured.state.decided[0]["candidates"]["1"]["repeatable"] is False


@pytest.mark.parametrize(
    ("scripts", "winner", "repeatable"),
    [
        (["noise-first+time=1.0"], 0, False),
        (["noise-later+time=1.0"], 0, False),
        (["noise-first+time=2.0", "noise-first+time=1.0"], 1, False),
        (["noise-later+time=2.0", "noise-later+time=1.0"], 0, False),
        (["noise+time=2.0", "noise-later+time=1.0"], 1, False),
        (["noise-later+time=1.0", "time=2.0"], 1, True),
    ],
)
def test_who_repeats_itself_by_chance_only_does_not_end_the_build(
    tmp_path: Path, scripts: list[str], winner: int, repeatable: bool
) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", scripts)]).run()
    assert measured.winner() == winner
    assert measured.state.decided[0]["candidates"][str(winner)]["repeatable"] is repeatable


def test_an_untuned_kernel_is_checked_too(tmp_path: Path) -> None:
    measured = Measured(tmp_path, [scripted.launch("k", ["random"], key=None)])
    with pytest.raises(BuildError, match="its candidate is rejected"):
        measured.run()


def test_what_was_known_before_is_not_tried_again(tmp_path: Path) -> None:
    first = Measured(tmp_path, [scripted.launch("k", ["hang", *GOOD])], time_limit_s=1.0).run()
    again = Measured(tmp_path, [scripted.launch("k", ["hang", *GOOD])], time_limit_s=1.0)
    for record in first.records:
        if record["kind"] not in ("decided", "case"):
            again.state.add(record)
    assert again.run().winner() == 2
    assert again.supervisor.workers == 1
    assert 0 not in {record["candidate"] for record in again.records if record["kind"] == "start"}


def test_a_candidate_that_took_the_machine_down_gets_no_second_chance() -> None:
    state = State(scripted.plan([scripted.launch("k", ["a", "b"])]))
    state.add({"kind": "start", "launch": 0, "candidate": 0, "boot": "earlier"})
    state.add({"kind": "outcome", "launch": 0, "candidate": 0, "data": {"outcome": "ok"}})
    state.add({"kind": "start", "launch": 0, "candidate": 1, "boot": "earlier"})
    assert list(state.fallen("earlier")) == [], "only the builder was killed"
    [record] = state.fallen("now")
    assert (record["candidate"], record["data"]["outcome"]) == (1, "crash")


# ---------------------------------------------------------------------------------------------- processes


def _child(tmp_path: Path, body: str) -> Child:
    program = (
        "import sys, os, time\nfrom kernelbake.worker import Channel\nchannel = Channel(sys.argv)\n"
        + textwrap.dedent(body)
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return Child(["-c", program], environment=environment, log=tmp_path / "log")


def test_lines_go_both_ways_and_prints_do_not_disturb(tmp_path: Path) -> None:
    child = _child(tmp_path, "print('noise')\nchannel.send({'got': channel.receive()})")
    child.send({"n": 1})
    assert child.receive(20) == {"got": {"n": 1}}
    with pytest.raises(ChildDiedError, match="exit status 0"):
        child.receive(20)
    child.close()
    assert child.log_tail() == ("noise",)


def test_a_line_sent_before_death_is_read(tmp_path: Path) -> None:
    child = _child(tmp_path, "channel.send({'n': 1})\nos.kill(os.getpid(), 6)")
    assert child.receive(20) == {"n": 1}
    with pytest.raises(ChildDiedError, match="signal SIGABRT"):
        child.receive(20)
    child.close()


def test_no_answer_in_time_is_none(tmp_path: Path) -> None:
    child = _child(tmp_path, "channel.receive()")
    assert child.receive(0.05) is None
    child.close()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _alive(pid)


def test_killing_a_child_ends_what_it_started(tmp_path: Path) -> None:
    child = _child(
        tmp_path,
        """
        import subprocess
        grandchild = subprocess.Popen(["sleep", "600"])
        channel.send({"pid": grandchild.pid})
        time.sleep(600)
        """,
    )
    message = child.receive(20)
    assert message is not None
    child.kill()
    assert _gone(message["pid"])
    child.close()


def test_a_worker_ends_when_its_builder_is_killed(tmp_path: Path) -> None:
    program = f"""
        import os, time
        from pathlib import Path
        from kernelbake.worker import Child
        body = "import sys, time; from kernelbake.worker import Channel; c = Channel(sys.argv)"
        body += "; c.send({{'up': 1}}); time.sleep(600)"
        child = Child(["-c", body], environment=os.environ, log=Path({str(tmp_path / "log")!r}))
        assert child.receive(20)
        print(child.pid, flush=True)
        time.sleep(600)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    builder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=environment
    )
    assert builder.stdout is not None
    with builder, builder.stdout:
        pid = int(builder.stdout.readline())
        assert _alive(pid)
        builder.send_signal(signal.SIGKILL)
        builder.wait()
    assert _gone(pid)
