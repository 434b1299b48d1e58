"""The fuzzer's targets on a few inputs of every kind; `make fuzz` runs them for as long as it is told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import fuzzing
import hostile
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[1] / "fuzz" / "fuzz.py"


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_every_seed_is_accepted_or_refused(target):
    verdicts = {fuzzing.TARGETS[target](seed) for seed in fuzzing.seeds(target)}
    assert verdicts == {True, False}


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_bundles_of_any_bytes(data):
    fuzzing.run_bundle(data)


@settings(max_examples=200)
@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_manifests_of_any_bytes(data):
    fuzzing.run_manifest(data)


def test_the_target_notices_a_reader_that_breaks(monkeypatch):
    """A fuzzer that cannot fail would find nothing."""
    monkeypatch.setattr(fuzzing.bundle, "read", lambda path: json.loads("{"))
    with pytest.raises(ValueError, match="Expecting"):
        fuzzing.run_bundle(b"\0")


def test_the_target_notices_a_reader_that_believes_anything(monkeypatch, tmp_path):
    sound = tmp_path / "bundle.tar"
    sound.write_bytes(hostile.sound_bytes())
    held = fuzzing.bundle.read(sound)
    monkeypatch.setattr(fuzzing, "bundle_file", lambda data: hostile.sound_bytes() + bytes(512))
    monkeypatch.setattr(fuzzing.bundle, "read", lambda path: held)
    with pytest.raises(AssertionError):
        fuzzing.run_bundle(b"")


def test_the_command_itself(tmp_path):
    command = [sys.executable, str(SCRIPT), "--cpu-seconds", "2", "--engine", "hypothesis", "--failures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["failures"] == 0
    assert result["cpu_s"] >= 2
    assert list(tmp_path.iterdir()) == []


def test_an_input_that_fails_is_kept(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("fuzz_command", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    monkeypatch.setitem(fuzzing.TARGETS, "bundle", lambda data: 1 / (len(data) - 3))
    once = command.Once("bundle", 10, tmp_path)
    once(b"ab")
    with pytest.raises(ZeroDivisionError):
        once(b"abc")
    [kept] = tmp_path.iterdir()
    assert kept.read_bytes() == b"abc"
    assert (once.runs, once.over) == (1, False)
