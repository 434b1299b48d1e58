"""The frozen launch path on a GPU: the bits of stock Triton, with nothing compiled, in every form and thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import frozenkernels as kernels
import pytest
import torch
import triton
import triton.language as tl

from kernelbake import freeze, triton_api
from kernelbake.bundle import Bundle
from kernelbake.errors import FrozenMissError

pytestmark = pytest.mark.gpu
N = 1000
SUPPORT = Path(__file__).parents[1] / "support"
two_gpus = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU here; this takes two")


def grid(meta: dict[str, Any]) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


class Work:
    """The calls of the bundle, on tensors of their own."""

    def __init__(self, device: str = "cuda") -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.x, self.bias = (torch.randn(N + 8, generator=generator, device=device) for _ in range(2))
        self.y = torch.zeros(N + 8, device=device)
        self.half = self.x.bfloat16()

    def forms(self) -> dict[str, Callable[[], Any]]:
        x, y, bias, half, odd = self.x, self.y, self.bias, self.half, self.x[1:]
        return {
            "function": lambda: kernels.plain[grid](x, y, N, BLOCK=64, num_warps=4),
            "function by keyword": lambda: kernels.plain[grid](y=y, n=N, x=x, BLOCK=32),
            "in place": lambda: kernels.inplace[grid](x, 1.5, N, BLOCK=64),
            "autotuned": lambda: kernels.tuned[grid](x, y, 2.0, N),
            "autotuned by keyword": lambda: kernels.tuned[grid](n=N, alpha=3.0, y=y, x=x),
            "autotuned by run": lambda: kernels.tuned.run(x, y, 2.5, N, grid=grid, warmup=False),
            "another dtype": lambda: kernels.tuned[grid](half, y, 2.0, N),
            "off alignment": lambda: kernels.tuned[grid](odd, y, 2.0, N),
            "number that is one": lambda: kernels.tuned[grid](x, y, 2.0, 1),
            "grid of two": lambda: kernels.tuned[(16, 1)](x, y, 2.0, N),
            "empty grid": lambda: kernels.tuned[(0,)](x, y, 2.0, N),
            "None": lambda: kernels.optional[grid](x, y, None, None, N, D=3, FLAG=False),
            "tensor": lambda: kernels.optional[grid](x, y, bias, 0.5, N, D=3, FLAG=True),
            "heuristics outside": lambda: kernels.outer_heuristic[grid](x, bias, N),
            "computed heuristic": lambda: kernels.computed[grid](x, y, N),
            "one config": lambda: kernels.one_config[grid](x, N),
            "hook": lambda: kernels.hooked[grid](x, y, 4.0, N),
            "restored": lambda: kernels.restoring[grid](x, y, 5.0, N),
            "defaults": lambda: kernels.defaults[grid](x, N),
            "unspecialized": lambda: kernels.unspecialized[grid](odd, y, 999, BLOCK=64),
            "annotated": lambda: kernels.annotated[grid](x, N, 1.25, True, BLOCK=64),
            "constexpr 1": lambda: kernels.typed[grid](x, N, KIND=1, DTYPE=tl.float32, BLOCK=64),
            "constexpr True": lambda: kernels.typed[grid](x, N, KIND=True, DTYPE=tl.float32, BLOCK=64),
            "function as constexpr": lambda: kernels.called[grid](x, N, FUNCTION=kernels.twice, BLOCK=64),
            "meta-parameter first": lambda: kernels.meta_first[grid](x, n=N, value=2.0),
        }


def results(form: str) -> list[torch.Tensor]:
    """What a call leaves in fresh tensors, launched once before so that a tuner is warm."""
    work = Work()
    work.forms()[form]()
    torch.cuda.synchronize()
    return [tensor.clone() for tensor in (work.x, work.y, work.half)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle, dict[str, list[torch.Tensor]]]:
    """A bundle of what stock Triton made of the calls, and the bits that they gave."""
    import fromstock

    taken = fromstock.Taken()
    for name in Work().forms():
        work = Work()
        taken.run("form=1", work.forms()[name])
    stock = {name: results(name) for name in Work().forms()}
    path = tmp_path_factory.mktemp("bundle") / "bundle.tar"
    return path, taken.write(path), stock


@pytest.fixture
def frozen(made: Any) -> Iterator[freeze.Frozen]:
    path, _, _ = made
    with freeze.freeze(path) as handle:
        yield handle


def test_every_form_gives_the_bits_of_stock(made: Any, frozen: freeze.Frozen) -> None:
    _, _, stock = made
    loads = frozen.counters.loads
    different = [name for name in stock if not all(map(torch.equal, results(name), stock[name]))]
    assert different == []
    assert frozen.counters == freeze.Counters(hits=len(stock), misses=0, loads=loads, refusals=0)


def test_which_kernels_have_no_written_launch_function(frozen: freeze.Frozen) -> None:
    assert {name.rpartition(".")[2] for name in frozen.unfused} == {"hooked", "computed"}


def test_nothing_is_compiled_built_or_written(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, stock = made
    noted: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: noted.append("compiled"))
    watching = [True]

    def audit(event: str, args: Any) -> None:
        written = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if watching[0] and (written or event in ("subprocess.Popen", "os.mkdir", "os.rename", "os.posix_spawn")):
            noted.append(f"{event} {args}")

    sys.addaudithook(audit)
    try:
        with freeze.freeze(path):
            for name in stock:
                results(name)
    finally:
        watching[0] = False
    assert noted == []


def test_a_miss_is_refused_on_the_device_too(frozen: freeze.Frozen) -> None:
    work = Work()
    with pytest.raises(FrozenMissError, match="no choice for autotune key"):
        kernels.tuned[grid](work.x, work.y, 2.0, N - 1)
    with pytest.raises(FrozenMissError, match="no code for"):
        kernels.plain[grid](work.x[1:], work.y, N, BLOCK=64, num_warps=4)


def test_a_cpu_tensor_is_refused_as_in_stock(frozen: freeze.Frozen) -> None:
    work = Work("cpu")
    with pytest.raises(ValueError, match="cpu tensor"):
        kernels.tuned[grid](work.x, work.y, 2.0, N)


def test_launch_hooks_run(frozen: freeze.Frozen) -> None:
    noted: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(noted.append)
    try:
        Work().forms()["autotuned"]()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(noted.append)
    assert noted[0].get()["name"] == "tuned"


def test_a_captured_launch_replays_and_capture_changes_nothing(made: Any, frozen: freeze.Frozen) -> None:
    _, _, stock = made
    work = Work()
    launch = work.forms()["autotuned"]
    kernel = frozen._dispatcher.kernels["frozenkernels.tuned"]
    assert kernel.fused is not None

    def state() -> Any:
        tables = {device: {key: id(value) for key, value in table.items()}
                  for device, table in kernel.fused["kb_tables"].items()}  # fmt: skip
        return tables, sorted(name for name in kernel.fused if name != "__builtins__"), frozen.counters.loads

    graph = torch.cuda.CUDAGraph()
    before = state()
    with torch.cuda.graph(graph):
        launch()
    assert state() == before
    work.y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(work.y, stock["autotuned"][1])


# ---------------------------------------------------------------------------------------------- threads


def test_eight_threads_launch_four_kernels_without_a_wrong_bit(frozen: freeze.Frozen) -> None:
    rounds, before = 250, sys.getswitchinterval()
    barrier = threading.Barrier(8)

    def work(index: int) -> list[str]:
        own, wrong = Work(), []
        own.x.fill_(index + 1.0)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        barrier.wait()
        with torch.cuda.stream(stream):
            counted = torch.zeros_like(own.x)
            for _ in range(rounds):
                kernels.hooked[grid](own.x, own.y, 4.0, N)
                kernels.restoring[grid](own.x, own.bias, 5.0, N)
                kernels.inplace[grid](counted, 1.5, N, BLOCK=64)
                kernels.tuned[grid](x=own.x, y=own.y, alpha=2.0, n=N)
            stream.synchronize()
        for name, tensor, value in (
            ("tuned", own.y, 2.0 * (index + 1)),
            ("restoring", own.bias, 5.0 * (index + 1)),
            ("inplace", counted, 1.5 * rounds),
        ):
            if not bool((tensor[:N] == value).all()):
                wrong.append(name)
        return wrong

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [[]] * 8
    finally:
        sys.setswitchinterval(before)
    assert frozen.counters.hits == 8 * rounds * 4


def test_a_thread_whose_first_act_on_the_gpu_is_a_launch(made: Any, frozen: freeze.Frozen) -> None:
    _, _, stock = made
    work = Work()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work.forms()["autotuned"]).result()
    torch.cuda.synchronize()
    assert torch.equal(work.y, stock["autotuned"][1])


@two_gpus
def test_a_launch_runs_on_the_device_of_its_tensors(made: Any) -> None:
    path, _, stock = made
    last = torch.cuda.device_count() - 1
    with freeze.freeze(path, devices=range(last + 1)) as frozen:
        assert frozen.counters.loads == (last + 1) * len(made[1].entries)
        work = Work(f"cuda:{last}")
        torch.cuda.synchronize(last)
        for form in ("autotuned", "hook"):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work.forms()[form]).result()
            torch.cuda.synchronize(last)
            assert torch.equal(work.y.cpu(), stock[form][1].cpu())
        assert torch.cuda.current_device() == 0
        other = Work("cuda:0")
        with pytest.raises(FrozenMissError, match="tensors on 2 devices") as caught:
            kernels.tuned[grid](work.x, other.y, 2.0, N)
        assert caught.value.reasons == ("`y` is on device 0", f"`x` is on device {last}")


@two_gpus
def test_a_device_that_was_not_named_is_refused(frozen: freeze.Frozen) -> None:
    with pytest.raises(FrozenMissError, match="device 1 has no kernels"):
        Work("cuda:1").forms()["autotuned"]()


# ---------------------------------------------------------------------------------------------- other processes

CHILD = """
import json, sys, torch
from kernelbake.freeze import freeze
with freeze(sys.argv[1]) as frozen:
    import frozenkernels as kernels
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    y = torch.zeros(1000, device="cuda")
    kernels.tuned[(16,)](x, y, 2.0, 1000)
    torch.cuda.synchronize()
    print(json.dumps([bool((y == 2 * x).all()), frozen.counters.hits, torch.cuda.device_count(), frozen.seconds]))
