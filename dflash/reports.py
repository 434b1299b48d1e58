"""What is known of a step once its results have been read: one step later, so that nobody waits for a device.

Results of all pairs and ranks are brought together here: losses are added up exactly, tallies by position. The norm of
the gradient is that of all pairs together, and must have the same bits everywhere. Loads torch.
"""

from __future__ import annotations

import array
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash.alarm import Alarm, Rung
from dflash.buckets import Shape
from dflash.errors import TrainingStoppedError
from dflash.feed import Dealt
from dflash.metrics import Scores
from dflash.pairs import StepTensors
from dflash.ranks import Ranks
from dflash.tracking import Sink

_POLL_S = 0.0005


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What is known of a step once its results have been read.

    Args:
        step: counted from 1.
        steps: of the whole run.
        loss: weighted mean over the step, all pairs and ranks.
        norm: of the gradient before clipping.
        lr: learning rate.
        scores: accuracy and acceptance length.
        shapes: of its batches.
        num_tokens: tokens that were no padding.
        seconds: from its beginning to that of the next step, or until it was done.
        epoch: position in the data.
        peak_bytes: largest memory in use on any of this process's devices so far; None on the CPU.
        peak_bytes_by_device: the same for each of them, empty on the CPU.
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
    peak_bytes_by_device: dict[str, int] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Made:
    """What the summary of a run needs of every step: 16 bytes of each, as a run may make millions.

    Attributes:
        losses: as reported.
        seconds: that each took.
    """

    def __init__(self) -> None:
        self.losses, self.seconds = array.array("d"), array.array("d")

    def add(self, report: StepReport) -> None:
        """Takes a step in."""
        self.losses.append(report.loss)
        self.seconds.append(report.seconds)


class NotFiniteError(TrainingStoppedError):
    """A loss or a gradient is not finite; no weight was changed by its step, nor by any later one.

    Args:
        launched: the step.
        loss, norm: what was found.
    """

    def __init__(self, launched: Launched, loss: float, norm: float) -> None:
        visits = [f"sample {index} of epoch {epoch}" for epoch, index in launched.dealt.visits]
        super().__init__(
            f"step {launched.step}: loss `{loss}`, gradient norm `{norm}`; wanted finite numbers",
            reasons=[f"{launched.dealt.shapes[0]}", *visits[:20]],
        )
        self.launched = launched


class _OnItsWay:
    """A tensor being copied to the host; reading it waits for this copy and for no later work of the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def tolist(self, alarm: Alarm) -> list[float]:
        """The values.

        Raises:
            Rung: somebody failed in the meantime; a device that waits for others would never be done.
        """
        while self._event is not None and not self._event.query():
            alarm.check()
            time.sleep(_POLL_S)
        values: list[float] = self._host.tolist()
        return values


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step whose results are on their way.

    Args:
        step: counted from 1.
        results: of each pair of this rank: the norm, the losses of its batches, its tally.
        dealt: its batches, and where in the data they were.
        lr: learning rate.
        begun: when, by ``time.perf_counter``.
    """

    step: int
    results: list[_OnItsWay]
    dealt: Dealt
    lr: float
    begun: float

    @classmethod
    def of(cls, step: int, tensors: Sequence[StepTensors], dealt: Dealt, lr: float, begun: float) -> Launched:
        """A step that was just launched on all pairs."""
        results = [
            _OnItsWay(torch.cat((one.norm.double()[None], one.losses_A.double(), one.counts))) for one in tensors
        ]
        slim = dataclasses.replace(dealt, mine=[])  # its tensors are not needed any more
        return cls(step, results, slim, lr, begun)


