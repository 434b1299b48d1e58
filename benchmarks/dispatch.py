"""What a launch costs the host: frozen against stock Triton, alone, in a forward, in threads, and captured in graphs.

Both sides run the same code: the bundle is made of what stock Triton tuned and compiled at the start. They take turns
in one process, several rounds each, and the figures are medians over the rounds. Host times are taken over bursts that
the driver's queue holds, with a synchronisation between them that is not timed. Writes ``dispatch_h200.json``.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

LENGTHS = (512, 2048, 8192)
BURST = 150
"""Launches that are timed together; the driver holds about a thousand."""

THREADS = 4
STRESS_THREADS, STRESS_ROUNDS = 8, 1000


def burst_us(call: Callable[[], Any], count: int) -> float:
    """Host time of one call in µs: the median of seven bursts."""
    import torch

    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def in_threads(works: list[Callable[[], None]]) -> float:
    """Seconds until all are done, each in its thread and on a stream of its own, let go together."""
    import torch

    barrier = threading.Barrier(len(works) + 1)

    def one(work: Callable[[], None]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            work()
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(len(works)) as pool:
        waiting = [pool.submit(one, work) for work in works]
        barrier.wait()
        start = time.perf_counter()
        for future in waiting:
            future.result()
        return time.perf_counter() - start


class Subject:
    """The forward, its inputs, and the bundle of its kernels."""

    def __init__(self, folder: Path) -> None:
        import fromstock
        import gdn

        self.given = {tokens: gdn.inputs(tokens) for tokens in LENGTHS}
        self.forwards = {tokens: gdn.forward(given) for tokens, given in self.given.items()}
        self.new_forwards = lambda: [gdn.forward(given) for given in self.given.values()]
        taken = fromstock.Taken()
        for tokens, forward in self.forwards.items():
            taken.run(f"tokens={tokens}", forward)
        self.calls = taken.calls
        self.path = folder / "bundle.tar"
        self.bundle = taken.write(self.path)

    @contextlib.contextmanager
    def side(self, name: str) -> Iterator[Any]:
        """Stock Triton, warm, or frozen onto the bundle."""
        from kernelbake.freeze import freeze

        with freeze(self.path) if name == "frozen" else contextlib.nullcontext() as frozen:
            yield frozen

    def call(self, kernel: str) -> Callable[[], Any]:
        """One launch of a kernel, as the forward at 512 tokens makes it."""
        launchable, args, kwargs = next(call for name, call in self.calls.items() if name.endswith(kernel))
        rest = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        grid = kwargs["grid"]
        return lambda: launchable[grid](*args, **rest)

    def jit_call(self, kernel: str) -> Callable[[], Any]:
        """The same through ``JITFunction.run`` alone, with what autotuner and heuristics would have added."""
        from kernelbake import triton_api

        launchable, args, kwargs = next(call for name, call in self.calls.items() if name.endswith(kernel))
        settled = dict(kwargs)
        for level in triton_api.levels(launchable):
            for name, heuristic in getattr(level, "values", {}).items():
                settled[name] = heuristic({**dict(zip(level.arg_names, args, strict=False)), **settled})
            if level is triton_api.autotuner_of(launchable):
                settled |= level.best_config.all_kwargs()
        function = triton_api.innermost(launchable)
        return lambda: function.run(*args, **settled)


def launches(subject: Subject, recorder: common.Recorder, rounds: int) -> None:
    """Host time of single launches, and of one forward."""
    kernels = {"l2norm": "l2norm_fwd_kernel", "chunk": "chunk_fwd_kernel_o"}
    names = {short: next(name for name in subject.calls if name.rpartition(".")[2].startswith(start))
             for short, start in kernels.items()}  # fmt: skip
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for side in ("stock", "frozen"):
            with subject.side(side):
                for short, name in names.items():
                    subject.call(name)()
                    found.setdefault(f"{side}_{short}_us", []).append(burst_us(subject.call(name), BURST))
                    if side == "stock":
                        jit = subject.jit_call(name)
                        found.setdefault(f"stock_jit_{short}_us", []).append(burst_us(jit, BURST))
                subject.forwards[512]()
                found.setdefault(f"{side}_gdn512_us", []).append(burst_us(subject.forwards[512], 15))
    medians = {name: statistics.median(values) for name, values in found.items()}
    recorder.raw["launches"] = {**found, "kernels": names}
    for short in kernels:
        recorder.add(f"launch_ratio_{short}", medians[f"frozen_{short}_us"] / medians[f"stock_{short}_us"])
    recorder.add("frozen_us", medians["frozen_chunk_us"])
    recorder.add("stock_us", medians["stock_chunk_us"])
    recorder.add("stock_jit_us", medians["stock_jit_chunk_us"])
    recorder.add("gdn512_host_ratio", medians["frozen_gdn512_us"] / medians["stock_gdn512_us"])


def threads(subject: Subject, recorder: common.Recorder, rounds: int) -> None:
    """Forwards per second of four threads on one GPU, and of captured forwards against one thread."""
    import torch

    count = 30
    seconds: dict[str, list[float]] = {}

    def eager(forwards: list[Callable[[], Any]]) -> Callable[[], None]:
        def work() -> None:
            for index in range(count):
                forwards[index % len(forwards)]()

        return work

    for _ in range(rounds):
        for side in ("stock", "frozen"):
            with subject.side(side):
                works = [eager(subject.new_forwards()) for _ in range(THREADS)]
                seconds.setdefault(f"eager_{side}", []).append(in_threads(works))
    with subject.side("frozen"):
        graphs = [_captured(forward) for forward in subject.new_forwards()[:1] for _ in range(THREADS)]

        def replay(graph: Any, times: int) -> Callable[[], None]:
            def work() -> None:
                for _ in range(times):
                    graph.replay()

            return work

        for _ in range(rounds):
            times = 400
            one = in_threads([replay(graphs[0], times)])
            four = in_threads([replay(graph, times) for graph in graphs])
            seconds.setdefault("graph_rate_1", []).append(times / one)
            seconds.setdefault("graph_rate_4", []).append(THREADS * times / four)
        torch.cuda.synchronize()
    recorder.raw["threads"] = seconds
    eager_ratio = statistics.median(seconds["eager_stock"]) / statistics.median(seconds["eager_frozen"])
    recorder.add("threads4_eager_over_stock", eager_ratio)
    graph_ratio = statistics.median(seconds["graph_rate_4"]) / statistics.median(seconds["graph_rate_1"])
    recorder.add("threads4_graph_over_1", graph_ratio)


def _captured(forward: Callable[[], Any]) -> Any:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph


# ---------------------------------------------------------------------------------------------- stress


def stress(recorder: common.Recorder, folder: Path) -> None:
    """Eight threads, four kernels, a thousand launches each; and cold keys under stock Triton."""
    import fromstock
    import frozenkernels as kernels
    import torch

    from kernelbake.freeze import freeze

    sizes = [1008 + 16 * index for index in range(STRESS_THREADS)]
    stock_wrong = _cold_stress(kernels, sizes)
    taken = fromstock.Taken()
    for size in sizes:
        taken.run(f"size={size}", lambda size=size: _round(kernels, _tensors(size, 1.0), size))
    path = folder / "stress.tar"
    taken.write(path)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with freeze(path) as frozen, ThreadPoolExecutor(STRESS_THREADS) as pool:
            wrong = sum(pool.map(lambda index: _stress_one(kernels, sizes[index], index), range(STRESS_THREADS)))
            torch.cuda.synchronize()
            launched = frozen.counters.hits
            wrong += frozen.counters.misses
    finally:
        sys.setswitchinterval(before)
    recorder.add("stress_launches", launched)
    recorder.add("stress_wrong", wrong)
    recorder.add("stock_stress_wrong", stock_wrong)


def _tensors(size: int, value: float) -> dict[str, Any]:
    import torch

    full = {name: torch.zeros(size, device="cuda") for name in ("a", "b", "c", "counted")}
    return {"x": torch.full((size,), value, device="cuda"), **full}


def _round(kernels: Any, own: dict[str, Any], size: int) -> None:
    grid = (-(-size // 64),)
    kernels.plain[grid](own["x"], own["a"], size, BLOCK=64)
    kernels.hooked[grid](own["x"], own["b"], 2.0, size)
    kernels.restoring[grid](own["x"], own["c"], 3.0, size)
    kernels.inplace[grid](own["counted"], 1.0, size, BLOCK=64)


def _stress_one(kernels: Any, size: int, index: int) -> int:
    """Elements that are wrong after a thread's launches on its own stream and tensors."""
    import torch

    value, wrong = float(index + 1), 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        own = _tensors(size, value)
        for number in range(1, STRESS_ROUNDS + 1):
            _round(kernels, own, size)
            if number % 100 == 0:
                expected = {"a": value + 1, "b": 2 * value, "c": 3 * value, "counted": number, "x": value}
                wrong += sum(int((own[name] != right).sum()) for name, right in expected.items())
    stream.synchronize()
    kernels.HOOKED.clear()
    return wrong


