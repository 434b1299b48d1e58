"""What the benchmarks of whole training runs share: processes that wait to be asked, a run's pairs, blocks of steps.

A block is a few steps by the trainer's own loop. It begins and ends with idle devices, so its seconds are those of its
work, however far the host runs ahead in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import main_job
from common import say

if TYPE_CHECKING:
    from dflash import data, order
    from dflash.launch import Plan, Started
    from dflash.profiling import Profile
    from dflash.reports import StepReport
    from dflash.trainer import Trainer

CALM_LR = 1e-5
"""Of the steps that are timed: their work does not depend on it, and no number of them leads astray."""

WATCHDOG_S = 300.0
"""Long enough for stock Triton to tune everything that one part of a step launches."""

MEMORY_S = 30.0
"""How long a process waits for memory that one before it gives back."""


def bake(folder: Path, manifest: str, buckets: Sequence[int] | None, layers: int | None) -> Path:
    """Builds a bundle in the folder from a manifest, with other buckets and layers of the target if they are given."""
    from kernelbake import manifest as manifests

    text = manifests.find(manifest).read_text()
    changes = []
    if buckets is not None:
        changes.append((r"(?m)^( *buckets:) \[[^]]*\]", rf"\1 {list(buckets)}"))
    if layers is not None:
        changes.append((r"(?m)^(  target:\n(?:    .*\n)*?    num_layers:) \d+", rf"\1 {layers}"))
    for pattern, new in changes:
        text, count = re.subn(pattern, new, text)
        if count != 1:
            sys.exit(f"`{manifest}`: {count} places are like `{pattern}`; wanted 1")
    (folder / "manifest.yaml").write_text(text)
    seconds, _ = main_job.must(folder, main_job.command("kernelbake", "build", "--manifest", "manifest.yaml"))
    say(f"built a bundle in {seconds:.1f} s")
    return folder / "bundle.tar"


# ---------------------------------------------------------------------------------------------- processes


class Child:
    """A process of the same script that imports everything, then answers one question after the other.

    Args:
        script: its path.
        given: what it is to be, as JSON; ``side`` names it in messages.
        environment: beside this process's own.
    """

    def __init__(self, script: str, given: Mapping[str, Any], **environment: str) -> None:
        self.name = str(given["side"])
        command = [sys.executable, script, "--child", json.dumps(given)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )

    def ask(self, question: str, limit_s: float | None = None, **given: Any) -> Any:
        """The answer to a question; a process that has none ends this one.

        Args:
            question: what ``serve`` there knows.
            limit_s: the process is killed after so long.
            given: to the question.
        """
        found = self.try_asking(question, limit_s, **given)
        if found is None:
            sys.exit(f"{self.name}: no answer to `{question}`, exit code {self._process.wait()}")
        return found

    def try_asking(self, question: str, limit_s: float | None = None, **given: Any) -> Any:
        """As ``ask``, and None if the process ends or is killed before it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill) if limit_s is not None else None
        if timer is not None:
            timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps([question, given]) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            if timer is not None:
                timer.cancel()
        return json.loads(line) if line else None

    def end(self) -> int:
        """Ends the process, whose memory is free then, and gives its exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def serve(answers: Mapping[str, Callable[..., Any]]) -> NoReturn:
    """Answers questions until there are none; what is printed meanwhile goes to stderr.

    The process then ends at once: threads that hang or wait keep it no longer.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            question, given = json.loads(line)
            out.write(json.dumps(answers[question](**given), allow_nan=False) + "\n")
            out.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ---------------------------------------------------------------------------------------------- a run


