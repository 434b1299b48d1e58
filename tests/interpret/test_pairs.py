"""Several pairs side by side, on the CPU: the same steps however they are divided, equal weights, one end for all."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dflashspec
import interpreted
import pytest
import stubpair
import torch

from dflash import checkpoint, config, target, trainer
from dflash.errors import ExitCode, HangError, InterruptedRunError, PairError, ResumeError, TrainingStoppedError
from dflash.exchange import PeerExchange
from dflash.pairs import Pair
from dflash.spec import Spec
from dflash.stop import Stop
from dflash.trainer import Job, StepReport, Trainer
from kernelbake.errors import FrozenMissError


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted.last_configs():
        yield


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that cost nothing."""
    monkeypatch.setattr(target, "load_target", lambda *args, **options: stubpair.TableTarget(stubpair.spec()))


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss without kernels."""
    monkeypatch.setattr(Pair, "loss", stubpair.cheap_loss)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stubpair.verses(tmp_path_factory.mktemp("data"))


def job(output: Path, text: Path, *, buckets: tuple[int, ...] = (32,), **options: Any) -> Job:
    section = dflashspec.changed("axes.buckets", list(buckets))
    section["axes"]["anchors"] = [4]
    section["drafter"]["num_layers"] = 1
    options = {
        "steps": 3,
        "output": str(output),
        "data.source": str(text),
        "optimizer.lr": 3e-3,
        "optimizer.schedule": "constant",
        "optimizer.warmup": 0.0,
        **options,
    }
    run = config.load(None, (), {name.replace("__", "."): value for name, value in options.items()})
    return Job(run, config.apply(run, Spec.parse(section)), bundle="sha256:b", interpreted=True)


def run(of: Job | Trainer, stop: Stop | None = None) -> list[StepReport]:
    made = trainer.build(of) if isinstance(of, Job) else of
    return list(trainer.train(made, stop or Stop()))


def pairs_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("pair ", "watchdog"))]


def equal_state(one: Trainer, first: int = 0, second: int = 1) -> bool:
    states = [one.pairs[number].optimizer.state() for number in (first, second)]
    weights = [list(one.pairs[number].drafter.parameters()) for number in (first, second)]
    return all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()) and all(
        torch.equal(a, b) for a, b in zip(*weights, strict=True)
    )


# ---------------------------------------------------------------------------------------------- the same steps


def test_the_global_loss_and_the_anchors_are_the_same_for_every_split_and_any_padding(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 × 4, 2 × 2 and 4 × 1 (pairs × accumulation), and 4 × 1 once more with 100 padding tokens in every row."""
    anchors: dict[tuple[int, int], list[int]] = {}

    def see(made: Trainer) -> None:
        true_make = made.loader.make

        def make(planned: Any) -> Any:
            batch = true_make(planned)
            for (visit,), row, valid in zip([batch.visits], batch.anchors_BN, batch.num_valid_B, strict=True):
                found = row[: int(valid)].tolist()
                assert anchors.setdefault(visit, found) == found
            return batch

        monkeypatch.setattr(made.loader, "make", make)

    found = {}
    for name, pairs, accumulate, buckets in (
        ("1×4", 1, 4, (32,)),
        ("2×2", 2, 2, (32,)),
        ("4×1", 4, 1, (32,)),
        ("padded", 4, 1, (132,)),
    ):
        made = trainer.build(
            job(tmp_path / name, text, buckets=buckets, dp_pairs=pairs, batch__accumulate=accumulate, steps=2)
        )
        see(made)
        found[name] = run(made)
        assert all(equal_state(made, 0, other) for other in range(1, pairs))
    assert len(anchors) == 8
    whole = found.pop("1×4")
    assert len(whole) == 2
    for reports in found.values():
        for one, other in zip(whole, reports, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-6)
            assert other.norm == pytest.approx(one.norm, rel=1e-5)
            assert other.scores == one.scores
            assert (other.num_tokens, other.epoch) == (one.num_tokens, one.epoch)


