"""A run whose configuration is settled, and the pairs that it trains. Loads torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash import checkpoint, data, graphs, memory
from dflash.anchors import Drafting
from dflash.buckets import Shape
from dflash.config import RunConfig
from dflash.pairs import Pair
from dflash.profiling import Profiler
from dflash.ranks import Ranks
from dflash.recipe import D_PACE
from dflash.spec import Spec
from dflash.stop import Stop
from dflash.tracking import Sink
from dflash.validation import Validation, batches, validate
from kernelbake.workload import Footprint


@dataclasses.dataclass(frozen=True)
class Job:
    """A run whose configuration is settled.

    Args:
        run: what was asked for; its pairs are those of this process.
        spec: the workload's section as it runs.
        bundle: digest of the frozen bundle; None of a stock run.
        interpreted: whether kernels run in Triton's interpreter, on the CPU.
        footprints: what a step of each case holds in memory, of the preflight; empty of a stock run.
        ranks: this process among others, connected.
    """

    run: RunConfig
    spec: Spec
    bundle: str | None
    interpreted: bool
    footprints: tuple[Footprint, ...] = ()
    ranks: Ranks = dataclasses.field(default_factory=Ranks)

    @property
    def output(self) -> Path:
        return Path(self.run.output)

    @property
    def drafting(self) -> Drafting:
        drafter, even = self.spec.drafter, self.run.loss.weights == D_PACE
        return Drafting(drafter.block_size, drafter.mask_token_id, self.run.gamma, even)

    @property
    def num_pairs(self) -> int:
        """Over all ranks."""
        return self.ranks.world * len(self.run.pairs)

    @property
    def step_batches(self) -> int:
        """Batches of one optimizer step, over all pairs and ranks."""
        return self.num_pairs * self.run.batch.accumulate

    @property
    def shapes(self) -> dict[int, Shape]:
        """For each bucket its only shape."""
        return {shape.bucket: shape for shape in map(Shape.of, self.spec.axes.cases().planned)}


@dataclasses.dataclass
class Trainer:
    """Pairs with their data, ready to step. ``build`` makes one.

    Args:
        job: the run.
        pairs: what trains: all with the same weights.
        loader: the batches; it is up to one step ahead.
        held_out: samples that are not trained on, or None.
        done: steps made.
        place: position in the data after them.
        validation: the newest one, if there are samples held out.
        notes: what a person should know of how it runs, one line each.
        meter: what the run takes on its devices, predicted and measured.
        group: of all ranks, for gradients; None where there is one.
        sinks: who is told every line of the log.
        profiler: times the waits for batches, where somebody asks.
    """

    job: Job
    pairs: Sequence[Pair]
    loader: data.Loader
    held_out: data.Source | None
    place: dict[str, Any]
    done: int = 0
    validation: Validation | None = None
    notes: tuple[str, ...] = ()
    meter: memory.Meter = dataclasses.field(default_factory=memory.Meter)
    group: Any = None
    sinks: Sequence[Sink] = ()
    profiler: Profiler | None = None

    @property
    def pair(self) -> Pair:
        """The first pair."""
        return self.pairs[0]

    def alone(self, number: int) -> Trainer:
        """One of the pairs by itself, with the same loader: for comparison with all of them side by side."""
        run = dataclasses.replace(self.job.run, devices=(self.job.run.pairs[number],), dp_pairs=None)
        return dataclasses.replace(self, pairs=[self.pairs[number]], job=dataclasses.replace(self.job, run=run))

    def peaks(self) -> list[memory.Peak]:
        """Of every device: memory beside weights, gradients and optimizer state."""
        return self.meter.peaks(lambda device: graphs.pool_bytes(self.pairs, device))

    def description(self) -> str:
        """What trains on what, in one line."""
        model, network = self.pair.target, self.pair.drafter
        count = sum(parameter.numel() for parameter in network.parameters())
        dropped = "".join(f", {number} dropped ({reason})" for reason, number in self.loader.source.dropped.items())
        several = f"{self.job.num_pairs} pairs; " if self.job.num_pairs > 1 else ""
        return (
            f"{several}target: {model.source}, {model.num_parameters:,} parameters; drafter: {count:,} parameters; "
            f"data: {self.loader.source.name}, {len(self.loader.source):,} samples{dropped}, "
            f"{self.loader.source.share:.1%} of the tokens supervised; from step {self.done}"
        )

    def validate(self, stop: Stop) -> Validation | None:
        """Loss and accuracy over the samples held out, if there are any and no signal comes."""
        job, found = self.job, None
        if self.held_out is not None:
            made = batches(self.held_out, job.shapes, job.drafting, job.run.seed)
            found = validate(self.pairs, made, job.drafting, self.meter.exhausted, stop, job.ranks)
        self.validation = found or self.validation
        return found

    def save(self) -> Path:
        """Writes a checkpoint of the current step, on rank 0; no rank goes on before.

        Raises:
            TrainingStoppedError: it cannot be written.
        """
        return self.job.ranks.together(lambda: self.write(self.pair))

    def write(self, pair: Pair) -> Path:
        """Writes a checkpoint of the current step with the state of this pair, on rank 0."""
        job = self.job
        state = checkpoint.State(
            step=self.done,
            seed=job.run.seed,
            loader=self.place,
            spec=job.spec.to_json(),
            run=job.run.to_json(),
            bundle=job.bundle,
            step_batches=job.step_batches,
            samples=self.loader.source.digest,
        )
        if not job.ranks.leads:
            return checkpoint.folder(job.output, self.done)
        return checkpoint.save(job.output, state, pair.optimizer.state())
