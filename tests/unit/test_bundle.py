"""Bundles written and read: what goes in comes out, equal contents give equal bytes, a file is whole or absent."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import samples

from kernelbake import archive, atomic, bundle, digest, plan, verify
from kernelbake.errors import BuildError, BundleError, ExitCode, InputError
from kernelbake.rules import Rule, ViolationsError

KINDS = [
    {},
    {"made": "compiled-only"},
    {"made": "interpreted"},
    {"launchers": True},
    {"profile": "rtx-pro-6000-blackwell"},
    {"profile": "b200", "num_kernels": 5, "keys_each": 3},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_goes_in_comes_out(kind, tmp_path):
    contents = samples.contents(**kind)
    path = tmp_path / "bundle.tar"
    identity = bundle.write(path, contents)
    held = bundle.read(path)
    assert held.digest == identity
    assert digest.is_digest(identity)
    assert held.name == contents.name
    assert held.made == contents.made
    assert held.manifest_text == contents.manifest_text
    assert held.manifest_resolved == contents.manifest_resolved
    assert held.fingerprint == contents.fingerprint
    assert held.plan == contents.plan
    assert sorted(held.choices, key=lambda c: c.id) == sorted(contents.choices, key=lambda c: c.id)
    assert held.record == contents.record
    assert dict(held.entries) == dict(contents.entries)
    assert held.libs == contents.libs
    assert held.size_bytes == path.stat().st_size
    assert held.header["counts"]["entries"] == len(contents.entries)
    assert bundle.read_header(path) == held.header
    assert all(held.entries[name].digest == name for name in held.entries)
    found = plan.coverage(held.plan, held.inventory())
    assert found.complete == (contents.made != "compiled-only" or bool(contents.choices))


def test_an_entrys_digest_covers_all_of_it():
    entry = next(iter(samples.contents().entries.values()))
    others = [
        dataclasses.replace(entry, binary=entry.binary + b"\0"),
        dataclasses.replace(entry, metadata={**entry.metadata, "shared": 0}),
        dataclasses.replace(entry, kernel=samples.Kernel("other", "kernel")),
        dataclasses.replace(entry, specialization=samples.specialization(256, 4, True)),
        dataclasses.replace(entry, launcher="sha256:" + "0" * 64),
    ]
    assert len({entry.digest, *(other.digest for other in others)}) == 6


def test_the_same_contents_give_the_same_bytes(tmp_path):
    """From any folder, in any order, at any time of day."""
    contents = samples.contents(3, launchers=True)
    first, second = tmp_path / "bundle.tar", tmp_path / "elsewhere" / "other.tar"
    second.parent.mkdir()
    shuffled = samples.changed(
        contents,
        choices=contents.choices[::-1],
        entries=dict(reversed(contents.entries.items())),
        manifest_resolved=dict(reversed(contents.manifest_resolved.items())),
    )
    assert bundle.write(first, contents) == bundle.write(second, shuffled)
    assert first.read_bytes() == second.read_bytes()
    assert str(tmp_path).encode() not in first.read_bytes()


def test_source_date_epoch_sets_times_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "bundle.tar"
    plain = bundle.write(path, samples.contents())
    with tarfile.open(path) as file:
        assert {member.mtime for member in file} == {0}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert bundle.write(path, samples.contents()) == plain
    with tarfile.open(path) as file:
        assert {member.mtime for member in file} == {1_700_000_000}
    assert bundle.read(path).header["time"] == 1_700_000_000


@pytest.mark.parametrize("text", ["", "now", "-1", "1.5", str(8**11), "١", "1" * 5000])
def test_a_bad_source_date_epoch(tmp_path, monkeypatch, text):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with pytest.raises(InputError, match="SOURCE_DATE_EPOCH: .*; wanted seconds since 1970"):
        bundle.write(tmp_path / "bundle.tar", samples.contents())
    assert os.listdir(tmp_path) == []


def test_tar_reads_it_too(tmp_path):
    """The archive is what Python's own tarfile would make of the same members."""
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents(launchers=True))
    data = path.read_bytes()
    with tarfile.open(path) as file:
        members = file.getmembers()
        assert all(member.isreg() and member.mode == 0o644 and member.uid == member.gid == 0 for member in members)
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size = member.size
            assert archive.header(member.name, member.size, 0) == info.tobuf(tarfile.USTAR_FORMAT)
            assert archive.header(member.name, member.size, 0) == data[member.offset : member.offset + 512]
    names = [member.name for member in members]
    assert names[:2] == ["bundle.json", "index.json"]
    assert names[2:] == sorted(names[2:])


