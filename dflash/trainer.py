"""The training loop, top to bottom. It yields a report for each step; whoever iterates shows it.

Nothing in a step waits for a device: what a step computed is read while the next one runs. Several pairs each have a
thread of their own (``crew``), exchange gradients during the backward pass (``exchange``), and take their batches from
one order (``feed``). Under ``torchrun`` each process has one pair, and the same things happen between processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash import checkpoint, data, devices, drafter, export, graphs, memory, ranks, sources, target
from dflash.alarm import Alarm
from dflash.anchors import Drafting
from dflash.buckets import Shape
from dflash.config import RunConfig
from dflash.crew import Crew, Work, hang_of
from dflash.errors import HangError, InterruptedRunError, TrainingStoppedError
from dflash.exchange import Outbox, PeerExchange, RankExchange, scratch_bytes
from dflash.feed import Dealt, Feed
from dflash.objective import Objective
from dflash.optimizer import Optimizer
from dflash.pairs import Pair
from dflash.profiling import Profiler
from dflash.ranks import Ranks
from dflash.recipe import D_PACE
from dflash.reports import Launched, Log, NotFiniteError, Reader, StepReport
from dflash.spec import Spec
from dflash.stop import Stop
from dflash.tracking import Sink
from dflash.validation import Validation, validate
from dflash.watch import OnStuck, Watch
from kernelbake.errors import KernelbakeError
from kernelbake.workload import Footprint

__all__ = ["Job", "StepReport", "Trainer", "build", "steps", "train"]

_SETTLE_S = 5.0
"""How long a failed run waits for the threads of its other pairs before it saves what they have."""


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

    def validate(self) -> Validation | None:
        """Loss and accuracy over the samples held out, if there are any."""
        if self.held_out is not None:
            job = self.job
            self.validation = validate(self.pairs, self.held_out, job.shapes, job.drafting, job.run.seed, job.ranks)
        return self.validation

    def save(self) -> Path:
        """Writes a checkpoint of the current step, on rank 0; no rank goes on before.

        Raises:
            TrainingStoppedError: it cannot be written.
        """
        return self.job.ranks.together(lambda: self.write(self.pair))

    def write(self, pair: Pair) -> Path:
        """Writes a checkpoint of the current step with the state of this pair, on rank 0."""
        job = self.job
        batches = job.num_pairs * job.run.batch.accumulate
        state = checkpoint.State(
            self.done, job.run.seed, self.place, job.spec.to_json(), job.run.to_json(), job.bundle, batches
        )
        if not job.ranks.leads:
            return checkpoint.folder(job.output, self.done)
        return checkpoint.save(job.output, state, pair.optimizer.state())


# ---------------------------------------------------------------------------------------------- building


def torch_device(number: int, *, interpreted: bool) -> torch.device:
    """The device of that number: a GPU, or the CPU under the interpreter."""
    return torch.device("cpu") if interpreted else torch.device("cuda", number)


def build(job: Job) -> Trainer:
    """Loads the targets, makes or restores drafters and optimizers, opens the data; all in this thread.

    Raises:
        InputError: the target cannot be loaded or does not fit, the data or the checkpoint cannot be used.
        ResumeError: the checkpoint belongs to another run.
        MisfitError: the ranks would not train the same.
        TrainingStoppedError: the target's forward pass cannot be captured.
    """
    run, spec = job.run, job.spec
    source, held_out = sources.open_source(spec), None
    if spec.data.held_out:
        source, held_out = data.hold_out(source, spec.data.held_out)
    resumed = checkpoint.load(checkpoint.find(job.output, run.resume)) if run.resume else None
    if resumed is not None:
        batches = job.num_pairs * run.batch.accumulate
        checkpoint.check_same_run(resumed[0], spec, run.seed, job.bundle, batches, other_bundle=run.other_bundle)
    _check_same(job, source, resumed[0].step if resumed is not None else 0)
    interpreted = job.interpreted
    places = [tuple(torch_device(gpu, interpreted=interpreted) for gpu in (at.target, at.drafter)) for at in run.pairs]
    needs = _needs(job, places)
    memory.check(needs)
    pairs = [_pair(job, number, there, here) for number, (there, here) in enumerate(places)]
    loader = data.Loader(source, job.shapes, job.drafting, run.seed, resumed[0].loader if resumed else None)
    trainer = Trainer(job, pairs, loader, held_out, loader.state(), meter=memory.Meter(needs))
    if job.ranks.world > 1:
        trainer.group = ranks.gradient_group(cuda=pairs[0].device.type == "cuda")
    if resumed is not None:
        trainer.done = resumed[0].step
    _share_weights(trainer, resumed[1] if resumed is not None else None)
    trainer.notes = graphs.install(pairs, spec, wanted=run.graphs, interpreted=job.interpreted)
    return trainer


def _needs(job: Job, places: Sequence[tuple[torch.device, ...]]) -> list[memory.Need]:
    """What all pairs of this process need on their devices."""
    found: list[memory.Need] = []
    for there, here in places:
        found += memory.of_run(
            job.footprints, job.spec, there, here, graphs_wanted=job.run.graphs, interpreted=job.interpreted
        )
        if job.num_pairs > 1:
            state = next(need.num_bytes for need in found if need.what == memory.OPTIMIZER)
            length = state // memory.MASTER_BYTES
            scratch = scratch_bytes(length, job.num_pairs)
            found.append(memory.Need(here, "gradients of other pairs", scratch, True))
    return found


def _pair(job: Job, number: int, there: torch.device, here: torch.device) -> Pair:
    run, spec, dtype = job.run, job.spec, devices.DTYPES[job.spec.axes.dtype]
    if here.type == "cuda":
        torch.cuda.set_device(here)
    model = target.load_target(spec.target, spec.drafter.target_layer_ids, there, dtype, seed=run.seed)
    torch.manual_seed(run.seed)
    network = drafter.build(spec.drafter, spec.target.hidden_size, here, dtype)
    optimizer = Optimizer(network, run.optimizer, job.num_pairs)
    return Pair(job.ranks.rank * len(run.pairs) + number, model, network, optimizer, Objective.of(run.loss))


def _check_same(job: Job, source: data.Source, step: int) -> None:
    """Refuses ranks that would not train the same, before anything large is loaded.

    Raises:
        MisfitError: with every difference, and the rank.
    """
    if job.ranks.world == 1:
        return
    import triton

    own = ("devices", "dp_pairs", "output", "bundle", "resume")  # of a host
    facts = {"bundle": job.bundle, "torch": torch.__version__, "triton": triton.__version__}
    facts |= {"pairs": len(job.run.pairs), "samples": len(source), "step": step}
    facts |= _flat({name: value for name, value in job.run.to_json().items() if name not in own}, "")
    job.ranks.check_same(facts | _flat(job.spec.to_json(), ""))


def _flat(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return found


def _share_weights(trainer: Trainer, resumed: Mapping[str, torch.Tensor] | None) -> None:
    """Gives all pairs the same weights, to the bit: those of a checkpoint, or of rank 0's first pair.

    Raises:
        MisfitError: ranks have read other checkpoints.
    """
    first, world = trainer.pair.optimizer, trainer.job.ranks
    for pair in trainer.pairs if resumed is not None else ():
        pair.optimizer.restore(resumed or {})
    if resumed is None and world.world > 1:
        import torch.distributed as dist

        for master in first.masters:
            dist.broadcast(master.detach(), 0, group=trainer.group)
        first.take_weights(first.masters)
    if resumed is None:
        for pair in trainer.pairs[1:]:
            pair.optimizer.take_weights(first.masters)
    if world.world > 1:
        read = first.state() if resumed is not None else {}  # beside weights: the moments, which are nothing at first
        held = {**{f"weights {place}": master for place, master in enumerate(first.masters)}, **read}
        world.check_same({name: float(tensor.detach().sum(dtype=torch.float64)) for name, tensor in held.items()})


# ---------------------------------------------------------------------------------------------- training


def train(trainer: Trainer, stop: Stop, on_stuck: OnStuck | None = None) -> Iterator[StepReport]:
    """Steps to the end of the run, with checkpoints; the last one and the served drafter are written at the end.

    Args:
        trainer: the run.
        stop: a wish to stop after the current step.
        on_stuck: ends the process when it hangs, and with it the main thread.

    Raises:
        TrainingStoppedError: a loss or a gradient is not finite, memory ran out, a pair failed or hangs.
        InterruptedRunError: a signal came; the state was saved.
        DataError: the data changed while it was in use; the state was saved.
    """
    job = trainer.job
    yield from steps(trainer, stop, on_stuck)
    saved = trainer.save()
    if stop.number is not None:
        raise InterruptedRunError(stop.number, f"step {trainer.done} of {job.run.steps} is saved in `{saved}`")
    _validate(trainer, Log(job.output, trainer.sinks) if job.ranks.leads else None)
    if job.ranks.leads:
        checkpoint.export(job.output / "drafter", trainer.pair.drafter, job.spec)
        export.load(job.output / "drafter")


def steps(trainer: Trainer, stop: Stop, on_stuck: OnStuck | None = None) -> Iterator[StepReport]:
    """As ``train``, without what comes after the last step: no checkpoint there, no validation, no served drafter."""
    loop = _Loop(trainer)
    trainer.meter.start()
    stop.armed = True
    watch = Watch(loop.alarm, trainer.job.run.watchdog_seconds, loop, trainer.job.ranks, on_stuck)
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.exchanging())
        stack.enter_context(loop.crew)
        stack.enter_context(watch)
        reports = loop.run(stop, watch)
        try:
            for report in reports:
                with watch.paused():
                    yield report
        except (NotFiniteError, HangError):
            raise
        except KernelbakeError as failure:
            if failure is not loop.alarm.failure:
                raise
            with watch.paused():
                trainer.job.ranks.leave_word(failure)
                yield from loop.finished()
                loop.rescue(failure)
            raise


class _Loop:
    """The steps of a run, one after the other."""

    def __init__(self, trainer: Trainer) -> None:
        job, run = trainer.job, trainer.job.run
        self.alarm = Alarm()
        self.crew = Crew(trainer.pairs, self.alarm, trainer.meter.exhausted)
        self.doing = "first batches"
        self._trainer = trainer
        self._reader = Reader(run.steps, run.batch.accumulate, job.ranks, self.alarm)
        self._log = Log(job.output, trainer.sinks) if job.ranks.leads else None
        self._launched: Launched | None = None
        self._began = [pair.updates for pair in trainer.pairs]
        self._from = trainer.done
        self._next: Dealt | None = None

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Connects the pairs for the time of the block."""
        trainer = self._trainer
        flats = [pair.optimizer.flat for pair in trainer.pairs]
        exchange: PeerExchange | RankExchange | None = None
        if trainer.job.ranks.world > 1:
            exchange = RankExchange(flats[0], trainer.job.ranks, trainer.group, self.alarm)
        elif len(flats) > 1:
            exchange = PeerExchange(flats, self.alarm)
        for place, pair in enumerate(trainer.pairs):
            pair.outbox = Outbox(pair.optimizer, exchange, place) if exchange is not None else None
        try:
            yield
        finally:
            for pair in trainer.pairs:
                pair.optimizer.on_added = None
                pair.outbox = None

    def last_move(self) -> float:
        """When a pair last went on, by ``time.monotonic``."""
        return self.crew.last_move()

    def describe(self, seconds: float) -> KernelbakeError:
        """What to say when nothing moves."""
        return hang_of(self.crew, seconds, self.doing)

    def run(self, stop: Stop, watch: Watch) -> Iterator[StepReport]:
        """Steps to the end or to a signal."""
        trainer, run = self._trainer, self._trainer.job.run
        feed = self._feed()
        deals = feed.deals(stop, run.steps - trainer.done)
        if trainer.profiler is not None:
            deals = trainer.profiler.timed(deals)
        upcoming = next(deals, None)
        while upcoming is not None and trainer.done < run.steps:
            self.doing = "next step's batches"
            begun = time.perf_counter()
            dealt, upcoming = upcoming, next(deals, None)
            if feed.signal is not None:
                break
            watch.moved()
            if dealt.failure is not None:
                yield from self.rest()
                if trainer.done:
                    with watch.paused():
                        trainer.save()
                raise dealt.failure
            self._next = dealt
            yield from self._step(dealt, upcoming, begun)
            watch.moved()
            if run.checkpoint_every and trainer.done % run.checkpoint_every == 0 and trainer.done < run.steps:
                yield from self.rest()
                with watch.paused():
                    trainer.save()
                    _validate(trainer, self._log)
        yield from self.rest()
        stop.number = feed.signal or feed.hear(stop)

    def _feed(self) -> Feed:
        trainer, run = self._trainer, self._trainer.job.run
        made: data.Loader | data.ShuffledLabels = trainer.loader
        if run.data.shuffle_labels:
            made = data.ShuffledLabels(trainer.loader, trainer.job.spec.target.vocab_size, run.seed)
        pinned = trainer.pair.device.type == "cuda"
        return Feed(trainer.loader, made, trainer.job.ranks, len(trainer.pairs), run.batch.accumulate, pinned=pinned)

    def _step(self, dealt: Dealt, upcoming: Dealt | None, begun: float) -> Iterator[StepReport]:
        """Launches a step on all pairs, and yields the report of the one before it."""
        trainer = self._trainer
        self.doing = "launch of a step"
        lr = trainer.job.run.optimizer.rate(trainer.done, trainer.job.run.steps)
        ahead = upcoming.mine if upcoming is not None and upcoming.failure is None else None
        works = [
            Work(batches, ahead[place][0] if ahead is not None else None, dealt.weight_sum, lr)
            for place, batches in enumerate(dealt.mine)
        ]
        tensors = self.crew.step(works)
        trainer.done += 1
        trainer.place = dealt.after
        launched = Launched.of(trainer.done, tensors, dealt, lr, begun)
        yield from self.rest(begun)
        self._launched = launched

    def rest(self, end: float | None = None) -> Iterator[StepReport]:
        """Yields what was launched and not read yet.

        Args:
            end: when the next step began; None waits for what there is.
        """
        launched, self._launched = self._launched, None
        if launched is None:
            return
        self.doing = "results of a step"
        try:
            report = self._reader.read(launched, end, _peak_bytes(self._trainer.pairs))
        except NotFiniteError as error:
            error.hint = f"{self._kept(error.launched)}; a lower --lr or other samples may help"
            raise
        if self._log is not None:
            self._log.write(report.to_json())
        yield report

    def _kept(self, launched: Launched) -> str:
        """Saves the state before a step that changed no weight, and says where it is."""
        trainer = self._trainer
        trainer.done, trainer.place = launched.step - 1, launched.dealt.before
        if not trainer.done:
            return "no weight was changed by it, nothing is lost"
        try:
            return f"the state before it is saved in `{trainer.save()}`"
        except TrainingStoppedError as error:
            return f"no weight was changed by it; {error.message}"

    # ------------------------------------------------------------------------------------------ after a failure

    def finished(self) -> Iterator[StepReport]:
        """Yields the step before the failed one, if its results still arrive. Ranks would have to agree on it first."""
        if self._trainer.job.ranks.world > 1:
            return
        self._reader.alarm = late = Alarm()
        timer = threading.Timer(_SETTLE_S, late.ring, (TrainingStoppedError("its results do not arrive"),))
        timer.start()
        with contextlib.suppress(Exception):
            yield from self.rest()
        timer.cancel()

    def rescue(self, failure: KernelbakeError) -> None:
        """Saves the last whole step, from a pair that did not fail, and says where it is; or that it is not.

        A pair that got through its update has a step more than the others, and it is a whole one: nobody updates before
        the gradients of all are there. With NCCL nothing is tried, as every GPU may wait for one that has left.
        """
        trainer = self._trainer
        lost = "the newest whole checkpoint is good; --resume latest goes on from it"
        failure.hint = "; ".join(filter(None, (failure.hint, lost)))
        if not trainer.job.ranks.leads or (trainer.job.ranks.world > 1 and trainer.pair.device.type == "cuda"):
            return
        ended = [pair for pair in self.crew.settle(_SETTLE_S) if pair not in self.crew.failed]
        steps_of = dict(zip(trainer.pairs, self._began, strict=True))
        made = {pair: self._from + pair.updates - steps_of[pair] for pair in ended}
        pair = max(ended, key=lambda pair: made[pair], default=None)
        with contextlib.suppress(Exception):
            if pair is None or not made[pair] or pair.optimizer.is_halted:
                return
            if made[pair] > trainer.done:
                assert self._next is not None
                trainer.done, trainer.place = made[pair], self._next.after
            found = f"the last whole step, {trainer.done}, is saved in `{trainer.write(pair)}`"
            failure.hint = failure.hint.replace(lost, found)


def _validate(trainer: Trainer, log: Log | None) -> None:
    """Validates and logs what came of it."""
    found = trainer.validate()
    if found is not None and log is not None:
        log.write({"step": trainer.done, "validation": dataclasses.asdict(found)})


def _peak_bytes(pairs: Sequence[Pair]) -> dict[str, int]:
    found = dict.fromkeys(device for pair in pairs for device in (pair.target.device, pair.device))
    return {
        str(device): int(torch.cuda.max_memory_allocated(device)) + graphs.pool_bytes(pairs, device)
        for device in found
        if device.type == "cuda"
    }
