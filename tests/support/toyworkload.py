"""A workload of small kernels for tests of the builder: real launches, no library behind them.

Its section is ``{sizes: [..], kernels: [names in toykernels]}``. Plug-ins here, by their names after
``toyworkload:``: ``WORKLOAD``, ``SURPRISING`` (a real step launches more than a shadow run), ``FAILING`` (a real step
raises), ``WATCHFUL`` (asserts what it sees around its launches), ``KNOWING`` (has an oracle).
"""

from __future__ import annotations

import contextlib
import os
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


def _launch_mark(x: Any, n: Any) -> None:
    """Two halves of outputs that hold, as memory does, something else in every process."""
    import torch
    import toykernels

    rubbish = torch.Generator(x.device).manual_seed(int.from_bytes(os.urandom(7)))
    loss = torch.randn(2 * n, generator=rubbish, device=x.device)
    positive = torch.randint(0, 2, (2 * n,), generator=rubbish, device=x.device).bool()
    for first in (0, n):
        toykernels.mark[(-(-n // 64),)](x, loss, positive, first, n, BLOCK=64)


def _launch_copy(name: str) -> Any:
    def launch(x: Any, n: Any) -> None:
        import torch
        import toykernels

        output = x.clone() if name == "leaves_gaps_at_64" else torch.zeros_like(x)
        output[0] = 0.0
        getattr(toykernels, name)[_grid(n)](x, output, n)

    return launch


def _launch_repeat(x: Any, n: Any) -> None:
    """Into an output that holds the result already, to the last element."""
    import toykernels

    toykernels.leaves_gaps_at_64[_grid(n)](x, x.clone(), n)


_LAUNCHES = {
    "scale": _launch_scale,
    "shift": _launch_shift,
    "accumulate": _launch_accumulate,
    "mark": _launch_mark,
    "wrong_at_128": _launch_copy("wrong_at_128"),
    "strays_at_64": _launch_copy("strays_at_64"),
    "leaves_gaps_at_64": _launch_copy("leaves_gaps_at_64"),
    "mostly_wrong": _launch_copy("mostly_wrong"),
    "repeats_itself": _launch_repeat,
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


def _is_real() -> bool:
    """Whether tensors hold data; a shadow run's do not."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(torch.empty(1), FakeTensor)


class _Surprised(ToySession):
    def step(self, case: Case) -> None:
        import torch

        super().step(case)
        if _is_real():
            x = torch.randn(case["size"] + 1, device=self._device)
            _launch_scale(x, case["size"] + 1)
            import toykernels

            toykernels.shift[(1,)](x, case["size"], BLOCK=32)


class _Failing(ToySession):
    def step(self, case: Case) -> None:
        super().step(case)
        if _is_real():
            _ = 1 / 0


class _Watchful(ToySession):
    def step(self, case: Case) -> None:
        import torch

        n = case["size"]
        x, total = torch.ones(n, device=self._device), torch.full((n,), 3.0, device=self._device)
        guard = torch.ones(3 * n, device=self._device)
        for _ in range(2):
            before = x.clone()
            _launch_shift(x, n)
            _assert_equal(x, before + 1.0)
            inside = guard[n : 2 * n]
            _launch_shift(inside, n)
            _assert_equal(guard[:n], torch.ones(n, device=self._device))
            _assert_equal(guard[2 * n :], torch.ones(n, device=self._device))
            import toykernels

            before = total.clone()
            toykernels.accumulate[_grid(n)](x, total, None, n)
            _assert_equal(total, before + x)


def _assert_equal(one: Any, other: Any) -> None:
    import torch

    if _is_real() and not torch.equal(one, other):
        raise AssertionError(f"{one} is not {other}")


class _Variation(ToyWorkload):
    """The toy workload with another session."""

    def __init__(self, session: type[ToySession]) -> None:
        self._session = session

    def open(self, spec: Any, *, device: str, seed: int) -> ToySession:
        return self._session(spec, device, seed)


class _Knowing(ToyWorkload):
    def oracles(self, spec: Any) -> Mapping[str, Oracle]:
        return {"toykernels.mostly_wrong": Oracle(lambda arguments: {"y": arguments["x"]}, 1e-6)}


WORKLOAD = ToyWorkload()
SURPRISING, FAILING, WATCHFUL = _Variation(_Surprised), _Variation(_Failing), _Variation(_Watchful)
KNOWING = _Knowing()
