"""The training loop, top to bottom. It yields a report for each step; whoever iterates shows it.

Nothing in a step waits for the device: what a step computed is read while the next one runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from dflash import checkpoint, data, devices, drafter, export, graphs, memory, sources, target
from dflash.anchors import Drafting
from dflash.buckets import Batch, Shape
from dflash.config import RunConfig
from dflash.errors import DataError, InterruptedRunError, TrainingStoppedError
from dflash.metrics import Scores
from dflash.objective import Objective
from dflash.optimizer import Optimizer
from dflash.pairs import Pair, StepTensors
from dflash.recipe import D_PACE
from dflash.spec import Spec
from dflash.stop import Stop
from dflash.validation import Validation, validate
from kernelbake.workload import Footprint


@dataclasses.dataclass(frozen=True)
class Job:
    """A run whose configuration is settled.

    Args:
        run: what was asked for.
        spec: the workload's section as it runs.
        bundle: digest of the frozen bundle; None of a stock run.
        interpreted: whether kernels run in Triton's interpreter, on the CPU.
        footprints: what a step of each case holds in memory, of the preflight; empty of a stock run.
    """

    run: RunConfig
    spec: Spec
    bundle: str | None
    interpreted: bool
    footprints: tuple[Footprint, ...] = ()

    @property
    def output(self) -> Path:
        return Path(self.run.output)

    @property
    def drafting(self) -> Drafting:
        drafter, even = self.spec.drafter, self.run.loss.weights == D_PACE
        return Drafting(drafter.block_size, drafter.mask_token_id, self.run.gamma, even)


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What is known of a step once its results have been read.

    Args:
        step: counted from 1.
        steps: of the whole run.
        loss: weighted mean over the step.
        norm: of the gradient before clipping.
        lr: learning rate.
        scores: accuracy and acceptance length.
        shapes: of its batches.
        num_tokens: tokens that were no padding.
        seconds: from its beginning to that of the next step, or until it was done.
        epoch: position in the data.
        peak_bytes: largest memory in use on the drafter's device so far; None on the CPU.
    """

    step: int
    steps: int
    loss: float
    norm: float
    lr: float
    scores: Scores
    shapes: tuple[Shape, ...]
    num_tokens: int
    seconds: float
    epoch: float
    peak_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Trainer:
    """A pair with its data, ready to step. ``build`` makes one.

    Args:
        job: the run.
        pair: what trains.
        loader: the batches.
        held_out: samples that are not trained on, or None.
        done: steps made.
        validation: the newest one, if there are samples held out.
        notes: what a person should know of how it runs, one line each.
        meter: what the run takes on its devices, predicted and measured.
    """

    job: Job
    pair: Pair
    loader: data.Loader
    held_out: data.Source | None = None
    done: int = 0
    validation: Validation | None = None
    notes: tuple[str, ...] = ()
    meter: memory.Meter = dataclasses.field(default_factory=memory.Meter)

    def peaks(self) -> list[memory.Peak]:
        """Of every device: memory beside weights, gradients and optimizer state."""
        return self.meter.peaks(lambda device: graphs.pool_bytes([self.pair], device))

    def state(self, loader_state: dict[str, Any]) -> checkpoint.State:
        """What a checkpoint of the current step says beside its tensors."""
        job = self.job
        return checkpoint.State(
            self.done, job.run.seed, loader_state, job.spec.to_json(), job.run.to_json(), job.bundle
        )

    def description(self) -> str:
        """What trains on what, in one line."""
        model, network = self.pair.target, self.pair.drafter
        count = sum(parameter.numel() for parameter in network.parameters())
        dropped = "".join(f", {number} dropped ({reason})" for reason, number in self.loader.source.dropped.items())
        return (
            f"target: {model.source}, {model.num_parameters:,} parameters; drafter: {count:,} parameters; "
            f"data: {self.loader.source.name}, {len(self.loader.source):,} samples{dropped}, "
            f"{self.loader.source.share:.1%} of the tokens supervised; from step {self.done}"
        )

    def validate(self) -> Validation | None:
        """Loss and accuracy over the samples held out, if there are any."""
        if self.held_out is not None:
            shapes = {shape.bucket: shape for shape in map(Shape.of, self.job.spec.axes.cases().planned)}
            self.validation = validate([self.pair], self.held_out, shapes, self.job.drafting, self.job.run.seed)
        return self.validation

    def save(self, loader_state: dict[str, Any] | None = None) -> Path:
        """Writes a checkpoint of the current step.

        Args:
            loader_state: position in the data at this step; None is where the loader stands.
        """
        place = self.loader.state() if loader_state is None else loader_state
        return checkpoint.save(self.job.output, self.state(place), self.pair.optimizer.state())


