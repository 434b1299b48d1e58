"""A workload whose cases are single scenarios, for tests of the planner: ``shadowworkload:WORKLOAD``.

Its section is ``{scenarios: [names of functions below]}``. ``x`` is always what a scenario launches on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from kernelbake.keys import Case
from kernelbake.workload import Cases

SCENARIOS: dict[str, Callable[[Any, str], None]] = {}


def scenario(function: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    SCENARIOS[function.__name__] = function
    return function


def _new(size: int, device: str, dtype: str = "float32") -> Any:
    import torch

    return torch.empty(size, dtype=getattr(torch, dtype), device=device)


@scenario
def numbers(kernels: Any, device: str) -> None:
    """1, multiples of 16, others, and both widths."""
    x, y = _new(64, device), _new(64, device)
    for n in (1, 15, 16, 17, 32, (1 << 31) - 1, 1 << 31, 1 << 32):
        kernels.plain[(1,)](x, y, n, 3, BLOCK=32)


@scenario
def addresses(kernels: Any, device: str) -> None:
    """Views that start anywhere."""
    x, y = _new(256, device, "bfloat16"), _new(256, device)
    for view in (x, x[8:], x[1:], x.view(16, 16)[1], x.view(16, 16)[:, 3], x.view(-1, 4)[1:]):
        kernels.plain[(1,)](view, y, 7, 3, BLOCK=32)
    kernels.plain[(1,)](x, y[4:], 7, 3, BLOCK=32)
    kernels.plain[(1,)](x, y[2:], 7, 3, BLOCK=32)


@scenario
def marks(kernels: Any, device: str) -> None:
    """``do_not_specialize`` on a constexpr and on an argument."""
    x = _new(64, device)
    for size in (3, 5):
        kernels.marked[(1,)](x, 16, SIZE=size)
    for n in (1, 16, 17):
        kernels.marked[(1,)](x, n, SIZE=3)


@scenario
def unaligned_marks(kernels: Any, device: str) -> None:
    x = _new(64, device)
    kernels.unaligned[(1,)](x, 7)
    kernels.unaligned[(1,)](x[1:], 7)


@scenario
def kinds(kernels: Any, device: str) -> None:
    """Every kind of argument that is no tensor."""
    x, bias = _new(64, device), _new(64, device)
    kernels.optional[(1,)](x, bias, 1.5, True, (3, 16), 7)
    kernels.optional[(1,)](x, None, 2.5, False, (3, 16), 7)
    kernels.optional[(1,)](x, None, 2, True, (1, (x, 2)), 7)


@scenario
def heuristics(kernels: Any, device: str) -> None:
    x = _new(64, device)
    for n in (64, 96):
        kernels.heuristics_inside[lambda meta: (96 // meta["BLOCK"],)](x, n)
    kernels.heuristics_outside[(1,)](x, None)
    kernels.heuristics_outside[(1,)](x, _new(64, device))


@scenario
def pruning(kernels: Any, device: str) -> None:
    x = _new(64, device)
    kernels.pruned[(1,)](x, 64)
    kernels.pruned[(1,)](x, n=16)
    kernels.modelled[(1,)](x, 64)


@scenario
def keys(kernels: Any, device: str) -> None:
    """Order and type of what a key holds."""
    x, y = _new(64, device), _new(64, device, "float16")
    kernels.keyed[(1,)](x, y, 8)
    kernels.keyed[(1,)](y=y, x=x, n=8)
    kernels.keyed[(1,)](x, y, True)
    kernels.keyed[(1,)](x, y, 1)
    kernels.single[(1,)](x, 8)


@scenario
def options(kernels: Any, device: str) -> None:
    """Launch options given at the call."""
    x, y = _new(64, device), _new(64, device)
    kernels.plain[(1,)](x, y, 7, 3, BLOCK=32)
    kernels.plain[(2, 3)](x, y, 7, 3, BLOCK=32, num_warps=8)


@scenario
def hooks(kernels: Any, device: str) -> None:
    x = _new(64, device)
    kernels.hooked[(1,)](x, 8)
    assert [sorted(call) for call in kernels.HOOKED] == [["BLOCK", "n", "num_ctas", "num_stages", "num_warps", "x"]]


@scenario
def restoring(kernels: Any, device: str) -> None:
    """Absent and present buffers that a tuner would restore."""
    x, total = _new(64, device), _new(1, device)
    kernels.restored[(1,)](x, None, total, 8)
    kernels.restored[(1,)](x, _new(64, device), total, 8)


@scenario
def functions(kernels: Any, device: str) -> None:
    import triton.language as tl

    x = _new(64, device)
    for function, dtype in ((kernels.double, tl.float32), (kernels.triple, tl.float32), (kernels.double, tl.bfloat16)):
        kernels.chosen[(1,)](x, 7, function, dtype)


@scenario
def values(kernels: Any, device: str) -> None:
    """What a kernel only reads stays known; what it writes does not."""
    import torch

    marks = torch.tensor([0, 3, 5], device=device)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    kernels.counting[(1,)](marks, counts, 1)
    x = _new(int(marks[-1]) * 64, device)
    kernels.plain[(1,)](x, x, len(x), 1, BLOCK=32)
    counts.tolist()


@scenario
def numpy_number(kernels: Any, device: str) -> None:
    import numpy as np

    x = _new(64, device)
    kernels.plain[(1,)](x, x, 7, 3, BLOCK=np.int64(32))


@scenario
def torch_dtype(kernels: Any, device: str) -> None:
    import torch

    kernels.chosen[(1,)](_new(64, device), 7, kernels.double, torch.float32)


@scenario
def descriptor(kernels: Any, device: str) -> None:
    class TensorDescriptor:
        """Stands for Triton's, which cannot be made without memory."""

    kernels.plain[(1,)](TensorDescriptor(), _new(64, device), 7, 3, BLOCK=32)


