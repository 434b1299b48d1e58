"""What a fuzzer runs: any bytes are turned into a file for the bundle reader, or are a manifest as they stand.

A reader may refuse, in its own words, or accept. Whatever else happens is a fault: another exception, a hang, something
accepted that cannot be used or that does not come out again as it went in.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forge
import hostile

from kernelbake import archive, bundle, diff, digest, manifest
from kernelbake.bundle import Contents
from kernelbake.errors import BundleError, InputError, ManifestError

ROOT = Path(__file__).parents[2]


class Taps:
    """Takes numbers and bytes off some data until there is none left, then zeros."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, limit: int) -> int:
        """A number from 0 to below the limit."""
        return int.from_bytes(self.bytes(4), "little") % limit if limit > 256 else self.bytes(1)[0] % limit

    def bytes(self, count: int) -> bytes:
        """Exactly so many bytes."""
        found = self._data[self._at : self._at + count]
        self._at += count
        return found.ljust(count, b"\0")

    def rest(self) -> bytes:
        """All that is left."""
        return self._data[self._at :]

    @property
    def left(self) -> bool:
        return self._at < len(self._data)


_KINDS = (("measured", "h200"), ("interpreted", "h200"), ("compiled-only", "rtx-pro-6000-blackwell"))


def _raw(taps: Taps) -> bytes:
    return taps.rest()


def _patched(taps: Taps) -> bytes:
    """A sound bundle with some bytes written over."""
    data = bytearray(hostile.sound_bytes(*_KINDS[taps.number(3)]))
    while taps.left:
        start = taps.number(len(data))
        piece = taps.bytes(1 + taps.number(16))
        data[start : start + len(piece)] = piece
    return bytes(data)


def _member(taps: Taps) -> bytes:
    """One member replaced, every digest right."""
    forged = hostile.sound(*_KINDS[taps.number(3)]).copy()
    names = sorted(forged.files)
    forged.files[names[taps.number(len(names))]] = taps.rest()
    return forged.data()


def _value(taps: Taps) -> bytes:
    """One value somewhere in a document exchanged, every digest right."""
    forged = hostile.sound(*_KINDS[taps.number(3)]).copy()
    names = [name for name in sorted(forged.files) if name.endswith(".json")]
    name = names[taps.number(len(names))]
    data = forged.document(name)
    place: Any = data
    while isinstance(place, dict | list) and place:
        key = list(place)[taps.number(len(place))] if isinstance(place, dict) else taps.number(len(place))
        if taps.number(4) == 0 or not isinstance(place[key], dict | list) or not place[key]:
            place[key] = _any(taps)
            break
        place = place[key]
    if name.startswith("kernels/"):
        folder = name.rpartition("/")[0]
        forged.change_entry(folder, describe=functools.partial(_become, new=data))
    else:
        forged.put(name, data)
    return forged.data()


def _become(old: dict[str, Any], new: Any) -> None:
    old.clear()
    old.update(new if isinstance(new, dict) else {"not": new})


def _any(taps: Taps) -> Any:
    choices: tuple[Any, ...] = (
        None, True, 0, -1, 1 << 70, 0.5, "", "\0", "sha256:" + "0" * 64, [], {}, [[]], {"dtype": "bf16"},
        {"float": "inf"}, {"tuple": [{"tuple": []}]}, "a:b",
    )  # fmt: skip
    pick = taps.number(len(choices) + 1)
    return choices[pick] if pick < len(choices) else taps.bytes(taps.number(20)).decode("utf-8", "replace")


def _entry(taps: Taps) -> bytes:
    """The code of an entry replaced, the entry's digest and all that names it right."""
    forged = hostile.sound().copy()
    folder = forged.folders[taps.number(len(forged.folders))]
    forged.change_entry(folder, cubin=taps.rest())
    return forged.data()


def _header(taps: Taps) -> bytes:
    """`bundle.json` or `index.json` replaced, the digest of the index right or not."""
    forged = hostile.sound().copy()
    if taps.number(2):
        return forged.data(index=taps.rest())
    _, *rest = forged.members()
    return forge.pack([("bundle.json", taps.rest()), *rest])


def _block(taps: Taps) -> bytes:
    """A foreign header block, its checksum right, somewhere between the members."""
    members = hostile.sound().members()
    block = taps.bytes(500).ljust(512, b"\0")
    return forge.inserted(members, forge.checksummed(block), after=taps.number(len(members)))


_MODES: tuple[Callable[[Taps], bytes], ...] = (_raw, _patched, _member, _value, _entry, _header, _block)


def bundle_file(data: bytes) -> bytes:
    """The file that some fuzzer's bytes stand for: the first says in which way."""
    taps = Taps(data)
    return _MODES[taps.number(len(_MODES))](taps)


def run_bundle(data: bytes) -> bool:
    """Gives a file to the reader; True where it is accepted, and then everything in it was used."""
    content = bundle_file(data)
    descriptor = os.memfd_create("bundle")
    try:
        os.write(descriptor, content)
        path = Path(f"/proc/self/fd/{descriptor}")
        try:
            held = bundle.read(path)
        except (BundleError, InputError):
            return False
    finally:
        os.close(descriptor)
    _use(held, content)
    return True


def _use(held: bundle.Bundle, content: bytes) -> None:
    """Everything that is asked of a bundle works, and written again it is the same file."""
    assert not diff.diff(held, held).code
    held.inventory()
    contents = Contents(
        held.name, held.made, held.manifest_text, held.manifest_resolved, held.fingerprint, held.plan, held.choices,
        held.record, dict(held.entries), held.libs, held.header["line_info"],
    )  # fmt: skip
    assert all(name == entry.digest for name, entry in contents.entries.items())
    if held.header["kernelbake"] == bundle.__version__:
        members, _ = bundle._members(contents, held.header["time"])
        assert b"".join(archive.pack(members, held.header["time"])) == content


def run_manifest(data: bytes) -> bool:
    """Gives bytes to the manifest parser; True where they are a manifest, which then resolves and comes back."""
    try:
        found = manifest.parse(data, "fuzzed.yaml")
    except ManifestError:
        return False
    resolved = json.loads(digest.canonical_json(found.resolved()))
    again = manifest.Manifest.from_resolved(resolved)
    assert digest.canonical_json(again.resolved()) == digest.canonical_json(resolved)
    return True


TARGETS: dict[str, Callable[[bytes], bool]] = {"bundle": run_bundle, "manifest": run_manifest}


def seeds(target: str) -> list[bytes]:
    """Where to start from: something of every kind that the target tells apart, made anew and small."""
    if target == "manifest":
        paths = sorted((ROOT / "kernelbake" / "manifests").glob("*.yaml")) + sorted((ROOT / "manifests").glob("*.yaml"))
        return [path.read_bytes() for path in paths] + [b"", b"format: 1\n", b"format: 1\nname: x\ngpu: {}\n", b"- a\n"]
    forged = hostile.sound("interpreted")
    names = sorted(forged.files)
    found = [bytes([mode]) for mode in range(len(_MODES))] + [b"\0" + hostile.sound_bytes("interpreted")]
    found += [bytes([2, 1, number]) + forged.files[name] for number, name in enumerate(names)]
    found += [
        bytes([3, kind, number, step, 1, 1, step]) for kind in range(3) for number in range(6) for step in range(3)
    ]
    found += [b"\1\0" + bytes([0, offset, 0, 0, 1, 255, 1]) for offset in (0, 100, 124, 156)]
    found.append(b"\6" + archive.header("plan.json", 0, 0)[:500] + b"\3")
    found.append(b"\5\1" + digest.canonical_json(forged.index()))
    return found
