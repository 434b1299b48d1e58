"""The target's forward pass as CUDA graphs: captured once for each shape, before training, and replayed in every step.

A replay is one call of the driver where an eager pass is thousands of calls of Python, which hold the interpreter's
lock and keep other pairs' threads from launching.

Who owns what:

- All graphs of a target share two buffers, one of inputs and one of features, and one pool of memory for what lies
  between. They are captured largest first, so that the pool is about as large as the largest of them needs. It begins
  as one block of that size: grown block by block it would be half as large again, by gaps that fit nothing. Nothing in
  the pool outlives a replay: a pass reads the inputs and writes the features as they come.
- ``features`` returns a copy. It belongs to the caller, who may keep it while later batches are replayed; the copy
  costs less than a thousandth of a pass.
- Replays of one target take turns: on the host by a lock, and on the device by an event that a replay on another stream
  waits for. Targets share nothing, so pairs do not wait for each other.

Loads torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from dflash import capturable, devices, pools, synthetic
from dflash.buckets import Batch, Shape
from dflash.errors import TrainingStoppedError
from dflash.pairs import Pair
from dflash.spec import Spec
from dflash.target import Target
from kernelbake.errors import InputError, KernelbakeError

WORK_SPACE_BYTES = 32 * 2**20
"""What cuBLAS holds for the stream of the captures on a Hopper or Blackwell GPU, as torch gives it. The warm-up takes
it, so it lies outside the pool."""

SPARE = 16
"""The pool's first block is as large as what the largest pass holds at most and, for gaps between blocks of unlike
sizes, this fraction of it more."""

_capturing = threading.Lock()
"""torch lets one capture at a time run in a process."""


class NotCapturableError(Exception):
    """The work did what no graph can hold; the cause says what."""


class Recorder(Protocol):
    """Makes replays on one device. ``CudaRecorder`` is the only one of the product; tests have one for the CPU.

    Attributes:
        pool_bytes: memory that replays use and no tensor owns.
    """

    pool_bytes: int

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs work once, and returns what runs it again in the same memory.

        Raises:
            NotCapturableError: it can be run and not recorded.
        """
        ...

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """What is launched in it comes, on the device, after what was launched in the turn before."""
        ...


