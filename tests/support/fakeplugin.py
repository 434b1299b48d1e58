"""A workload plug-in for tests: two axes, faults of its own, no library behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelbake.keys import Case
from kernelbake.workload import Cases, Fault, FaultsError, Oracle, Session


class FakeWorkload:
    """Its section is ``{sizes: [whole numbers, ascending], label: text}``."""

    name = "fake"

    def parse(self, section: Mapping[str, Any]) -> dict[str, Any]:
        faults = [Fault(name, "unknown key") for name in section if name not in ("sizes", "label")]
        sizes = section.get("sizes", [])
        if not sizes:
            faults.append(Fault("sizes", "found none; wanted at least one"))
        for position, size in enumerate(sizes):
            if type(size) is not int:
                faults.append(Fault(f"sizes.{position}", f"found `{size}`; wanted a whole number"))
        if all(type(size) is int for size in sizes) and list(sizes) != sorted(set(sizes)):
            faults.append(Fault("sizes", "not ascending"))
        if not isinstance(section.get("label", ""), str):
            faults.append(Fault("label", f"found `{section['label']}`; wanted text"))
        if faults:
            raise FaultsError(faults)
        return {"sizes": list(sizes), "label": section.get("label", "none")}

    def resolve(self, spec: Any) -> dict[str, Any]:
        return dict(spec)

    def of_run(self, path: Path, section: Mapping[str, Any]) -> dict[str, Any]:
        return self.parse({**section, "label": path.stem})

    def cases(self, spec: Any) -> Cases:
        return Cases(tuple(Case((("size", size),)) for size in spec["sizes"]))

    def open(self, spec: Any, *, device: str, seed: int) -> Session:
        raise AssertionError("nothing here is to be run")

    def implementations(self, spec: Any) -> dict[str, str]:
        return {}

    def oracles(self, spec: Any) -> Mapping[str, Oracle]:
        return {}

    def prepare(self, *, interpreted: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