class Reader:
    """Reads the results of steps, in their order, and checks them.

    Args:
        steps: of the whole run.
        accumulate: batches of each pair in a step.
        ranks: this rank among the others.
        alarm: of the run.
    """

    def __init__(self, steps: int, accumulate: int, ranks: Ranks, alarm: Alarm) -> None:
        self._steps = steps
        self._accumulate = accumulate
        self._ranks = ranks
        self.alarm = alarm

    def read(self, launched: Launched, end: float | None, peaks: dict[str, int]) -> StepReport:
        """The report of a step.

        Args:
            launched: the step.
            end: when the next step began; None: it has not.
            peaks: memory in use so far, by device.

        Raises:
            NotFiniteError: its loss or gradient is not finite.
            TrainingStoppedError: pairs or ranks have different gradients.
        """
        try:
            mine = [result.tolist(self.alarm) for result in launched.results]
        except Rung as rung:
            assert self.alarm.failure is not None
            raise self.alarm.failure from rung
        size = len(mine[0])
        flat = self._ranks.numbers([value for values in mine for value in values])
        found = [values[begin : begin + size] for values in flat for begin in range(0, len(values), size)]
        norms = [norm for norm, *_ in found]
        loss = math.fsum(value for _, *values in found for value in values[: self._accumulate])
        if not math.isfinite(loss) or not math.isfinite(norms[0]):
            raise NotFiniteError(launched, loss, norms[0])
        if len(set(norms)) > 1:
            raise TrainingStoppedError(
                f"step {launched.step}: the pairs have different gradients; wanted the same bits",
                reasons=[f"pair {pair}: norm `{norm!r}`" for pair, norm in enumerate(norms)],
            )
        tallies = [values[1 + self._accumulate :] for values in found]
        return StepReport(
            step=launched.step,
            steps=self._steps,
            loss=loss,
            norm=norms[0],
            lr=launched.lr,
            scores=Scores.of([sum(counts) for counts in zip(*tallies, strict=True)]),
            shapes=launched.dealt.shapes,
            num_tokens=launched.dealt.num_tokens,
            seconds=(time.perf_counter() if end is None else end) - launched.begun,
            epoch=launched.dealt.epoch,
            peak_bytes=max(peaks.values(), default=None),
            peak_bytes_by_device=peaks,
        )


class Log:
    """``metrics.jsonl`` of an output folder: one line for each step and each validation.

    Args:
        output: the folder, made where it is not there.
        sinks: who is told every line, too.
    """

    def __init__(self, output: Path, sinks: Sequence[Sink] = ()) -> None:
        self._path = output / "metrics.jsonl"
        self._sinks = sinks
        output.mkdir(parents=True, exist_ok=True)

    def go_on_from(self, step: int) -> None:
        """Takes away what stands there of later steps, which will be made again, and a line that was never ended.

        Raises:
            TrainingStoppedError: it cannot be written.
        """
        self._shorten(lambda line: _stays(line, step))

    def _shorten(self, stays: Callable[[bytes], bool], end: bytes = b"") -> bool:
        """Leaves lines out and puts others at the end, at once or not at all; whether there was any to leave out.

        Raises:
            TrainingStoppedError: it cannot be written.
        """
        try:
            if not self._path.exists():
                return False
            with self._path.open("rb") as file:
                if all(map(stays, file)):
                    return False
                file.seek(0)
                partial = self._path.with_name(f".{self._path.name}.partial")
                with partial.open("wb") as shorter:
                    shorter.writelines(line for line in file if stays(line))
                    shorter.write(end)
            partial.replace(self._path)
        except OSError as error:
            raise self._not_written(error) from error
        return True

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line.

        Raises:
            TrainingStoppedError: it cannot be written.
        """
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise self._not_written(error) from error
        self._tell(line)

    def write_again(self, line: dict[str, Any]) -> None:
        """Writes a validation in the place of the one of the same step, where an earlier run has left it.

        Raises:
            TrainingStoppedError: it cannot be written; what stood there is still whole.
        """
        if self._shorten(lambda one: not _is_validation(one, line["step"]), json.dumps(line).encode() + b"\n"):
            self._tell(line)
        else:
            self.write(line)

    def _tell(self, line: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(line)

    def _not_written(self, error: OSError) -> TrainingStoppedError:
        return TrainingStoppedError(
            f"metrics: `{self._path}` cannot be written ({error.strerror}); wanted room and a file to append to"
        )


def _stays(line: bytes, step: int) -> bool:
    return line.endswith(b"\n") and _step_of(line) <= step


def _is_validation(line: bytes, step: int) -> bool:
    return b'"validation"' in line and _step_of(line) == step


def _step_of(line: bytes) -> float:
    """The step of a line of the log; behind all others where it has none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
