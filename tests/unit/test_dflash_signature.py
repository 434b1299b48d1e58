"""A run that requires a signature refuses a bundle without one before anything else is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import samples
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from dflash import config, launch
from kernelbake import bundle, signing
from kernelbake.errors import ExitCode, InputError, SignatureError


def _key(path: Path, seed: int) -> Path:
    private = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    form = serialization.PrivateFormat.OpenSSH
    path.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    path.chmod(0o600)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")
    return path


def _run(path: Path, key: Path) -> config.RunConfig:
    return config.load(None, [], {"bundle": str(path), "require_signature": str(key.with_suffix(".pub"))})


def test_missing_foreign_broken_and_right(tmp_path):
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents())
    mine, other = _key(tmp_path / "mine", 1), _key(tmp_path / "other", 2)
    with pytest.raises(SignatureError, match="missing") as refusal:
        launch.settle(_run(path, mine))
    assert refusal.value.exit_code == ExitCode.BUNDLE
    signing.sign(path, other)
    with pytest.raises(SignatureError, match="made by SHA256:"):
        launch.settle(_run(path, mine))
    signing.sign(path, mine)
    with pytest.raises(InputError, match="made for workload `sample`; wanted `dflash`"):
        launch.settle(_run(path, mine))
    bundle.write(path, samples.contents(3))
    with pytest.raises(SignatureError, match="not a signature of this file"):
        launch.settle(_run(path, mine))


def test_the_option_is_there():
    from dflash import cli

    shown = CliRunner().invoke(cli.cli, ["train", "--help"]).output
    assert "--require-signature KEY" in shown
