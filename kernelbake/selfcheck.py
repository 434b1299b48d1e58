"""The self-check's process: ``python -m kernelbake.selfcheck``. It knows nothing but the packed bundle."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kernelbake import bundle, plan
from kernelbake.bundle import Bundle
from kernelbake.worker import Channel


def faults(packed: Bundle, *, on_device: bool) -> list[str]:
    """Everything that the bundle's own plan needs and cannot be had from it.

    Args:
        packed: the bundle, its integrity checked.
        on_device: whether to load every entry on the current device.
    """
    found = []
    if packed.made != "compiled-only":
        found += [str(missing) for missing in plan.coverage(packed.plan, packed.inventory()).missing]
    if on_device:
        found += _unloadable(packed)
    return found


def _unloadable(packed: Bundle) -> list[str]:
    import torch  # before Triton's driver, which takes torch's streams only then

    from kernelbake.errors import KernelbakeError
    from kernelbake.loading import Libraries, load_entry, prepare_driver

    torch.cuda.init()
    libraries = Libraries(packed.libs)
    prepare_driver(libraries)
    found = []
    for entry in packed.entries.values():
        try:
            load_entry(entry, 0, libraries)
        except (RuntimeError, LookupError, KernelbakeError) as error:
            found.append(f"{entry.kernel.name} {entry.specialization}: {str(error).splitlines()[0]}")
    return found


def main() -> None:
    """The process; it ends without destructors."""
    channel = Channel(sys.argv)
    request = channel.receive()
    channel.send({"faults": faults(bundle.read(Path(request["bundle"])), on_device=request["on_device"])})
    os._exit(0)


if __name__ == "__main__":
    main()