@dataclasses.dataclass
class Process:
    """A process in which pairs may be made.

    Args:
        plan: the run.
        started: frozen, or stock.
    """

    plan: Plan
    started: Started

    @property
    def stock(self) -> bool:
        return self.started.frozen is None

    def facts(self) -> dict[str, Any]:
        """What it runs on, and the memory that its pairs need and have, in bytes; None on the CPU."""
        import torch

        from dflash import memory, trainer

        run, spec = self.plan.run, self.plan.spec
        needs: dict[torch.device, int] = {}
        for at in run.pairs:
            there, here = (
                trainer.torch_device(gpu, interpreted=self.plan.interpreted) for gpu in (at.target, at.drafter)
            )
            for need in memory.needs(spec, there, here):
                needs[need.device] = needs.get(need.device, 0) + need.num_bytes
        on_gpu = not self.plan.interpreted
        return {
            "interpreted": self.plan.interpreted,
            "gpu": torch.cuda.get_device_name(0) if on_gpu else None,
            "bundle": self.plan.held.digest,
            "layers": spec.target.num_layers,
            "buckets": list(spec.axes.buckets),
            "shapes": [case.id for case in spec.axes.cases().planned],
            "needed_bytes": max(needs.values()) if on_gpu else None,
            "free_bytes": min(torch.cuda.mem_get_info(device)[0] for device in needs) if on_gpu else None,
        }

    def build(self) -> Trainer:
        """The pairs of the run, with equal weights; what is noteworthy goes to stderr."""
        from dflash import trainer

        plan = self.plan
        self._wait_for_memory()
        made = trainer.build(
            trainer.Job(plan.run, plan.spec, None if self.stock else plan.held.digest, plan.interpreted)
        )
        for text in (made.description(), *made.notes):
            print(text, file=sys.stderr, flush=True)
        return made

    def _wait_for_memory(self) -> None:
        """Gives the driver the time to free what a process that has just ended held."""
        end = time.monotonic() + MEMORY_S
        while not self.plan.interpreted and time.monotonic() < end:
            found = self.facts()
            if found["free_bytes"] >= found["needed_bytes"]:
                return
            time.sleep(0.5)

    def counts(self) -> dict[str, Any]:
        """What happened at run time so far, and the launches out of the bundle."""
        frozen = self.started.frozen
        counters = dataclasses.asdict(frozen.counters) if frozen is not None else None
        return {"proof": dataclasses.asdict(self.started.proof), "frozen": counters}


@contextlib.contextmanager
def opened(
    bundle: Path, output: Path, devices: str, *, stock: bool, buckets: Sequence[int] | None, layers: int | None
) -> Iterator[Process]:
    """Makes this process ready: imported, and frozen or left to stock Triton, whose target then runs without graphs.

    Args:
        bundle: names workload and shapes, in a stock process too.
        output: folder for the log of the steps.
        devices: of the pairs.
        stock: whether Triton tunes and compiles as usual.
        buckets: instead of the manifest's.
        layers: of the target, instead of the manifest's; no kernel depends on their number.
    """
    from dflash import config, launch

    options = {
        "bundle": str(bundle),
        "target": "random",
        "devices": devices,
        "output": str(output),
        "watchdog_seconds": WATCHDOG_S,
        "batch.buckets": list(buckets) if buckets is not None else None,
        "graphs": False if stock else None,
    }
    plan = launch.settle(config.load(None, (), options))
    if layers is not None and layers != plan.spec.target.num_layers:
        plan = dataclasses.replace(plan, spec=_with_layers(plan.spec, layers))
    with launch.started(plan, stock=stock) as started:
        if stock and plan.interpreted:
            _tune_nothing()
        yield Process(plan, started)


def _tune_nothing() -> None:
    """Makes stock Triton take any configuration: its benchmarks want a GPU, and the interpreter has nothing to time."""
    from triton.runtime.autotuner import Autotuner

    def check_disk_cache(self: Any, key: Any, configs: Any, bench: Callable[[], None]) -> bool:
        bench()
        return False

    Autotuner.check_disk_cache = check_disk_cache
    Autotuner.do_bench = staticmethod(lambda call, quantiles=None: [1.0] * 3)


def _with_layers(spec: Any, layers: int) -> Any:
    from dflash.spec import Spec

    section = spec.to_json()
    section["target"]["num_layers"] = layers
    section["drafter"]["target_layer_ids"] = None
    return Spec.parse(section)


# ---------------------------------------------------------------------------------------------- data


def loader_of(trainer: Trainer, buckets: Sequence[int], state: Mapping[str, Any] | None = None) -> data.Loader:
    """A loader of its own with batches of these buckets only, in the run's order."""
    from dflash import data, sources

    job = trainer.job
    axes = dataclasses.replace(job.spec.axes, buckets=tuple(buckets))
    source = sources.open_source(dataclasses.replace(job.spec, axes=axes))
    shapes = {bucket: job.shapes[bucket] for bucket in buckets}
    return data.Loader(source, shapes, job.drafting, job.run.seed, state, step_batches=job.step_batches)


