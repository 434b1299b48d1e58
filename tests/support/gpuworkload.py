"""The workload of ``gpukernels``; named ``gpuworkload:WORKLOAD``. Its section is ``{kernels, pool_bytes}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toyworkload import ToyWorkload, _grid

from kernelbake.keys import Case
from kernelbake.workload import Cases


class GpuSession:
    def __init__(self, spec: Mapping[str, Any], device: str, seed: int) -> None:
        self._spec, self._device, self._seed = spec, device, seed

    def step(self, case: Case) -> None:
        import gpukernels
        import torch

        n = case["size"]
        x = torch.randn(n, generator=torch.Generator(self._device).manual_seed(self._seed), device=self._device)
        for name in self._spec["kernels"]:
            kernel = getattr(gpukernels, name)
            if name == "touches_little":
                pool = torch.zeros(self._spec["pool_bytes"] // 4, device=self._device)
                kernel[_grid(n)](pool, n)
            elif name == "hangs_at_128":
                kernel[_grid(n)](x, torch.zeros_like(x), torch.zeros(1, dtype=torch.int32, device=self._device), n)
            else:
                kernel[_grid(n)](x, torch.zeros_like(x), n)


class GpuWorkload(ToyWorkload):
    name = "gpu"

    def parse(self, section: Mapping[str, Any]) -> dict[str, Any]:
        return {"kernels": list(section["kernels"]), "pool_bytes": int(section.get("pool_bytes", 0))}

    def cases(self, spec: Any) -> Cases:
        return Cases((Case((("size", 1000),)),))

    def open(self, spec: Any, *, device: str, seed: int) -> Any:
        return GpuSession(spec, device, seed)


WORKLOAD = GpuWorkload()
