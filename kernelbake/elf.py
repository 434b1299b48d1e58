"""The few facts of a cubin's ELF header that say for which GPU its code is."""

from __future__ import annotations

import dataclasses

MACHINE_CUDA = 190
"""``EM_CUDA`` of the ELF registry."""

_OLD_ABI, _NEW_ABI = 0x33, 0x41
"""``EI_OSABI`` of the two layouts. Seen on cubins of Triton 3.6 to 3.9: the old one for sm_80, and for sm_90 up to 3.8;
the new one for sm_100 and sm_120 always, and for sm_90 from 3.9 on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cubin:
    """What the header of a cubin says.

    Args:
        arch: compute capability without the dot, 120.
    """

    arch: int


def read(data: bytes | memoryview) -> Cubin:
    """Reads the header of a cubin.

    Raises:
        ValueError: the data is no cubin, in a few words that say why.
    """
    head = bytes(data[:64])
    if len(head) < 64 or not head.startswith(b"\x7fELF"):
        raise ValueError("no ELF header")
    if head[4:7] != b"\x02\x01\x01":
        raise ValueError("not a 64-bit little-endian ELF file of version 1")
    machine = int.from_bytes(head[18:20], "little")
    if machine != MACHINE_CUDA:
        raise ValueError(f"an ELF file for machine {machine}, not for CUDA ({MACHINE_CUDA})")
    flags = int.from_bytes(head[48:52], "little")
    if head[7] == _OLD_ABI:
        return Cubin(flags & 0xFF)
    if head[7] == _NEW_ABI:
        return Cubin(flags >> 8 & 0xFF)
    raise ValueError(f"an ELF file of the unknown ABI 0x{head[7]:02x}")
