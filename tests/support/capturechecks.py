"""What targets' forward passes ask of a GPU, in a process of its own: operations that no CUDA graph can hold.

``python capturechecks.py`` runs every architecture's forward pass on fake CUDA tensors and prints, as JSON, name → the
operations in which the host would wait for the device, or copy between them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from kernelbake import fakedevice, profiles

fakedevice.install(profiles.load("h200"))

import tinytarget  # noqa: E402
import torch  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dflash import synthetic, target  # noqa: E402
from dflash.buckets import Shape  # noqa: E402
from dflash.spec import Spec  # noqa: E402
from dflash.target import Target  # noqa: E402
from kernelbake import faketensors, triton_api  # noqa: E402
from kernelbake.bounds import Limits  # noqa: E402
from kernelbake.recorder import Observer  # noqa: E402
from kernelbake.shadow import LaunchLog, shadowed  # noqa: E402

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class Watch(TorchDispatchMode):
    """Notes operations whose result the host waits for, and copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.forbidden: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not faketensors.DEVICE_QUERY:
            self.operations += 1
            tensors = [item for item in pytree.tree_leaves((args, kwargs, result)) if isinstance(item, torch.Tensor)]
            copies = func in (aten._to_copy.default, aten.copy_.default) and len({item.device for item in tensors}) > 1
            if copies or self._waits(func, args):
                self.forbidden.append(str(func))
        return result

    def _waits(self, func: Any, args: Any) -> bool:
        if func is aten.index.Tensor:  # by numbers it has the shape of the numbers
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return any(tag in _DYNAMIC for tag in func.tags)


def build(architecture: str) -> tuple[Target, Spec]:
    spec = tinytarget.spec(architecture)
    made = target.random_target(spec.target, spec.drafter.target_layer_ids, CUDA, torch.bfloat16, seed=0)
    return made, spec


def watched(architecture: str, change: Callable[[Target], None]) -> dict[str, Any]:
    """Every padded shape's pass, the second time: the first makes what is made once."""
    model, spec = build(architecture)
    change(model)
    watch = Watch()
    for length in (64, 256):
        given = synthetic.batch(Shape(length, 8, 2, "padded", "bfloat16"), spec, 0).on(CUDA)
        model.features(given)
        with watch:
            found = model.features(given)
        assert found.device == CUDA
        assert found.shape == (2, length, model.width)
    return {"operations": watch.operations, "forbidden": sorted(set(watch.forbidden))}


def nothing(model: Target) -> None:
    """Changes nothing."""


def reads_a_number(model: Target) -> None:
    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * int(torch.ones(1, dtype=torch.int64, device=CUDA))

    model.model.model.layers[0].register_forward_hook(hook)


def brings_a_table(model: Target) -> None:
    model.model.model.layers[0].register_forward_hook(lambda module, args, output: output + torch.ones(1).to(CUDA))


def selects_by_mask(model: Target) -> None:
    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        rows = torch.ones(output.shape[0], dtype=torch.bool, device=CUDA)
        return output[rows]

    model.model.model.layers[0].register_forward_hook(hook)


CHECKS: dict[str, tuple[str, Callable[[Target], None]]] = {
    "qwen3_5": ("qwen3_5", nothing),
    "qwen3_next": ("qwen3_next", nothing),
    "qwen3_5_moe": ("qwen3_5_moe", nothing),
    "reads a number": ("qwen3_5", reads_a_number),
    "brings a table": ("qwen3_5", brings_a_table),
    "selects by mask": ("qwen3_5", selects_by_mask),
}


def main() -> None:
    results: dict[str, Any] = {}
    for name, (architecture, change) in CHECKS.items():
        log = LaunchLog(Observer(triton_api.gpu_target(90), faketensors.stand_in, run_hooks=True), Limits())
        with shadowed(log):
            results[name] = watched(architecture, change)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
