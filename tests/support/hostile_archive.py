"""Hostile files that are no bundle's archive: another file altogether, or another archive (MUST 1 to 10)."""

from __future__ import annotations

import gzip
import io
import os
import socket
import zipfile
from pathlib import Path

import forge
from forge import Forged
from hostile import attack, sound_bytes, special

from kernelbake import archive, digest
from kernelbake.rules import Rule

# ---------------------------------------------------------------------------------------------- MUST 1 to 3


@special("a directory", Rule.REGULAR_FILE, place="a directory")
def _(path: Path) -> None:
    path.mkdir()


@special("a FIFO", Rule.REGULAR_FILE, place="a FIFO")
def _(path: Path) -> None:
    os.mkfifo(path)


@special("a link to a device", Rule.REGULAR_FILE, place="a device")
def _(path: Path) -> None:
    path.symlink_to("/dev/zero")


@special("a socket", Rule.REGULAR_FILE, place="a socket")
def _(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    try:  # the address of a socket is short, so it is bound from inside its folder
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)
        os.close(here)


@attack("an empty file", Rule.LENGTH, place="0 bytes")
def _(forged: Forged) -> bytes:
    return b""


@attack("gzip data", Rule.LENGTH, place="gzip data")
def _(forged: Forged) -> bytes:
    return gzip.compress(forged.data(), mtime=0)


@attack("a zip archive", Rule.LENGTH, place="a zip archive")
def _(forged: Forged) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bundle.json", bytes(1 << 20))
    return buffer.getvalue()


@attack("a gzip bomb", Rule.LENGTH, place="gzip data")
def _(forged: Forged) -> bytes:
    return gzip.compress(bytes(64 << 20), mtime=0)


@attack("cut inside a block", Rule.LENGTH, place="wanted whole blocks")
def _(forged: Forged) -> bytes:
    return forged.data()[:-100]


@attack("zeros", Rule.ORDER, Rule.HEADER_BYTES, place="bundle.json")
def _(forged: Forged) -> bytes:
    return bytes(64 * 512)


@special("a sparse file of 3 GiB", Rule.LENGTH, place="3,221,225,472 bytes")
def _(path: Path) -> None:
    with path.open("wb") as file:
        file.write(sound_bytes()[:4096])
        file.truncate(3 << 30)


@special("a sparse file of 1 GiB", Rule.TRAILER, place="as the index says")
def _(path: Path) -> None:
    with path.open("wb") as file:
        file.write(sound_bytes())
        file.truncate(1 << 30)


@attack("10 GB claimed by the header", Rule.BOUNDS, place="10,000,000,000 bytes")
def _(forged: Forged) -> bytes:
    data = forged.data()
    base_256 = b"\x80" + (10_000_000_000).to_bytes(11, "big")
    return forge.patched(data[:512], 124, base_256) + data[512:]


@attack("10 GB claimed for the index", Rule.BOUNDS, place="8,589,934,591 bytes")
def _(forged: Forged) -> bytes:
    head, index, *rest = forged.members()
    start = forge.pack([head], trailer=b"")
    return start + forge.header("index.json", 8**11 - 1) + forge.pack([index, *rest])[512:]


@attack("10 GB claimed in the index", Rule.BOUNDS, place="kernel.cubin")
def _(forged: Forged) -> bytes:
    index = forged.index()
    index["members"][f"{forged.folders[0]}/kernel.cubin"][0] = 10_000_000_000
    return forged.data(index=index)


@attack("a million members in the index", Rule.BOUNDS, place="index.json")
def _(forged: Forged) -> bytes:
    rows = (b'"lib/%064x.so":[0,"sha256:%064x"]' % (number, number) for number in range(1_000_000))
    return forged.data(index=b'{"about":"sha256:' + b"0" * 64 + b'","members":{' + b",".join(rows) + b"}}")


@attack("more members than are allowed", Rule.BOUNDS, place="70,010 members")
def _(forged: Forged) -> bytes:
    index = forged.index()
    extra = 70_010 - len(index["members"])
    index["members"] |= {f"lib/{number:064x}.so": [0, digest.of_bytes(b"")] for number in range(extra)}
    return forged.data(index=index)


# ---------------------------------------------------------------------------------------------- MUST 4 to 7


def _foreign(name: str, type_: bytes, link: bytes = b"", content: bytes = b"") -> None:
    what = archive.TYPES.get(type_, "an unknown type")

    @attack(f"{what} added", Rule.MEMBER_TYPE, Rule.LISTED, place=name.strip("/")[:60])
    def _(forged: Forged) -> bytes:
        block = forge.header(name, len(content), type_, link)
        return forge.inserted(forged.members(), block, content)


