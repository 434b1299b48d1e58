"""Detached signatures: ours and OpenSSH's are the same, and everything else is refused without a secret in sight."""

from __future__ import annotations

import base64
import builtins
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import samples
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from kernelbake import bundle, signing
from kernelbake.errors import BundleError, ExitCode, InputError, SignatureError

needs_ssh_keygen = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="`ssh-keygen` is not installed on this machine"
)


def make_key(path: Path, seed: int, comment: str = "") -> Path:
    """A private key at the path and its public half beside it."""
    private = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    path.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    )
    path.chmod(0o600)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + (f" {comment}" if comment else "").encode() + b"\n")
    return path


@pytest.fixture
def key(tmp_path) -> Path:
    return make_key(tmp_path / "key", 1, "builder@host")


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents(1, keys_each=1))
    return path


def test_signed_and_checked(path, key):
    target = signing.sign(path, key)
    assert target == path.with_name("bundle.tar.sig")
    signer = signing.check(path, [key.with_suffix(".pub")])
    assert re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43} \(builder@host\)", str(signer))
    assert signing.check(bundle.read(path), [key.with_suffix(".pub")]) == signer


def test_the_same_bundle_and_key_give_the_same_signature(path, key):
    first = signing.sign(path, key).read_bytes()
    assert signing.sign(path, key).read_bytes() == first


@needs_ssh_keygen
def test_openssh_accepts_ours(path, key, tmp_path):
    target = signing.sign(path, key)
    signers = tmp_path / "allowed"
    signers.write_text("builder " + key.with_suffix(".pub").read_text())
    command = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "builder", "-n", "kernelbake", "-s", str(target)]
    with path.open("rb") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path.write_bytes(path.read_bytes() + b"\0")
    with path.open("rb") as file:
        assert subprocess.run(command, stdin=file, capture_output=True, check=False).returncode != 0


@needs_ssh_keygen
@pytest.mark.parametrize("options", [[], ["-O", "hashalg=sha256"]])
def test_we_accept_openssh(path, tmp_path, options):
    own = tmp_path / "own"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a b", "-f", str(own)], check=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-Y", "sign", "-n", "kernelbake", *options, "-f", str(own), str(path)],
        check=True,
        capture_output=True,
    )
    signer = signing.check(path, [own.with_suffix(".pub")])
    shown = subprocess.run(["ssh-keygen", "-l", "-f", str(own)], check=True, capture_output=True, text=True).stdout
    assert signer.fingerprint in shown
    assert signer.comment == "a b"
    assert signing.sign(path, own)


@needs_ssh_keygen
def test_both_make_the_same_bytes(path, key):
    ours = signing.sign(path, key).read_text()
    signing.signature_path(path).unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "kernelbake", "-f", str(key), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    assert signing.signature_path(path).read_text() == ours


@needs_ssh_keygen
def test_another_purpose_is_refused(path, key):
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", str(key), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(SignatureError, match="made for the purpose `git`; wanted an SSH signature for `kernelbake`"):
        signing.check(path, [key.with_suffix(".pub")])


def _refusal(path, *trusted) -> SignatureError:
    with pytest.raises(SignatureError) as refusal:
        signing.check(path, trusted)
    assert refusal.value.exit_code == ExitCode.BUNDLE
    return refusal.value


def test_missing(path, key):
    error = _refusal(path, key.with_suffix(".pub"))
    assert "missing; wanted one by SHA256:" in error.message
    assert "kernelbake sign" in (error.hint or "")


def test_foreign(path, key, tmp_path):
    other, third = make_key(tmp_path / "other", 2), make_key(tmp_path / "third", 3, "third")
    signing.sign(path, key)
    error = _refusal(path, other.with_suffix(".pub"), third.with_suffix(".pub"))
    assert "made by SHA256:" in error.message
    assert " or SHA256:" in error.message
    assert signing.check(path, [other.with_suffix(".pub"), key.with_suffix(".pub")]).comment == "builder@host"


def test_another_files_signature(path, key):
    signing.sign(path, key)
    bundle.write(path, samples.contents(2, keys_each=1))
    assert "not a signature of this file" in _refusal(path, key.with_suffix(".pub")).message


def test_what_was_read_is_what_is_checked(path, key):
    held = bundle.read(path)
    signing.sign(path, key)
    path.write_bytes(b"replaced since")
    assert signing.check(held, [key.with_suffix(".pub")])


def test_every_byte_of_a_signature_counts(path, key):
    target = signing.sign(path, key)
    lines = target.read_text().splitlines()
    data = bytearray(base64.b64decode("".join(lines[1:-1])))
    for position in range(len(data)):
        data[position] ^= 1
        target.write_text("\n".join([lines[0], base64.b64encode(data).decode(), lines[-1], ""]))
        _refusal(path, key.with_suffix(".pub"))
        data[position] ^= 1
    for end in range(0, len(data), 7):
        target.write_text("\n".join([lines[0], base64.b64encode(data[:end] or b"x").decode(), lines[-1], ""]))
        _refusal(path, key.with_suffix(".pub"))
    target.write_text("\n".join([lines[0], base64.b64encode(data + b"\0").decode(), lines[-1], ""]))
    assert "does not belong" in _refusal(path, key.with_suffix(".pub")).message


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 100, b"-----BEGIN SSH SIGNATURE-----\n", b"x" * 100_000, b"-----BEGIN PGP SIGNATURE-----\nAAAA\n"],
)
def test_no_signature_at_all(path, key, content):
    signing.signature_path(path).write_bytes(content)
    assert "wanted an SSH signature" in _refusal(path, key.with_suffix(".pub")).message


def test_a_folder_instead_of_a_signature(path, key):
    signing.signature_path(path).mkdir()
    assert "cannot be read" in _refusal(path, key.with_suffix(".pub")).message


