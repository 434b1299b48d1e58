"""A workload made of single operations of flash-linear-attention, for tests of the planner: ``flaworkload:WORKLOAD``.

Its section is ``{operations, batches, lengths, layouts}``; shapes are those of a 9B-class hybrid model. A packed case
has one row of batch · length tokens: ``batch`` documents of equal length, or two unequal ones where batch is 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from kernelbake.errors import PlanError
from kernelbake.keys import Case
from kernelbake.workload import Cases

H, HV, K, V = 16, 32, 128, 128
HIDDEN, VOCABULARY, INTERMEDIATE = 4096, 151936, 12288
PACKABLE = ("gdn", "gdn_forward", "gdn_cache", "recurrent", "conv", "rotary")


def _new(*shape: int, dtype: str = "bfloat16", grad: bool = True) -> Any:
    import torch

    return torch.empty(*shape, dtype=getattr(torch, dtype), device="cuda").requires_grad_(grad)


def _backward(result: Any) -> None:
    result.float().sum().backward()


def _chunked(batch: int, length: int, bounds: Any, grad: bool, state: Any, keep_state: bool) -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        _new(batch, length, H, K, grad=grad),
        _new(batch, length, H, K, grad=grad),
        _new(batch, length, HV, V, grad=grad),
        g=_new(batch, length, HV, dtype="float32", grad=grad),
        beta=_new(batch, length, HV, grad=grad),
        initial_state=state,
        output_final_state=keep_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds,
    )[0]


def gdn(batch: int, length: int, bounds: Any) -> None:
    _backward(_chunked(batch, length, bounds, True, None, False))


def gdn_forward(batch: int, length: int, bounds: Any) -> None:
    import torch

    with torch.no_grad():
        _chunked(batch, length, bounds, False, None, False)


def gdn_cache(batch: int, length: int, bounds: Any) -> None:
    import torch

    rows = batch if bounds is None else len(bounds) - 1
    with torch.no_grad():
        _chunked(batch, length, bounds, False, _new(rows, HV, K, V, dtype="float32", grad=False), True)


def recurrent(batch: int, length: int, bounds: Any) -> None:
    import torch
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    rows = batch if bounds is None else len(bounds) - 1
    with torch.no_grad():
        fused_recurrent_gated_delta_rule(
            _new(batch, length, H, K),
            _new(batch, length, H, K),
            _new(batch, length, HV, V),
            g=_new(batch, length, HV, dtype="float32"),
            beta=_new(batch, length, HV),
            initial_state=_new(rows, HV, K, V, dtype="float32"),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
        )


def gated_norm(batch: int, length: int, bounds: Any) -> None:
    import torch
    from fla.modules import FusedRMSNormGated

    norm = FusedRMSNormGated(V, eps=1e-6, activation="silu", device="cuda", dtype=torch.bfloat16)
    _backward(norm(_new(batch * length * HV, V), _new(batch * length * HV, V)))


def norm(batch: int, length: int, bounds: Any) -> None:
    import torch
    from fla.modules import RMSNorm

    _backward(RMSNorm(HIDDEN, dtype=torch.bfloat16, device="cuda")(_new(batch, length, HIDDEN)))
    _backward(RMSNorm(K, dtype=torch.bfloat16, device="cuda")(_new(batch, length, H, K)))


def conv(batch: int, length: int, bounds: Any) -> None:
    from fla.modules.causal_conv1d import causal_conv1d

    width = 2 * H * K + HV * V
    x, weight = _new(batch, length, width), _new(width, 4)
    _backward(causal_conv1d(x, weight=weight, bias=None, activation="silu", cu_seqlens=bounds)[0])


def conv_update(batch: int, length: int, bounds: Any) -> None:
    """One token a row, with the cache that is updated in place and without one."""
    import torch
    from fla.modules.causal_conv1d.ops import causal_conv1d_update

    width = 2 * H * K + HV * V
    with torch.no_grad():
        for cache in (_new(length, width, 4, grad=False), None):
            causal_conv1d_update(_new(length, width, grad=False), cache, weight=_new(width, 4, grad=False))


def rotary(batch: int, length: int, bounds: Any) -> None:
    from fla.modules.rotary import rotary_embedding

    cos, sin = (_new(65536, 64, grad=False) for _ in range(2))
    _backward(rotary_embedding(_new(batch, length, 32, 128), cos, sin, cu_seqlens=bounds))


def swiglu(batch: int, length: int, bounds: Any) -> None:
    from fla.modules.activations import swiglu as fused

    _backward(fused(_new(batch, length, INTERMEDIATE), _new(batch, length, INTERMEDIATE)))


def linear_cross_entropy(batch: int, length: int, bounds: Any) -> None:
    import torch
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    labels = torch.zeros(batch * length, dtype=torch.long, device="cuda")
    _backward(fused_linear_cross_entropy_loss(_new(batch * length, 2048), labels, _new(VOCABULARY, 2048)))


def cross_entropy(batch: int, length: int, bounds: Any) -> None:
    import torch
    from fla.modules import FusedCrossEntropyLoss

    labels = torch.zeros(batch * length, dtype=torch.long, device="cuda")
    _backward(FusedCrossEntropyLoss()(_new(batch * length, VOCABULARY), labels))


def kl_div(batch: int, length: int, bounds: Any) -> None:
    from fla.modules.fused_kl_div import fused_kl_div_loss

    student, teacher = _new(batch * length, 2048), _new(batch * length, 2048, grad=False)
    _backward(fused_kl_div_loss(student, teacher, _new(VOCABULARY, 2048), _new(VOCABULARY, 2048, grad=False)))


OPERATIONS: dict[str, Callable[[int, int, Any], None]] = {
    function.__name__: function
    for function in (
        *(gdn, gdn_forward, gdn_cache, recurrent, gated_norm, norm, conv, rotary, swiglu),
        *(linear_cross_entropy, cross_entropy, kl_div, conv_update),
    )
}


@dataclasses.dataclass(frozen=True)
class Spec:
    operations: tuple[str, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    layouts: tuple[str, ...] = ("fixed",)


class OperationsSession:
    """A step runs the one operation of a case."""

    def step(self, case: Case) -> None:
        operation = OPERATIONS[str(case["operation"])]
        batch, length = int(case["batch"]), int(case["length"])  # type: ignore[arg-type]
        if case["layout"] == "fixed":
            operation(batch, length, None)
        else:
            operation(1, batch * length, _bounds(batch, length))


def _bounds(batch: int, length: int) -> Any:
    import torch

    ends = [index * length for index in range(batch + 1)] if batch > 1 else [0, length // 4 + 1, length]
    return torch.tensor(ends, device="cuda")


class OperationsWorkload:
    """Implements ``kernelbake.workload.Workload``."""

    name = "fla-operations"

    def parse(self, section: Mapping[str, Any]) -> Spec:
        return Spec(**{name: tuple(value) for name, value in section.items()})

    def resolve(self, spec: Spec) -> dict[str, Any]:
        return {name: list(value) for name, value in dataclasses.asdict(spec).items()}

    def cases(self, spec: Spec) -> Cases:
        axes = itertools.product(spec.operations, spec.lengths, spec.batches, spec.layouts)
        return Cases(
            tuple(
                Case((("operation", operation), ("length", length), ("batch", batch), ("layout", layout)))
                for operation, length, batch, layout in axes
                if layout == "fixed" or operation in PACKABLE
            )
        )

    def open(self, spec: Spec, *, device: str, seed: int) -> OperationsSession:
        if device != "cuda":
            raise PlanError(f"workload: device `{device}`; wanted `cuda`")
        return OperationsSession()

    def implementations(self, spec: Spec) -> dict[str, str]:
        return {}

    def oracles(self, spec: Spec) -> Mapping[str, Any]:
        return {}

    def prepare(self, *, interpreted: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


WORKLOAD = OperationsWorkload()
