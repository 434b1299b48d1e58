"""What a run holds on each device: known before anything is made, refused if it does not fit, shown beside the truth.

Weights, gradients and optimizer state follow from shapes. What a step needs beside them is added up by the preflight,
which executes the run's own steps on tensors without memory. Loads torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from dflash import capturable, devices, drafter, graphs, pools, recipe, target
from dflash.buckets import Shape
from dflash.errors import TrainingStoppedError
from dflash.pairs import TARGET
from dflash.spec import Spec
from kernelbake.errors import InputError
from kernelbake.keys import Case
from kernelbake.workload import Footprint, PartPeak

LIBRARY_BYTES = 64 * 2**20
"""Work space that cuBLAS holds on a Hopper or Blackwell GPU, as torch gives it: 32 MiB for each thread that multiplies,
and there are two, the step's and the backward pass's. No shadow run sees it."""

MASTER_BYTES = 4 * 4
"""Of a parameter in the optimizer: master, gradient and two moments, all fp32."""

OPTIMIZER = "masters, gradients and moments of the optimizer"

_LOWER = "lower --max-anchors, --batch-size or the largest of --buckets"
_LOWER_TARGET = "lower --batch-size or the largest of --buckets"
_APART = "--devices 0:1 puts target and drafter on two GPUs"


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory of one part.

    Args:
        device: where it lies.
        what: the part, for messages.
        num_bytes: its size.
        of_step: whether it is neither weight nor gradient nor optimizer state.
    """

    device: torch.device
    what: str
    num_bytes: int
    of_step: bool = False


def needs(spec: Spec, target_device: torch.device, drafter_device: torch.device) -> list[Need]:
    """Weights, gradients and optimizer state: what is there before a step and after it."""
    dtype = devices.DTYPES[spec.axes.dtype]
    with torch.device("meta"), devices.default_dtype(dtype):
        network = drafter.Drafter(spec.drafter, spec.target.hidden_size)
    count = sum(parameter.numel() for parameter in network.parameters())
    kept = None if _reads_target(spec) else target.layers_read(spec.drafter.target_layer_ids)
    found = [
        Need(target_device, "the target's weights", target.parameter_bytes(spec.target, dtype, kept)),
        Need(drafter_device, "the drafter's weights", count * dtype.itemsize),
        Need(drafter_device, OPTIMIZER, count * MASTER_BYTES),
    ]
    if target_device != drafter_device:
        head = spec.target.vocab_size * spec.target.hidden_size * dtype.itemsize
        found.append(Need(drafter_device, "a copy of the target's head", head))
    return found


def _reads_target(spec: Spec) -> bool:
    """Whether the loss reads the target's last hidden state; a target that it does not ends behind its features."""
    return recipe.KL in spec.loss.terms


# ---------------------------------------------------------------------------------------------- a step


@dataclasses.dataclass(frozen=True)
class _Peak:
    """The most that one part of one case's step holds."""

    case: Case
    part: str
    num_bytes: int


def step_needs(
    footprints: Sequence[Footprint],
    spec: Spec,
    target_device: torch.device,
    drafter_device: torch.device,
    *,
    graphed: bool,
) -> list[Need]:
    """What a step of a pair needs beside weights, gradients and optimizer state, by device.

    On two devices the target works one batch ahead, and the drafter's device holds what it gave for that batch, too.

    Args:
        footprints: of the preflight; empty where there was none, and then nothing is predicted.
        spec: the run's.
        target_device, drafter_device: of the pair.
        graphed: whether the target's forward pass is captured: its memory is then held between steps, too.
    """
    if not footprints:
        return []
    passes = [_Peak(item.case, TARGET, _target_part(item, spec).peak_bytes) for item in footprints]
    rest = [_Peak(item.case, part.name, part.peak_bytes) for item in footprints for part in _behind_target(item)]
    handed = max((item.begun_bytes for footprint in footprints for item in _behind_target(footprint)[:1]), default=0)
    gpus = {device for device in (target_device, drafter_device) if device.type == "cuda"}
    found = [Need(device, "work space of libraries", LIBRARY_BYTES, True) for device in gpus]
    if graphed:
        found.append(Need(target_device, "CUDA graphs of the target's pass", _graph_bytes(footprints, spec), True))
    if target_device == drafter_device:
        found.append(_largest(target_device, rest if graphed else [*passes, *rest]))
        return found
    if graphed:
        found.append(Need(target_device, "features on their way to the drafter", handed, True))
    else:
        found.append(_largest(target_device, passes))
    found.append(_largest(drafter_device, rest))
    found.append(Need(drafter_device, "features of the next batch", handed, True))
    return found


def _behind_target(footprint: Footprint) -> list[PartPeak]:
    """The parts that work with the target's features."""
    names = [part.name for part in footprint.parts]
    return list(footprint.parts[names.index("drafter") :])


def _target_part(footprint: Footprint, spec: Spec) -> PartPeak:
    """The target's pass, with one hidden state more than the two layers of the shadow run's target show.

    transformers keeps the embeddings to the end. From the second layer on, a layer's input lies beside them; of the
    first layer, the Gated DeltaNet whose kind holds most, they are the input.
    """
    shape = Shape.of(footprint.case)
    hidden = shape.batch * shape.bucket * spec.target.hidden_size * devices.DTYPES[shape.dtype].itemsize
    part = next(part for part in footprint.parts if part.name == TARGET)
    return PartPeak(TARGET, part.begun_bytes, part.peak_bytes + hidden, pools.beside(hidden, part.changes))


