"""Captured forward passes on a GPU: the eager pass to the bit, whoever calls, on whatever stream, in whatever order."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tinytarget
import torch

from dflash import graphs, pools, synthetic, target
from dflash.buckets import Batch, Shape
from dflash.errors import TrainingStoppedError
from dflash.graphs import CudaRecorder, GraphedTarget
from dflash.spec import Spec
from dflash.target import Target

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU here; this takes two")
grouped = pytest.mark.skipif(
    "torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10)",
    reason="torch's grouped product of bf16 asks the host on this GPU",
)

SUPPORT = Path(__file__).parents[1] / "support"
BUCKETS = (256, 512)
LARGER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num": 4, "per_token": 2, "intermediate_size": 64, "shared_intermediate_size": 64}


def spec(architecture: str = "qwen3_5") -> Spec:
    section = tinytarget.spec(architecture).to_json()
    section["target"].update(LARGER)
    if architecture != "qwen3_5":
        section["target"]["experts"] = EXPERTS
    section["axes"] |= {"buckets": list(BUCKETS), "anchors": [16], "dtype": "bfloat16"}
    return Spec.parse(section)


@functools.cache
def eager(architecture: str = "qwen3_5", device: int = 0, seed: int = 0) -> Target:
    made = spec(architecture)
    where = torch.device("cuda", device)
    found = target.random_target(made.target, made.drafter.target_layer_ids, where, torch.bfloat16, seed=seed)
    tinytarget.spread(found.model)
    return found


def batch(bucket: int, seed: int = 0, rows: int = 1) -> Batch:
    return synthetic.batch(Shape(bucket, 16, rows, "padded", "bfloat16"), spec(), seed)


def graphed(model: Target, buckets: Sequence[int] = BUCKETS, rows: Sequence[int] = (1,)) -> GraphedTarget:
    examples = [batch(bucket, 0, count) for bucket in buckets for count in rows]
    return GraphedTarget(model, examples, CudaRecorder(model.device))


def wanted(model: Target, given: Batch) -> torch.Tensor:
    found = Target.features(model, given.on(model.device))
    torch.cuda.synchronize(model.device)
    return found


@pytest.fixture(autouse=True)
def _no_work_is_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize(
    "architecture",
    ["qwen3_5", *(pytest.param(name, marks=grouped) for name in ("qwen3_5_moe", "qwen3_next"))],
)
def test_replays_are_the_eager_pass_to_the_bit_with_inputs_that_change(architecture: str) -> None:
    model = eager(architecture)
    replayed = graphed(model, rows=(1, 2))
    given = [batch(bucket, seed, rows) for seed in (1, 2, 3) for bucket in BUCKETS for rows in (2, 1)]
    expected = [wanted(model, item) for item in given]
    assert not torch.equal(expected[0], expected[4]), "another seed gives another batch"
    for number in [*range(len(given)), *reversed(range(len(given)))]:
        assert torch.equal(replayed.features(given[number].on(model.device)), expected[number])


def test_the_last_hidden_state_is_replayed_too() -> None:
    model = Target(eager().model, eager().layer_ids, "tiny")
    model.appends_last = True
    given = batch(256, 4)
    found = graphed(model).features(given.on(model.device))
    assert found.shape == (1, 256, 256 * 4)
    assert torch.equal(found, wanted(model, given))


def test_features_of_a_batch_survive_the_replays_of_later_ones() -> None:
    """Nothing waits in between: the second and third replay overwrite the buffers while the first copy is in use."""
    model = eager()
    replayed, given = graphed(model), [batch(512, 1), batch(512, 2), batch(256, 3)]
    expected = [wanted(model, item) for item in given]
    there = [item.on(model.device) for item in given]
    found = [replayed.features(item) for item in there]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_another_stream_waits_for_the_replay_before() -> None:
    """Without it two replays would write to the same memory at the same time."""
    model = eager()
    replayed, given = graphed(model), [batch(512, 1), batch(512, 2)]
    expected = [wanted(model, item) for item in given]
    there = [item.on(model.device) for item in given]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found: list[tuple[int, torch.Tensor]] = []
    for turn in range(100):
        with torch.cuda.stream(streams[turn % 2]):
            found.append((turn % 2, replayed.features(there[turn % 2])))
    torch.cuda.synchronize()
    assert all(torch.equal(features, expected[number]) for number, features in found)


# ---------------------------------------------------------------------------------------------- threads


def rounds(model: GraphedTarget, given: Sequence[Batch], expected: Sequence[torch.Tensor], start: int) -> int:
    """Replays on a stream of this thread; how many results were wrong."""
    wrong = torch.zeros((), dtype=torch.int64, device=model.device)
    torch.cuda.set_device(model.device)
    with torch.cuda.stream(torch.cuda.Stream(model.device)):
        there = [item.on(model.device) for item in given]
        for turn in range(start, start + 100):
            number = turn % len(there)
            wrong += model.features(there[number]).ne(expected[number]).any()
        torch.cuda.current_stream(model.device).synchronize()
    return int(wrong)


@pytest.mark.parametrize("shared", [True, False], ids=["one target", "a target each"])
def test_two_threads_on_one_gpu_get_their_own_features(shared: bool) -> None:
    models = [eager(), eager() if shared else eager(seed=1)]
    first = graphed(models[0])
    replayed = [first, first if shared else graphed(models[1])]
    given = [batch(bucket, seed) for seed in (1, 2) for bucket in BUCKETS]
    expected = [[wanted(model, item) for item in given] for model in models]
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(rounds, replayed[n], given, expected[n], n) for n in range(2)]
        assert [result.result() for result in results] == [0, 0]


@two_gpus
def test_two_threads_on_two_gpus_get_the_same_features() -> None:
    models = [eager(device=device) for device in range(2)]
    replayed = [graphed(model) for model in models]
    given = [batch(bucket, seed) for seed in (1, 2) for bucket in BUCKETS]
    expected = [[wanted(model, item) for item in given] for model in models]
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(*expected, strict=True))
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(rounds, replayed[n], given, expected[n], n) for n in range(2)]
        assert [result.result() for result in results] == [0, 0]


def test_what_another_thread_does_breaks_no_capture() -> None:
    """It takes new memory from the driver and asks for events, which a capture in CUDA's global mode forbids to all."""
    model, stop, failed = eager(), threading.Event(), []

    def disturb() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                event, held = torch.cuda.Event(), []
                while not stop.is_set():
                    held.append(torch.zeros(8 << 20, device="cuda"))
                    event.record()
                    event.query()
                    held = held[-8:]
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        captured = [graphed(model) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert failed == []
    given = batch(256, 7)
    assert all(torch.equal(one.features(given.on(model.device)), wanted(model, given)) for one in captured)


# ---------------------------------------------------------------------------------------------- memory


def test_nothing_in_the_pool_outlives_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did, another graph would overwrite. torch's generator keeps two numbers for graphs, a block of 512 each."""
    held: list[int] = []
    stock = CudaRecorder._capture

    def capture(self: CudaRecorder, *args: Any) -> None:
        before = torch.cuda.memory_allocated()
        stock(self, *args)
        held.append(torch.cuda.memory_allocated() - before)

    monkeypatch.setattr(CudaRecorder, "_capture", capture)
    graphed(eager(), rows=(1, 2))
    assert len(held) == 4
    assert max(held) <= 1024


def test_all_shapes_share_the_pool_of_the_largest() -> None:
    """Four shapes of as many tokens: pools of their own would hold four times the memory."""
    model, shapes = eager(), [(4096, 4), (8192, 2), (2048, 8), (1024, 16)]
    recorders = [CudaRecorder(model.device), CudaRecorder(model.device)]
    alone = GraphedTarget(model, [batch(4096, 0, 4)], recorders[0])
    four = GraphedTarget(model, [batch(bucket, 0, rows) for bucket, rows in shapes], recorders[1])
    assert alone.pool_bytes > 16384 * model.width * 2
    assert four.pool_bytes < 2 * alone.pool_bytes
    assert four.buffer_bytes == alone.buffer_bytes == 16384 * (2 * 8 + model.width * 2)


def allocations(model: Target, given: Batch) -> list[int]:
    """What an eager pass allocates and frees, as torch's own record has it, as ``PartPeak.changes``."""
    there = given.on(model.device)
    features_BSF = model.features(there)
    torch.cuda.memory._record_memory_history(context=None)
    try:
        model.features(there, features_BSF)
        [entries] = torch.cuda.memory._snapshot()["device_traces"][:1]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    made: dict[int, int] = {}
    changes: list[int] = []
    count = 0
    for entry in entries:
        if entry["action"] == "alloc":
            count += 1
            made[entry["addr"]] = count
            changes.append(entry["size"])
        elif entry["action"] == "free_requested" and entry["addr"] in made:
            changes.append(-made.pop(entry["addr"]))
    return changes


def test_the_pool_is_as_large_as_this_torch_s_rules_say() -> None:
    """Another torch may have others. Up to a small segment, for what capturing itself may keep."""
    model = eager()
    passes = {(8, bucket): allocations(model, batch(bucket, 0, 8)) for bucket in (256, 4096)}
    replayed = graphed(model, buckets=(256, 4096), rows=(8,))
    predicted = graphs.predicted_bytes(passes, model.width, torch.bfloat16)
    held = replayed.pool_bytes + replayed.buffer_bytes + graphs.WORK_SPACE_BYTES
    assert abs(held - predicted) <= pools.SMALL_SEGMENT_BYTES
    assert replayed.pool_bytes < 1.2 * pools.peak_bytes(passes[8, 4096])


def test_a_run_s_graphs_are_counted_on_their_device_and_told() -> None:
    pair: Any = SimpleNamespace(target=eager())
    [line] = graphs.install([pair], spec(), wanted=None, interpreted=False)
    assert isinstance(pair.target, GraphedTarget)
    assert line.startswith("graphs: the target's forward pass is captured on `cuda:0` for 1 × 512, 1 × 256 tokens: ")
    assert graphs.pool_bytes([pair], torch.device("cuda", 0)) == pair.target.pool_bytes > 0
    assert graphs.pool_bytes([pair], torch.device("cuda", 1)) == 0
    given = batch(512, 9)
    assert torch.equal(pair.target.features(given.on(pair.target.device)), wanted(eager(), given))


def test_packed_batches_run_eagerly_and_a_run_says_so() -> None:
    pair: Any = SimpleNamespace(target=eager())
    packed = dataclasses.replace(spec(), axes=dataclasses.replace(spec().axes, layouts=("packed",)))
    [line] = graphs.install([pair], packed, wanted=None, interpreted=False)
    assert "packed batches hold another number of documents" in line
    assert pair.target is eager()


# ---------------------------------------------------------------------------------------------- failures


def test_no_memory_names_the_shape() -> None:
    model = eager()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with pytest.raises(TrainingStoppedError, match=r"no memory left on `cuda:0` .* Shape\(bucket=32768") as caught:
            graphed(model, buckets=(32768,), rows=(4,))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "--no-graphs" in str(caught.value.hint)
    given = batch(256, 1)
    assert torch.equal(graphed(model).features(given.on(model.device)), wanted(model, given))


def test_a_pass_in_which_the_host_waits_is_refused_with_the_line_that_waits() -> None:
    """In a process of its own: what a broken capture leaves behind is nobody's to rely on."""
    program = """
        import os

        import test_graphs_gpu as here

        model = here.eager()

        def hook(module, args, output):
            return output * float(output.sum().isfinite().item())

        model.model.model.layers[1].register_forward_hook(hook)
        try:
            here.graphed(model)
        except here.TrainingStoppedError as error:
            print(error, flush=True)
            os._exit(0)
    """
    paths = f"import sys; sys.path[:0] = [{str(SUPPORT)!r}, {str(Path(__file__).parent)!r}]\n"
    command = [sys.executable, "-c", paths + textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot be captured on `cuda:0`, at Shape(bucket=512" in done.stdout
    assert "in hook" in done.stdout
    assert "--no-graphs runs it eagerly" in done.stdout
