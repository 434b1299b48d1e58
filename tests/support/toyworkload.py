"""A workload of small kernels for tests of the builder: real launches, no library behind them.

Its section is ``{sizes: [..], kernels: [names in toykernels], device_case: …}``; named ``toyworkload:WORKLOAD``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from kernelbake.keys import Case
from kernelbake.workload import Cases, Oracle


class ToySession:
    """Launches every wanted kernel once a step, on seeded inputs, twice the first one."""

    def __init__(self, spec: Mapping[str, Any], device: str, seed: int) -> None:
        self._spec, self._device, self._seed = spec, device, seed

    def step(self, case: Case) -> None:
        import torch

        n = case["size"]
        generator = torch.Generator(self._device).manual_seed(self._seed)
        for name in self._spec["kernels"]:
            x = torch.randn(n, generator=generator, device=self._device)
            _LAUNCHES[name](x, n)


def _grid(n: Any) -> Any:
    import triton

    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def _launch_scale(x: Any, n: Any) -> None:
    import torch
    import toykernels

    for _ in range(2):
        toykernels.scale[_grid(n)](x, torch.empty_like(x), 2.0, n)


def _launch_shift(x: Any, n: Any) -> None:
    import toykernels

    toykernels.shift[(-(-n // 64),)](x, n, BLOCK=64)


def _launch_accumulate(x: Any, n: Any) -> None:
    import torch
    import toykernels

    for bias in (None, torch.ones_like(x)):
        toykernels.accumulate[_grid(n)](x, torch.ones_like(x), bias, n)


def _launch_copy(name: str) -> Any:
    def launch(x: Any, n: Any) -> None:
        import torch
        import toykernels

        output = x.clone() if name == "leaves_gaps_at_64" else torch.zeros_like(x)
        getattr(toykernels, name)[_grid(n)](x, output, n)

    return launch


_LAUNCHES = {
    "scale": _launch_scale,
    "shift": _launch_shift,
    "accumulate": _launch_accumulate,
    "wrong_at_128": _launch_copy("wrong_at_128"),
    "strays_at_64": _launch_copy("strays_at_64"),
    "leaves_gaps_at_64": _launch_copy("leaves_gaps_at_64"),
}


class ToyWorkload:
    name = "toy"

    def parse(self, section: Mapping[str, Any]) -> dict[str, Any]:
        return {"sizes": list(section["sizes"]), "kernels": list(section["kernels"])}

    def resolve(self, spec: Any) -> dict[str, Any]:
        return dict(spec)

    def cases(self, spec: Any) -> Cases:
        return Cases(tuple(Case((("size", size),)) for size in spec["sizes"]))

    def open(self, spec: Any, *, device: str, seed: int) -> ToySession:
        return ToySession(spec, device, seed)

    def implementations(self, spec: Any) -> dict[str, str]:
        return {}

    def oracles(self, spec: Any) -> Mapping[str, Oracle]:
        return {}

    def prepare(self, *, interpreted: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


WORKLOAD = ToyWorkload()
