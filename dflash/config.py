"""The run's configuration: one dataclass per part, from a YAML file, ``--set`` and options. Loads no torch.

What a run leaves open is what the bundle's manifest says; ``apply`` puts the two together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash import placement
from dflash.placement import Devices
from dflash.recipe import D_PACE, LossConfig
from dflash.schema import LARGEST_FP32, Reader
from dflash.spec import DTYPES, LAYOUTS, Axes, DataSpec, LossSpec, Spec, read_options
from dflash.tracking import TrackingConfig
from kernelbake.errors import InputError
from kernelbake.workload import Fault

SCHEDULES = ("cosine", "constant")

LONGEST_WATCH = 30 * 86400.0

MOST_ACCUMULATED = 4096
"""Batches of a pair in a step: the host holds all of them, and nothing moves until they are made."""

_BELOW_ONE = 0.999999  # at 1, a moment never takes a gradient in, and AdamW's bias correction divides by 0
_SMALLEST_EPS = 1e-30  # at 0, a weight without a gradient becomes 0 / 0


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Shapes of the batches; None is what the manifest says.

    Args:
        size: rows of a batch.
        buckets: padded lengths, in tokens.
        max_anchors: the most anchor slots of a row; a bucket has the largest planned number that fits.
        layout: ``padded`` or ``packed``.
        dtype: of weights and activations.
        accumulate: batches of one optimizer step.
    """

    size: int | None
    buckets: tuple[int, ...] | None
    max_anchors: int | None
    layout: str | None
    dtype: str | None
    accumulate: int

    @classmethod
    def read(cls, reader: Reader) -> BatchConfig:
        config = cls(
            size=reader.integer("size", None),
            buckets=reader.integers("buckets", None, low=2),
            max_anchors=reader.integer("max_anchors", None),
            layout=reader.text("layout", None, choices=LAYOUTS),
            dtype=reader.text("dtype", None, choices=DTYPES),
            accumulate=reader.integer("accumulate", 1, high=MOST_ACCUMULATED),
        )
        reader.done()
        return config


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule; the defaults are the DFlash paper's.

    Args:
        lr: peak learning rate.
        warmup: share of the steps over which it rises linearly.
        schedule: ``cosine`` (to ``min_lr`` times the peak) or ``constant``.
        min_lr: share of the peak at the end of the cosine.
        beta1, beta2, eps, weight_decay: AdamW's.
        clip: largest norm of the gradient.
    """

    lr: float = 6e-4
    warmup: float = 0.04
    schedule: str = "cosine"
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0

    @classmethod
    def read(cls, reader: Reader) -> OptimizerConfig:
        config = cls(
            lr=reader.number("lr", cls.lr, high=LARGEST_FP32),
            warmup=reader.number("warmup", cls.warmup, high=1.0),
            schedule=reader.text("schedule", cls.schedule, choices=SCHEDULES),
            min_lr=reader.number("min_lr", cls.min_lr, high=1.0),
            beta1=reader.number("beta1", cls.beta1, high=_BELOW_ONE),
            beta2=reader.number("beta2", cls.beta2, high=_BELOW_ONE),
            eps=reader.number("eps", cls.eps, low=_SMALLEST_EPS),
            weight_decay=reader.number("weight_decay", cls.weight_decay),
            clip=reader.number("clip", cls.clip, low=1e-6),
        )
        reader.done()
        return config

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of step ``step``, counted from 0, of ``steps``."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        if self.schedule == "constant":
            return self.lr
        progress = (step - rising) / max(steps - rising, 1)
        return self.lr * (self.min_lr + (1 - self.min_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where samples come from; None is what the manifest says.

    Args:
        source, tokenizer, too_long, broken, template, template_options, held_out: as in the manifest's ``data``.
        shuffle_labels: trains on labels that mean nothing, as a control.
    """

    source: str | None
    tokenizer: str | None
    too_long: str | None
    broken: str | None
    template: str | None
    template_options: tuple[tuple[str, Any], ...] | None
    held_out: int | None
    shuffle_labels: bool

    @classmethod
    def read(cls, reader: Reader) -> DataConfig:
        config = cls(
            source=reader.text("source", None),
            tokenizer=reader.text("tokenizer", None, choices=("bytes", "target")),
            too_long=reader.text("too_long", None, choices=("drop", "truncate")),
            broken=reader.text("broken", None, choices=("refuse", "skip")),
            template=reader.text("template", None),
            template_options=read_options(reader),
            held_out=reader.integer("held_out", None, low=0),
            shuffle_labels=reader.flag("shuffle_labels", False),
        )
        reader.done()
        return config


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        bundle: path of the bundle; None for a stock run.
        require_signature: file with the public keys of which one must have signed the bundle; None requires nothing.
        target: Hub id, folder or ``random``; None is what the manifest says.
        steps: optimizer steps.
        seed: of weights, order and anchors.
        gamma: scale of the loss's decay over a block; None is the paper's for the block size.
        devices: of each pair; None is one GPU for each, from 0 on.
        dp_pairs: how many pairs; None is as many as ``devices`` has, or one. Under ``torchrun``: on each host.
        watchdog_seconds: how long nothing may move before the run is stopped.
        output: folder of checkpoints, metrics and the served drafter.
        checkpoint_every: steps between two checkpoints; None saves at the end only.
        resume: a checkpoint's folder, or ``latest`` of the output folder.
        other_bundle: whether a checkpoint made under another bundle may go on.
        graphs: whether the target's forward pass is captured and replayed, to the same bits; None: where it can be.
    """

    bundle: str | None
    require_signature: str | None
    target: str | None
    steps: int
    seed: int
    gamma: float | None
    devices: tuple[Devices, ...] | None
    dp_pairs: int | None
    watchdog_seconds: float
    output: str
    checkpoint_every: int | None
    resume: str | None
    other_bundle: bool
    graphs: bool | None
    batch: BatchConfig
    optimizer: OptimizerConfig
    data: DataConfig
    loss: LossConfig
    tracking: TrackingConfig

    @classmethod
    def read(cls, reader: Reader) -> RunConfig:
        devices, dp_pairs = placement.read(reader)
        config = cls(
            bundle=reader.text("bundle", None),
            require_signature=reader.text("require_signature", None),
            target=reader.text("target", None),
            steps=reader.integer("steps", 1000),
            seed=reader.integer("seed", 0, low=0),
            gamma=reader.number("gamma", None, low=1e-3),
            devices=devices,
            dp_pairs=dp_pairs,
            watchdog_seconds=reader.number("watchdog_seconds", 600.0, low=1.0, high=LONGEST_WATCH),
            output=reader.text("output", "runs/drafter"),
            checkpoint_every=reader.integer("checkpoint_every", None),
            resume=reader.text("resume", None),
            other_bundle=reader.flag("other_bundle", False),
            graphs=reader.flag("graphs", None),
            batch=BatchConfig.read(reader.section("batch", required=False)),
            optimizer=OptimizerConfig.read(reader.section("optimizer", required=False)),
            data=DataConfig.read(reader.section("data", required=False)),
            loss=LossConfig.read(reader.section("loss", required=False)),
            tracking=TrackingConfig.read(reader.section("tracking", required=False)),
        )
        if config.gamma is not None and config.loss.weights == D_PACE and reader.good("gamma"):
            reader.fault("gamma", f"given with `loss.weights: {D_PACE}`; wanted it with decaying weights only")
        reader.done()
        return config

    @property
    def pairs(self) -> tuple[Devices, ...]:
        """The devices of each pair."""
        return self.devices or placement.numbered(self.dp_pairs or 1)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the run's record."""
        return dataclasses.asdict(self)


