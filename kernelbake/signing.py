"""Detached signatures beside bundles, in the form that OpenSSH makes: ``ssh-keygen -Y sign -n kernelbake``.

A signature says who vouches for a file; that the file is a sound bundle is the reader's business. The form is that of
OpenSSH's ``PROTOCOL.sshsig``; keys and signatures themselves are handled by the ``cryptography`` library.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import os
import re
import stat
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernelbake import atomic, bundle
from kernelbake.bundle import Bundle
from kernelbake.errors import InputError, SignatureError

NAMESPACE = "kernelbake"
"""A signature made for another purpose with the same key does not count."""
SUFFIX = ".sig"

_MAGIC, _KEY_TYPE = b"SSHSIG", b"ssh-ed25519"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_HASHES = ("sha512", "sha256")
_MAX_BYTES = 1 << 16
"""Longest signature or key file."""


@dataclasses.dataclass(frozen=True)
class PublicKey:
    """An Ed25519 key that someone may have signed with.

    Args:
        raw: its 32 bytes.
        comment: what its file says about it.
    """

    raw: bytes
    comment: str = ""

    @property
    def blob(self) -> bytes:
        """The key in SSH's wire format."""
        return _string(_KEY_TYPE) + _string(self.raw)

    @property
    def fingerprint(self) -> str:
        """As ``ssh-keygen -l`` prints it: ``SHA256:…``."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")

    def __str__(self) -> str:
        return f"{self.fingerprint} ({self.comment})" if self.comment else self.fingerprint


def signature_path(path: Path | str) -> Path:
    """Where the signature of a bundle stands."""
    path = Path(path)
    return path.with_name(path.name + SUFFIX)


def sign(path: Path | str, key: Path | str, *, passphrase: Callable[[], bytes] | None = None) -> Path:
    """Signs a bundle, after checking that it is one.

    Args:
        path: the bundle.
        key: a private Ed25519 key in OpenSSH's form.
        passphrase: asked for the key's passphrase, if it has one.

    Returns:
        The signature's path.

    Raises:
        InputError: the key cannot be used, or the signature cannot be written.
        BundleError: the bundle is not sound, and is not signed.
    """
    private = _private_key(Path(key), passphrase)
    held = bundle.read(path)
    public = PublicKey(private.public_key().public_bytes_raw())
    signature = private.sign(_signed(held.data, "sha512", NAMESPACE))
    parts = (public.blob, NAMESPACE.encode(), b"", b"sha512", _string(_KEY_TYPE) + _string(signature))
    body = base64.b64encode(_MAGIC + (1).to_bytes(4, "big") + b"".join(map(_string, parts))).decode()
    lines = [_BEGIN, *(body[start : start + 70] for start in range(0, len(body), 70)), _END, ""]
    target = signature_path(path)
    with atomic.replacing(target, "signature") as (descriptor, _):
        atomic.write_all(descriptor, ["\n".join(lines).encode()])
    return target


def check(held: Bundle | Path | str, trusted: Sequence[Path | str]) -> PublicKey:
    """Requires a signature by one of some keys.

    Args:
        held: a bundle. One that was read is checked as it was read, whatever has happened to its file since.
        trusted: files with public keys.

    Returns:
        The key that signed.

    Raises:
        InputError: a key file cannot be used.
        BundleError: the bundle is not sound.
        SignatureError: the signature is missing, broken, for another purpose, by another key or of another file.
    """
    keys = [key for file in trusted for key in public_keys(Path(file))]
    held = held if isinstance(held, Bundle) else bundle.read(held)
    target = signature_path(held.path)
    where = f"signature {target}"
    try:
        with open(os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO must not wait
            text = file.read(_MAX_BYTES + 1) or b""
    except FileNotFoundError:
        hint = f"sign it with `kernelbake sign {held.path} --key KEY`"
        raise SignatureError(f"{where}: missing; wanted one by {_listed(keys)}", hint=hint) from None
    except OSError as error:
        raise SignatureError(f"{where}: it cannot be read ({error.strerror}); wanted a signature") from error
    try:
        signer, hash_name, signature = _parse(text)
    except ValueError as error:
        raise SignatureError(f"{where}: {error}; wanted an SSH signature for `{NAMESPACE}`") from None
    known = next((key for key in keys if key.raw == signer.raw), None)
    if known is None:
        raise SignatureError(f"{where}: made by {signer}; wanted one by {_listed(keys)}")
    if not _verifies(known, signature, _signed(held.data, hash_name, NAMESPACE)):
        raise SignatureError(f"{where}: not a signature of this file by {known}; wanted one")
    return known


def _listed(keys: Sequence[PublicKey]) -> str:
    return " or ".join(map(str, keys))


# ---------------------------------------------------------------------------------------------- keys


def _library() -> types.SimpleNamespace:
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InputError(
            "signing: the library `cryptography` is not installed; wanted it for signatures",
            hint="install the extra: `pip install 'kernelbake[sign]'`",
        ) from error
    return types.SimpleNamespace(
        InvalidSignature=InvalidSignature,
        UnsupportedAlgorithm=UnsupportedAlgorithm,
        load_private=serialization.load_ssh_private_key,
        Private=ed25519.Ed25519PrivateKey,
        Public=ed25519.Ed25519PublicKey,
    )


def _private_key(path: Path, passphrase: Callable[[], bytes] | None) -> Any:
    """The private key; nothing of its content ever enters a message."""
    library = _library()
    text = _key_text(path, "key")
    if "PRIVATE KEY-----" not in text:
        raise InputError(f"key `{path}`: no private key; wanted an Ed25519 key as `ssh-keygen -t ed25519` makes it")
    key = None
    with_passphrase = _is_encrypted(text)
    if with_passphrase and passphrase is None:
        hint = f"sign with `ssh-keygen -Y sign -n {NAMESPACE} -f KEY BUNDLE`, which asks for it or uses your agent"
        raise InputError(f"key `{path}`: it has a passphrase; wanted a key without one here", hint=hint)
    try:
        secret = passphrase() if with_passphrase and passphrase is not None else None
        key = library.load_private(text.encode(), password=secret)
    except library.UnsupportedAlgorithm:
        raise InputError(f"key `{path}`: its kind or cipher is not supported; wanted an Ed25519 key") from None
    except (ValueError, TypeError):
        found = "it does not open with that passphrase" if with_passphrase else "it is damaged"
        raise InputError(f"key `{path}`: {found}; wanted an Ed25519 key in OpenSSH's form") from None
    if not isinstance(key, library.Private):
        raise InputError(f"key `{path}`: another kind of key; wanted an Ed25519 key")
    _refuse_readable(path)
    return key


def _refuse_readable(path: Path) -> None:
    """OpenSSH's own rule: a private key of ours that others may read is no secret."""
    found = path.stat()
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o077:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise InputError(
            f"key `{path}`: others may use it (mode {mode}); wanted a key that its owner alone may read",
            hint=f"chmod 600 {path}",
        )


