"""The probe's process: ``python -m kernelbake.probe`` says what GPU this machine has."""

from __future__ import annotations

import os
import sys

from kernelbake import host
from kernelbake.errors import KernelbakeError
from kernelbake.worker import Channel


def main() -> None:
    """The process; it ends without destructors."""
    channel = Channel(sys.argv)
    try:
        import torch

        profile = host.running_profile(0)
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        channel.send({"profile": profile.to_json(), "uuid": uuid})
    except KernelbakeError as error:
        channel.send({"message": error.message, "reasons": list(error.reasons)})
    except ImportError as error:
        channel.send({"message": f"GPU: torch cannot be imported: {error}", "reasons": []})
    os._exit(0)


if __name__ == "__main__":
    main()
