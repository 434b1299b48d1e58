"""The workload: what a trainer tells kernelbake about its training steps, and how its plug-in is found.

kernelbake knows no trainer. A plug-in is an object registered in the entry-point group ``kernelbake.workloads`` under
the name that a manifest's ``workload.plugin`` gives. Its module may load nothing heavy at import; torch comes in only
when ``open`` is called, in a process that kernelbake has prepared for it (fake or real).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from kernelbake.errors import InputError
from kernelbake.keys import Case
from kernelbake.words import counted

GROUP = "kernelbake.workloads"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing wrong with a plug-in's section of a manifest or with a run configuration.

    Args:
        path: dotted path below the section, list positions as numbers: ``axes.buckets.2``.
        message: what was found and what was wanted.
    """

    path: str
    message: str


class FaultsError(InputError):
    """All the faults of a section at once; the manifest adds lines and shows them."""

    def __init__(self, faults: list[Fault]) -> None:
        reasons = [f"{fault.path}: {fault.message}" for fault in faults]
        super().__init__(f"workload: {counted(len(faults), 'fault')}", reasons=reasons)
        self.faults = tuple(faults)


@dataclasses.dataclass(frozen=True)
class Cases:
    """The static shapes of a workload, and those left out with the reason for each."""

    planned: tuple[Case, ...]
    skipped: tuple[tuple[Case, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A reference for the outputs of one kernel's launch.

    Args:
        reference: called with the launch's arguments by parameter name (tensors are inputs before the launch); returns
            the expected contents, by parameter name, of the tensors that the launch writes.
        tolerance: the largest ‖out − reference‖ / ‖reference‖ that counts as right.
    """

    reference: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    tolerance: float


@dataclasses.dataclass(frozen=True)
class PartPeak:
    """Memory of one part of a step, on all devices together, above what is there between steps.

    Args:
        name: the part, by the session's word for it.
        begun_bytes: held when it began for the first time.
        peak_bytes: the most held while the step was in it.
        changes: what it allocates and frees again, in order: a positive number allocates so many bytes, −k frees what
            the k-th allocation, counted from 1, has made.
    """

    name: str
    begun_bytes: int
    peak_bytes: int
    changes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a step of a case holds beyond what is there between steps, part by part in the order in which they began."""

    case: Case
    parts: tuple[PartPeak, ...]

    @property
    def largest(self) -> PartPeak | None:
        """The part with the highest peak; None of a step that makes no tensor."""
        return max(self.parts, key=lambda part: part.peak_bytes, default=None)

    def to_json(self) -> dict[str, Any]:
        return {"case": self.case.to_json(), "parts": [dataclasses.astuple(part) for part in self.parts]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Footprint:
        parts = (PartPeak(name, begun, peak, tuple(changes)) for name, begun, peak, changes in data["parts"])
        return cls(Case.from_json(data["case"]), tuple(parts))


class Session(Protocol):
    """A workload opened in this process: its modules built once, its step run for one case after another.

    A session may have an attribute ``part``, a text that says what a step is at work on; without it a step is one part.
    """

    def step(self, case: Case) -> None:
        """Runs one representative step of the case: the real code of the trainer, every kind of layer at least once,
        forward, backward and optimizer, with seeded inputs, on the session's device.

        The same seed and case give the same launches with the same inputs, in the same order.
        """
        ...


class Workload(Protocol):
    """What a plug-in offers."""

    name: str

    def parse(self, section: Mapping[str, Any]) -> Any:
        """The plug-in's own validated, frozen form of its manifest section, defaults filled in. Loads no torch.

        Raises:
            FaultsError: with every fault of the section.
        """
        ...

    def resolve(self, spec: Any) -> dict[str, Any]:
        """The section again as plain data, after defaults and model dimensions were filled in; ``parse`` accepts it."""
        ...

    def of_run(self, path: Path, section: Mapping[str, Any]) -> Any:
        """The spec of a run: a bundle's section, with what the run's configuration file says instead. Loads no torch.

        Raises:
            InputError: the configuration cannot be read, or asks for what cannot be.
        """
        ...

    def cases(self, spec: Any) -> Cases:
        """The static shapes that the section asks for. Loads no torch."""
        ...

    def open(self, spec: Any, *, device: str, seed: int) -> Session:
        """Builds what a step needs on the device (``cuda`` or ``cpu``), with random weights of the real shapes.

        Under a shadow run this happens on fake tensors; the plug-in does not notice.

        Raises:
            PlanError: the workload cannot run like this, with the reason (a kernel library that refuses, say).
        """
        ...

    def implementations(self, spec: Any) -> dict[str, str]:
        """Which implementation serves each call that could be rerouted: back ends, fallbacks, hub kernels."""
        ...

    def oracles(self, spec: Any) -> Mapping[str, Oracle]:
        """References by kernel name (``module.qualname``); kernels without one are checked by agreement."""
        ...

    def prepare(self, *, interpreted: bool) -> contextlib.AbstractContextManager[None]:
        """What the workload's kernels need around them in this process, under the interpreter in particular."""
        ...


_METHODS = ("parse", "resolve", "cases", "open", "implementations", "oracles", "prepare")


def names() -> list[str]:
    """The names of all installed plug-ins, sorted."""
    return sorted(point.name for point in _points())


def load(name: str) -> Workload:
    """The plug-in of that name.

    Raises:
        InputError: no such plug-in is installed, its module does not import, or what it gives is none.
    """
    for point in _points():
        if point.name == name:
            try:
                workload: Workload = point.load()
            except (Exception, SystemExit) as error:  # another's module may do anything
                said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
                where = _where_from(point)
                raise InputError(f"workload `{name}`: its plug-in does not import: {said}{where}") from error
            lacking = [f"`{method}`" for method in _METHODS if not callable(getattr(workload, method, None))]
            if lacking:
                raise InputError(f"workload `{name}`: its plug-in has no {', '.join(lacking)}; wanted a workload")
            return workload
    known = ", ".join(f"`{known}`" for known in names()) or "none"
    raise InputError(f"workload: `{name}` is not installed; installed plug-ins: {known}")


def _where_from(point: importlib.metadata.EntryPoint) -> str:
    """Says where the plug-in's package comes from: one of the same name may stand before it on the path."""
    root = point.module.partition(".")[0]
    found = importlib.util.find_spec(root)
    if found is None or point.dist is None:
        return ""
    return f"; `{root}` is imported from `{found.origin}`, wanted the one that `{point.dist.name}` installed"


def _points() -> Iterator[importlib.metadata.EntryPoint]:
    yield from importlib.metadata.entry_points(group=GROUP)