class CudaRecorder:
    """Captures on one GPU.

    Warm-up and capture run on one stream of the recorder's own, in the calling thread: libraries keep work space and
    plans for a thread and a stream, and what the warm-up has made there is what the capture finds.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool_bytes = 0
        self._device = device
        with devices.current(device):
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()
            self._done = torch.cuda.Event()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs work as a warm-up, then captures it.

        Of the first work, the largest, a second warm-up shows how much memory it holds at most: the first may have made
        what stays. What the work raises is told, not what ending the capture raises after it.
        """
        failed: list[Exception] = []
        with _capturing, devices.current(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                work()  # loads kernels and, in a stock run, tunes them; neither may happen in a capture
                first = 0 if self.pool_bytes else first_block_bytes(self._peak(work))
                graph = torch.cuda.CUDAGraph()
                try:
                    self._capture(graph, work, first, failed)
                except Exception as error:
                    cause = (failed or [error])[0]
                    if isinstance(cause, KernelbakeError | torch.OutOfMemoryError):
                        raise cause from None
                    raise NotCapturableError from cause
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay

    def _peak(self, work: Callable[[], None]) -> int:
        """Bytes that tensors of the work take at most at a time."""
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        found = torch.cuda.memory_stats(self._device)
        return int(found["requested_bytes.all.peak"] - found["requested_bytes.all.current"])

    def _capture(
        self, graph: torch.cuda.CUDAGraph, work: Callable[[], None], first: int, failed: list[Exception]
    ) -> None:
        """Captures, and counts what the pool grew by; a block of ``first`` bytes is put there before.

        ``thread_local``: calls that no capture allows are errors in this thread alone. Other threads (a data loader's,
        NCCL's watchdog) may make them, and have nothing to do with what is captured here.
        """
        options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **options):
            before = torch.cuda.memory_reserved(self._device)  # all cached memory was given back a moment ago
            try:
                torch.empty(first, dtype=torch.uint8, device=self._device)  # given back at once, and the pool keeps it
                work()
            except Exception as error:
                failed.append(error)
                raise
            self.pool_bytes += torch.cuda.memory_reserved(self._device) - before

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """As ``Recorder.turn``."""
        with devices.current(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            yield
            self._done.record(stream)


@dataclasses.dataclass(frozen=True)
class _Captured:
    """One shape's graph and its part of the buffers."""

    replay: Callable[[], None]
    input_ids_BS: torch.Tensor
    positions_BS: torch.Tensor
    features_BSF: torch.Tensor


class GraphedTarget(Target):
    """A target whose ``features`` are replayed; everything else is the eager target's.

    Args:
        target: the eager one; weights are shared.
        examples: one batch of each shape, padded, on the CPU.
        recorder: of the target's device.

    Raises:
        TrainingStoppedError: a shape's pass does not fit the memory, or does what no graph can hold.
    """

    def __init__(self, target: Target, examples: Sequence[Batch], recorder: Recorder) -> None:
        super().__init__(target.model, target.layer_ids, target.source, frozen=target.frozen)
        self.appends_last = target.appends_last
        self._recorder = recorder
        self._lock = threading.Lock()
        self._width = target.width
        falling = sorted(examples, key=lambda example: example.input_ids_BS.numel(), reverse=True)
        largest = falling[0].input_ids_BS.numel()
        with _explained(self.device, falling[0]), devices.current(self.device):
            self._inputs = torch.zeros(2, largest, dtype=torch.int64, device=self.device)
            self._outputs = torch.empty(largest * self._width, dtype=self.head_VE.dtype, device=self.device)
        self._by_shape: dict[tuple[int, ...], _Captured] = {}
        for example in falling:
            with _explained(self.device, example):
                self._by_shape[tuple(example.input_ids_BS.shape)] = self._captured(example)

    @property
    def pool_bytes(self) -> int:
        """Memory of the graphs' pool; the allocator counts it as reserved and, between captures, not as allocated."""
        return self._recorder.pool_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory of the buffers of inputs and features."""
        return int(self._inputs.nbytes + self._outputs.nbytes)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Rows and bucket of each graph, in the order of their capture."""
        return list(self._by_shape)

    def features(self, batch: Batch, out_BSF: torch.Tensor | None = None) -> torch.Tensor:
        """As the eager target's, to the bit, on the current stream: no later replay changes what is returned.

        Raises:
            InputError: no graph has this shape and layout.
        """
        found = self._by_shape.get(tuple(batch.input_ids_BS.shape)) if batch.doc_ids_BS is None else None
        if found is None or self.width != self._width:
            raise InputError(
                f"graphs: {batch.shape} is not captured; wanted one of {self.shapes} rows and tokens, padded, "
                f"{self._width} features wide",
                hint="--no-graphs runs the target eagerly",
            )
        with self._lock, self._recorder.turn():
            found.input_ids_BS.copy_(batch.input_ids_BS)
            found.positions_BS.copy_(batch.positions_BS)
            found.replay()
            return found.features_BSF.clone() if out_BSF is None else out_BSF.copy_(found.features_BSF)

    def _captured(self, example: Batch) -> _Captured:
        rows, length = example.input_ids_BS.shape
        ids_BS, positions_BS = (row[: rows * length].view(rows, length) for row in self._inputs)
        features_BSF = self._outputs[: rows * length * self._width].view(rows, length, self._width)
        ids_BS.copy_(example.input_ids_BS)
        positions_BS.copy_(example.positions_BS)
        static = dataclasses.replace(example, input_ids_BS=ids_BS, positions_BS=positions_BS)

        def work() -> None:
            Target.features(self, static, features_BSF)

        return _Captured(self._recorder.record(work), ids_BS, positions_BS, features_BSF)


@contextlib.contextmanager
def _explained(device: torch.device, example: Batch) -> Iterator[None]:
    """Says of a failure on which device and at which shape it was, and what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingStoppedError(
            f"graphs: no memory left on `{device}` to capture the target's forward pass, at {example.shape}",
            hint="lower --batch-size or the largest of --buckets; with --no-graphs the drafter may use the same memory",
            reasons=str(error).splitlines()[:3],
        ) from error
    except NotCapturableError as error:
        cause = error.__cause__ or error
        raise TrainingStoppedError(
            f"graphs: the target's forward pass cannot be captured on `{device}`, at {example.shape}",
            hint="--no-graphs runs it eagerly, to the same bits",
            reasons=[*str(cause).splitlines()[:2], *_frames(cause)],
        ) from error


def _frames(error: BaseException) -> list[str]:
    """Where it was raised, as far as that is not inside torch: the innermost lines."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "torch" not in Path(frame.filename).parts]
    return [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in outside[-4:]]


# ---------------------------------------------------------------------------------------------- a run's graphs


def install(pairs: Sequence[Pair], spec: Spec, *, wanted: bool | None, interpreted: bool) -> tuple[str, ...]:
    """Captures the targets of all pairs, one after the other; call it before their threads start.

    Args:
        pairs: complete, with all the memory that they hold taken; their targets are replaced.
        spec: the run's.
        wanted: False leaves the targets as they are, None captures where it can be done without doubt, True refuses
            where it cannot.
        interpreted: whether kernels run in Triton's interpreter.

    Returns:
        what a person should know, one line each.

    Raises:
        InputError: graphs are wanted and cannot be, with every reason.
        TrainingStoppedError: a capture failed.
    """
    if wanted is False:
        return () if interpreted else ("graphs: off, the target runs eagerly",)
    reasons = capturable.obstacles(spec, interpreted=interpreted) or _obstacles_of(pairs[0].target)
    reasons += [] if wanted else capturable.doubts(spec)
    if reasons:
        if wanted:
            capturable.refuse(reasons)
        return () if interpreted else (f"graphs: none, the target runs eagerly: {'; '.join(reasons)}",)
    shapes = {(shape.batch, shape.bucket): shape for shape in map(Shape.of, spec.axes.cases().planned)}
    examples = [synthetic.batch(shape, spec, seed=0) for shape in shapes.values()]
    lines = []
    for pair in pairs:
        device = pair.target.device
        graphed = GraphedTarget(pair.target, examples, CudaRecorder(device))
        pair.target = graphed
        torch.cuda.reset_peak_memory_stats(device)  # captures count as allocated, what they replay does not
        sizes = ", ".join(f"{rows} × {length}" for rows, length in graphed.shapes)
        held = devices.gib(graphed.pool_bytes + graphed.buffer_bytes)
        lines.append(f"graphs: the target's forward pass is captured on `{device}` for {sizes} tokens: {held}")
    return tuple(lines)


def pool_bytes(pairs: Sequence[Pair], device: torch.device) -> int:
    """Memory of all graphs' pools on a device: what a peak of allocated memory leaves out."""
    graphed = [pair.target for pair in pairs if isinstance(pair.target, GraphedTarget)]
    return sum(target.pool_bytes for target in graphed if target.device == device)


def first_block_bytes(peak_bytes: int) -> int:
    """Size of the block with which a pool begins.

    Args:
        peak_bytes: the most that the largest pass holds at a time.
    """
    return peak_bytes + peak_bytes // SPARE


def predicted_bytes(passes: Mapping[tuple[int, int], Sequence[int]], width: int, dtype: torch.dtype) -> int:
    """Memory that graphs will hold: buffers, the pool that the captures fill, and work space of the captures.

    Args:
        passes: of each shape, rows and bucket, what a pass allocates and frees, as ``PartPeak.changes``.
        width: columns of the features.
        dtype: of the features.
    """
    falling = sorted(passes, key=math.prod, reverse=True)
    pool = pools.Pool()
    pool.free(pool.allocate(first_block_bytes(pools.peak_bytes(passes[falling[0]]))))
    for shape in falling:
        pool.run(passes[shape])
    buffers: int = math.prod(falling[0]) * (2 * torch.int64.itemsize + width * dtype.itemsize)
    return buffers + pool.reserved_bytes + WORK_SPACE_BYTES


def _obstacles_of(target: Target) -> list[str]:
    """What only the loaded model shows."""
    found = []
    kind = str(target.model.model.rotary_emb.rope_type)
    if "dynamic" in kind or kind == "longrope":
        found.append(f"rotary embeddings of type `{kind}` depend on positions that the host reads from the device")
    experts = getattr(target.model.config, "num_experts", 0)
    if experts and getattr(target.model.config, "_experts_implementation", None) == "eager":
        found.append(f"each of its {experts} experts is called by the host, which asks the device who has tokens")
    return found
