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
from collections.abc import Iterator, Sequence

import torch

from dflash import checkpoint, data, export, graphs
from dflash.alarm import Alarm
from dflash.assembly import build, torch_device
from dflash.crew import Crew, Work, hang_of
from dflash.errors import HangError, InterruptedRunError, TrainingStoppedError
from dflash.exchange import Outbox, PeerExchange, RankExchange
from dflash.feed import Dealt, Feed
from dflash.folder import DRAFTER
from dflash.job import Job, Trainer
from dflash.pairs import Pair
from dflash.reports import Launched, Log, NotFiniteError, Reader, StepReport
from dflash.stop import Stop
from dflash.watch import OnStuck, Watch
from kernelbake.errors import KernelbakeError

__all__ = ["Job", "StepReport", "Trainer", "build", "steps", "torch_device", "train"]

_SETTLE_S = 5.0
"""How long a failed run waits for the threads of its other pairs before it saves what they have."""


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
    job, began = trainer.job, trainer.done
    yield from steps(trainer, stop, on_stuck)
    saved = trainer.save()
    if stop.number is not None:
        raise InterruptedRunError(stop.number, f"step {trainer.done} of {job.run.steps} is saved in `{saved}`")
    log = Log(job.output, trainer.sinks) if job.ranks.leads else None
    _validate(trainer, log, stop, again=trainer.done == began)
    if stop.number is not None:
        raise InterruptedRunError(
            stop.number, f"all {trainer.done} steps are saved in `{saved}`, no drafter is written"
        )
    if job.ranks.leads:
        checkpoint.export(job.output / DRAFTER, trainer.pair.drafter, job.spec)
        export.load(job.output / DRAFTER)


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
        except NotFiniteError:
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
        if self._log is not None:
            self._log.go_on_from(trainer.done)
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
                    _validate(trainer, self._log, stop)
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
            first = error.launched.step == self._from + 1  # no update of this process is behind it
            cause = (
                "the target's weights may hold such numbers, too" if first else "a lower --lr or other samples may help"
            )
            error.hint = f"{self._kept(error.launched)}; {cause}"
            raise
        if self._log is not None:
            try:
                self._log.write(report.to_json())
            except TrainingStoppedError as error:
                error.hint = self._saved(self._trainer.pair) or checkpoint.remains(self._trainer.job.output)
                raise
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
            return f"no weight was changed by it; {error.message}; {checkpoint.remains(trainer.job.output)}"

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
        the gradients of all are there. With NCCL nothing is tried, as every GPU may wait for one that has left; nor,
        after a hang, on a device that has not done what was launched.
        """
        job, said = self._trainer.job, None
        if job.ranks.leads and (job.ranks.world == 1 or self._trainer.pair.device.type != "cuda"):
            said = self._rescued(hangs=isinstance(failure, HangError))
        failure.hint = "; ".join(filter(None, (failure.hint, said or checkpoint.remains(job.output))))

    def _rescued(self, *, hangs: bool) -> str | None:
        trainer = self._trainer
        ended = [pair for pair in self.crew.settle(_SETTLE_S) if pair not in self.crew.failed]
        ended = [pair for pair in ended if not (hangs and pair.awaits_devices)]
        steps_of = dict(zip(trainer.pairs, self._began, strict=True))
        made = {pair: self._from + pair.updates - steps_of[pair] for pair in ended}
        pair = max(ended, key=lambda pair: made[pair], default=None)
        if pair is None or not made[pair]:
            return None
        if made[pair] > trainer.done:
            assert self._next is not None
            trainer.done, trainer.place = made[pair], self._next.after
        return self._saved(pair)

    def _saved(self, pair: Pair) -> str | None:
        """Saves what a pair holds, without asking other ranks, and says where it is; None if it cannot be saved."""
        trainer = self._trainer
        with contextlib.suppress(Exception):
            if not pair.optimizer.is_halted:
                return f"the last whole step, {trainer.done}, is saved in `{trainer.write(pair)}`"
        return None


def _validate(trainer: Trainer, log: Log | None, stop: Stop, *, again: bool = False) -> None:
    """Validates and logs what came of it, unless a signal comes.

    Args:
        trainer: the run.
        log: of the run, on the rank that leads.
        stop: a wish to stop.
        again: whether an earlier run may have logged this step's validation.
    """
    found = trainer.validate(stop)
    if found is not None and log is not None:
        line = {"step": trainer.done, "validation": dataclasses.asdict(found)}
        (log.write_again if again else log.write)(line)


def _peak_bytes(pairs: Sequence[Pair]) -> dict[str, int]:
    found = dict.fromkeys(device for pair in pairs for device in (pair.target.device, pair.device))
    return {
        str(device): int(torch.cuda.max_memory_allocated(device)) + graphs.pool_bytes(pairs, device)
        for device in found
        if device.type == "cuda"
    }
