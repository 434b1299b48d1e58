"""What a build tells while it runs, and what it comes to."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kernelbake.bundle import Made


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened.

    Args:
        kind: ``phase`` begins one, ``progress`` counts within it, ``rejected`` is a candidate that cannot be used,
            ``note`` is something a person should know.
        phase: ``plan``, ``compile``, ``measure``, ``pack`` or ``self-check``.
        done, total: how far the phase is; None where that is not counted.
        message: for people.
        data: the same for machines.
    """

    kind: Literal["phase", "progress", "rejected", "note"]
    phase: str
    done: int | None = None
    total: int | None = None
    message: str = ""
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


OnEvent: TypeAlias = Callable[[Event], None]


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """What a build came to.

    Args:
        path: the bundle.
        digest: the bundle's digest.
        made: how it was made.
        keys: decisions made.
        candidates: all that were considered.
        rejected: their number by reason.
        bundle_bytes: size of the file.
        entries: binaries in it.
        seconds: wall time of each phase.
        device_busy_share: device-busy time over wall time of all tuning; None where nothing was measured.
        measuring: where the last worker's wall time went, in s by part; ``measure.run`` names them.
        tells: whether this process is the one that tells a person; of several ranks, one.
    """

    path: Path
    digest: str
    made: Made
    keys: int
    candidates: int
    rejected: collections.Counter[str]
    bundle_bytes: int
    entries: int
    seconds: Mapping[str, float]
    device_busy_share: float | None = None
    tells: bool = True
    measuring: Mapping[str, float] = dataclasses.field(default_factory=dict)
