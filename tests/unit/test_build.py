"""The build as a whole, with scripted candidates: results, resume, locks, disks, older bundles."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripted

from kernelbake import build, bundle, digest, journal
from kernelbake.build import Options
from kernelbake.bundle import Bundle
from kernelbake.errors import BuildError, InputError, LockedError
from kernelbake.plan import Plan
from kernelbake.progress import BuildResult, Event

SUPPORT = Path(scripted.__file__).parent
ROOT = Path(__file__).parents[2]

PLAN = scripted.plan(
    [
        scripted.launch("tuned", ["time=2.0", "time=1.0", "time=1.005", "wrong+time=0.1", "raise"], cases=["size=1"]),
        scripted.launch("other", ["time=1.0", "time=3.0", "nan"], cases=["size=1", "size=2"]),
        scripted.launch("single", ["time=1.0"], key=None, cases=["size=2"]),
    ],
    cases=2,
)


@pytest.fixture(autouse=True)
def _path_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT}{os.pathsep}{ROOT}")


def _options(plan: Plan = PLAN, **changes: Any) -> Options:
    return Options(engine=scripted.ENGINE, plan=plan, fingerprint=scripted.fingerprint(plan), **changes)


def _build(output: Path, plan: Plan = PLAN, events: list[Event] | None = None, **policy: Any) -> BuildResult:
    collected: list[Event] = [] if events is None else events
    return build.run(scripted.manifest(**policy), output, _options(plan), collected.append)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The choices of a build that nothing disturbed."""
    output = tmp_path_factory.mktemp("unbroken") / "bundle.tar"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{SUPPORT}{os.pathsep}{ROOT}")
        _build(output)
    return _choices(bundle.read(output))


def _choices(held: Bundle) -> bytes:
    return digest.canonical_json([choice.to_json() for choice in held.choices])


def test_a_build_from_start_to_end(tmp_path: Path) -> None:
    events: list[Event] = []
    output = tmp_path / "bundle.tar"
    result = _build(output, events=events)
    held = bundle.read(output)
    assert held.digest == result.digest
    assert held.made == result.made == "interpreted"
    winners = {choice.kernel.qualname: dict(choice.winner.meta)["DO"] for choice in held.choices}
    assert winners == {"tuned": "time=1.0", "other": "time=1.0", "single": "time=1.0"}
    assert result.rejected == {"wrong-result": 2, "crash": 1}
    assert (result.keys, result.candidates, result.entries) == (2, 9, 0)
    assert set(result.seconds) == {"plan", "open", "measure", "pack", "self-check"}
    assert [event.phase for event in events if event.kind == "phase"] == ["plan", "measure", "pack", "self-check"]
    assert [event.done for event in events if event.kind == "progress" and event.phase == "measure"] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.tar"], "nothing else is left"


