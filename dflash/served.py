"""What an exported drafter says of itself: configuration, and names, shapes and dtypes of its tensors. Loads no torch.

Serving engines skip names that they do not know and do not miss those that are absent, so a wrongly named file would
serve random weights without a word; and they honour keys of the target's rotary embedding that a drafter must not have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dflash.folder import EXPORTED
from dflash.schema import Reader
from dflash.spec import ATTENTIONS, DrafterSpec, TargetSpec
from kernelbake.errors import InputError
from kernelbake.workload import Fault

CONFIG, WEIGHTS = EXPORTED
_FOREIGN = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Keys of hybrid targets' rotary embeddings; the drafter rotates all of its head dimension by one position."""

_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
"""Names of dtypes in a file of safetensors and in a configuration."""


@dataclasses.dataclass(frozen=True)
class Described:
    """An exported drafter without its weights.

    Args:
        spec: its dimensions.
        hidden_size, vocab_size, num_target_layers: what its target must have.
    """

    spec: DrafterSpec
    hidden_size: int
    vocab_size: int
    num_target_layers: int

    def check_target(self, target: TargetSpec) -> None:
        """Refuses a target for which the drafter was not made.

        Raises:
            InputError: with every difference.
        """
        pairs = (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        )
        reasons = [f"{name}: `{ours}`; the target has `{theirs}`" for name, ours, theirs in pairs if ours != theirs]
        if reasons:
            raise InputError(f"drafter: made for another target than `{target.model}`", reasons=reasons)


def describe(folder: Path) -> Described:
    """Reads ``config.json`` and the head of ``model.safetensors``.

    Raises:
        InputError: a file is missing or broken, or anything in them is; all faults are listed.
    """
    config, reasons = examine(folder)
    refuse(folder, reasons)
    return config.described()