def test_a_fifo_instead_of_a_signature_does_not_wait(path, key):
    os.mkfifo(signing.signature_path(path))
    assert "wanted an SSH signature" in _refusal(path, key.with_suffix(".pub")).message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_private_key_that_others_may_use(path, key, mode):
    key.chmod(mode)
    with pytest.raises(InputError, match=rf"others may use it \(mode {mode:04o}\)") as refusal:
        signing.sign(path, key)
    assert refusal.value.hint == f"chmod 600 {key}"
    assert not signing.signature_path(path).exists()
    key.chmod(0o400)
    signing.sign(path, key)


def test_a_file_of_several_trusted_keys_with_remarks(path, key, tmp_path):
    signing.sign(path, key)
    other = make_key(tmp_path / "other", 2)
    lines = [
        "# who may sign",
        "",
        f"  {other.with_suffix('.pub').read_text().strip()} of the office  ",
        "   # the builder",
    ]
    trusted = tmp_path / "trusted"
    trusted.write_bytes("\r\n".join([*lines, key.with_suffix(".pub").read_text()]).encode())
    assert signing.check(path, [trusted]).comment == "builder@host"
    assert signing.check(path, [other.with_suffix(".pub"), trusted]).comment == "builder@host"


def test_a_damaged_bundle_is_not_signed(path, key):
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(BundleError, match="bundle format"):
        signing.sign(path, key)
    assert not signing.signature_path(path).exists()


def _secret_of(key: Path) -> str:
    return key.read_text().split("-----")[2].strip()


def _other_keys(folder: Path) -> dict[str, bytes]:
    private = ed25519.Ed25519PrivateKey.from_private_bytes(b"\7" * 32)
    form = serialization.PrivateFormat
    nothing = serialization.NoEncryption()
    curve = ec.derive_private_key(7, ec.SECP256R1())
    text = (make_key(folder / "plain", 5)).read_bytes()
    return {
        "an elliptic curve": curve.private_bytes(serialization.Encoding.PEM, form.OpenSSH, nothing),
        "PKCS 8": private.private_bytes(serialization.Encoding.PEM, form.PKCS8, nothing),
        "damaged": text[:200] + b"A" + text[202:],
        "cut": text[:150],
        "no key": b"hello",
        "a public key": (folder / "plain.pub").read_bytes(),
        "nothing": b"",
    }


_KINDS = ["an elliptic curve", "PKCS 8", "damaged", "cut", "no key", "a public key", "nothing"]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_private_key_that_cannot_be_used(path, tmp_path, kind):
    file = tmp_path / "bad"
    file.write_bytes(_other_keys(tmp_path)[kind])
    with pytest.raises(InputError, match=r"key `.*bad`: .*; wanted an Ed25519 key") as refusal:
        signing.sign(path, file)
    body = file.read_text().split("-----")[2:3]
    assert not any(line and line in str(refusal.value) for line in "".join(body).split())
    assert not signing.signature_path(path).exists()


def test_a_key_with_a_passphrase(path, tmp_path):
    private = ed25519.Ed25519PrivateKey.from_private_bytes(b"\7" * 32)
    locked = tmp_path / "locked"
    encoded = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    # the name of a cipher in place of `none`, which is what tells the two apart
    body = bytearray(base64.b64decode(encoded.split(b"-----")[2]))
    body[15:23] = b"\0\0\0\4aes2"
    pem = b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + base64.b64encode(body) + b"\n-----END OPENSSH PRIVATE KEY-----\n"
    locked.write_bytes(pem)
    with pytest.raises(InputError, match="it has a passphrase") as refusal:
        signing.sign(path, locked)
    assert "ssh-keygen -Y sign -n kernelbake" in (refusal.value.hint or "")
    asked = []
    with pytest.raises(InputError, match="not supported|does not open") as refusal:
        signing.sign(path, locked, passphrase=lambda: asked.append(1) or b"swordfish")
    assert asked == [1]
    assert "swordfish" not in str(refusal.value)


def test_a_missing_key(path, tmp_path):
    with pytest.raises(InputError, match="No such file"):
        signing.sign(path, tmp_path / "none")
    with pytest.raises(InputError, match="No such file"):
        signing.check(path, [tmp_path / "none.pub"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no key in it"),
        ("# only a remark\n\n", "no key in it"),
        ("ssh-rsa AAAA me\n", "line 1: `ssh-rsa`; wanted `ssh-ed25519`"),
        ("ssh-ed25519 !!!! me\n", "a damaged key"),
        ("ssh-ed25519 AAAA me\n", "a damaged key"),
        ("ssh-ed25519\n", "a damaged key"),
        ("# remark\n" * 10_000, "more than 65536 bytes"),
    ],
)
def test_a_public_key_that_cannot_be_used(path, tmp_path, content, message):
    file = tmp_path / "bad.pub"
    file.write_text(content)
    with pytest.raises(InputError, match=re.escape(message)):
        signing.check(path, [file])


def test_the_private_key_given_as_trusted(path, key):
    signing.sign(path, key)
    with pytest.raises(InputError, match="a private key; wanted the file that ends in `.pub`") as refusal:
        signing.check(path, [key])
    assert _secret_of(key)[:40] not in str(refusal.value)


def test_without_the_library(path, key, monkeypatch):
    signing.sign(path, key)
    original = builtins.__import__

    def refuse(name, *rest, **more):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for attempt in (lambda: signing.sign(path, key), lambda: signing.check(path, [key.with_suffix(".pub")])):
        with pytest.raises(InputError, match="`cryptography` is not installed") as refusal:
            attempt()
        assert "kernelbake[sign]" in (refusal.value.hint or "")