_foreign("plan.link", b"1", b"plan.json")
_foreign("kernels/link", b"2", b"/etc/passwd")
_foreign("dev/null", b"3")
_foreign("dev/sda", b"4")
_foreign("kernels/", b"5")
_foreign("pipe", b"6")
_foreign("contiguous", b"7")
_foreign("dump", b"D")
_foreign("././@LongLink", b"K", content=b"/etc/passwd\0")
_foreign("./@LongLink", b"L", content=b"a" * 200 + b"\0")
_foreign("multi", b"M")
_foreign("names", b"N")
_foreign("sparse", b"S", content=bytes(512))
_foreign("volume", b"V")
_foreign("solaris", b"X", content=b"20 path=/etc/passwd\n")
_foreign("pax_global_header", b"g", content=b"20 path=/etc/passwd\n")
_foreign("PaxHeaders/plan.json", b"x", content=b"20 path=/etc/passwd\n")
_foreign("future", b"Z")


@attack("a member made a link", Rule.MEMBER_TYPE, place="plan.json")
def _(forged: Forged) -> bytes:
    def headers(name: str, data: bytes) -> bytes:
        block = archive.header(name, len(data), 0)
        return forge.patched(block, 156, b"2") if name == "plan.json" else block

    return forge.pack(forged.members(), headers)


@attack("the header made a pax header", Rule.MEMBER_TYPE, place="bundle.json")
def _(forged: Forged) -> bytes:
    data = forged.data()
    return forge.patched(data[:512], 156, b"g") + data[512:]


@attack("an old regular type", Rule.MEMBER_TYPE, place="choices.json")
def _(forged: Forged) -> bytes:
    def headers(name: str, data: bytes) -> bytes:
        block = archive.header(name, len(data), 0)
        return forge.patched(block, 156, b"\0") if name == "choices.json" else block

    return forge.pack(forged.members(), headers)


@attack("a link and a file through it", Rule.MEMBER_TYPE, Rule.MEMBER_NAME, place="kernels/x/evil")
def _(forged: Forged) -> bytes:
    members = forged.members()
    link = forge.header("kernels/x", 0, b"2", b"/tmp")
    file = forge.header("kernels/x/evil", 4) + b"evil" + bytes(508)
    return forge.pack(members[:4], trailer=link + file) + forge.pack(members[4:])


for _name in (
    "../evil",
    "/etc/passwd",
    "kernels/../../evil",
    "kernels/" + "A" * 64 + "/kernel.cubin",
    "kernels/" + "a" * 64 + "/kernel.ptx",
    "./plan.json",
    "plan.json/",
    "PLAN.JSON",
    "lib/x.so",
    "extra.txt",
    "con\\..\\evil",
    "plan.json\n",
):

    @attack(f"the name {_name!r} in the index", Rule.MEMBER_NAME, place="the name")
    def _(forged: Forged, name: str = _name) -> None:
        forged.files[name] = b"evil"

    @attack(
        f"the name {_name!r} in the archive", Rule.MEMBER_NAME, Rule.LISTED, place="evil" if "evil" in _name else ""
    )
    def _(forged: Forged, name: str = _name) -> bytes:
        return forge.inserted(forged.members(), forge.header(name, 4), b"evil")


@attack("a name that is no ASCII", Rule.MEMBER_NAME, place="\\xff")
def _(forged: Forged) -> bytes:
    return forge.inserted(forged.members(), forge.header(b"plan\xff.json", 4), b"evil")


@attack("bundle.json listed", Rule.MEMBER_NAME, place="bundle.json")
def _(forged: Forged) -> None:
    forged.files["bundle.json"] = b"{}"


@attack("a member twice", Rule.UNIQUE, place="plan.json")
def _(forged: Forged) -> bytes:
    members = forged.members()
    plan = next(member for member in members if member[0] == "plan.json")
    return forge.pack([*members, plan])


@attack("another member of a listed name", Rule.UNIQUE, place="plan.json")
def _(forged: Forged) -> bytes:
    return forge.pack([*forged.members(), ("plan.json", b"{}")])


@attack("index before header", Rule.ORDER, place="byte 0")
def _(forged: Forged) -> bytes:
    head, index, *rest = forged.members()
    return forge.pack([index, head, *rest])


@attack("a member between header and index", Rule.ORDER, place="byte 1024")
def _(forged: Forged) -> bytes:
    head, index, first, *rest = forged.members()
    return forge.pack([head, first, index, *rest])