@scenario
def assertions(kernels: Any, device: str) -> None:
    kernels.plain[(1,)](_new(64, device), _new(64, device), 7, 3, BLOCK=32, debug=True)


@scenario
def local_kernel(kernels: Any, device: str) -> None:
    import triton

    @triton.jit
    def inner(x, n):
        pass

    inner[(1,)](_new(64, device), 7)


@scenario
def replaced_kernel(kernels: Any, device: str) -> None:
    import triton

    old = kernels.plain
    kernels.plain = triton.jit(old.fn)
    old[(1,)](_new(64, device), _new(64, device), 7, 3, BLOCK=32)


@scenario
def compiled_by_torch(kernels: Any, device: str) -> None:
    import torch

    torch.compile(lambda x: x + 1)(_new(64, device))


@scenario
def reads_a_loss(kernels: Any, device: str) -> None:
    loss = (_new(64, device) * 2).sum()
    if loss.item() > 0:
        kernels.plain[(1,)](loss, loss, 7, 3, BLOCK=32)


@scenario
def dies(kernels: Any, device: str) -> None:
    import os
    import sys

    print("fatal: a library ended the process", file=sys.stderr, flush=True)
    os._exit(77)


@scenario
def waits(kernels: Any, device: str) -> None:
    """Says who it is, and waits for its parent to be killed."""
    import os
    import time
    from pathlib import Path

    file = Path(os.environ["SCENARIO_FILE"])
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)
    time.sleep(600)


@scenario
def prints(kernels: Any, device: str) -> None:
    """On both streams; neither may reach the parent as an event."""
    import os

    print('{"event": "plan", "plan": null}', flush=True)
    os.system("echo not an event")
    kernels.single[(1,)](_new(64, device), 8)


class ScenarioSession:
    def __init__(self, device: str) -> None:
        import shadowkernels

        self._kernels, self._device = shadowkernels, device

    def step(self, case: Case) -> None:
        SCENARIOS[str(case["scenario"])](self._kernels, self._device)


class ScenarioWorkload:
    """Implements ``kernelbake.workload.Workload``."""

    name = "scenarios"

    def parse(self, section: Mapping[str, Any]) -> list[str]:
        return list(section["scenarios"])

    def resolve(self, spec: Any) -> dict[str, Any]:
        return {"scenarios": spec}

    def cases(self, spec: Any) -> Cases:
        return Cases(tuple(Case((("scenario", name),)) for name in spec))

    def open(self, spec: Any, *, device: str, seed: int) -> ScenarioSession:
        return ScenarioSession(device)

    def implementations(self, spec: Any) -> dict[str, str]:
        return {"toy": "triton"}

    def oracles(self, spec: Any) -> Mapping[str, Any]:
        return {}

    def prepare(self, *, interpreted: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


WORKLOAD = ScenarioWorkload()