@pytest.mark.usefixtures("cheap")
def test_a_pair_without_any_label_takes_part(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third batch of pair 1 has no anchor: the step is the one of pair 0's batch alone."""
    losses = {}
    for pairs in (1, 2):
        made = trainer.build(job(tmp_path / str(pairs), text, dp_pairs=pairs, batch__accumulate=2 // pairs))
        count, true_make = [0], made.loader.make

        def make(planned: Any, count: list[int] = count, true_make: Any = true_make) -> Any:
            batch = true_make(planned)
            count[0] += 1
            if count[0] != 4:
                return batch
            nothing = torch.zeros_like(batch.weights_BNK)
            labels = torch.full_like(batch.labels_BNK, -100)
            none = torch.zeros_like(batch.num_valid_B)
            return dataclasses.replace(batch, weights_BNK=nothing, labels_BNK=labels, num_valid_B=none, weight_sum=0.0)

        monkeypatch.setattr(made.loader, "make", make)
        losses[pairs] = [report.loss for report in run(made)]
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)


def test_pairs_keep_equal_bits_and_one_pair_alone_goes_its_own_way(text: Path, tmp_path: Path) -> None:
    made = trainer.build(job(tmp_path, text, dp_pairs=2, steps=3))
    reports = list(trainer.steps(made, Stop()))
    assert [report.step for report in reports] == [1, 2, 3]
    assert equal_state(made)
    assert not pairs_threads()
    alone = made.alone(1)
    alone.job = dataclasses.replace(alone.job, run=dataclasses.replace(alone.job.run, steps=4))
    [report] = list(trainer.steps(alone, Stop()))
    assert report.step == 4
    assert not equal_state(made)


@pytest.mark.usefixtures("cheap")
def test_a_resumed_run_of_two_pairs_is_the_unbroken_one_and_so_is_one_pair_with_twice_the_batches(
    text: Path, tmp_path: Path
) -> None:
    whole = run(job(tmp_path / "whole", text, dp_pairs=2, steps=6, checkpoint_every=3))
    start = str(tmp_path / "whole" / "step-00000003")
    resumed = run(job(tmp_path / "resumed", text, dp_pairs=2, steps=6, resume=start))
    assert [report.loss for report in resumed] == [report.loss for report in whole[3:]]
    one, other = (checkpoint.load(tmp_path / name / "step-00000006") for name in ("whole", "resumed"))
    assert one[0].loader == other[0].loader
    assert all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())
    alone = run(job(tmp_path / "alone", text, steps=6, batch__accumulate=2, resume=start))
    assert [report.loss for report in alone] == pytest.approx([report.loss for report in whole[3:]], rel=1e-5)


@pytest.mark.usefixtures("cheap")
def test_another_number_of_batches_in_a_step_is_refused_with_what_keeps_it(text: Path, tmp_path: Path) -> None:
    run(job(tmp_path, text, dp_pairs=2, steps=1))
    with pytest.raises(ResumeError) as caught:
        trainer.build(job(tmp_path, text, resume="latest"))
    [reason] = caught.value.reasons
    assert reason.startswith("batches of a step: `2`; now `1`")
    assert "--accumulate" in reason


# ---------------------------------------------------------------------------------------------- one end for all


@contextlib.contextmanager
def ended_within(seconds: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


def failing(made: Trainer, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, step: int = 3) -> None:
    """Makes pair 1 fail in a step: before its gradients leave, while they do, or after those of all have arrived."""
    pair = made.pairs[1]
    where: tuple[Any, str] = {
        "before": (pair, "loss"),
        "within": (pair, "_begin"),
        "after": (pair.optimizer, "step"),
    }[place]
    true, count = getattr(*where), 0

    def broken(*args: Any, **options: Any) -> Any:
        nonlocal count
        if place != "within" or args == ("exchange of gradients",):
            count += 1
            if count == step:
                raise error
        return true(*args, **options)

    monkeypatch.setattr(*where, broken)


@pytest.mark.parametrize("place", ["before", "within", "after"])
@pytest.mark.usefixtures("cheap")
def test_a_failure_in_pair_1_stops_all_within_the_step_and_keeps_the_last_whole_one(
    place: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer.build(job(tmp_path / "run", text, dp_pairs=3, steps=50))
    failing(made, monkeypatch, place, RuntimeError("the device fell off"))
    reports: list[StepReport] = []
    with ended_within(10), pytest.raises(PairError, match="pair 1 .*the device fell off") as caught:
        reports.extend(trainer.train(made, Stop()))
    assert caught.value.exit_code == ExitCode.STOPPED
    assert "`cpu`" in caught.value.message
    assert any("in broken" in line for line in caught.value.reasons), "the traceback"
    assert any("RuntimeError: the device fell off" in line for line in caught.value.reasons)
    assert [report.step for report in reports] == [1, 2]
    [saved] = (tmp_path / "run").glob("step-*")
    whole = int(saved.name[-8:])  # once all gradients of pair 1 have left, others may be quick enough to make the step
    assert whole in {"before": (2,), "within": (2, 3), "after": (3,)}[place]
    assert f"the last whole step, {whole}, is saved in `{saved}`" in str(caught.value.hint)
    unbroken = run(job(tmp_path / "unbroken", text, dp_pairs=3, steps=5))
    rest = run(job(tmp_path / "run", text, dp_pairs=3, steps=5, resume="latest"))
    assert [report.loss for report in rest] == [report.loss for report in unbroken[whole:]]


@pytest.mark.usefixtures("cheap")
def test_a_refused_launch_keeps_its_exit_code(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer.build(job(tmp_path, text, dp_pairs=2, steps=50))
    failing(made, monkeypatch, "before", FrozenMissError("kernel k: not held", hint="build it"), step=1)
    with pytest.raises(PairError, match=r"pair 1 \(`cpu`\) failed in the \w+.*kernel k: not held") as caught:
        run(made)
    assert caught.value.exit_code == ExitCode.MISS
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.usefixtures("cheap")
def test_no_memory_left_in_pair_1_names_it(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer.build(job(tmp_path, text, dp_pairs=2, steps=50))
    failing(made, monkeypatch, "before", torch.OutOfMemoryError("tried to allocate 1 GiB"))
    with ended_within(10), pytest.raises(TrainingStoppedError, match="pair 1: no memory left on `cpu`") as caught:
        run(made)
    assert "--batch-size" in str(caught.value.hint)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.usefixtures("cheap")
def test_what_is_not_finite_in_pair_1_changes_no_weight_of_any_pair(
    what: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The infinite loss has finite gradients: it travels with them, and stops the updates all the same."""
    made = trainer.build(job(tmp_path, text, dp_pairs=2, steps=50))
    true_loss, count = made.pairs[1].loss, 0

    def loss(*args: Any) -> Any:
        nonlocal count
        count += 1
        value, correct = true_loss(*args)
        if count == 3:
            value = value * torch.nan if what == "gradient" else value + torch.inf
        return value, correct

    monkeypatch.setattr(made.pairs[1], "loss", loss)
    with ended_within(10), pytest.raises(TrainingStoppedError, match=r"step 3: loss `(nan|inf)`"):
        run(made)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
    assert equal_state(made)
    _, saved = checkpoint.load(tmp_path / "step-00000002")
    assert all(torch.equal(saved[name], tensor) for name, tensor in made.pairs[1].optimizer.state().items())


@pytest.mark.usefixtures("cheap")
def test_a_pair_that_hangs_is_named_with_all_stacks(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer.build(job(tmp_path, text, dp_pairs=2, steps=50, watchdog_seconds=1))
    release, count, true_loss = threading.Event(), 0, made.pairs[1].loss

    def loss(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            release.wait(60)
        return true_loss(*args)

    monkeypatch.setattr(made.pairs[1], "loss", loss)
    try:
        with ended_within(20), pytest.raises(HangError, match=r"pair 1 \(`cpu`\) hangs in the \w+") as caught:
            run(made)
    finally:
        release.set()
    assert caught.value.exit_code == ExitCode.STOPPED
    assert "pair 0 (`cpu`) waits" in caught.value.reasons
    stacks = "\n".join(caught.value.reasons)
    assert "thread `pair 1`:" in stacks
    assert "release.wait(60)" in stacks
    hint = f"the last whole step, 1, is saved in `{tmp_path / 'step-00000001'}`"
    assert caught.value.hint == f"--watchdog-seconds says how long a step may take; {hint}"
    assert len(run(job(tmp_path, text, dp_pairs=2, steps=2, resume="latest"))) == 1


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("enter", r"pair 1 \(`cpu`\) hangs in the start of its thread"),
        ("exchange", r"pair 1 \(`cpu`\) does not get on in the exchange of gradients"),
    ],
)
def test_a_pair_that_hangs_outside_its_work_is_named(
    where: str, said: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer.build(job(tmp_path, text, dp_pairs=2, steps=50, watchdog_seconds=1))
    release, finish = threading.Event(), PeerExchange.finish

    def hanging(self: PeerExchange, pair: int) -> None:
        if pair == 1:
            release.wait(60)
        finish(self, pair)

    if where == "enter":
        monkeypatch.setattr(made.pairs[1], "enter", lambda: release.wait(60))
    else:
        monkeypatch.setattr(PeerExchange, "finish", hanging)
    try:
        with ended_within(20), pytest.raises(HangError, match=said):
            run(made)
    finally:
        release.set()


@pytest.mark.usefixtures("cheap")
def test_an_exception_that_cannot_say_what_it_is_ends_the_run_like_any_other(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    def loss(*args: Any) -> Any:
        raise Mute

    made = trainer.build(job(tmp_path, text, dp_pairs=2, watchdog_seconds=60))
    monkeypatch.setattr(made.pairs[1], "loss", loss)
    with ended_within(20), pytest.raises(PairError, match=r"pair 1 .*: Mute: <its text cannot be made: ValueError>"):
        run(made)


@pytest.mark.usefixtures("cheap")
def test_a_step_may_take_as_long_as_the_watchdog_says_and_reports_may_be_read_slowly(
    text: Path, tmp_path: Path
) -> None:
    made = trainer.build(job(tmp_path, text, dp_pairs=2, steps=3, watchdog_seconds=1))
    for report in trainer.train(made, Stop()):
        if report.step == 1:
            time.sleep(2.0)
    assert made.done == 3


@pytest.mark.usefixtures("cheap")
def test_a_process_whose_main_thread_hangs_is_ended_from_outside(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread hangs in the data, where nothing can be raised in it: the callback is called, which ends it."""
    from dflash import watch

    monkeypatch.setattr(watch, "_GRACE_S", 0.5)
    made = trainer.build(job(tmp_path, text, dp_pairs=2, steps=50, watchdog_seconds=1))
    release, told, true_plan, count = threading.Event(), [], made.loader.plan, 0

    def plan() -> Any:
        nonlocal count
        count += 1
        if count == 5:
            release.wait(60)
        return true_plan()

    def end(error: Any) -> None:
        told.append(error)
        release.set()

    monkeypatch.setattr(made.loader, "plan", plan)
    with ended_within(20), pytest.raises(HangError, match="no pair is at work, the run is at the next step's batches"):
        list(trainer.train(made, Stop(), end))
    assert len(told) == 1


@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.usefixtures("cheap")
def test_a_signal_ends_all_pairs_after_their_step(number: int, text: Path, tmp_path: Path) -> None:
    whole = run(job(tmp_path / "whole", text, dp_pairs=2, steps=6))
    stop, part = Stop(), []

    def until_stopped() -> None:
        for report in trainer.train(trainer.build(job(tmp_path / "part", text, dp_pairs=2, steps=6)), stop):
            part.append(report)
            if report.step == 2:
                stop.number = number

    with pytest.raises(InterruptedRunError, match=r"step \d of 6 is saved") as caught:
        until_stopped()
    assert caught.value.exit_code == 128 + number
    assert not pairs_threads()
    rest = run(job(tmp_path / "part", text, dp_pairs=2, steps=6, resume="latest"))
    assert [report.loss for report in part + rest] == [report.loss for report in whole]


@pytest.mark.usefixtures("cheap")
def test_what_is_left_of_a_run_that_nobody_reads_to_its_end(text: Path, tmp_path: Path) -> None:
    """A caller that stops iterating leaves no thread behind."""
    training = trainer.train(trainer.build(job(tmp_path, text, dp_pairs=2, steps=50)), Stop())
    next(training)
    training.close()
    end = time.monotonic() + 10
    while pairs_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not pairs_threads()