def _graph_bytes(footprints: Sequence[Footprint], spec: Spec) -> int:
    passes = {}
    for footprint in footprints:
        shape = Shape.of(footprint.case)
        passes[shape.batch, shape.bucket] = _target_part(footprint, spec).changes
    outputs = len(spec.drafter.target_layer_ids) + _reads_target(spec)
    return graphs.predicted_bytes(passes, outputs * spec.target.hidden_size, devices.DTYPES[spec.axes.dtype])


def _largest(device: torch.device, peaks: Sequence[_Peak]) -> Need:
    top = max(peaks, key=lambda peak: peak.num_bytes)
    return Need(device, f"a step, at most in the {top.part} at {top.case.id}", top.num_bytes, True)


# ---------------------------------------------------------------------------------------------- what comes of it


def of_run(
    footprints: Sequence[Footprint],
    spec: Spec,
    target_device: torch.device,
    drafter_device: torch.device,
    *,
    graphs_wanted: bool | None,
    interpreted: bool,
) -> list[Need]:
    """All needs of a pair: ``needs`` and ``step_needs``, with graphs where the run will capture them."""
    graphed = capturable.used(graphs_wanted, spec, interpreted=interpreted)
    found = step_needs(footprints, spec, target_device, drafter_device, graphed=graphed)
    return needs(spec, target_device, drafter_device) + found


def check(wanted: Sequence[Need]) -> None:
    """Refuses what does not fit into the memory that is free now.

    Raises:
        InputError: with the sizes of all parts and what is free, for every device that is too small.
    """
    reasons: list[str] = []
    weights_fit = True
    for device in dict.fromkeys(need.device for need in wanted):
        parts = [need for need in wanted if need.device == device]
        total, free = sum(need.num_bytes for need in parts), devices.free_bytes(device)
        if free is not None and total > free:
            reasons.append(f"{device}: {devices.gib(total)} needed, {devices.gib(free)} free")
            reasons += [f"{device}: {need.what}: {devices.gib(need.num_bytes)}" for need in parts]
            weights_fit &= sum(need.num_bytes for need in parts if not need.of_step) <= free
    if reasons and weights_fit:
        raise InputError(
            "memory: the models fit and a step does not; wanted room for both",
            hint=f"{_LOWER}; {_APART}",
            reasons=reasons,
        )
    if reasons:
        raise InputError(
            "memory: the models do not fit; wanted room for all their weights before a step",
            hint=f"{_APART}; or choose a smaller target",
            reasons=reasons,
        )


@dataclasses.dataclass(frozen=True)
class Peak:
    """A device's peak: memory beside weights, gradients and optimizer state.

    Args:
        device: its name.
        predicted_bytes: None where there was no preflight.
        measured_bytes: None on the CPU, and before a step was made.
        largest: the part of a step that needs most, by prediction.
    """

    device: str
    predicted_bytes: int | None
    measured_bytes: int | None
    largest: str | None

    def line(self) -> str:
        """For people."""
        sizes = [
            f"{devices.gib(size)} {how}"
            for size, how in ((self.measured_bytes, "measured"), (self.predicted_bytes, "predicted"))
            if size is not None
        ]
        where = f" ({self.largest})" if self.largest and self.measured_bytes is None else ""
        return f"memory: `{self.device}`: peak beside weights and optimizer: {', '.join(sizes)}{where}"


class Meter:
    """Holds the prediction against what a run really takes.

    Args:
        wanted: all needs of the run.
    """

    def __init__(self, wanted: Sequence[Need] = ()) -> None:
        self.wanted = tuple(wanted)
        self._started = False

    def start(self) -> None:
        """The first step begins: what loading took at a time counts no more."""
        self._started = True
        for device in self._devices():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

    def peaks(self, pool_bytes: Callable[[torch.device], int]) -> list[Peak]:
        """Of every device.

        Args:
            pool_bytes: gives what graphs of a device hold and the allocator does not count.
        """
        found = []
        for device in self._devices():
            parts = [need for need in self.wanted if need.device == device]
            steps = [need for need in parts if need.of_step]
            measured = None
            if self._started and device.type == "cuda":
                there = sum(need.num_bytes for need in parts if not need.of_step)
                measured = torch.cuda.max_memory_allocated(device) + pool_bytes(device) - there
            predicted = sum(need.num_bytes for need in steps) if steps else None
            largest = max(steps, key=lambda need: need.num_bytes).what if steps else None
            found.append(Peak(str(device), predicted, measured, largest))
        return found

    def exhausted(
        self, error: torch.OutOfMemoryError, number: int, device: torch.device, part: str, shape: Shape
    ) -> TrainingStoppedError:
        """The error of a step that found no memory left.

        Args:
            error: torch's.
            number: of the pair.
            device: where it was at work.
            part: what it was at work on.
            shape: of the batch.
        """
        parts = [need for need in self.wanted if need.device == device]
        expected = sum(need.num_bytes for need in parts if need.of_step)
        there, free = sum(need.num_bytes for need in parts if not need.of_step), devices.free_bytes(device)
        reasons = [f"{device}: {devices.gib(expected)} predicted for a step, beside {devices.gib(there)}"]
        if free is not None:
            reasons.append(f"{device}: {devices.gib(free)} free now")
        return TrainingStoppedError(
            f"pair {number}: no memory left on `{device}` in the {part}, at {shape}",
            hint=f"{_LOWER_TARGET if part == TARGET else _LOWER}; {_APART}",
            reasons=[*(reasons if expected else ()), *str(error).splitlines()[:3]],
        )

    def _devices(self) -> list[torch.device]:
        return list(dict.fromkeys(need.device for need in self.wanted))
