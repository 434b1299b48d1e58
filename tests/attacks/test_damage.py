"""Not one byte of a bundle can change without a refusal that says where."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import damage
import hostile
import pytest
import samples

from kernelbake import archive, bundle
from kernelbake.rules import Rule, ViolationsError

FILES = hostile.load()
SEED = 20_251_129
TENTH = 1 if os.environ.get("KERNELBAKE_LONG") else 10
"""`make test-long` runs the ten thousand flips and the thousand cuts whole."""


@pytest.fixture(scope="module")
def data() -> bytes:
    contents = samples.contents(3, keys_each=2, cubin_bytes=3000)
    members, _ = bundle._members(contents, 0)
    return b"".join(archive.pack(members, 0))


def _refusal(path, content: bytes) -> ViolationsError:
    path.write_bytes(content)
    with pytest.raises(ViolationsError) as refusal:
        bundle.read(path)
    return refusal.value


def test_flips(data, tmp_path):
    path = tmp_path / "bundle.tar"
    for position, damaged in damage.flips(data, 10_000 // TENTH, SEED):
        error = _refusal(path, damaged)
        assert all("`" in violation.place or "byte" in violation.place for violation in error.violations), (
            position,
            error,
        )


def test_cuts(data, tmp_path):
    path = tmp_path / "bundle.tar"
    for length, damaged in damage.cuts(data, 1_000 // TENTH, SEED):
        error = _refusal(path, damaged)
        assert {violation.rule for violation in error.violations} & {Rule.LENGTH, Rule.TRAILER}, (length, error)


def test_a_flip_is_blamed_on_its_member(data, tmp_path):
    """R026: header, document, code, padding and trailer, each named."""
    offset, seen = 0, set()
    path = tmp_path / "bundle.tar"
    while any(data[offset : offset + 512]):
        found = archive.parse(data[offset : offset + 512])
        places = [offset + 100, offset + 512, offset + 512 + found.size // 2]
        if found.size % 512:
            places.append(offset + 512 + found.size)  # the first byte of padding
        for place in places:
            error = _refusal(path, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert any(f"`{found.name}`" in violation.place for violation in error.violations), (
                found.name,
                place,
                error,
            )
            seen |= {violation.rule for violation in error.violations}
        offset += 512 + archive.padded(found.size)
    assert {Rule.HEADER_BYTES, Rule.DIGEST, Rule.PADDING, Rule.BUNDLE_DIGEST} <= seen
    for place in (offset, offset + 1023):
        error = _refusal(path, data[:place] + b"\1" + data[place + 1 :])
        assert {violation.rule for violation in error.violations} & {Rule.TRAILER, Rule.HEADER_BYTES}


def test_cut_at_every_tenth_and_lengthened(data, tmp_path):
    """R026."""
    for tenth in range(10):
        _refusal(tmp_path / "bundle.tar", data[: len(data) * tenth // 10])
    for more in (b"\0", bytes(512), bytes(1024), b"x" * 512, bytes(10_240)):
        error = _refusal(tmp_path / "bundle.tar", data + more)
        assert {violation.rule for violation in error.violations} & {Rule.LENGTH, Rule.TRAILER}


def test_two_damaged_members_are_both_named(data, tmp_path):
    position = data.index(b"\x7fELF") + 100
    second = data.index(b"\x7fELF", position) + 100
    damaged = bytearray(data)
    damaged[position] ^= 1
    damaged[second] ^= 1
    error = _refusal(tmp_path / "bundle.tar", bytes(damaged))
    assert len({violation.place for violation in error.violations if violation.rule is Rule.DIGEST}) == 2
    assert len(error.reasons) == len(error.violations)


_BOUNDED = """
import resource, sys, time
from pathlib import Path
from kernelbake import bundle
from kernelbake.rules import ViolationsError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
try:
    bundle.read(sys.argv[1])
except ViolationsError as error:
    seconds = time.process_time() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(seconds, grown * 1024, [int(v.rule) for v in error.violations][:3])
"""


@pytest.mark.parametrize(
    "name",
    [
        "10 GB claimed by the header",
        "10 GB claimed for the index",
        "10 GB claimed in the index",
        "a million members in the index",
        "more members than are allowed",
        "a sparse file of 1 GiB",
        "a sparse file of 3 GiB",
        "a gzip bomb",
        "a zip archive",
        "a deep list in plan.json",
        "a deep object in plan.json",
        "an open list in plan.json",
        "two million values in plan.json",
        "as many lists as fit in plan.json",
        "a deep list in index.json",
        "a hundred thousand names and one twice in plan.json",
        "plan: half a million faults",
        "a million members in the archive",
    ],
)
def test_refused_within_a_second_and_100_mb(name, tmp_path):
    """CPU time, so that a busy machine does not fail it; memory by the high-water mark of a fresh process."""
    path = tmp_path / "bundle.tar"
    if name == "a million members in the archive":
        head = hostile.sound_bytes()[:-1024]
        with path.open("wb") as file:
            file.write(head)
            file.write(archive.header("plan.json", 0, 0) * 1_000_000)
    else:
        FILES[name].make(path)
    done = subprocess.run([sys.executable, "-c", _BOUNDED, str(path)], capture_output=True, text=True, check=True)
    seconds, grown, *rules = done.stdout.split(maxsplit=2)
    assert rules
    assert float(seconds) < 1
    assert int(grown) < 100_000_000


def test_a_fifo_does_not_wait(tmp_path):
    FILES["a FIFO"].make(tmp_path / "pipe")
    start = time.monotonic()
    with pytest.raises(ViolationsError):
        bundle.read(tmp_path / "pipe")
    assert time.monotonic() - start < 5


def test_memory_of_this_process_is_measured_in_kilobytes():
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 10_000
