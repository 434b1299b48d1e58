"""The frozen hybrid target: hidden states of chosen layers, embedding and head.

Legend of shape suffixes: B rows, S context length, E hidden size, P outputs side by side, F = P·E, V vocabulary.

Whole-sequence logits are never made: only the decoder stack runs, and the head is applied by the loss to block rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from dflash import devices, hub, memos
from dflash.buckets import Batch
from dflash.spec import RANDOM, TargetSpec
from kernelbake.errors import InputError

_CLASSES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
}

_LAYER = re.compile(r"model\.(language_model\.)?layers\.")
"""How the names of a decoder layer's weights begin, in a text model's files and in those of a multimodal one."""


class Target:
    """A loaded target.

    Args:
        model: transformers' causal language model, with ``model`` (the decoder stack) and ``lm_head``.
        layer_ids: the layers whose outputs are the features, ascending.
        source: where the weights came from, for people.
        frozen: whether it runs without gradients.

    Attributes:
        appends_last: whether the last hidden state, which the head reads, stands behind the features, for a loss that
            compares distributions. One tensor then moves and is replayed as before.
    """

    appends_last = False

    def __init__(self, model: Any, layer_ids: tuple[int, ...], source: str, *, frozen: bool = True) -> None:
        self._model = model
        self._layer_ids = layer_ids
        self._ended = False
        self.source = source
        self.frozen = frozen
        model.requires_grad_(not frozen)
        model.eval()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.lm_head.weight.device
        return device

    @property
    def head_VE(self) -> torch.Tensor:
        """The head's weight; the embedding's own where they are tied."""
        weight: torch.Tensor = self._model.lm_head.weight
        return weight

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers whose outputs are the features."""
        return self._layer_ids

    @property
    def width(self) -> int:
        """Columns of the features."""
        return int(self.head_VE.shape[1]) * (len(self._layer_ids) + self.appends_last)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., E] of token ids."""
        embeddings: torch.Tensor = self._model.model.embed_tokens(ids)
        return embeddings

    @property
    def model(self) -> Any:
        """transformers' causal language model."""
        return self._model

    def features(self, batch: Batch, out_BSF: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs [B, S, F] of the chosen layers, side by side, for a batch on this target's device.

        With ``appends_last`` there are E more columns: the last hidden state, behind the final norm.

        Args:
            batch: the batch.
            out_BSF: where to write them; new memory without it. Each layer's output is copied there as it comes, and
                none is kept until the last.
        """
        self._check_whole()
        if out_BSF is None:
            shape = (*batch.input_ids_BS.shape, self.width)
            out_BSF = torch.empty(shape, dtype=self.head_VE.dtype, device=self.device)
        out_BSPE = out_BSF.unflatten(-1, (-1, self.head_VE.shape[1]))
        gradients = torch.no_grad() if self.frozen else contextlib.nullcontext()
        with gradients, self._hooked(lambda position, output: out_BSPE[:, :, position].copy_(output)):
            result = self._model.model(
                input_ids=batch.input_ids_BS,
                position_ids=batch.positions_BS,
                attention_mask={"full_attention": _attention_mask(batch), "linear_attention": None},
                use_cache=False,
                **_boundaries(batch),
            )
            if self.appends_last:
                out_BSPE[:, :, -1].copy_(result.last_hidden_state)
        return out_BSF

    def end_after_features(self) -> int:
        """Drops the layers behind the last chosen one, which training reads only for ``appends_last``; how many.

        Raises:
            InputError: the last hidden state is asked for, now or by a later ``features``.
        """
        decoder, needed = self._model.model, layers_read(self._layer_ids)
        dropped = len(decoder.layers) - needed
        decoder.layers = decoder.layers[:needed]
        self._ended = dropped > 0
        self._check_whole()
        return dropped

    def _check_whole(self) -> None:
        if self.appends_last and self._ended:
            raise InputError("target: its last hidden state is asked for; wanted a target with all of its layers")

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Keeps this thread's outputs of the chosen layers; what it yields puts the last side by side [B, S, F]."""
        outputs: dict[int, torch.Tensor] = {}
        with self._hooked(outputs.__setitem__):
            yield lambda: torch.cat([outputs[place] for place in range(len(self._layer_ids))], dim=-1)

    @contextlib.contextmanager
    def _hooked(self, take: Callable[[int, torch.Tensor], Any]) -> Iterator[None]:
        """Gives the outputs of the chosen layers, in this thread, to a function, each with its position among them."""
        handles = [
            self._model.model.layers[layer].register_forward_hook(_hook(take, position))
            for position, layer in enumerate(self._layer_ids)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _hook(take: Callable[[int, torch.Tensor], Any], position: int) -> Any:
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:  # another thread's pass through the same model is none of ours
            take(position, output[0] if isinstance(output, tuple) else output)

    return hook


def _attention_mask(batch: Batch) -> torch.Tensor | None:
    """None where causality alone decides: in the padded layout no token looks at the padding to its right."""
    if batch.doc_ids_BS is None:
        return None
    same_document = batch.doc_ids_BS[:, None, :, None] == batch.doc_ids_BS[:, None, None, :]
    length = batch.doc_ids_BS.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=same_document.device).tril()
    return same_document & before


def _boundaries(batch: Batch) -> dict[str, torch.Tensor]:
    """What makes the recurrent layers stop at the documents' ends."""
    if batch.cu_seqlens_D is None or batch.chunk_indices is None:
        return {}
    return {"cu_seq_lens_q": batch.cu_seqlens_D, "chunk_indices": batch.chunk_indices}


# ---------------------------------------------------------------------------------------------- building


def model_config(spec: TargetSpec) -> Any:
    """transformers' configuration of these dimensions."""
    module = importlib.import_module(f"transformers.models.{spec.architecture}.configuration_{spec.architecture}")
    experts = {}
    if spec.experts is not None:
        experts = {
            "num_experts": spec.experts.num,
            "num_experts_per_tok": spec.experts.per_token,
            "moe_intermediate_size": spec.experts.intermediate_size,
            "shared_expert_intermediate_size": spec.experts.shared_intermediate_size,
        }
    return getattr(module, _CLASSES[spec.architecture][0])(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        linear_num_key_heads=spec.linear_num_key_heads,
        linear_num_value_heads=spec.linear_num_value_heads,
        linear_key_head_dim=spec.linear_key_head_dim,
        linear_value_head_dim=spec.linear_value_head_dim,
        linear_conv_kernel_dim=spec.linear_conv_kernel_dim,
        layer_types=list(spec.layer_types),
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": spec.rope_theta,
            "partial_rotary_factor": spec.partial_rotary_factor,
        },
        tie_word_embeddings=spec.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
        **experts,
    )


