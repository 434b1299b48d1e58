"""The workload's section of a manifest as frozen values: target, drafter, axes, data. Stdlib only, loads no torch.

The dimensions of the models stand in the section itself, so that planning, building and verifying need no network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dflash.recipe import CE, KL, LossConfig
from dflash.schema import Reader, shown
from kernelbake.keys import Case
from kernelbake.workload import Cases, Fault, FaultsError

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Hybrid Gated-DeltaNet targets, by the name of their module in transformers."""

MIXTURES = ("qwen3_5_moe", "qwen3_next")
"""Those whose MLP is a mixture of experts."""

DTYPES = ("bfloat16", "float32")
LAYOUTS = ("padded", "packed")
ATTENTIONS = ("full_attention", "sliding_attention")
HEAD_DIMS = (64, 96, 128, 256)
"""Head dimensions of the drafter's attention kernels, repeated here as ``dflash.attention`` loads torch."""

MAX_LAYERS = 10_000
"""Of a model; what is above it is a slip of the hand that planning would not get to the end of."""
MAX_GROUP = 16
"""The most query heads that may share a kv head there."""

RANDOM = "random"
STDLIB = "python-stdlib"
"""The model name that stands for random weights."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """Dimensions of a mixture of experts.

    Args:
        num: experts of a layer.
        per_token: experts that a token is sent to.
        intermediate_size: width of one expert.
        shared_intermediate_size: width of the shared expert.
    """

    num: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int

    @classmethod
    def read(cls, reader: Reader) -> Experts:
        experts = cls(
            num=reader.integer("num"),
            per_token=reader.integer("per_token"),
            intermediate_size=reader.integer("intermediate_size"),
            shared_intermediate_size=reader.integer("shared_intermediate_size"),
        )
        if reader.good("num", "per_token") and experts.per_token > experts.num:
            reader.fault("per_token", f"found `{experts.per_token}`; wanted at most the `{experts.num}` experts")
        reader.done()
        return experts


@dataclasses.dataclass(frozen=True)
class TargetSpec:
    """The frozen hybrid target: what to load and its dimensions.

    Args:
        model: Hub id, folder, or ``random``.
        architecture: one of ``ARCHITECTURES``.
        full_attention_interval: every so many layers one attention layer, the others Gated DeltaNet.
        head_dim, num_heads, num_kv_heads: of the attention layers.
        linear_…: of the Gated-DeltaNet layers; key heads are shared by groups of value heads.
        partial_rotary_factor: share of ``head_dim`` that is rotated.
        tie_embeddings: whether the head is the embedding.
        experts: dimensions of the mixture; None for a dense MLP.
        frozen: False plans a backward pass through the target too. Training always freezes it.
    """

    model: str
    architecture: str
    num_layers: int
    full_attention_interval: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rope_theta: float
    partial_rotary_factor: float
    rms_norm_eps: float
    tie_embeddings: bool
    experts: Experts | None
    frozen: bool

    @classmethod
    def read(cls, reader: Reader) -> TargetSpec:
        architecture = reader.text("architecture", choices=ARCHITECTURES)
        spec = cls(
            model=reader.text("model"),
            architecture=architecture,
            num_layers=reader.integer("num_layers", high=MAX_LAYERS),
            full_attention_interval=reader.integer("full_attention_interval", 4),
            hidden_size=reader.integer("hidden_size"),
            intermediate_size=reader.integer("intermediate_size"),
            vocab_size=reader.integer("vocab_size", low=2),
            num_heads=reader.integer("num_heads"),
            num_kv_heads=reader.integer("num_kv_heads"),
            head_dim=reader.integer("head_dim"),
            linear_num_key_heads=reader.integer("linear_num_key_heads"),
            linear_num_value_heads=reader.integer("linear_num_value_heads"),
            linear_key_head_dim=reader.integer("linear_key_head_dim"),
            linear_value_head_dim=reader.integer("linear_value_head_dim"),
            linear_conv_kernel_dim=reader.integer("linear_conv_kernel_dim", 4, low=2),
            rope_theta=reader.number("rope_theta", 1e7, low=1.0),
            partial_rotary_factor=reader.number("partial_rotary_factor", 0.25, high=1.0),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            tie_embeddings=reader.flag("tie_embeddings", False),
            experts=_experts(reader) if architecture in MIXTURES else None,
            frozen=reader.flag("frozen", True),
        )
        spec._check(reader)
        reader.done()
        return spec

    def _check(self, reader: Reader) -> None:
        dense = reader.good("architecture") and self.architecture not in MIXTURES
        if dense and reader.raw("experts") is not None:
            reader.fault("experts", f"`{self.architecture}` has a dense MLP; wanted no `experts`")
        _divides(reader, "num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        _divides(
            reader,
            "linear_num_value_heads",
            self.linear_num_value_heads,
            "linear_num_key_heads",
            self.linear_num_key_heads,
        )
        if reader.good("full_attention_interval", "num_layers") and self.full_attention_interval > self.num_layers:
            found = f"found `{self.full_attention_interval}` for `{self.num_layers}` layers"
            reader.fault("full_attention_interval", f"{found}; wanted a hybrid, with at least one attention layer")
        rotated = self.head_dim * self.partial_rotary_factor
        if reader.good("head_dim", "partial_rotary_factor") and (rotated < 2 or rotated % 2):
            found = f"`{self.partial_rotary_factor:g}` of `{self.head_dim}` rotates `{rotated:g}` dimensions"
            reader.fault("partial_rotary_factor", f"{found}; wanted an even number of at least 2")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """``linear_attention`` or ``full_attention`` of each layer."""
        return tuple(
            "linear_attention" if (index + 1) % self.full_attention_interval else "full_attention"
            for index in range(self.num_layers)
        )


def _experts(reader: Reader) -> Experts:
    return Experts.read(reader.section("experts"))


def _divides(reader: Reader, name: str, value: int, divisor_name: str, divisor: int) -> None:
    if reader.good(name, divisor_name) and value % divisor:
        reader.fault(name, f"found `{value}`; wanted a multiple of `{divisor_name}`, which is `{divisor}`")


@dataclasses.dataclass(frozen=True)
class DrafterSpec:
    """The drafter; its hidden size, vocabulary, embedding and head are the target's.

    Args:
        block_size: positions drafted in one pass, the anchor included.
        mask_token_id: the id that fills the rest of a block; inside the target's vocabulary and in no text.
        target_layer_ids: the target layers, counted from 0, whose outputs feed the drafter.
        rope_theta: base of the full rotary embedding.
        layer_types: ``full_attention`` or ``sliding_attention`` of each layer.
        sliding_window: width of the sliding layers' window, in tokens; None without any.
        is_causal: whether a block's positions see only those before them.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool

    @classmethod
    def read(cls, reader: Reader, target: TargetSpec, target_reader: Reader) -> DrafterSpec:
        num_layers = reader.integer("num_layers", 5, high=MAX_LAYERS)
        spec = cls(
            num_layers=num_layers,
            num_heads=reader.integer("num_heads"),
            num_kv_heads=reader.integer("num_kv_heads"),
            head_dim=reader.integer("head_dim"),
            intermediate_size=reader.integer("intermediate_size"),
            block_size=reader.integer("block_size", 16, low=2),
            mask_token_id=reader.integer("mask_token_id", low=0),
            target_layer_ids=_target_layer_ids(reader, target, target_reader, num_layers),
            rope_theta=reader.number("rope_theta", target.rope_theta, low=1.0),
            rms_norm_eps=reader.number("rms_norm_eps", target.rms_norm_eps),
            layer_types=_layer_types(reader, num_layers),
            sliding_window=reader.integer("sliding_window", None),
            is_causal=reader.flag("is_causal", False),
        )
        spec._check(reader, target, target_reader)
        reader.done()
        return spec

    def _check(self, reader: Reader, target: TargetSpec, target_reader: Reader) -> None:
        _divides(reader, "num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        if reader.good("head_dim") and self.head_dim not in HEAD_DIMS:
            wanted = ", ".join(f"`{size}`" for size in HEAD_DIMS)
            reader.fault(
                "head_dim", f"found `{self.head_dim}`; wanted one of {wanted}, which the drafter's attention has"
            )
        if reader.good("num_heads", "num_kv_heads") and self.num_heads > MAX_GROUP * self.num_kv_heads:
            found = f"found `{self.num_heads}` for `{self.num_kv_heads}` kv heads"
            reader.fault("num_heads", f"{found}; wanted at most `{MAX_GROUP}` query heads to a kv head")
        inside = self.mask_token_id < target.vocab_size
        if reader.good("mask_token_id") and target_reader.good("vocab_size") and not inside:
            wanted = f"wanted an id inside the target's vocabulary of `{target.vocab_size}`"
            reader.fault("mask_token_id", f"found `{self.mask_token_id}`; {wanted}")
        slides = ATTENTIONS[1] in self.layer_types
        if reader.good("layer_types", "sliding_window") and slides != (self.sliding_window is not None):
            found = "some layers slide" if slides else "no layer slides"
            reader.fault("sliding_window", f"{found}; wanted a window exactly if `layer_types` has sliding layers")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, in tokens; None if it sees all of its context."""
        return self.sliding_window if self.layer_types[layer] == ATTENTIONS[1] else None


def computed_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The default choice of target layers: the middle one, or ``count`` spread evenly from 1 to N − 3."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + index * (num_target_layers - 4) / (count - 1)) for index in range(count))


def _target_layer_ids(reader: Reader, target: TargetSpec, target_reader: Reader, count: int) -> tuple[int, ...]:
    name = "target_layer_ids"
    given = reader.integers(name, None, low=0)
    if given is None:
        if not target_reader.good("num_layers") or not reader.good("num_layers"):
            return ()
        ids = computed_layer_ids(target.num_layers, count)
        if len(set(ids)) != len(ids) or min(ids) < 0:
            found = f"`{count}` of `{target.num_layers}` target layers would be {list(ids)}"
            reader.fault(name, f"{found}; wanted them given, as the computed choice needs more layers")
        return ids
    for position, layer in enumerate(given):
        if target_reader.good("num_layers") and layer >= target.num_layers:
            reader.fault(f"{name}.{position}", f"found `{layer}`; the target has `{target.num_layers}` layers")
    return tuple(given)


def _layer_types(reader: Reader, num_layers: int) -> tuple[str, ...]:
    found = reader.raw("layer_types")
    full = (ATTENTIONS[0],) * num_layers
    if found is None:
        return full
    good = isinstance(found, list | tuple) and all(isinstance(item, str) and item in ATTENTIONS for item in found)
    if not good or len(found) != num_layers:
        wanted = f"wanted `{num_layers}` of {', '.join(f'`{kind}`' for kind in ATTENTIONS)}"
        reader.fault("layer_types", f"found {shown(found)}; {wanted}")
        return full
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The static shapes.

    Args:
        buckets: padded sequence lengths, in tokens.
        anchors: slots for anchors in a row.
        anchor_slots: ``every`` anchor count that fits a bucket, or only the ``largest``: what one run uses.
        batch_sizes: rows of a batch.
        layouts: ``padded`` (one sample a row) and ``packed`` (documents one after the other in one row).
        dtype: of weights and activations.
    """

    buckets: tuple[int, ...]
    anchors: tuple[int, ...]
    anchor_slots: str
    batch_sizes: tuple[int, ...]
    layouts: tuple[str, ...]
    dtype: str

    @classmethod
    def read(cls, reader: Reader) -> Axes:
        axes = cls(
            buckets=reader.integers("buckets", low=2),
            anchors=reader.integers("anchors"),
            anchor_slots=reader.text("anchor_slots", "every", choices=("every", "largest")),
            batch_sizes=reader.integers("batch_sizes", (1,)),
            layouts=reader.texts("layouts", ("padded",), choices=LAYOUTS),
            dtype=reader.text("dtype", "bfloat16", choices=DTYPES),
        )
        if reader.good("buckets", "anchors") and axes.buckets and axes.anchors:
            smallest, top = axes.anchors[0], axes.buckets[-1]
            if smallest > top // 2:
                found = f"found `{smallest}` as the smallest count, the largest bucket is `{top}`"
                reader.fault("anchors", f"{found}; wanted at most half a bucket, so that there is a case")
        if reader.good("layouts", "batch_sizes") and axes.layouts == ("packed",) and 1 not in axes.batch_sizes:
            found = f"found {list(axes.batch_sizes)} with the packed layout alone"
            reader.fault("batch_sizes", f"{found}; wanted `1`, as a packed batch is one row")
        reader.done()
        return axes

    def cases(self) -> Cases:
        """Every case and every combination left out, with its reason."""
        planned: list[Case] = []
        skipped: list[tuple[Case, str]] = []
        for bucket in self.buckets:
            fitting = [count for count in self.anchors if count <= bucket // 2]
            largest = fitting[-1:] if self.anchor_slots == "largest" else fitting
            for anchors in self.anchors:
                for batch in self.batch_sizes:
                    for layout in self.layouts:
                        case = case_of(bucket, anchors, batch, layout, self.dtype)
                        if anchors > bucket // 2:
                            skipped.append((case, "more anchors than half the bucket"))
                        elif anchors not in largest:
                            skipped.append((case, "the bucket has room for more anchors"))
                        elif layout == "packed" and batch > 1:
                            skipped.append((case, "a packed batch is one row; a larger bucket holds more documents"))
                        else:
                            planned.append(case)
        return Cases(tuple(planned), tuple(skipped))

    def slots(self, bucket: int) -> int | None:
        """The largest planned number of anchor slots of a bucket; None if it has no case."""
        return max((count for count in self.anchors if count <= bucket // 2), default=None)


def case_of(bucket: int, anchors: int, batch: int, layout: str, dtype: str) -> Case:
    """The case of these shapes."""
    return Case(
        (("bucket", bucket), ("anchors", anchors), ("batch", batch), ("layout", layout), ("dtype", dtype)),
    )


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """Where samples come from.

    Args:
        source: ``python-stdlib`` (the sources of the running Python's standard library), the path of a JSONL or parquet
            file, or a Hub id ``owner/name[/subset][@revision][:split]``.
        tokenizer: ``bytes``, ``target`` (the one of the target's folder or Hub id), or None: bytes for random weights,
            the target's own otherwise.
        too_long: what happens to samples longer than the largest bucket: ``drop`` or ``truncate``.
        broken: what happens to broken lines and records: ``refuse`` the file, or ``skip`` and count them.
        template: path of a chat template other than the tokenizer's own.
        template_options: names and values for the chat template, such as ``enable_thinking``.
        held_out: samples kept apart, which training never sees and ``dflash eval`` measures with.
    """

    source: str
    tokenizer: str | None
    too_long: str
    broken: str = "refuse"
    template: str | None = None
    template_options: tuple[tuple[str, Any], ...] = ()
    held_out: int = 0

    @classmethod
    def read(cls, reader: Reader) -> DataSpec:
        data = cls(
            source=reader.text("source", STDLIB),
            tokenizer=reader.text("tokenizer", None, choices=("bytes", "target")),
            too_long=reader.text("too_long", "drop", choices=("drop", "truncate")),
            broken=reader.text("broken", "refuse", choices=("refuse", "skip")),
            template=reader.text("template", None),
            template_options=read_options(reader) or (),
            held_out=reader.integer("held_out", 0, low=0),
        )
        reader.done()
        return data


def read_options(reader: Reader) -> tuple[tuple[str, Any], ...] | None:
    """``template_options``, a mapping of names to values, in the order given; None where it is absent."""
    found = reader.raw("template_options")
    if found is None:
        return None
    scalar = (str, int, float, bool)
    good = isinstance(found, Mapping) and all(
        isinstance(name, str)
        and isinstance(value, scalar)
        and not (isinstance(value, float) and not math.isfinite(value))
        for name, value in found.items()
    )
    if good:
        return tuple(found.items())
    reader.fault("template_options", f"found {shown(found)}; wanted names with texts, finite numbers or flags")
    return None


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """Which losses there are to be launches for; weights of positions make no difference to them.

    Args:
        terms: ``ce``, of a loss without a KL term, and ``kl``, of one with it.
    """

    terms: tuple[str, ...] = (CE,)

    @classmethod
    def read(cls, reader: Reader) -> LossSpec:
        loss = cls(reader.texts("terms", (CE,), choices=(CE, KL)))
        reader.done()
        return loss

    @classmethod
    def of(cls, config: LossConfig) -> LossSpec:
        """What a run with this loss needs."""
        return cls((KL if config.kl_share else CE,))


@dataclasses.dataclass(frozen=True)
class Spec:
    """The whole section."""

    target: TargetSpec
    drafter: DrafterSpec
    axes: Axes
    data: DataSpec
    loss: LossSpec = LossSpec()

    @classmethod
    def parse(cls, section: Mapping[str, Any]) -> Spec:
        """Checks plain data.

        Raises:
            FaultsError: with every fault.
        """
        faults: list[Fault] = []
        reader = Reader(section, "", faults)
        target_reader = reader.section("target")
        target = TargetSpec.read(target_reader)
        drafter = DrafterSpec.read(reader.section("drafter"), target, target_reader)
        axes = Axes.read(reader.section("axes"))
        data = DataSpec.read(reader.section("data", required=False))
        loss = LossSpec.read(reader.section("loss", required=False))
        reader.done()
        if faults:
            raise FaultsError(faults)
        return cls(target, drafter, axes, data, loss)

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``parse`` accepts, defaults filled in."""
        data: dict[str, Any] = _plain(dataclasses.asdict(self))
        if self.target.experts is None:
            del data["target"]["experts"]
        data["data"]["template_options"] = dict(self.data.template_options)
        return data


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