def test_contents_that_contradict_each_other_are_not_written(tmp_path):
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents())
    before = path.read_bytes()
    wrong = samples.changed(samples.contents(), choices=samples.contents().choices[1:], line_info=True)
    with pytest.raises(BuildError, match="its contents contradict each other") as refusal:
        bundle.write(path, wrong)
    assert len(refusal.value.reasons) > 1
    assert isinstance(refusal.value.__cause__, ViolationsError)
    found = {violation.rule for violation in refusal.value.__cause__.violations}
    assert found == {Rule.ENTRY_CHOICES, Rule.PLANNED_CHOSEN, Rule.PROFILE}
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["bundle.tar"]


def test_an_entry_for_what_is_not_planned_is_not_written(tmp_path):
    contents = samples.contents()
    first = contents.choices[0]
    entries = {**first.entries, samples.specialization(1024, 4, True).token: next(iter(contents.entries))}
    choices = (dataclasses.replace(first, entries=entries), *contents.choices[1:])
    with pytest.raises(BuildError, match="1 entry for what the plan does not launch"):
        bundle.write(tmp_path / "bundle.tar", samples.changed(contents, choices=choices))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_never_gets_into_a_bundle(tmp_path, value):
    """R075: a time that is no number stops the writer."""
    record = ({**samples.contents().record[0], "median_ms": value},)
    with pytest.raises(ValueError, match="not JSON compliant"):
        bundle.write(tmp_path / "bundle.tar", samples.changed(samples.contents(), record=record))
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------------------------------- reading


def test_a_link_to_a_bundle_is_followed(tmp_path):
    target, link = tmp_path / "bundle.tar", tmp_path / "link.tar"
    bundle.write(target, samples.contents())
    link.symlink_to(target)
    assert bundle.read(link).digest == bundle.read(target).digest


def test_a_missing_file_is_an_error_of_the_input(tmp_path):
    for call in (bundle.read, bundle.read_header):
        with pytest.raises(InputError, match="No such file") as refusal:
            call(tmp_path / "none.tar")
        assert refusal.value.exit_code == ExitCode.INPUT
    with pytest.raises(InputError, match="cannot be opened"):
        bundle.read(tmp_path / ("a" * 300))
    with pytest.raises(InputError, match="cannot be opened"):
        bundle.read("a\0b")


def test_a_bundle_outlives_its_file(tmp_path):
    """What was read stays what it was, whatever happens to the file: replaced, overwritten in place, cut, removed."""
    path = tmp_path / "bundle.tar"
    contents = samples.contents()
    bundle.write(path, contents)
    held = bundle.read(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * 4096)
    os.truncate(path, 512)
    path.unlink()
    assert dict(held.entries) == dict(contents.entries)
    assert held.record == contents.record


def test_nothing_is_unpacked(tmp_path, monkeypatch):
    """R084, R025: a bundle lives in memory, so no path is predictable and no temporary folder can be too small."""
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents())
    canary = tmp_path / "canary"
    canary.mkdir()
    for name in ("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HOME"):
        monkeypatch.setenv(name, str(canary))
    before = sorted(tmp_path.rglob("*"))
    held = bundle.read(path)
    assert [held.entries[name].binary for name in held.entries]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4/80GB (MIG)", "../../evil", "a  b ", "/etc/passwd", "GPU\n\0\u00e9"])