def layers_read(layer_ids: tuple[int, ...]) -> int:
    """How many layers, from the first, it takes to have the outputs of these."""
    return max(layer_ids) + 1


def representative(spec: TargetSpec) -> TargetSpec:
    """The same dimensions with one layer of each kind: Gated DeltaNet, then attention."""
    return dataclasses.replace(spec, num_layers=2, full_attention_interval=2)


def representative_layer_ids(layer_ids: tuple[int, ...]) -> tuple[int, ...]:
    """As many feature layers, of the two that there are."""
    return tuple(position % 2 for position in range(len(layer_ids)))


def random_target(
    spec: TargetSpec,
    layer_ids: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int,
) -> Target:
    """A target with random weights, made on the device in its dtype.

    The head has a standard deviation of 1/(2·√E): normed hidden states get logits of variance 1/4, at any size.
    """
    module = modeling(spec.architecture)
    torch.manual_seed(seed)
    with devices.current(device), torch.device(device), devices.default_dtype(dtype):
        model = getattr(module, _CLASSES[spec.architecture][1])(model_config(spec))
        if not spec.tie_embeddings:
            torch.nn.init.normal_(model.lm_head.weight, std=0.5 * spec.hidden_size**-0.5)
    return Target(model, layer_ids, f"random weights, seed {seed}", frozen=spec.frozen)


def load_target(
    spec: TargetSpec,
    layer_ids: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int,
    whole: bool = True,
) -> Target:
    """The target that the spec names, on the device; random weights where its model is ``random``.

    With ``whole`` off it ends behind the last of the layers: their outputs are the same, sooner and in less memory.

    With the package ``accelerate`` weights go straight to the device; without it they pass through the CPU's memory.

    Raises:
        InputError: it does not fit, cannot be loaded, or its files lack weights; all of them are listed.
    """
    check_fits(spec, device, dtype)
    if spec.model == RANDOM:
        made = random_target(spec, layer_ids, device, dtype, seed=seed)
    else:
        made = _stored_target(spec, layer_ids, device, dtype)
    if not whole:
        made.end_after_features()
    return made