def _cold_stress(kernels: Any, sizes: list[int]) -> int:
    """Errors and wrong tensors of stock Triton, when threads meet cold keys and one takes longest to benchmark."""
    barrier = threading.Barrier(4)
    order = threading.local()

    def bench(call: Callable[[], None], quantiles: Any = None, **more: Any) -> list[float]:
        call()
        time.sleep(0.3 if order.index == 0 else 0.05)
        return [1.0] * 3

    def one(index: int) -> int:
        import torch

        order.index = index
        torch.cuda.set_device(0)
        own = _tensors(sizes[index], index + 1.0)
        barrier.wait()
        try:
            kernels.restoring[(64,)](own["x"], own["c"], 3.0, sizes[index])
            torch.cuda.synchronize()
        except (TypeError, KeyError, RuntimeError):  # the last: copies of another thread, of another size
            return 1
        return int(bool((own["c"] != 3.0 * (index + 1)).any()) or bool((own["x"] != index + 1.0).any()))

    kernels.restoring._do_bench = bench
    vars(kernels.restoring).pop("do_bench", None)
    try:
        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(one, range(4)))
    finally:
        kernels.restoring._do_bench = None
        kernels.restoring.nargs = None
        kernels.restoring.cache.clear()
        vars(kernels.restoring).pop("do_bench", None)


def main() -> None:
    sys.path[:0] = [str(common.ROOT), str(common.ROOT / "tests" / "support")]
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of both sides")
    options = parser.parse_args()
    recorder = common.Recorder("dispatch_h200", __file__, options.commit, options.results)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stress(recorder, folder)
        subject = Subject(folder)
        launches(subject, recorder, options.rounds)
        threads(subject, recorder, options.rounds)
    for figure, value in recorder.figures.items():
        print(f"{figure:28} {value:.3f}" if isinstance(value, float) else f"{figure:28} {value}")
    print(f"{recorder.write()} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
