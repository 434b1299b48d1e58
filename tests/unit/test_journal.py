from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelbake.errors import LockedError
from kernelbake.journal import Journal, lock

HEADER = {"manifest": "m", "plan": "p", "fingerprint": "f"}


def _written(path: Path, *records: dict[str, object]) -> bytes:
    journal = Journal(path, HEADER)
    for record in records:
        journal.append(record)
    journal.close()
    return path.read_bytes()


def _records(path: Path, header: dict[str, str] = HEADER) -> tuple[list[dict[str, object]], str | None]:
    journal = Journal(path, header)
    journal.close()
    return journal.records, journal.restarted


def test_records_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _written(path, {"kind": "a", "text": "äß\n"}, {"kind": "b", "n": 1.5})
    assert _records(path) == ([{"kind": "a", "text": "äß\n"}, {"kind": "b", "n": 1.5}], None)


@pytest.mark.parametrize("name", ["manifest", "plan", "fingerprint"])
def test_another_header_starts_afresh_and_says_why(tmp_path: Path, name: str) -> None:
    path = tmp_path / "journal"
    _written(path, {"kind": "a"})
    assert _records(path, {**HEADER, name: "other"}) == ([], f"it was made for another {name}")
    assert _records(path, {**HEADER, name: "other"}) == ([], None), "the fresh journal has the new header"


def test_two_differences_are_both_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _written(path)
    assert _records(path, {"manifest": "x", "plan": "p", "fingerprint": "y"})[1] == (
        "it was made for another fingerprint, manifest"
    )


@given(data=st.data())
def test_any_cut_loses_the_torn_line_only(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("cut") / "journal"
    whole = _written(path, {"n": 1}, {"n": 2}, {"n": 3})
    lines = whole.splitlines(keepends=True)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = sum(1 for number in range(2, len(lines) + 1) if len(b"".join(lines[:number])) <= cut)
    records, _ = _records(path)
    assert [record["n"] for record in records] == [1, 2, 3][:kept]
    journal = Journal(path, HEADER)
    journal.append({"n": 9})
    journal.close()
    assert [record["n"] for record in _records(path)[0]] == [*[1, 2, 3][:kept], 9], "what follows a cut is readable"


def test_a_damaged_line_in_the_middle_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = _written(path, {"n": 1}, {"n": 2})
    path.write_bytes(whole.replace(b'{"n":1}', b'{"n":7}'))
    assert _records(path) == ([], "line 2 of the journal is damaged")


def test_every_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = _written(path, {"n": 1}, {"n": 2}, {"n": 3})
    last = len(whole[:-1].rpartition(b"\n")[0])  # without its end the line before is part of the last one
    for place in range(len(whole)):
        for byte in {whole[place] ^ 1, whole[place] ^ 0x20, ord("\n"), ord("\r"), 0} - {whole[place]}:
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            records, restarted = _records(path)
            if place < last:
                assert (records, bool(restarted)) == ([], True), (place, byte)
            else:
                assert [record["n"] for record in records] in ([1, 2], [1], []), (place, byte)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:2], *lines[3:]],
        lambda lines: lines[1:],
        lambda lines: [*lines[:2], lines[1], *lines[2:]],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines[:2], b"\n", *lines[2:]],
        lambda lines: [*lines, lines[1], lines[2]],
    ],
    ids=["lost", "headless", "repeated", "exchanged", "empty", "old ones behind"],
)
def test_lines_that_are_whole_and_out_of_place_start_afresh(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    path = tmp_path / "journal"
    whole = _written(path, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 4})
    path.write_bytes(b"".join(change(whole.splitlines(keepends=True))))
    records, restarted = _records(path)
    assert records == []
    assert restarted is not None
    assert restarted.endswith("of the journal is damaged")


def test_infinity_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", HEADER)
    with pytest.raises(ValueError, match="JSON"):
        journal.append({"time": float("inf")})
    journal.close()


def test_a_record_is_on_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    journal = Journal(path, HEADER)
    synced.clear()
    journal.append({"n": 1})
    assert len(synced) == 1
    assert synced[0].endswith(b'{"n":1}\n')
    journal.append({"n": 2}, durable=False)
    assert len(synced) == 1
    journal.close()


def test_a_second_holder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock(path, "build x.tar"):
        with (
            pytest.raises(LockedError, match="build x.tar: another process holds its lock") as caught,
            lock(path, "build x.tar"),
        ):
            pytest.fail("both hold it")
        assert caught.value.exit_code == 7
    with lock(path, "build x.tar"):
        pass


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = f"""
        import time
        from pathlib import Path
        from kernelbake.journal import lock
        with lock(Path({str(path)!r}), "it"):
            print("held", flush=True)
            time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(LockedError), lock(path, "it"):
            pytest.fail("both hold it")
        child.send_signal(signal.SIGKILL)
        child.wait()
    with lock(path, "it"):
        pass
