"""Hostile files whose archive is right, and whose header or index is not (MUST 11 to 20)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import forge
from forge import Forged
from hostile import attack

from kernelbake.members import DOCUMENTS
from kernelbake.rules import Rule

# ---------------------------------------------------------------------------------------------- MUST 11

_BAD_JSON: dict[str, bytes] = {
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "a name twice": b'{"a":1,"a":2}',
    "a deep list": b"[" * 100_000 + b"]" * 100_000,
    "forty levels": b"[" * 40 + b"]" * 40,
    "a deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "an open list": b"[" * 1_000_000,
    "spaces": b'{"a": 1}',
    "unsorted names": b'{"b":1,"a":2}',
    "a byte-order mark": b'\xef\xbb\xbf{"a":1}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "half a surrogate pair": b'{"a":"\\ud800"}',
    "bytes that are no UTF-8": b'{"a":"\xff"}',
    "a number too long": b'{"a":' + b"9" * 5000 + b"}",
    "a number too large": b'{"a":1e999}',
    "another spelling of a number": b'{"a":1.50}',
    "an escape without need": b'{"a":"\\u0041"}',
    "something behind": b'{"a":1}{"a":1}',
    "nothing": b"",
    "two million values": b"[" + b"0," * 2_000_000 + b"0]",
    "as many lists as fit": b"[" + b"[]," * 499_990 + b"[]]",
    "a hundred thousand names and one twice": b"{" + b"".join(b'"%d":0,' % n for n in range(100_000)) + b'"7":0}',
}

for _what, _text in _BAD_JSON.items():
    for _target in ("plan.json", "choices.json"):
        _rule = {"plan.json": Rule.PLAN, "choices.json": Rule.CHOICES}[_target] if "fit" in _what else Rule.STRICT_JSON

        @attack(f"{_what} in {_target}", _rule, place=_target)
        def _(forged: Forged, target: str = _target, text: bytes = _text) -> None:
            forged.files[target] = text


for _what in ("NaN", "a name twice", "a deep list", "spaces", "UTF-16", "half a surrogate pair", "a number too long"):
    for _target in ("fingerprint.json", "manifest.resolved.json"):

        @attack(f"{_what} in {_target}", Rule.STRICT_JSON, place=_target)
        def _(forged: Forged, target: str = _target, text: bytes = _BAD_JSON[_what]) -> None:
            forged.files[target] = text

    @attack(f"{_what} in index.json", Rule.STRICT_JSON, place="index.json")
    def _(forged: Forged, text: bytes = _BAD_JSON[_what]) -> bytes:
        return forged.data(index=text)


for _what in ("NaN", "a name twice", "spaces", "a number too large", "forty levels", "nothing"):

    @attack(f"{_what} in bundle.json", Rule.STRICT_JSON, place="bundle.json")
    def _(forged: Forged, text: bytes = _BAD_JSON[_what]) -> bytes:
        _, *rest = forged.members()
        return forge.pack([("bundle.json", text), *rest])


# ---------------------------------------------------------------------------------------------- MUST 12 to 20

for _format in (2, 1000, 0, -1, "1", 1.5, True, None, [1]):

    @attack(f"format {_format!r}", Rule.FORMAT, place="wanted 1")
    def _(forged: Forged, format_: Any = _format) -> None:
        forged.header["format"] = format_


@attack("no format", Rule.FORMAT, place="bundle.json")
def _(forged: Forged) -> bytes:
    head = {name: value for name, value in forged.header.items() if name != "format"}
    return forged.data(head=head)


@attack("a header that is a list", Rule.FORMAT, place="bundle.json")
def _(forged: Forged) -> bytes:
    _, *rest = forged.members()
    return forge.pack([("bundle.json", b"[1]"), *rest])


def _field_attack(what: str, name: str, value: Any) -> None:
    @attack(f"{what} in the header", Rule.HEADER_FIELDS, place=name)
    def _(forged: Forged) -> None:
        forged.header[name] = value


_field_attack("complete: false", "complete", False)
_field_attack("complete: 1", "complete", 1)
_field_attack("another way of making", "made", "guessed")
_field_attack("an empty name", "name", "")
_field_attack("a negative time", "time", -1)
_field_attack("a field more", "extra", 1)
_field_attack("a negative count", "counts", {"cases": -1})
_field_attack("a version that is a number", "kernelbake", 1)
_field_attack("line information of unknown kind", "line_info", "yes")


@attack("a time beyond a header's", Rule.HEADER_BYTES, place="bundle.json")
def _(forged: Forged) -> None:
    forged.header["time"] = 8**12


@attack("another name, its digest not refreshed", Rule.HEADER_DIGEST, place="bundle.json")
def _(forged: Forged) -> bytes:
    (_, head), *rest = forged.members()
    return forge.pack([("bundle.json", head.replace(b'"name":"sample"', b'"name":"simple"')), *rest])


@attack("another index", Rule.BUNDLE_DIGEST, place="index.json")
def _(forged: Forged) -> bytes:
    head, *_ = forged.members()
    other = forged.copy()
    other.files["manifest.yaml"] += b"# more\n"
    _, index, *rest = other.members()
    return forge.pack([head, index, *rest])


def _index_attack(what: str, place: str, change: Callable[[dict[str, Any]], None]) -> None:
    @attack(f"{what} in the index", Rule.INDEX_FIELDS, place=place)
    def _(forged: Forged) -> bytes:
        index = forged.index()
        change(index)
        return forged.data(index=index)


_index_attack("a negative size", "plan.json.0", lambda index: index["members"]["plan.json"].__setitem__(0, -1))
_index_attack("a size that is a text", "plan.json.0", lambda index: index["members"]["plan.json"].__setitem__(0, "9"))
_index_attack("a size that is true", "plan.json.0", lambda index: index["members"]["plan.json"].__setitem__(0, True))
_index_attack("no digest", "plan.json", lambda index: index["members"]["plan.json"].pop())
_index_attack("another hash", "plan.json.1", lambda index: index["members"]["plan.json"].__setitem__(1, "md5:00"))
_index_attack("members as a list", "members", lambda index: index.update(members=[]))
_index_attack("a field more", "extra", lambda index: index.update(extra=1))


def _about_attack(what: str, name: str, value: Any) -> None:
    @attack(f"{what}, the header's digest refreshed", Rule.ABOUT_DIGEST, place="index.json")
    def _(forged: Forged) -> bytes:
        index = forged.index()
        return forged.data(index=index, head={**forged.header, name: value})


_about_attack("another way of making claimed", "made", "compiled-only")
_about_attack("another name claimed", "name", "other")
_about_attack("another version claimed", "kernelbake", "9.9")


@attack("a member dropped", Rule.LISTED, place="kernel.json")
def _(forged: Forged) -> bytes:
    members = forged.members()
    return forge.pack([member for member in members if member[0] != f"{forged.folders[0]}/kernel.json"])


@attack("a member added", Rule.LISTED, place="lib/")
def _(forged: Forged) -> bytes:
    return forge.pack([*forged.members(), ("lib/" + "0" * 64 + ".so", b"\x7fELF")])


@attack("a member renamed", Rule.LISTED, place="kernels/" + "0" * 64)
def _(forged: Forged) -> bytes:
    first = forged.folders[0]
    return forge.pack([(name.replace(first, "kernels/" + "0" * 64), data) for name, data in forged.members()])


for _name in DOCUMENTS:

    @attack(f"no {_name} at all", Rule.LISTED, place=_name)
    def _(forged: Forged, name: str = _name) -> None:
        del forged.files[name]


@attack("a member longer within its padding", Rule.SIZE, place="manifest.yaml")
def _(forged: Forged) -> bytes:
    members = forged.members()
    return forge.pack([(name, data + b"#" if name == "manifest.yaml" else data) for name, data in members])


@attack("a member of another size", Rule.SIZE, place="kernel.cubin")
def _(forged: Forged) -> bytes:
    index, name = forged.index(), f"{forged.folders[0]}/kernel.cubin"
    forged.files[name] += bytes(512)
    return forged.data(index=index)


@attack("metadata replaced", Rule.DIGEST, place="kernel.json")
def _(forged: Forged) -> bytes:
    index, name = forged.index(), f"{forged.folders[0]}/kernel.json"
    forged.files[name] = forged.files[name].replace(b'"shared":1024', b'"shared":4096')
    return forged.data(index=index)


@attack("code replaced", Rule.DIGEST, place="kernel.cubin")
def _(forged: Forged) -> bytes:
    index, name = forged.index(), f"{forged.folders[0]}/kernel.cubin"
    forged.files[name] = forged.files[name][:-1] + b"\x90"
    return forged.data(index=index)


@attack("two cubins exchanged", Rule.DIGEST, place="kernel.cubin")
def _(forged: Forged) -> bytes:
    index, (first, second, *_) = forged.index(), forged.folders
    one, two = f"{first}/kernel.cubin", f"{second}/kernel.cubin"
    forged.files[one], forged.files[two] = forged.files[two], forged.files[one]
    return forged.data(index=index)