def _stored_target(spec: TargetSpec, layer_ids: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Target:
    from transformers.utils import is_accelerate_available

    cls = getattr(modeling(spec.architecture), _CLASSES[spec.architecture][1])
    direct = device.type == "cuda" and is_accelerate_available()
    options = {"dtype": dtype, "attn_implementation": "sdpa", "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # told below, with all that does not fit
    try:
        with _without_bar():
            model, info = cls.from_pretrained(
                spec.model,
                **options,
                **({"device_map": {"": device}} if direct else {}),
                local_files_only=_is_local(spec),
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()
        raise InputError(f"target: `{spec.model}` cannot be loaded; {hub.CHOICES}", reasons=reason[:20]) from error
    _check_filled(spec.model, info)
    return Target(model.to(device), layer_ids, spec.model, frozen=spec.frozen)


@contextlib.contextmanager
def _without_bar() -> Iterator[None]:
    """Without transformers' bar of the weights that are read: it would run into our own line, and fill logs."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _check_filled(model: str, info: Mapping[str, Any]) -> None:
    """Refuses a target that would compute with other weights than its files hold.

    A weight of a decoder layer that the configuration has no place for counts, too: of a layer more than it names, or
    the scales of weights that were quantized. Parts that are not run (vision, prediction of several tokens) do not.

    Args:
        model: its name, for messages.
        info: what transformers says about the loading.

    Raises:
        InputError: weights are missing, of another shape or without a place; all of them are listed.
    """
    lacking, reshaped = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    homeless = sorted(name for name in info["unexpected_keys"] if _LAYER.match(name))
    counts = ((lacking, "missing"), (reshaped, "of another shape"), (homeless, "without a place in the model"))
    if found := [f"{len(names)} {what}" for names, what in counts if names]:
        raise InputError(
            f"target: the weights in the files of `{model}` are not those of its `config.json`: {', '.join(found)}",
            reasons=[
                *(f"`{name}` is missing" for name in lacking),
                *(f"`{name}` has shape {tuple(there)}; wanted {tuple(here)}" for name, there, here in reshaped),
                *(f"`{name}` has no place in the model" for name in homeless),
            ],
        )


def _is_local(spec: TargetSpec) -> bool:
    """Whether everything is on this machine already: a folder, or a complete entry of the Hub's cache."""
    return Path(spec.model).is_dir() or hub.is_cached(spec.model)


def check_fits(spec: TargetSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses a target that is larger than the memory that is free on its device.

    Raises:
        InputError: with both figures.
    """
    needed, free = parameter_bytes(spec, dtype), devices.free_bytes(device)
    if free is not None and needed > free:
        raise InputError(
            f"target: its weights take {devices.gib(needed)} and `{device}` has {devices.gib(free)} free",
            hint="choose a device with more memory, or a smaller target",
        )


def modeling(architecture: str) -> Any:
    """transformers' modeling module, with the convolution that knows documents in place, for any number of threads."""
    with devices.importing_fla():
        module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    memos.keep_apart()
    _stop_convolution_at_documents(module)
    return module


def _stop_convolution_at_documents(module: Any) -> None:
    """Makes the convolution of the module's Gated-DeltaNet layers end at document boundaries.

    transformers hands the boundaries to its convolution, whose torch implementation ignores them without a word. Calls
    that come with boundaries go to FLA's Triton kernel instead; all others go where they went before. What a call does
    depends on its arguments alone, so that any number of threads and models may share the module.

    Raises:
        InputError: this transformers has no such function to replace.
    """
    original = getattr(module, "causal_conv1d_fn", None)
    if original is None:
        raise InputError(
            f"target: `{module.__name__}` has no `causal_conv1d_fn`; wanted transformers 5.16 or later",
            hint="with this version packed batches would mix documents in the convolution",
        )
    if getattr(original, "knows_documents", False):
        return

    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if kwargs.get("cu_seq_lens_q") is None:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        from fla.modules.causal_conv1d import causal_conv1d

        out_BSC, _ = causal_conv1d(
            hidden_states.transpose(1, 2),
            weight,
            bias,
            activation=activation,
            cu_seqlens=kwargs["cu_seq_lens_q"],
            chunk_indices=kwargs.get("chunk_indices"),
        )
        return out_BSC.transpose(1, 2)

    causal_conv1d_fn.knows_documents = True  # type: ignore[attr-defined]
    causal_conv1d_fn.original = original  # type: ignore[attr-defined]
    module.causal_conv1d_fn = causal_conv1d_fn


# ---------------------------------------------------------------------------------------------- size


def parameter_bytes(spec: TargetSpec, dtype: torch.dtype, num_layers: int | None = None) -> int:
    """Memory of the target's weights, from its shapes alone: one layer of each kind is laid out without memory.

    Args:
        spec: the target.
        dtype: of its weights.
        num_layers: how many of its layers count, from the first; None: all.
    """
    module = modeling(spec.architecture)
    with torch.device("meta"), devices.default_dtype(dtype):
        model = getattr(module, _CLASSES[spec.architecture][1])(model_config(representative(spec)))
    linear, attention = (_bytes(layer) for layer in model.model.layers)
    total = _bytes(model) - linear - attention
    for kind in spec.layer_types[:num_layers]:
        total += linear if kind == "linear_attention" else attention
    return total


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
