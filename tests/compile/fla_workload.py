"""Workloads made of single kernels of flash-linear-attention, for tests of the planner; named ``fla_workload:NAME``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kernelbake.keys import Case
from kernelbake.workload import Cases

H, HV, K, V = 16, 32, 128, 128


def _make(*shape: int, dtype: Any = None, grad: bool = True) -> Any:
    import torch

    return torch.empty(*shape, dtype=dtype or torch.bfloat16, device="cuda").requires_grad_(grad)


def gdn(batch: int, length: int, cu: Any) -> None:
    """``chunk_gated_delta_rule``, forward and backward."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        _make(batch, length, H, K),
        _make(batch, length, H, K),
        _make(batch, length, HV, V),
        g=_make(batch, length, HV, dtype=torch.float32),
        beta=_make(batch, length, HV),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu,
    )
    out.float().sum().backward()


OPERATIONS: dict[str, Callable[[int, int, Any], None]] = {"gdn": gdn}


@dataclasses.dataclass(frozen=True)
class Spec:
    operations: tuple[str, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    layouts: tuple[str, ...]


class OperationsSession:
    """Runs every operation of the spec at a case's shape."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def step(self, case: Case) -> None:
        batch, length = int(case["batch"]), int(case["length"])  # type: ignore[arg-type]
        for name in self._spec.operations:
            if case["layout"] == "fixed":
                OPERATIONS[name](batch, length, None)
            else:
                OPERATIONS[name](1, batch * length, _boundaries(batch, length))


def _boundaries(batch: int, length: int) -> Any:
    import torch

    ends = [index * length for index in range(batch + 1)] if batch > 1 else [0, length // 4 + 1, length]
    return torch.tensor(ends, device="cuda")


class OperationsWorkload:
    """A workload without a trainer."""

    name = "fla-operations"

    def parse(self, section: Mapping[str, Any]) -> Spec:
        return Spec(**{name: tuple(value) for name, value in section.items()})

    def resolve(self, spec: Spec) -> dict[str, Any]:
        return {name: list(value) for name, value in dataclasses.asdict(spec).items()}

    def cases(self, spec: Spec) -> Cases:
        return Cases(
            tuple(
                Case((("length", length), ("batch", batch), ("layout", layout)))
                for length in spec.lengths
                for batch in spec.batches
                for layout in spec.layouts
            )
        )

    def open(self, spec: Spec, *, device: str, seed: int) -> OperationsSession:
        return OperationsSession(spec)

    def implementations(self, spec: Spec) -> dict[str, str]:
        import fla.ops.gated_delta_rule  # noqa: F401

        return {}

    def oracles(self, spec: Spec) -> Mapping[str, Any]:
        return {}

    @contextlib.contextmanager
    def prepare(self, *, interpreted: bool) -> Iterator[None]:
        yield


WORKLOAD = OperationsWorkload()