def torch_device(number: int, *, interpreted: bool) -> torch.device:
    """The device of that number: a GPU, or the CPU under the interpreter."""
    return torch.device("cpu") if interpreted else torch.device("cuda", number)


def build(job: Job) -> Trainer:
    """Loads the target, makes or restores drafter and optimizer, opens the data.

    Raises:
        InputError: the target cannot be loaded or does not fit, the data or the checkpoint cannot be used.
        ResumeError: the checkpoint belongs to another run.
        TrainingStoppedError: the target's forward pass cannot be captured.
    """
    run, spec = job.run, job.spec
    dtype = devices.DTYPES[spec.axes.dtype]
    source = sources.open_source(spec)
    held_out = None
    if spec.data.held_out:
        source, held_out = data.hold_out(source, spec.data.held_out)
    resumed = checkpoint.load(checkpoint.find(job.output, run.resume)) if run.resume else None
    if resumed is not None:
        checkpoint.check_same_run(resumed[0], spec, run.seed, job.bundle, other_bundle=run.other_bundle)
    there = torch_device(run.devices.target, interpreted=job.interpreted)
    here = torch_device(run.devices.drafter, interpreted=job.interpreted)
    needs = memory.of_run(job.footprints, spec, there, here, graphs_wanted=run.graphs, interpreted=job.interpreted)
    memory.check(needs)
    model = target.load_target(spec.target, spec.drafter.target_layer_ids, there, dtype, seed=run.seed)
    torch.manual_seed(run.seed)
    network = drafter.build(spec.drafter, spec.target.hidden_size, here, dtype)
    pair = Pair(0, model, network, Optimizer(network, run.optimizer), Objective.of(run.loss))
    shapes = {shape.bucket: shape for shape in map(Shape.of, spec.axes.cases().planned)}
    loader = data.Loader(source, shapes, job.drafting, run.seed, resumed[0].loader if resumed else None)
    trainer = Trainer(job, pair, loader, held_out, meter=memory.Meter(needs))
    if resumed is not None:
        trainer.done = resumed[0].step
        pair.optimizer.restore(resumed[1])
    trainer.notes = graphs.install([pair], spec, wanted=run.graphs, interpreted=job.interpreted)
    return trainer


def train(trainer: Trainer, stop: Stop) -> Iterator[StepReport]:
    """Steps to the end of the run, with checkpoints; the last one and the served drafter are written at the end.

    Raises:
        TrainingStoppedError: a loss or a gradient is not finite, or memory ran out.
        InterruptedRunError: a signal came; the state was saved.
    """
    job, run = trainer.job, trainer.job.run
    batches: Iterator[Batch] = trainer.loader
    if run.data.shuffle_labels:
        batches = data.ShuffledLabels(trainer.loader, job.spec.target.vocab_size, run.seed)
    reader = _Reader(trainer)
    trainer.meter.start()
    stop.armed = True
    while trainer.done < run.steps and stop.number is None:
        reader.begin(trainer.loader.state())
        step = yield from reader.fetch(batches, run.batch.accumulate)
        lr = run.optimizer.rate(trainer.done, run.steps)
        tensors = _step(trainer, step, lr)
        trainer.done += 1
        yield from reader.read(tensors, step, lr)
        if run.checkpoint_every and trainer.done % run.checkpoint_every == 0 and trainer.done < run.steps:
            yield from reader.rest()
            trainer.save()
            reader.validate()
    yield from reader.rest()
    saved = trainer.save()
    if stop.number is not None:
        raise InterruptedRunError(stop.number, f"step {trainer.done} of {run.steps} is saved in `{saved}`")
    reader.validate()
    checkpoint.export(job.output / "drafter", trainer.pair.drafter, job.spec)
    export.load(job.output / "drafter")


def _step(trainer: Trainer, batches: list[Batch], lr: float) -> StepTensors:
    pair = trainer.pair
    if pair.device.type == "cuda":
        batches = [batch.pinned() for batch in batches]
    try:
        return pair.step(batches, lr)
    except torch.OutOfMemoryError as error:
        device = pair.target.device if pair.part == "target" else pair.device
        raise trainer.meter.exhausted(error, pair.number, device, pair.part, batches[0].shape) from error