@attack("two members exchanged", Rule.ORDER, place="record.jsonl")
def _(forged: Forged) -> bytes:
    members = forged.members()
    return forge.pack([*members[:-2], members[-1], members[-2]])


@attack("members in reverse order", Rule.ORDER, place="record.jsonl")
def _(forged: Forged) -> bytes:
    head, index, *rest = forged.members()
    return forge.pack([head, index, *reversed(rest)])


# ---------------------------------------------------------------------------------------------- MUST 8 to 10


def _header_attack(what: str, target: str, start: int, field: bytes) -> None:
    @attack(f"{what} in the header of {target}", Rule.HEADER_BYTES, place=target)
    def _(forged: Forged) -> bytes:
        def headers(name: str, data: bytes) -> bytes:
            block = archive.header(name, len(data), 0)
            return forge.patched(block, start, field) if name == target else block

        return forge.pack(forged.members(), headers)


for _target in ("bundle.json", "index.json", "fingerprint.json", "record.jsonl"):
    _header_attack("another mode", _target, 100, b"0000755\0")
    _header_attack("an owner", _target, 108, b"0001750\0")
    _header_attack("a time", _target, 136, b"00000000001\0")
    _header_attack("an owner's name", _target, 265, b"root\0")
    _header_attack("the GNU magic", _target, 257, b"ustar  \0")
    _header_attack("a link's name", _target, 157, b"/etc/passwd")
    _header_attack("a device number", _target, 329, b"0000001\0")
    _header_attack("a name in the reserved bytes", _target, 500, b"x")
    _header_attack("bytes after the name's end", _target, 90, b"x")
    _header_attack("a size without its zero", _target, 124, b" ")


@attack("a prefix before a name", Rule.MEMBER_NAME, place="evil/plan.json")
def _(forged: Forged) -> bytes:
    def headers(name: str, data: bytes) -> bytes:
        block = archive.header(name, len(data), 0)
        return forge.patched(block, 345, b"evil") if name == "plan.json" else block

    return forge.pack(forged.members(), headers)


@attack("a checksum in another form", Rule.HEADER_BYTES, place="plan.json")
def _(forged: Forged) -> bytes:
    def headers(name: str, data: bytes) -> bytes:
        block = archive.header(name, len(data), 0)
        return block[:148] + b" " + block[149:154] + b" \0" + block[156:] if name == "plan.json" else block

    return forge.pack(forged.members(), headers)


@attack("a wrong checksum", Rule.HEADER_BYTES, place="plan.json")
def _(forged: Forged) -> bytes:
    def headers(name: str, data: bytes) -> bytes:
        block = archive.header(name, len(data), 0)
        return block[:148] + b"000000\0 " + block[156:] if name == "plan.json" else block

    return forge.pack(forged.members(), headers)


@attack("something hidden in the padding", Rule.PADDING, place="choices.json")
def _(forged: Forged) -> bytes:
    parts = [forge.pack([member], trailer=b"") for member in forged.members()]
    parts[2] = parts[2][:-4] + b"evil"
    return b"".join([*parts, bytes(1024)])


@attack("no trailer", Rule.TRAILER, place="without a trailer")
def _(forged: Forged) -> bytes:
    return forge.pack(forged.members(), trailer=b"")


@attack("half a trailer", Rule.TRAILER, place="512 bytes after the last member")
def _(forged: Forged) -> bytes:
    return forge.pack(forged.members(), trailer=bytes(512))


@attack("a trailer as long as a tape's record", Rule.TRAILER, place="bytes after the last member")
def _(forged: Forged) -> bytes:
    return forge.pack(forged.members(), trailer=bytes(10240))


@attack("something after the trailer", Rule.TRAILER, place="bytes after the last member")
def _(forged: Forged) -> bytes:
    return forged.data() + b"evil" + bytes(508)


@attack("another bundle after the trailer", Rule.TRAILER, place="bytes after the last member")
def _(forged: Forged) -> bytes:
    return forged.data() + forged.data()


@attack("something in the trailer", Rule.TRAILER, place="byte")
def _(forged: Forged) -> bytes:
    return forge.pack(forged.members(), trailer=bytes(512) + b"evil" + bytes(508))


@attack("cut between members", Rule.TRAILER, Rule.LISTED, place="specializations.json")
def _(forged: Forged) -> bytes:
    return forge.pack(forged.members()[:-1], trailer=b"")


@attack("cut inside a member", Rule.TRAILER, place="inside it")
def _(forged: Forged) -> bytes:
    return forge.pack(forged.members()[:4], trailer=b"")[:-1024]
