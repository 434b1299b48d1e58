"""Device profiles: the facts about a GPU that kernels ask for at import. Data; a new profile is a new file here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from kernelbake.errors import InputError

INTERPRETER = "interpreter"


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """What a kernel library may ask about a GPU.

    Args:
        id: the profile's own short name, ``rtx-pro-6000-blackwell``.
        name: the name that the driver reports, exactly.
        backend: ``cuda``, or ``interpreter`` for Triton's interpreter on the CPU.
        capability: compute capability, (12, 0).
        sm_count: streaming multiprocessors.
        shared_memory_bytes: the most shared memory a block can opt in to.
        shared_memory_per_sm_bytes: shared memory of one multiprocessor.
        total_memory_bytes: device memory.
        l2_bytes: level-2 cache.
        warp_size: threads of a warp.
        source: where the figures come from.
    """

    id: str
    name: str
    backend: str
    capability: tuple[int, int]
    sm_count: int
    shared_memory_bytes: int
    shared_memory_per_sm_bytes: int
    total_memory_bytes: int
    l2_bytes: int
    warp_size: int = 32
    source: str = ""

    @property
    def arch(self) -> int:
        """Compute capability without the dot: 120."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def gpu_target(self) -> str:
        """``sm_120``, or ``interpreter``."""
        return INTERPRETER if self.backend == INTERPRETER else f"sm_{self.arch}"

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "capability": list(self.capability)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceProfile:
        return cls(**{**data, "capability": tuple(data["capability"])})


def names() -> list[str]:
    """The ids of all packaged profiles, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))


def load(id_: str) -> DeviceProfile:
    """The packaged profile of that id.

    Raises:
        InputError: there is none; the message lists those that there are.
    """
    if id_ not in names():
        raise InputError(f"device profile: `{id_}` is unknown; known: {', '.join(f'`{name}`' for name in names())}")
    return DeviceProfile.from_json(json.loads((resources.files(__name__) / f"{id_}.json").read_text()))