def test_the_record_says_what_became_of_everyone(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar"
    _build(output)
    record = bundle.read(output).record
    fates = {(line["kernel"], dict(line["config"]["meta"])["DO"]): line for line in record}
    assert len(fates) == len(record) == 9
    wrong = fates["scripted_kernels:tuned", "wrong+time=0.1"]
    assert (wrong["outcome"], wrong["error"]) == ("wrong-result", 0.5)
    assert fates["scripted_kernels:tuned", "raise"]["detail"] == "RuntimeError: PassManager::run failed"
    assert fates["scripted_kernels:other", "nan"]["detail"] == "it took `nan` ms; wanted a finite time above 0"
    good = fates["scripted_kernels:tuned", "time=1.005"]
    assert (good["outcome"], good["median_ms"], good["error"], good["repeatable"]) == ("ok", 1.005, 0.0, True)
    assert set(good["samples_ms"]) == {1.005}


def test_a_tie_is_said_to_be_one(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar"
    _build(output)
    times = {choice.kernel.qualname: choice.times for choice in bundle.read(output).choices}
    assert (times["tuned"]["tied"], times["tuned"]["told_apart"], times["tuned"]["margin"]) == (2, False, 0.005)
    assert (times["other"]["tied"], times["other"]["told_apart"], times["other"]["runner_up_ms"]) == (1, True, 3.0)
    assert "runner_up" not in times["single"]


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (_build(tmp_path / name).digest for name in ("a.tar", "b.tar"))
    assert first == second
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_shuffled_candidates_give_the_same_winners(tmp_path: Path) -> None:
    scripts = ["time=1.0", "time=1.004", "time=1.002", "time=2.0", "time=1.008"]

    def winner(order: list[int], name: str) -> str:
        launch = scripted.launch("k", scripts)
        [variant] = launch.variants
        shuffled = dataclasses.replace(
            launch,
            candidates=tuple(launch.candidates[place] for place in order),
            variants=(
                dataclasses.replace(variant, specializations=tuple(variant.specializations[place] for place in order)),
            ),
        )
        _build(tmp_path / name, scripted.plan([shuffled]))
        [choice] = bundle.read(tmp_path / name).choices
        return str(choice.winner)

    assert winner([0, 1, 2, 3, 4], "a.tar") == winner([4, 2, 3, 0, 1], "b.tar") == winner([1, 0, 4, 3, 2], "c.tar")


def test_all_rejected_makes_no_bundle(tmp_path: Path) -> None:
    plan = scripted.plan([scripted.launch("k", ["inf", "inf+time=2"])])
    with pytest.raises(BuildError, match="all 2 candidates are rejected") as caught:
        _build(tmp_path / "bundle.tar", plan)
    assert caught.value.exit_code == 6
    assert not (tmp_path / "bundle.tar").exists()


def test_the_interpreter_compiles_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the interpreter compiles nothing"):
        build.build(scripted.manifest(), tmp_path / "bundle.tar", compile_only=True)


# ---------------------------------------------------------------------------------------------- interrupted builds


class _StopError(Exception):
    pass


def _stop_after(number: int) -> Callable[[Event], None]:
    """Ends a build from its own callback when so many launches are decided."""

    def on_event(event: Event) -> None:
        if event.kind == "progress" and event.phase == "measure" and event.done == number:
            raise _StopError

    return on_event


@pytest.mark.parametrize("number", [1, 2])
def test_a_stopped_build_goes_on(tmp_path: Path, number: int, unbroken: bytes) -> None:
    output = tmp_path / "bundle.tar"
    with pytest.raises(_StopError):
        build.run(scripted.manifest(), output, _options(), _stop_after(number))
    assert not output.exists()
    events: list[Event] = []
    _build(output, events=events)
    assert any("going on from a journal" in event.message for event in events)
    assert next(event.done for event in events if event.kind == "progress" and event.phase == "measure") == number + 1
    assert _choices(bundle.read(output)) == unbroken


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda: (scripted.manifest(seed=1), _options()), "manifest"),
        (lambda: (scripted.manifest(tie_threshold=0.02), _options()), "manifest"),
        (
            lambda: (
                scripted.manifest(),
                dataclasses.replace(_options(), fingerprint=scripted.fingerprint(PLAN, **{"triton.version": "3.8.0"})),
            ),
            "fingerprint",
        ),
    ],
)
def test_something_else_starts_afresh_and_says_why(
    tmp_path: Path, changed: Callable[[], tuple[Any, Options]], why: str
) -> None:
    output = tmp_path / "bundle.tar"
    with pytest.raises(_StopError):
        build.run(scripted.manifest(), output, _options(), _stop_after(1))
    events: list[Event] = []
    manifest, options = changed()
    build.run(manifest, output, options, events.append)
    notes = [event.message for event in events if event.kind == "note"]
    assert notes == [f"the journal of an earlier build is not used: it was made for another {why}"]
    assert [event.done for event in events if event.kind == "progress" and event.phase == "measure"] == [1, 2, 3]


def test_two_builds_of_one_output_are_kept_apart(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar"
    refused: list[LockedError] = []

    def on_event(event: Event) -> None:
        if event.kind == "phase" and event.phase == "measure":
            with pytest.raises(LockedError, match="another process holds its lock") as caught:
                _build(output)
            refused.append(caught.value)

    build.run(scripted.manifest(), output, _options(), on_event)
    assert [error.exit_code for error in refused] == [7]
    assert bundle.read(output).made == "interpreted"


_KILLED = """
import sys
import scripted
from pathlib import Path
from kernelbake import build
from kernelbake.build import Options
from test_build import PLAN
plan = PLAN
options = Options(engine=scripted.ENGINE, plan=plan, fingerprint=scripted.fingerprint(plan))
build.run(scripted.manifest(), Path(sys.argv[1]), options, lambda event: None)
"""


@pytest.mark.parametrize("after_s", [1.0, 2.0])
def test_a_killed_builder_goes_on(tmp_path: Path, after_s: float, unbroken: bytes) -> None:
    output = tmp_path / "bundle.tar"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT), str(Path(__file__).parent)])}
    victim = subprocess.Popen([sys.executable, "-c", _KILLED, str(output)], env=environment)
    time.sleep(after_s)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    if output.exists():
        bundle.read(output)
    _build(output)
    assert _choices(bundle.read(output)) == unbroken


# ---------------------------------------------------------------------------------------------- disks and older bundles