def test_no_path_is_built_from_a_devices_name(name, tmp_path):
    """R018: a device's name is a text that is compared, and nothing else."""
    base = samples.contents()
    profile = {**base.plan.profile, "name": name}
    facts = samples.fingerprint_of(samples.profiles.DeviceProfile.from_json(profile), list(base.plan.kernels.values()))
    resolved = {**base.manifest_resolved, "gpu": profile}
    plan_ = dataclasses.replace(base.plan, profile=profile)
    contents = samples.changed(base, plan=plan_, fingerprint=facts, manifest_resolved=resolved)
    bundle.write(tmp_path / "bundle.tar", contents)
    assert os.listdir(tmp_path) == ["bundle.tar"]
    held = bundle.read(tmp_path / "bundle.tar")
    assert held.fingerprint["gpu.device"] == name
    with tarfile.open(tmp_path / "bundle.tar") as file:
        assert not any(name in member for member in file.getnames())


def test_the_header_that_was_read_is_the_one_that_was_checked(tmp_path, monkeypatch):
    """A file that changes between two reads of it is refused: no signature could cover what was believed."""
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents())
    before = path.read_bytes()
    bundle.write(path, samples.named(samples.contents(), "simple"))
    after = path.read_bytes()
    assert len(before) == len(after)
    original = verify._load

    def load(*arguments):
        path.write_bytes(before)
        return original(*arguments)

    monkeypatch.setattr(verify, "_load", load)
    with pytest.raises(ViolationsError) as refusal:
        bundle.read(path)
    places = {violation.place for violation in refusal.value.violations if violation.rule is Rule.DIGEST}
    assert places == {"`bundle.json`", "`index.json`", "`manifest.resolved.json`"}


def test_a_compiled_only_bundle_says_so(tmp_path):
    path = tmp_path / "bundle.tar"
    contents = samples.contents(made="compiled-only")
    everything = {
        entry.digest: entry
        for launch in contents.plan.launches
        for variant in launch.variants
        for wanted in variant.specializations
        for entry in [
            samples.Entry(
                launch.kernel, wanted, samples.metadata(90, dict(wanted.options)["num_warps"]), samples.cubin()
            )
        ]
    }
    bundle.write(path, samples.changed(contents, choices=(), entries=everything))
    held = bundle.read(path)
    assert held.made == "compiled-only"
    assert bundle.read_header(path)["made"] == "compiled-only"
    assert held.choices == ()
    assert len(held.entries) == 16


def test_read_header_sees_damage_to_the_header_alone(tmp_path):
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents())
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)
    assert bundle.read_header(path)["name"] == "sample"
    with pytest.raises(BundleError):
        bundle.read(path)
    data[600] ^= 1
    path.write_bytes(data)
    with pytest.raises(ViolationsError) as refusal:
        bundle.read_header(path)
    assert {violation.rule for violation in refusal.value.violations} <= {
        Rule.STRICT_JSON,
        Rule.HEADER_FIELDS,
        Rule.HEADER_DIGEST,
        Rule.FORMAT,
    }


def test_a_later_format_is_refused_by_name(tmp_path):
    import forge
    import hostile

    forged = hostile.sound().copy()
    forged.header["format"] = 2
    path = tmp_path / "bundle.tar"
    path.write_bytes(forged.data())
    assert forge.Forged.of(path.read_bytes()).header["format"] == 2
    with pytest.raises(ViolationsError, match="format `2`; wanted 1") as refusal:
        bundle.read(path)
    assert "a later one" in (refusal.value.hint or "")
    assert len(refusal.value.violations) == 1


# ---------------------------------------------------------------------------------------------- whole or not at all


def _write_fails(path: Path, match: str) -> InputError:
    before = {entry: (path.parent / entry).read_bytes() for entry in os.listdir(path.parent)}
    with pytest.raises(InputError, match=match) as refusal:
        bundle.write(path, samples.contents(3))
    assert refusal.value.exit_code == ExitCode.INPUT
    assert {entry: (path.parent / entry).read_bytes() for entry in os.listdir(path.parent)} == before
    return refusal.value


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_old_file_survives_a_failing_disk(tmp_path, monkeypatch, number, call):
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents())

    def fail(*_args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, call, fail)
        error = _write_fails(path, os.strerror(number))
    assert ("older file of that name is untouched" in (error.hint or "")) == (number != errno.EIO)
    assert bundle.read(path).header["counts"]["kernels"] == 2