def _is_encrypted(text: str) -> bool:
    """Whether an OpenSSH private key names a cipher; the name stands first in it, before anything secret."""
    body = "".join(text.split("-----")[2:3]).encode()
    try:
        data = base64.b64decode(body)
        length = int.from_bytes(data[15:19], "big")
        return data.startswith(b"openssh-key-v1\0") and data[19 : 19 + length] != b"none"
    except binascii.Error:
        return False


def public_keys(path: Path) -> list[PublicKey]:
    """The keys of a file in OpenSSH's form, one in a line: ``ssh-ed25519 AAAA… comment``.

    Raises:
        InputError: the file cannot be read, or holds no such key or something else beside one.
    """
    keys = []
    text = _key_text(path, "public key")
    if "PRIVATE KEY" in text:
        raise InputError(f"public key `{path}`: a private key; wanted the file that ends in `.pub`")
    for number, line in enumerate(text.splitlines(), 1):
        kind, body, comment = (*line.split(maxsplit=2), "", "", "")[:3]
        if not kind or kind.startswith("#"):
            continue
        if kind != _KEY_TYPE.decode():
            raise InputError(f"public key `{path}` line {number}: `{kind:.30}`; wanted `ssh-ed25519`")
        try:
            keys.append(PublicKey(_raw_key(base64.b64decode(body, validate=True)), comment.strip()))
        except ValueError:
            raise InputError(f"public key `{path}` line {number}: a damaged key; wanted `ssh-ed25519 AAAA…`") from None
    if not keys:
        raise InputError(f"public key `{path}`: no key in it; wanted a line `ssh-ed25519 AAAA…`")
    return keys