def load(path: Path | None, settings: Sequence[str], options: Mapping[str, Any]) -> RunConfig:
    """The configuration of a file, then of ``--set a.b=c``, then of options, each over the one before.

    Args:
        path: YAML file, or None.
        settings: ``a.b=c``, the value as YAML would read it.
        options: dotted path → value; None is not given.

    Raises:
        InputError: with every fault.
    """
    faults: list[Fault] = []
    data = _yaml(_read_file(path), str(path)) if path is not None else None
    data = {} if data is None else data
    if isinstance(data, dict):
        for setting in settings:
            _apply_setting(data, setting, faults)
        for dotted, value in options.items():
            if value is not None:
                _put(data, dotted, value, faults)
    config = RunConfig.read(Reader(data, "", faults))
    if faults:
        where = f"configuration `{path}`" if path is not None else "configuration"
        reasons = [f"{fault.path}: {fault.message}" for fault in faults]
        raise InputError(f"{where}: {len(faults)} fault{'s' if len(faults) > 1 else ''}", reasons=reasons)
    return config


def _read_file(path: Path) -> bytes:
    try:
        if path.is_file():
            return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"configuration: `{path}` cannot be read ({reason}); wanted a YAML file") from error
    raise InputError(f"configuration: `{path}` is no file; wanted a YAML file")