"""


def in_child(path: Path, **environment: str) -> list[Any]:
    paths = [str(SUPPORT), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_fresh_process_needs_no_compiler_and_no_home(made: Any, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    cache = str(home / "cache")
    right, hits, _, _ = in_child(made[0], PATH="", CC="/bin/false", HOME=str(home), TRITON_CACHE_DIR=cache)
    assert (right, hits) == (True, 1)
    left = [path for path in home.rglob("*") if path.is_file()]
    assert left == []  # the CUDA driver makes an empty `.nv` where it may write


def test_devices_may_be_named_by_uuid(made: Any) -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.device_count() - 1).uuid}"
    right, hits, count, _ = in_child(made[0], CUDA_VISIBLE_DEVICES=uuid)
    assert (right, hits, count) == (True, 1, 1)


def test_a_forked_child_is_refused_by_name(frozen: freeze.Frozen) -> None:
    work = Work()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kernels.tuned[grid](work.x, work.y, 2.0, N)
            message = "launched"
        except BaseException as error:
            message = f"{type(error).__name__} {error}"
        os.write(write, message.encode()[:1000])
        os._exit(0)
    os.waitpid(child, 0)
    assert "launched in a forked child of the frozen process" in os.read(read, 2000).decode()


def test_the_general_path_gives_the_same_bits(made: Any, frozen: freeze.Frozen) -> None:
    _, _, stock = made
    work = Work()
    frozen._dispatcher.general(kernels.tuned)(grid, work.x, work.y, 2.0, N)
    torch.cuda.synchronize()
    assert torch.equal(work.y, stock["autotuned"][1])
    assert triton_api.autotuner_of(kernels.tuned).nargs is None