def examine(folder: Path) -> tuple[Config, list[str]]:
    """The configuration, and what is wrong with it and with the tensors, as far as that stands in the file's head.

    Raises:
        InputError: a file is missing or broken.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = _head(folder / WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise unreadable(folder, error) from error
    if not isinstance(config, dict):
        raise InputError(f"drafter `{folder}`: `{CONFIG}` is no object; wanted a model's configuration")
    faults: list[Fault] = []
    read = Config(config, faults)
    reasons = [f"`{CONFIG}`: {fault.path}: {fault.message}" for fault in faults]
    if read.has_shapes:
        reasons += [f"`{WEIGHTS}`: {reason}" for reason in _tensor_faults(tensors, config)]
    return read, reasons


def unreadable(folder: Path, error: Exception) -> InputError:
    """What to say of a file that cannot be read."""
    return InputError(f"drafter `{folder}`: cannot be read ({error}); wanted an exported drafter")


def refuse(folder: Path, reasons: Sequence[str]) -> None:
    """Refuses a drafter for these reasons, if there are any.

    Raises:
        InputError: there are.
    """
    if reasons:
        count = f"{len(reasons)} fault{'s' if len(reasons) > 1 else ''}"
        raise InputError(f"drafter `{folder}`: {count}", reasons=reasons)


def _head(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name → shape and dtype of every tensor."""
    with safe_open(path, framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        return {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}


def served_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a served drafter of this configuration has."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "fc.weight": (hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for number in range(config["num_hidden_layers"]):
        shapes.update({f"layers.{number}.{name}.weight": shape for name, shape in layer.items()})
    return shapes


def _tensor_faults(tensors: Mapping[str, tuple[tuple[int, ...], str]], config: Mapping[str, Any]) -> list[str]:
    wanted = served_shapes(config)
    faults = [f"`{name}` is missing" for name in wanted if name not in tensors]
    faults += [f"`{name}` is unknown" for name in sorted(tensors) if name not in wanted]
    for name, shape in wanted.items():
        if name not in tensors:
            continue
        found, dtype = tensors[name]
        if found != shape:
            faults.append(f"`{name}` has shape {found}; wanted {shape}")
        elif config.get("dtype") in _DTYPES.values() and _DTYPES.get(dtype) != config["dtype"]:
            faults.append(f"`{name}` is {_DTYPES.get(dtype, dtype)}; wanted `{config['dtype']}`")
    return faults


class Config:
    """The keys that engines read, checked one by one and against each other."""

    def __init__(self, config: dict[str, Any], faults: list[Fault]) -> None:
        self._reader = reader = Reader(config, "", faults)
        self._own = own = reader.section("dflash_config")
        self.hidden_size: int = reader.integer("hidden_size")
        self.vocab_size: int = reader.integer("vocab_size")
        self.num_target_layers: int = reader.integer("num_target_layers")
        self._num_layers: int = reader.integer("num_hidden_layers")
        self._sizes = {
            "num_heads": reader.integer("num_attention_heads"),
            "num_kv_heads": reader.integer("num_key_value_heads"),
            "head_dim": reader.integer("head_dim"),
            "intermediate_size": reader.integer("intermediate_size"),
        }
        self._block_size: int = reader.integer("block_size", low=2)
        self._mask_token_id: int = own.integer("mask_token_id", low=0)
        self._layer_ids: tuple[int, ...] = own.integers("target_layer_ids", low=0)
        self._eps: float = reader.number("rms_norm_eps")
        self._is_causal: bool = reader.flag("is_causal")
        self._layer_types = self._read_layer_types()
        self._window: int | None = reader.integer("sliding_window", None)
        self._theta: float = reader.number("rope_theta", low=1.0)
        self._check_names()
        self._check_block()
        self._check_target()
        self._check_attention()
        self._check_rotary()
        sized = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        self.has_shapes = reader.good(*sized, "intermediate_size", "dflash_config") and own.good("target_layer_ids")

    def spec(self) -> DrafterSpec:
        """The drafter's dimensions; only after no fault was found."""
        return DrafterSpec(
            num_layers=self._num_layers,
            block_size=self._block_size,
            mask_token_id=self._mask_token_id,
            target_layer_ids=self._layer_ids,
            rope_theta=self._theta,
            rms_norm_eps=self._eps,
            layer_types=self._layer_types,
            sliding_window=self._window,
            is_causal=self._is_causal,
            **self._sizes,
        )

    def described(self) -> Described:
        """The drafter; only after no fault was found."""
        return Described(self.spec(), self.hidden_size, self.vocab_size, self.num_target_layers)

    def _read_layer_types(self) -> tuple[str, ...]:
        found = self._reader.raw("layer_types")
        good = isinstance(found, list) and all(kind in ATTENTIONS for kind in found)
        if not good or len(found) != self._num_layers:
            wanted = " or ".join(f"`{kind}`" for kind in ATTENTIONS)
            self._reader.fault("layer_types", f"found `{found}`; wanted {wanted} for each of the layers")
            return ()
        return tuple(found)

    def _same(self, reader: Reader, name: str, wanted: Any, why: str, *, required: bool = True) -> None:
        """A key that repeats another one, or can have one value only."""
        found = reader.raw(name)
        if (required or reader.has(name)) and (type(found) is not type(wanted) or found != wanted):
            reader.fault(name, f"found `{found}`; wanted `{wanted}`, {why}")

    def _check_names(self) -> None:
        self._same(self._reader, "architectures", ["DFlashDraftModel"], "the class that engines look for")
        self._same(self._reader, "model_type", "qwen3", "whose layers the drafter has")
        self._same(self._reader, "hidden_act", "silu", "the activation of its MLP")
        self._same(self._reader, "attention_bias", False, "as its projections have none")
        self._same(self._reader, "tie_word_embeddings", False, "as it has neither embedding nor head")
        self._same(self._reader, "attention_dropout", 0.0, "as it is served, not trained")
        self._reader.integer("max_position_embeddings")
        self._reader.text("dtype", choices=tuple(_DTYPES.values()))

    def _check_block(self) -> None:
        if self._reader.good("block_size"):
            self._same(self._own, "block_size", self._block_size, "as at the top level")
            why = "one fewer than the block size, as the first position is the anchor"
            self._same(self._reader, "num_speculative_tokens", self._block_size - 1, why, required=False)
        inside = self._mask_token_id < self.vocab_size
        if self._own.good("mask_token_id") and self._reader.good("vocab_size") and not inside:
            wanted = f"wanted an id inside the vocabulary of `{self.vocab_size}`"
            self._own.fault("mask_token_id", f"found `{self._mask_token_id}`; {wanted}")

    def _check_target(self) -> None:
        if not self._reader.good("num_target_layers"):
            return
        self._same(self._own, "num_target_layers", self.num_target_layers, "as at the top level", required=False)
        for place, layer in enumerate(self._layer_ids):
            if layer >= self.num_target_layers:
                found = f"found `{layer}`; the target has `{self.num_target_layers}` layers"
                self._own.fault(f"target_layer_ids.{place}", found)

    def _check_attention(self) -> None:
        heads, kv = self._sizes["num_heads"], self._sizes["num_kv_heads"]
        if self._reader.good("num_attention_heads", "num_key_value_heads") and heads % kv:
            self._reader.fault("num_attention_heads", f"found `{heads}`; wanted a multiple of `{kv}` kv heads")
        if self._reader.good("is_causal"):
            self._same(self._own, "causal", self._is_causal, "as `is_causal` says", required=False)
        slides = ATTENTIONS[1] in self._layer_types
        if self._reader.good("layer_types", "sliding_window") and slides != (self._window is not None):
            wanted = "a window exactly if a layer slides"
            self._reader.fault("sliding_window", f"found `{self._window}`; wanted {wanted}")
        if self._reader.good("layer_types"):
            self._same(self._reader, "use_sliding_window", slides, "as `layer_types` says")

    def _check_rotary(self) -> None:
        rope = self._reader.section("rope_parameters")
        self._same(rope, "rope_type", "default", "the only one that it was trained with")
        if self._reader.good("rope_theta") and rope.number("rope_theta", low=1.0) != self._theta:
            rope.fault("rope_theta", f"wanted `{self._theta:g}`, as at the top level")
        if self._reader.raw("rope_scaling") is not None:
            self._reader.fault("rope_scaling", "wanted `null`, as it was trained without")
        for reader in (self._reader, rope, self._own):
            for name in _FOREIGN:
                if reader.has(name):
                    reader.fault(name, "wanted none: the drafter rotates all of its head dimension")