class Alike:
    """A loader that goes round the buckets, and gives so many batches of one before it goes on to the next.

    Args:
        loaders: of each bucket.
        count: batches of a bucket in a row; with as many as there are pairs, all pairs of a step work on equal lengths.
    """

    def __init__(self, loaders: Mapping[int, data.Loader], count: int) -> None:
        self._loaders = list(loaders.values())
        self._count = count
        self._planned = 0
        self.source = self._loaders[0].source
        self.epoch = 0.0

    def plan(self) -> order.Planned:
        loader = self._loaders[self._planned // self._count % len(self._loaders)]
        self._planned += 1
        return loader.plan()

    def make(self, planned: order.Planned) -> Any:
        return self._loaders[0].make(planned)

    def state(self) -> dict[str, Any]:
        return {"planned": self._planned}


# ---------------------------------------------------------------------------------------------- steps


def configured(trainer: Trainer, loader: Any, count: int, *, lr: float = CALM_LR) -> Trainer:
    """The same pairs as a run of so many steps, which writes no checkpoint, not even after a failure."""
    from dflash.errors import TrainingStoppedError

    run = trainer.job.run
    run = dataclasses.replace(run, steps=count, optimizer=dataclasses.replace(run.optimizer, lr=lr))
    job = dataclasses.replace(trainer.job, run=run)
    made = dataclasses.replace(trainer, job=job, loader=loader, place=loader.state(), done=0)

    def refuse(pair: Any) -> Path:
        raise TrainingStoppedError("a benchmark keeps no checkpoint")

    made.write = refuse  # type: ignore[method-assign]
    return made


def block(trainer: Trainer) -> list[StepReport]:
    """Makes the steps of a configured run, from idle devices to idle devices."""
    from dflash import trainer as trainers
    from dflash.stop import Stop

    synchronize(trainer)
    reports = list(trainers.steps(trainer, Stop(), _end_at_once))
    synchronize(trainer)
    return reports


def seconds_of(reports: Sequence[StepReport]) -> float:
    """Of a block: from its first step's beginning until its last one was done."""
    return math.fsum(report.seconds for report in reports)


def profiled(trainer: Trainer) -> Profile:
    """A block, and where the time of its steps went."""
    from dflash.profiling import Profiler

    trainer.profiler = profiler = Profiler(trainer.pairs)
    try:
        return profiler.profile([report.seconds for report in block(trainer)])
    finally:
        for pair in trainer.pairs:
            pair.clock = None


def exchange_shares(profile: Mapping[str, Any]) -> list[float]:
    """Of each pair: the share of the step in which the drafter's device waits for the exchange of gradients.

    Args:
        profile: as in ``summary.json``.
    """
    part = "exchange of gradients"
    return [
        pair["parts"][part]["device_ms"] / profile["step_ms"] if part in pair["parts"] else 0.0
        for pair in profile["pairs"]
    ]


def rates(rounds: Sequence[Mapping[str, Any]], side: str) -> list[float]:
    """Batches per second of each round.

    Args:
        rounds: seconds of every step of ``threads``, and of each pair ``alone``.
        side: ``threads``, a batch of each pair in a step; or ``alone``, one pair after the other.
    """
    if side == "threads":
        return [len(one["alone"]) * len(one[side]) / sum(one[side]) for one in rounds]
    return [sum(map(len, one[side])) / sum(map(sum, one[side])) for one in rounds]


def speedup(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Threads over in turn: the median of the rounds' ratios."""
    sides = (rates(rounds, "threads"), rates(rounds, "alone"))
    return median([threads / alone for threads, alone in zip(*sides, strict=True)])


def synchronize(trainer: Trainer) -> None:
    """Waits for all devices of the pairs."""
    import torch

    for pair in trainer.pairs:
        for device in (pair.target.device, pair.device):
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def count_for(step_s: float, block_s: float) -> int:
    """Steps of a block that lasts about so long: at least 2, at most 20."""
    return max(2, min(20, math.ceil(block_s / step_s)))


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _end_at_once(error: BaseException) -> None:
    print(error, file=sys.stderr, flush=True)
    os._exit(8)