def _yaml(text: bytes | str, source: str) -> Any:
    """One document of YAML 1.2 as plain data. Aliases are refused: a few lines of them make data without end.

    Raises:
        InputError: it is not one.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.events import AliasEvent

    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            if isinstance(event, AliasEvent):
                line = event.start_mark.line + 1
                raise InputError(f"configuration `{source}`: line {line}: `*{event.anchor}`; wanted no aliases")
        return YAML(typ="safe", pure=True).load(text)
    except RecursionError as error:
        raise InputError(f"configuration `{source}`: nested too deep; wanted a few levels") from error
    except InputError:
        raise
    except Exception as error:  # beside its own errors the library raises Python's: of a date, of a number, of a tag
        raise InputError(f"configuration `{source}`: no YAML", reasons=str(error).splitlines()) from error


def _apply_setting(data: dict[str, Any], setting: str, faults: list[Fault]) -> None:
    dotted, equals, text = setting.partition("=")
    if not equals or not dotted.strip():
        faults.append(Fault(f"--set {setting}", "wanted `path.to.key=value`"))
        return
    value = _yaml(text, f"--set {dotted}") if text.strip() else None
    _put(data, dotted.strip(), value, faults)


def _put(data: dict[str, Any], dotted: str, value: Any, faults: list[Fault]) -> None:
    *parents, last = dotted.split(".")
    here: Any = data
    for name in parents:
        here = here.setdefault(name, {})
        if not isinstance(here, dict):
            faults.append(Fault(dotted, f"`{name}` is a value; wanted a mapping"))
            return
    here[last] = value


def _first(given: Any, planned: Any) -> Any:
    return planned if given is None else given


def apply(run: RunConfig, spec: Spec) -> Spec:
    """The manifest's section with what the run says instead; its cases are exactly those of this run.

    Raises:
        InputError: a bucket that no number of anchors fits.
    """
    batch, axes = run.batch, spec.axes
    buckets = batch.buckets or axes.buckets
    cap = batch.max_anchors or axes.anchors[-1]
    counts = {count for count in axes.anchors if count < cap} | {cap}
    slots = {bucket: max((count for count in counts if count <= bucket // 2), default=None) for bucket in buckets}
    empty = [f"`{bucket}`" for bucket, count in slots.items() if count is None]
    if empty:
        raise InputError(
            f"batch.buckets: {', '.join(empty)} with at least `{min(counts)}` anchors; wanted at most half a bucket",
            hint="give --max-anchors, or leave these buckets out with --buckets",
        )
    narrowed = Axes(
        buckets=buckets,
        anchors=tuple(sorted(count for count in set(slots.values()) if count is not None)),
        anchor_slots="largest",
        batch_sizes=(batch.size,) if batch.size else axes.batch_sizes[:1],
        layouts=(batch.layout,) if batch.layout else axes.layouts[:1],
        dtype=batch.dtype or axes.dtype,
    )
    if narrowed.layouts == ("packed",) and narrowed.batch_sizes != (1,):
        found = f"`{narrowed.batch_sizes[0]}` with the packed layout"
        raise InputError(f"batch.size: {found}; wanted `1`, as a packed batch is one row of many documents")
    data = DataSpec(
        source=run.data.source or spec.data.source,
        tokenizer=run.data.tokenizer or spec.data.tokenizer,
        too_long=run.data.too_long or spec.data.too_long,
        broken=run.data.broken or spec.data.broken,
        template=run.data.template or spec.data.template,
        template_options=_first(run.data.template_options, spec.data.template_options),
        held_out=_first(run.data.held_out, spec.data.held_out),
    )
    return dataclasses.replace(spec, axes=narrowed, data=data, loss=LossSpec.of(run.loss))
