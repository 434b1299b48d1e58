"""Random workloads, planned and then run through Triton's own launch path: both must reach the same set.

``python planproperty.py EXAMPLES SEED`` runs in a process of its own. Nothing is compiled: the real path is Triton's
autotuner, heuristics, binder and cache keys, on real CPU tensors, with a stub where the compiler would begin. Decisions
are forgotten after each launch, so that every candidate is tried for every class of arguments.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from kernelbake import fakedevice, profiles

PROFILE = profiles.load("h200")
fakedevice.install(PROFILE)

import propertykernels as kernels  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kernelbake import faketensors, triton_api  # noqa: E402
from kernelbake.bounds import Limits  # noqa: E402
from kernelbake.keys import Case  # noqa: E402
from kernelbake.recorder import Observer, read_memories  # noqa: E402
from kernelbake.shadow import LaunchLog, shadowed  # noqa: E402

KERNELS = (kernels.norm, kernels.scan, kernels.scale, kernels.reduce, kernels.reduce_backward)
TARGET = triton_api.gpu_target(PROFILE.arch)

# ---------------------------------------------------------------------------------------------- workloads


class Reduced(torch.autograd.Function):
    """Launches in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        out = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
        kernels.reduce[(x.shape[0],)](x, out, x.numel(), PER_PROGRAM=triton.cdiv(x.shape[1], 132))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        result = torch.zeros_like(x)
        kernels.reduce_backward[(1,)](grad, result, x.shape[1], PER_PROGRAM=x.shape[0])
        return result


def step(work: dict[str, Any], device: str) -> None:
    """One step: a norm, a scan over padded or packed rows, views that start anywhere, and a backward pass."""
    for batch, length in work["shapes"]:
        heads, dim, dtype = work["heads"], work["dim"], getattr(torch, work["dtype"])
        x = torch.zeros(batch * length * heads * dim + work["offset"], dtype=dtype, device=device)[work["offset"] :]
        rows = batch * length * heads
        bias = torch.zeros(dim, dtype=dtype, device=device) if work["bias"] else None
        blocks = triton.cdiv(rows, work["step"])
        kernels.norm[lambda meta, rows=rows: (triton.cdiv(rows, meta["BLOCK"]),)](
            x, bias, torch.empty_like(x), rows, 1e-6, D=dim, NB=blocks
        )
        bounds = chunks = None
        if work["cuts"]:
            ends = sorted({0, length, *(cut % (length + 1) for cut in work["cuts"])})
            bounds = torch.tensor(ends, dtype=getattr(torch, work["index"]), device=device)
            sizes = (bounds.diff() + 63) // 64
            chunks = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
            assert len(chunks) == sum(sizes.tolist())
        count = triton.cdiv(length, 64) if chunks is None else len(chunks)
        state = torch.zeros(heads + 1, dim, device=device)[work["row"] :]
        kernels.scan[(count,)](x, state, bounds, chunks, length, count, H=heads, D=dim, B=batch)
        view = x.view(batch, length, heads * dim)[:, work["skip"] % length :]
        kernels.scale[(1,)](view, x, n=view.shape[1], stride_b=view.stride(0), stride_t=heads * dim, factor=0.5)
        leaf = torch.zeros(length, heads, device=device, requires_grad=True)
        (Reduced.apply(leaf * 2.0).sum() * 3.0).backward()


@st.composite
def workloads(draw: Any) -> dict[str, Any]:
    batches = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2, unique=True))
    lengths = draw(st.lists(st.one_of(st.integers(1, 300), st.sampled_from([1, 16, 64, 128])), min_size=1, max_size=3))
    return {
        "shapes": [(batch, length) for batch in batches for length in lengths],
        "heads": draw(st.sampled_from([1, 2, 3, 16])),
        "dim": draw(st.sampled_from([1, 8, 15, 32, 64])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "offset": draw(st.sampled_from([0, 1, 4, 8])),
        "skip": draw(st.integers(0, 5)),
        "step": draw(st.sampled_from([64, 1000, 65536])),
        "bias": draw(st.booleans()),
        "row": draw(st.integers(0, 1)),
        "cuts": draw(st.lists(st.integers(0, 300), max_size=4)),
        "index": draw(st.sampled_from(["int32", "int64"])),
    }


# ---------------------------------------------------------------------------------------------- both sides

Reached = tuple[set[tuple[str, Any]], set[tuple[str, str]]]


def planned(work: dict[str, Any]) -> Reached:
    log = LaunchLog(Observer(TARGET, faketensors.stand_in, run_hooks=True), Limits())
    log.case = Case((("work", 0),))
    with shadowed(log):
        step(work, "cuda")
    launches = log.launches()
    keys = {(launch.kernel.name, launch.key.triton_key()) for launch in launches if launch.key}
    return keys, {
        (launch.kernel.name, specialization.token)
        for launch in launches
        for variant in launch.variants
        for specialization in variant.specializations
    }


class Forgetful(dict[Any, Any]):
    """An autotuner's memory that never knows a key again, and keeps a list of what it was told."""

    def __contains__(self, key: object) -> bool:
        return False


class Uncompiled:
    """What is launched where nothing was compiled."""

    function, packed_metadata = 0, ()

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        return None


class TimingDriver(fakedevice.FakeDriver):
    def get_benchmarker(self) -> Any:
        def benchmark(function: Any, quantiles: Any = None, **options: Any) -> list[float]:
            function()
            return [1.0, 1.0, 1.0]

        return benchmark


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    def do_compile(self: Any, key: Any, signature: Any, device: int, *rest: Any) -> Uncompiled:
        kernel = self.device_caches[device][0][key] = Uncompiled()
        return kernel

    original, JITFunction._do_compile = JITFunction._do_compile, do_compile
    try:
        yield
    finally:
        JITFunction._do_compile = original


def reached(work: dict[str, Any]) -> Reached:
    for kernel in KERNELS:
        triton_api.innermost(kernel).device_caches.clear()
        autotuner = triton_api.autotuner_of(kernel)
        if autotuner is not None:
            autotuner.cache = Forgetful()
    with uncompiled():
        step(work, "cpu")
    memories = read_memories()
    return set(memories.keys), set(memories.specializations)


tried = 0


def check(work: dict[str, Any]) -> None:
    global tried
    tried += 1
    plan, real = planned(work), reached(work)
    for mine, theirs in zip(plan, real, strict=True):
        assert mine, "nothing was planned"
        assert mine == theirs, f"planned only: {sorted(mine - theirs, key=str)}; reached only: {theirs - mine}"


def main(examples: int, first: int) -> None:
    triton.runtime.driver.set_active(TimingDriver(PROFILE))
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    limits = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=health, phases=phases)
    seed(first)(limits(given(workloads())(check)))()
    print(f"{tried} workloads")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
