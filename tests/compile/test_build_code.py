"""Measuring with compiled code, up to the launch itself: real cubins, real binding, and a stand-in for the GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toykernels

from kernelbake import measure, profiles, runners, triton_api
from kernelbake.bundle import Entry
from kernelbake.compile import Compiled, compile_one, store
from kernelbake.devices import CpuDevice
from kernelbake.errors import BuildError
from kernelbake.keys import Case
from kernelbake.manifest import MeasurePolicy
from kernelbake.measure import Conductor, CudaCode
from kernelbake.outcome import Files, Rejected
from kernelbake.plan import KernelFacts, Plan, collect
from kernelbake.recorder import Observer, intercepted

H200 = profiles.load("h200")
N = 100


class Written:
    """A report that keeps everything."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def rejected(self, launch: int) -> Mapping[int, Rejected]:
        return {}

    def start(self, launch: int, candidate: int, meanwhile: Callable[[], None]) -> None:
        self.lines.append(("start", launch, candidate))
        meanwhile()

    def sampling(self, launch: int, candidate: int) -> None:
        pass

    def outcome(self, launch: int, candidate: int, data: Mapping[str, Any]) -> None:
        self.lines.append(("outcome", launch, candidate, dict(data)))

    def decided(self, launch: int, data: Mapping[str, Any]) -> None:
        self.lines.append(("decided", launch, dict(data)))

    def lost(self, message: str) -> None:
        raise AssertionError(message)


class StandIn:
    """Takes what Triton's launcher takes, and does in torch what the kernel does: ``y = alpha x``."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.function, self.packed_metadata = 1, (entry.metadata["num_warps"],)

    def _run(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        launch_metadata, enter, leave, *bound = rest
        source, target, alpha, n, block = bound
        assert (launch_metadata, enter, leave, y, z) == (None, None, None, 1, 1)
        assert x == -(-n // block), "the grid is the candidate's own"
        target[:n] = source[:n] * alpha
        if block == 128:
            target[0] += 1.0


def _launch(x: torch.Tensor, y: torch.Tensor) -> None:
    toykernels.scale[lambda meta: (-(-N // meta["BLOCK"]),)](x, y, 2.0, N)


@pytest.fixture(scope="module")
def plan() -> Plan:
    observer = Observer(triton_api.gpu_target(H200.arch))
    seen = []

    def on_call(original: Any, launchable: Any, args: Any, kwargs: Any) -> None:
        seen.append(("n=100", observer.observe(launchable, args, kwargs)))

    with intercepted(on_call):
        _launch(torch.zeros(N), torch.zeros(N))
    facts: KernelFacts = triton_api.facts(toykernels.scale)
    case = Case((("n", N),))
    return Plan(H200.to_json(), {}, {}, (case,), (), {facts.kernel.name: facts}, collect(seen))


@pytest.fixture(scope="module")
def compiled(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("code")
    [launch] = plan.launches
    codes: dict[str, Any] = {}
    for specialization in launch.variants[0].specializations:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as the compile server does; 3.9 warns without it
            made = compile_one(launch.kernel, specialization, 90, shared_limit=H200.shared_memory_bytes, folder=folder)
        assert isinstance(made, Compiled), made
        codes[specialization.digest] = {"outcome": "ok", "code": store(Files(folder), made).to_json()}
    return {launch.kernel.to_json(): codes}, folder


def _conductor(plan: Plan, codes: dict[str, Any], folder: Path, report: Written) -> Conductor:
    policy = MeasurePolicy(warmup_ms=0, samples_ms=0.1, min_samples=3, max_samples=3, rounds=2, max_extra_rounds=0)
    return Conductor(plan, {}, [0], CudaCode(codes, folder), CpuDevice(), policy, report, {})


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "load_entry", lambda entry, device, libraries, launchable: StandIn(entry))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = type("Stream", (), {"cuda_stream": 0})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def test_each_candidate_runs_its_own_code_on_copies(plan: Plan, compiled: tuple[dict[str, Any], Path]) -> None:
    report = Written()
    conductor = _conductor(plan, *compiled, report)
    x, y = torch.randn(N), torch.full((N,), 7.0)
    with intercepted(conductor):
        _launch(x, y)
        _launch(x, y)
    assert torch.equal(y, 2.0 * x)
    assert [line[0] for line in report.lines].count("decided") == 1, "the second launch is decided already"
    wrong = [line for line in report.lines if line[0] == "outcome" and line[3]["outcome"] != "ok"]
    assert [(line[2], line[3]["outcome"]) for line in wrong] == [(2, "wrong-result")]
    [decided] = [line[2] for line in report.lines if line[0] == "decided"]
    assert decided["winner"] in (0, 1)
    assert conductor.met == {(0, 0): None}
    assert conductor.tuning_ms > 0


def test_equal_code_is_told_from_equal_source(plan: Plan, compiled: tuple[dict[str, Any], Path]) -> None:
    codes, folder = compiled
    shapes = [data["code"]["shape"] for data in codes["toykernels:scale"].values()]
    assert len(set(shapes)) == 3, "three blocks, three binaries"
    code = CudaCode(codes, folder)
    conductor = _conductor(plan, codes, folder, Written())
    call = measure.Call(toykernels.scale, (torch.zeros(N), torch.zeros(N), 2.0, N), {}, (1,))
    resolved = [conductor._resolve(0, call, candidate) for candidate in range(3)]
    identities = [code.identity(toykernels.scale, found) for found in resolved]
    assert len(set(identities)) == 3
    assert [found.specialization.digest for found in resolved] == list(codes["toykernels:scale"])


def test_a_misaligned_argument_is_outside_the_plan(plan: Plan, compiled: tuple[dict[str, Any], Path]) -> None:
    conductor = _conductor(plan, *compiled, Written())
    x = torch.randn(N + 1)[1:]
    with intercepted(conductor), pytest.raises(BuildError, match="what the plan does not hold") as caught:
        _launch(x, torch.zeros(N))
    [reason] = caught.value.reasons
    assert "specialization with x: made `x:*fp32`; planned `x:*fp32%D`" in reason


def test_metadata_holds_no_path(compiled: tuple[dict[str, Any], Path]) -> None:
    codes, folder = compiled
    for data in codes["toykernels:scale"].values():
        text = json.dumps(json.loads(Files(folder)[data["code"]["metadata"]]))
        assert '"/' not in text