@pytest.mark.parametrize("at", [1, 9, 22])
def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, unbroken: bytes) -> None:
    output = tmp_path / "bundle.tar"
    output.write_bytes(before := b"an older bundle")
    fsync, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="No space left on device") as caught:
            _build(output)
    assert caught.value.exit_code == 2
    assert output.read_bytes() == before, "the older bundle is untouched"
    _build(output)
    assert _choices(bundle.read(output)) == unbroken


def test_a_failed_build_leaves_the_older_bundle(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar"
    output.write_bytes(before := b"an older bundle")
    with pytest.raises(BuildError):
        _build(output, scripted.plan([scripted.launch("k", ["random"], key=None)]))
    assert output.read_bytes() == before


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written") as caught:
        _build(tmp_path / "no" / "bundle.tar")
    assert caught.value.hint == "make the folder first"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    output = tmp_path / "bundle.tar"
    opened = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(InputError, match="cannot be written") as caught:
        _build(output)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_what_changes_the_compilers_code_is_said(tmp_path: Path) -> None:
    changed = scripted.fingerprint(PLAN, **{"build.environment": {"DISABLE_PTXAS_OPT": "true"}})
    events: list[Event] = []
    options = dataclasses.replace(_options(), fingerprint=changed)
    build.run(scripted.manifest(), tmp_path / "bundle.tar", options, events.append)
    notes = [event.message for event in events if event.kind == "note"]
    assert notes == ["`DISABLE_PTXAS_OPT=true` asks the compiler for other code"]


def test_a_bad_time_of_writing_is_refused_before_anything_takes_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    events: list[Event] = []
    with pytest.raises(InputError, match="SOURCE_DATE_EPOCH: `yesterday`"):
        _build(tmp_path / "bundle.tar", events=events)
    assert events == []


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "x", "LOCAL_WORLD_SIZE": ""}, {"WORLD_SIZE": "2", "RANK": "-1"}])
def test_variables_of_torchrun_that_say_nothing_are_all_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BuildError) as caught:
        _build(tmp_path / "bundle.tar")
    wrong = [name for name, value in variables.items() if not value.isdecimal()]
    assert sorted(reason.partition(":")[0] for reason in caught.value.reasons) == sorted(wrong)


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (lambda work: work.symlink_to(work.parent / "elsewhere"), "a link"),
        (lambda work: work.symlink_to("nowhere"), "a link"),
        (lambda work: work.write_text("precious"), "no folder"),
        (os.mkfifo, "no folder"),
        (lambda work: work.mkdir(0o777), r"made by user \d+"),
    ],
)
def test_what_another_left_where_the_journal_belongs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], object], what: str
) -> None:
    """In a folder that all may write to, code could be planted under the name that a build's folder will have."""
    (tmp_path / "elsewhere").mkdir()
    output = tmp_path / "bundle.tar"
    plant(tmp_path / "bundle.tar.work")
    with monkeypatch.context() as patched:
        if what.startswith("made by"):
            lstat = Path.lstat

            def foreign(path: Path) -> os.stat_result:
                found = lstat(path)
                return os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))

            patched.setattr(Path, "lstat", foreign)
        with pytest.raises(InputError, match=f"bundle.tar.work` is {what}; wanted"):
            _build(output)
    assert not output.exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_nobody_else_can_put_something_beside_the_journal(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with pytest.raises(_StopError):
            build.run(scripted.manifest(), tmp_path / "bundle.tar", _options(), _stop_after(1))
    finally:
        os.umask(before)
    assert (tmp_path / "bundle.tar.work").stat().st_mode & 0o777 == 0o700


def test_a_bundle_that_lacks_something_is_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelbake import packing

    output = tmp_path / "bundle.tar"
    output.write_bytes(before := b"an older bundle")
    real = packing.contents

    def forgetful(*arguments: Any) -> bundle.Contents:
        found = real(*arguments)
        return dataclasses.replace(found, choices=found.choices[1:])

    monkeypatch.setattr(packing, "contents", forgetful)
    with pytest.raises(BuildError, match="contradict each other"):
        _build(output)
    assert output.read_bytes() == before


def test_the_journal_of_a_build_is_strict_json(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar"
    plan = scripted.plan([scripted.launch("k", ["nan", "gaps", "time=1.0", "time=2.0"])])
    with pytest.raises(_StopError):
        build.run(scripted.manifest(), output, _options(plan), _stop_after(1))
    lines = (tmp_path / "bundle.tar.work" / "journal").read_text().splitlines()

    def refuse(text: str) -> None:
        pytest.fail(f"{text} is no JSON")

    for line in lines:
        json.loads(line.partition(" ")[2], parse_constant=refuse)
    assert any('"outcome":"wrong-result"' in line for line in lines)
    held = journal.Journal(tmp_path / "bundle.tar.work" / "journal", {})
    assert held.restarted is not None
    held.close()
