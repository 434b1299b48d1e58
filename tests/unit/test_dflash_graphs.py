"""Replayed targets: whose memory features are, the order of captures and replays, and what is refused, on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import rerun
import tinytarget
import torch

from dflash import capturable, graphs, pools, synthetic
from dflash.buckets import Batch, Shape
from dflash.errors import TrainingStoppedError
from dflash.graphs import GraphedTarget, NotCapturableError
from dflash.pools import MIB
from dflash.spec import Spec
from dflash.target import Target
from kernelbake.errors import FrozenMissError, InputError

BUCKETS = (16, 32)


@functools.cache
def tiny() -> Target:
    return tinytarget.build(tinytarget.spec())


def batch(bucket: int, seed: int, rows: int = 1) -> Batch:
    return synthetic.batch(Shape(bucket, 4, rows, "padded", "float64"), tinytarget.spec(), seed)


def graphed(target: Target | None = None, **options: Any) -> GraphedTarget:
    examples = [batch(bucket, 0, rows) for bucket in BUCKETS for rows in (1, 2)]
    return GraphedTarget(target or tiny(), examples, rerun.Rerun(**options))


def equal(found: torch.Tensor, given: Batch) -> bool:
    return torch.equal(found, tiny().features(given))


# ---------------------------------------------------------------------------------------------- features


def test_replays_are_the_eager_pass_to_the_bit_in_any_order() -> None:
    model = graphed()
    given = [batch(bucket, seed, rows) for seed in (1, 2) for bucket in (32, 16) for rows in (2, 1)]
    assert all(equal(model.features(item), item) for item in [*given, *reversed(given)])


def test_features_survive_every_later_replay_and_are_the_caller_s_to_change() -> None:
    model, items = graphed(), [batch(32, 1), batch(32, 2), batch(16, 3)]
    found = [model.features(item) for item in items]
    assert all(equal(features, item) for features, item in zip(found, items, strict=True))
    kept = found[1].clone()
    found[0].zero_()
    assert torch.equal(found[1], kept)
    assert equal(model.features(items[0]), items[0])


def test_the_last_hidden_state_is_replayed_where_the_loss_wants_it() -> None:
    eager = Target(tiny().model, tiny().layer_ids, "tiny")
    eager.appends_last = True
    model, given = graphed(eager), batch(16, 5)
    found = model.features(given)
    assert found.shape == (1, 16, eager.width)
    assert torch.equal(found, eager.features(given))
    model.appends_last = False
    with pytest.raises(InputError, match="128 features wide"):
        model.features(given)


def test_threads_that_share_a_target_take_turns() -> None:
    """Without the lock the second thread's inputs would overwrite the first one's while its replay waits."""
    model, items = graphed(pause_s=0.005), [batch(BUCKETS[seed % 2], seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(model.features, items))
    assert all(equal(features, item) for features, item in zip(found, items, strict=True))


def test_everything_else_is_the_eager_target_s() -> None:
    model, ids = graphed(), torch.tensor([[1, 2, 3]])
    assert torch.equal(model.embed(ids), tiny().embed(ids))
    assert model.model is tiny().model
    assert model.head_VE is tiny().head_VE
    assert (model.source, model.num_parameters, model.device) == (tiny().source, tiny().num_parameters, tiny().device)
    with torch.no_grad(), model.capturing() as captured:
        model.model.model(input_ids=ids, use_cache=False)
    assert captured().shape == (1, 3, model.width)


# ---------------------------------------------------------------------------------------------- captures


def test_the_largest_shape_is_captured_first_and_decides_the_buffers() -> None:
    model = graphed()
    assert model.shapes in ([(2, 32), (1, 32), (2, 16), (1, 16)], [(2, 32), (2, 16), (1, 32), (1, 16)])
    assert model.buffer_bytes == 64 * (2 * 8 + model.width * 8)
    assert model.pool_bytes == 4000
    predicted = graphs.predicted_bytes(dict.fromkeys(model.shapes, (16 * MIB,)), model.width, torch.float64)
    assert predicted == model.buffer_bytes + 18 * MIB + graphs.WORK_SPACE_BYTES, "17 MiB in whole 2 MiB"


def test_the_pool_begins_as_one_block_for_the_largest_pass_and_grows_by_what_finds_no_room() -> None:
    large = (*[20 * MIB] * 4, -1, -2, -3, -4, 80 * MIB, -5, 60 * MIB)
    small, odd = (10 * MIB, 30 * MIB, -1), (86 * MIB, 40 * MIB)
    buffers = 64 * (2 * 8 + 8 * 2) + graphs.WORK_SPACE_BYTES

    def pool(passes: dict[int, tuple[int, ...]]) -> int:
        shapes = {(1, bucket): changes for bucket, changes in passes.items()}
        return graphs.predicted_bytes(shapes, 8, torch.bfloat16) - buffers

    grown = pools.Pool()
    grown.run(large)
    assert grown.reserved_bytes == 160 * MIB, "none of four gaps fits what comes after"
    first = 86 * MIB  # 80 and a sixteenth of it, in whole 2 MiB
    assert pool({64: large}) == first
    assert pool({64: large, 16: small}) == pool({16: small, 64: large}) == first
    assert pool({64: large, 16: odd}) == first + 40 * MIB


@pytest.mark.parametrize("name", ["a shape", "packed"])
def test_a_batch_that_was_not_captured_is_refused(name: str) -> None:
    packed = synthetic.batch(Shape(16, 4, 1, "packed", "float64"), tinytarget.spec(), 0)
    given = packed if name == "packed" else batch(24, 0)
    with pytest.raises(InputError, match=r"is not captured; wanted one of \[\(2, 32\), .* rows and tokens, padded"):
        graphed().features(given)


def test_no_memory_names_the_bucket_and_what_to_lower() -> None:
    with pytest.raises(
        TrainingStoppedError, match=r"no memory left on `cpu` .* Shape\(bucket=16, .* batch=1"
    ) as caught:
        graphed(failure=(3, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")))
    assert caught.value.reasons == ("CUDA out of memory. Tried to allocate 2 GiB",)
    assert "--no-graphs" in str(caught.value.hint)


def test_what_no_graph_can_hold_is_named_with_its_place() -> None:
    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand much more\nand more")

    try:
        waits()
    except RuntimeError as error:
        cause = error
    failure = NotCapturableError()
    failure.__cause__ = cause
    with pytest.raises(TrainingStoppedError, match=r"cannot be captured on `cpu`, at Shape\(bucket=32") as caught:
        graphed(failure=(0, failure))
    assert caught.value.reasons[:2] == ("operation not permitted when stream is capturing", "and much more")
    assert "test_dflash_graphs.py" in caught.value.reasons[-1]
    assert "in waits: raise RuntimeError" in caught.value.reasons[-1]


@pytest.mark.parametrize("error", [FrozenMissError("kernel x: no such key"), RuntimeError("a fault of the model")])
def test_errors_that_an_eager_pass_would_raise_too_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        graphed(failure=(0, error))


# ---------------------------------------------------------------------------------------------- refusals

OBSTACLES: dict[str, tuple[Callable[[Spec], Spec], str]] = {
    "packed": (
        lambda spec: dataclasses.replace(spec, axes=dataclasses.replace(spec.axes, layouts=("packed",))),
        "packed batches hold another number of documents in every step",
    ),
    "gradients": (
        lambda spec: dataclasses.replace(spec, target=dataclasses.replace(spec.target, frozen=False)),
        "the target is not frozen",
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_a_target_that_cannot_be_captured_runs_eagerly_and_says_why_or_is_refused(name: str) -> None:
    change, text = OBSTACLES[name]
    spec = change(tinytarget.spec())
    pair: Any = SimpleNamespace(target=tiny())
    [line] = graphs.install([pair], spec, wanted=None, interpreted=False)
    assert line.startswith(f"graphs: none, the target runs eagerly: {text}")
    assert pair.target is tiny()
    with pytest.raises(InputError) as caught:
        graphs.install([pair], spec, wanted=True, interpreted=False)
    assert [reason for reason in caught.value.reasons if text in reason]
    with pytest.raises(InputError, match="graphs: asked for"):
        capturable.check(True, spec, interpreted=False)
    for wanted in (None, False):
        capturable.check(wanted, spec, interpreted=False)
    assert not any(capturable.used(wanted, spec, interpreted=False) for wanted in (None, True, False))


def test_every_reason_is_told_at_once() -> None:
    spec = OBSTACLES["gradients"][0](OBSTACLES["packed"][0](tinytarget.spec("qwen3_5_moe")))
    with pytest.raises(InputError) as caught:
        capturable.check(True, spec, interpreted=True)
    assert len(caught.value.reasons) == 3
    assert capturable.obstacles(tinytarget.spec(), interpreted=False) == []
    assert capturable.used(None, tinytarget.spec(), interpreted=False)
    assert not capturable.used(None, tinytarget.spec(), interpreted=True)


@pytest.mark.parametrize("wanted", [None, False])
def test_the_interpreter_has_no_graphs_and_says_nothing_about_them(wanted: bool | None) -> None:
    pair: Any = SimpleNamespace(target=tiny())
    assert graphs.install([pair], tinytarget.spec(), wanted=wanted, interpreted=True) == ()
    assert pair.target is tiny()


def test_graphs_may_be_left_away() -> None:
    pair: Any = SimpleNamespace(target=tiny())
    assert graphs.install([pair], tinytarget.spec(), wanted=False, interpreted=False) == (
        "graphs: off, the target runs eagerly",
    )
    assert pair.target is tiny()
    assert graphs.pool_bytes([pair], torch.device("cpu")) == 0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_the_host_recomputes_are_an_obstacle(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny().model.model.rotary_emb, "rope_type", kind)
    pair: Any = SimpleNamespace(target=tiny())
    [line] = graphs.install([pair], tinytarget.spec(), wanted=None, interpreted=False)
    assert f"rotary embeddings of type `{kind}`" in line


def test_experts_are_captured_on_demand_alone_and_never_where_the_host_calls_each() -> None:
    spec = tinytarget.spec("qwen3_5_moe")
    pair: Any = SimpleNamespace(target=tinytarget.build(spec))  # whose experts are transformers' `eager`
    [line] = graphs.install([pair], spec, wanted=None, interpreted=False)
    assert "each of its 4 experts is called by the host" in line
    assert line.endswith("--graphs tries to capture them")
    capturable.check(True, spec, interpreted=False)
    assert [capturable.used(wanted, spec, interpreted=False) for wanted in (None, True, False)] == [False, True, False]
    with pytest.raises(InputError) as caught:
        graphs.install([pair], spec, wanted=True, interpreted=False)
    assert len(caught.value.reasons) == 1
    grouped: Any = SimpleNamespace(target=tiny())
    [line] = graphs.install([grouped], spec, wanted=None, interpreted=False)
    assert line == f"graphs: none, the target runs eagerly: {capturable.doubts(spec)[0]}"


def test_what_refuses_graphs_loads_no_torch() -> None:
    text = "import sys, dflash.capturable; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