def _key_text(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{what} {path}: it cannot be read ({error.strerror}); wanted a key file") from error
    if len(data) > _MAX_BYTES:
        raise InputError(f"{what} {path}: more than {_MAX_BYTES} bytes; wanted a key file")
    return data.decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------- the form


def _string(data: bytes) -> bytes:
    """SSH's ``string``: four bytes of length, then the bytes."""
    return len(data).to_bytes(4, "big") + data


def _take(data: bytes) -> tuple[bytes, bytes]:
    """The first ``string`` of the data, and what follows it."""
    length = int.from_bytes(data[:4], "big")
    if len(data) < 4 + length:
        raise ValueError("cut short")
    return data[4 : 4 + length], data[4 + length :]


def _raw_key(blob: bytes) -> bytes:
    kind, rest = _take(blob)
    if kind != _KEY_TYPE:
        raise ValueError(f"a key of type `{kind.decode('ascii', 'replace'):.30}`")
    raw, rest = _take(rest)
    if len(raw) != 32 or rest:
        raise ValueError("a damaged key")
    return raw


def _signed(data: bytes | memoryview, hash_name: str, namespace: str) -> bytes:
    """What the key itself signs: the purpose and the hash of the file."""
    parts = (namespace.encode(), b"", hash_name.encode(), hashlib.new(hash_name, data).digest())
    return _MAGIC + b"".join(map(_string, parts))


def _parse(text: bytes) -> tuple[PublicKey, str, bytes]:
    """Signer, name of the hash and signature.

    Raises:
        ValueError: what is wrong with it.
    """
    if len(text) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    armour = re.fullmatch(rf"{_BEGIN}\r?\n([A-Za-z0-9+/=\r\n]+){_END}\s*", text.decode("ascii", "replace"))
    if armour is None:
        raise ValueError("not in the armour of one")
    try:
        data = base64.b64decode("".join(armour[1].split()), validate=True)
    except binascii.Error:
        raise ValueError("its text is damaged") from None
    if data[:6] != _MAGIC or data[6:10] != (1).to_bytes(4, "big"):
        raise ValueError("not of version 1")
    blob, rest = _take(data[10:])
    namespace, rest = _take(rest)
    reserved, rest = _take(rest)
    hash_name, rest = _take(rest)
    wrapped, rest = _take(rest)
    kind, inner = _take(wrapped)
    signature, behind = _take(inner)
    if rest or behind or reserved:
        raise ValueError("something behind or within it that does not belong")
    if namespace != NAMESPACE.encode():
        raise ValueError(f"made for the purpose `{namespace.decode('utf-8', 'replace'):.40}`")
    if hash_name.decode("ascii", "replace") not in _HASHES or kind != _KEY_TYPE or len(signature) != 64:
        raise ValueError("of an unknown kind")
    return PublicKey(_raw_key(blob)), hash_name.decode(), signature


def _verifies(key: PublicKey, signature: bytes, signed: bytes) -> bool:
    library = _library()
    try:
        library.Public.from_public_bytes(key.raw).verify(signature, signed)
    except library.InvalidSignature:
        return False
    return True