class _OnItsWay:
    """A tensor being copied to the host; reading it waits for this copy and for no later work of the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values


@dataclasses.dataclass(frozen=True)
class _Launched:
    """A step whose results are on their way."""

    step: int
    results: _OnItsWay
    batches: list[Batch]
    lr: float
    epoch: float
    begun: float
    before: dict[str, Any]  # position in the data


class _Reader:
    """Reads each step's results one step later, when they are ready, and checks that they are finite."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._waiting: list[_Launched] = []
        self._begun = time.perf_counter()
        self._before: dict[str, Any] = {}
        trainer.job.output.mkdir(parents=True, exist_ok=True)
        self._log = trainer.job.output / "metrics.jsonl"

    def begin(self, before: dict[str, Any]) -> None:
        """Notes that a step begins, and where in the data."""
        self._begun = time.perf_counter()
        self._before = before

    def fetch(self, batches: Iterator[Batch], count: int) -> Generator[StepReport, None, list[Batch]]:
        """The batches of a step.

        Raises:
            DataError: the data changed while it was in use; what has been trained is saved first.
        """
        try:
            return [next(batches) for _ in range(count)]
        except DataError:
            yield from self.rest()
            if self._trainer.done:
                self._trainer.save(self._before)
            raise

    def validate(self) -> None:
        """Validates and logs what came of it."""
        found = self._trainer.validate()
        if found is not None:
            line = {"step": self._trainer.done, "validation": dataclasses.asdict(found)}
            self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        try:
            with self._log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise TrainingStoppedError(
                f"metrics: `{self._log}` cannot be written ({error.strerror}); wanted room and a file to append to",
                hint="the newest whole checkpoint is good; --resume latest goes on from it",
            ) from error

    def read(self, tensors: StepTensors, batches: list[Batch], lr: float) -> Iterator[StepReport]:
        """Takes a step that was launched, and yields the one before it."""
        results = _OnItsWay(torch.cat((tensors.loss.double()[None], tensors.norm.double()[None], tensors.counts)))
        yield from self.rest(self._begun)
        self._waiting.append(
            _Launched(self._trainer.done, results, batches, lr, self._trainer.loader.epoch, self._begun, self._before)
        )

    def rest(self, end: float | None = None) -> Iterator[StepReport]:
        """Yields what was launched and not read yet.

        Args:
            end: when the next step began; None waits for what there is.
        """
        while self._waiting:
            launched = self._waiting.pop(0)
            loss, norm, *counts = launched.results.tolist()
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise _not_finite(launched, loss, norm, self._kept(launched))
            report = StepReport(
                step=launched.step,
                steps=self._trainer.job.run.steps,
                loss=loss,
                norm=norm,
                lr=launched.lr,
                scores=Scores.of(counts),
                shapes=tuple(batch.shape for batch in launched.batches),
                num_tokens=sum(batch.num_tokens for batch in launched.batches),
                seconds=(time.perf_counter() if end is None else end) - launched.begun,
                epoch=launched.epoch,
                peak_bytes=_peak_bytes(self._trainer.pair),
            )
            self._write(report.to_json())
            yield report

    def _kept(self, launched: _Launched) -> str:
        """Saves the state before a step that changed no weight, and says where it is."""
        trainer = self._trainer
        trainer.done = launched.step - 1
        if not trainer.done:
            return "no weight was changed by it, nothing is lost"
        try:
            return f"the state before it is saved in `{trainer.save(launched.before)}`"
        except TrainingStoppedError as error:
            return f"no weight was changed by it; {error.message}"


def _not_finite(launched: _Launched, loss: float, norm: float, kept: str) -> TrainingStoppedError:
    batches = launched.batches
    visits = [f"sample {index} of epoch {epoch}" for batch in batches for epoch, index in batch.visits]
    return TrainingStoppedError(
        f"step {launched.step}: loss `{loss}`, gradient norm `{norm}`; wanted finite numbers",
        reasons=[f"{batches[0].shape}", *visits[:20]],
        hint=f"{kept}; a lower --lr or other samples may help",
    )


def _peak_bytes(pair: Pair) -> int | None:
    if pair.device.type != "cuda":
        return None
    return int(torch.cuda.max_memory_allocated(pair.device)) + graphs.pool_bytes([pair], pair.device)