_LIMITED = """
import os, resource, sys
sys.path[:0] = sys.argv[2:]
import samples
from kernelbake import bundle
from kernelbake.errors import InputError
contents = samples.contents(3)
what = sys.argv[1]
if what == "too small":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
elif os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    bundle.write("folder/bundle.tar", contents)
except InputError as error:
    print(error)
print(sorted(os.listdir("folder")))
"""


@pytest.mark.parametrize(("what", "message"), [("too small", "File too large"), ("no right", "Permission denied")])
def test_the_system_itself_refuses(tmp_path, what, message):
    """A real limit on the size of files, and a folder that a person without rights may not write to."""
    folder = tmp_path / "folder"
    folder.mkdir()
    bundle.write(folder / "bundle.tar", samples.contents())
    before = (folder / "bundle.tar").read_bytes()
    if what == "no right":
        folder.chmod(0o555)
        for parent in (tmp_path, tmp_path.parent):
            parent.chmod(0o755)
        if os.geteuid() == 0:
            tmp_path.parent.parent.chmod(0o755)
    command = [sys.executable, "-c", _LIMITED, what, *[part for part in sys.path if part]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    folder.chmod(0o755)
    assert message in done.stdout
    assert "hint: " in done.stdout
    assert done.stdout.endswith("['bundle.tar']\n")
    assert (folder / "bundle.tar").read_bytes() == before


@pytest.mark.parametrize("call", [lambda path: bundle.write(path, samples.contents()), bundle.check_output])
def test_places_where_nothing_can_be_written(tmp_path, call):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "none/bundle.tar": "No such file or directory",
        "file/bundle.tar": "Not a directory",
        "folder": "no regular file is there",
        "pipe": "no regular file is there",
        "a" * 300: "File name too long",
    }.items():
        with pytest.raises(InputError, match=message) as refusal:
            call(tmp_path / name)
        assert refusal.value.exit_code == ExitCode.INPUT
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "pipe"]


def test_check_output_leaves_nothing(tmp_path):
    bundle.check_output(tmp_path / "bundle.tar")
    assert os.listdir(tmp_path) == []
    (tmp_path / "bundle.tar").write_text("old")
    bundle.check_output(tmp_path / "bundle.tar")
    assert (tmp_path / "bundle.tar").read_text() == "old"


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    canary, path = tmp_path / "canary", tmp_path / "bundle.tar"
    canary.write_text("sing")
    path.symlink_to(canary)
    bundle.write(path, samples.contents())
    assert canary.read_text() == "sing"
    assert not path.is_symlink()


def test_what_a_killed_writer_left_is_removed_and_what_one_at_work_holds_is_not(tmp_path):
    dead, alive = tmp_path / ".bundle.tar.00.partial", tmp_path / ".bundle.tar.11.partial"
    other = tmp_path / ".other.tar.00.partial"
    for file in (dead, alive, other):
        file.write_text("x")
    with alive.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        bundle.write(tmp_path / "bundle.tar", samples.contents())
    assert sorted(os.listdir(tmp_path)) == [alive.name, other.name, "bundle.tar"]


_ENDLESS = """
import sys
sys.path[:0] = sys.argv[2:]
import samples
from kernelbake import bundle
contents = [samples.contents(2, cubin_bytes=200_000), samples.contents(3, cubin_bytes=200_000)]
print("ready", flush=True)
while True:
    for each in contents:
        bundle.write(sys.argv[1], each)
"""


def test_killed_while_writing(tmp_path):
    """At whatever moment a writer dies, the file is the old bundle or the new one."""
    path = tmp_path / "bundle.tar"
    source = random.Random(7)
    for _ in range(6):
        command = [sys.executable, "-c", _ENDLESS, str(path), *[part for part in sys.path if part]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(source.uniform(0.05, 0.4))
            writer.send_signal(signal.SIGKILL)
        if path.exists():
            assert bundle.read(path).header["counts"]["kernels"] in (2, 3)
    bundle.write(path, samples.contents())
    assert os.listdir(tmp_path) == ["bundle.tar"]
