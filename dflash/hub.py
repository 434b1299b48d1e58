"""What a model's folder or Hub entry says about itself before anything is loaded. Loads no torch."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash.schema import Reader
from dflash.spec import ARCHITECTURES, RANDOM, TargetSpec
from kernelbake.errors import InputError
from kernelbake.workload import Fault

BYTES = "--set data.tokenizer=bytes takes the bytes of the text as ids"
CHOICES = "wanted `random`, a folder with `config.json` and safetensors, or a Hub id that is cached or can be reached"

_AGAIN_S = 1.0
"""Between two tries to reach the Hub."""


def config_of(model: str) -> dict[str, Any]:
    """The model's ``config.json``: of a folder, else of the Hub's local cache, else fetched.

    Raises:
        InputError: there is none; the message names what could be given.
    """
    folder = Path(model)
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"target: `{model}` is no folder; {CHOICES}")
        path = folder / "config.json" if folder.is_dir() else Path(_hub_file(model, "config.json"))
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"target: `{model}` has no readable `config.json` ({error}); {CHOICES}") from error
    if not isinstance(config, dict):
        raise InputError(f"target: `{path}` is no object; wanted a model's configuration")
    return config


def _hub_file(model: str, name: str) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return hf_hub_download(model, name, local_files_only=True)
    except HFValidationError as error:
        raise InputError(f"target: `{model}` is neither a folder nor a Hub id; {CHOICES}") from error
    except LocalEntryNotFoundError:
        pass
    _check_reachable(model, name)
    try:
        return hf_hub_download(model, name)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"target: `{model}` cannot be loaded ({reason}); {CHOICES}", hint="--target random") from error


def _check_reachable(model: str, name: str) -> None:
    """Asks whether the Hub is there, before its client would ask six times more and say so each time.

    Only a connection that cannot be made counts, at the second try or after ``HF_HUB_ETAG_TIMEOUT`` seconds. Whoever is
    connected and waits, or is told to come again, is on a slow network or early: there the client's patience helps.

    Raises:
        InputError: it cannot be reached, or must not be: ``HF_HUB_OFFLINE``.
    """
    import httpx
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import OfflineModeIsEnabled

    def ask() -> None:
        get_hf_file_metadata(hf_hub_url(model, name), timeout=constants.HF_HUB_ETAG_TIMEOUT)

    try:
        try:
            ask()
        except httpx.ConnectError:  # a name server may be busy
            time.sleep(_AGAIN_S)
            ask()
    except OfflineModeIsEnabled as error:
        raise InputError(
            f"target: `{model}` is not in the Hub's cache on this machine, and HF_HUB_OFFLINE forbids to ask the Hub; "
            f"{CHOICES}",
            hint="--target random, or fetch it first: `hf download` fills the cache",
        ) from error
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"target: `{model}` is not in the Hub's cache on this machine, and `{constants.ENDPOINT}` cannot be "
            f"reached ({reason}); {CHOICES}",
            hint="--target random, a folder, or `hf download` where there is a network; HF_ENDPOINT names a mirror, "
            "HF_HUB_ETAG_TIMEOUT the seconds to wait",
        ) from error
    except Exception:  # of any kind: the Hub has answered, or may yet; what it says is told by the download
        return


def target_spec(model: str, config: Mapping[str, Any], *, frozen: bool) -> TargetSpec:
    """The dimensions that a model's configuration states.

    Args:
        model: its name, for messages.
        config: its ``config.json``; a multimodal one holds the text model's part below ``text_config``.
        frozen: whether the target runs without gradients, which no configuration says.

    Raises:
        InputError: it is no hybrid Gated-DeltaNet model, or lacks dimensions; all faults are listed.
    """
    text = config.get("text_config", config)
    text = text if isinstance(text, Mapping) else {}
    kind = str(text.get("model_type", config.get("model_type"))).removesuffix("_text")
    if kind not in ARCHITECTURES:
        known = ", ".join(f"`{name}`" for name in ARCHITECTURES)
        raise InputError(f"target: `{model}` has the model type `{kind}`; wanted one of {known}")
    for part in (config, text):
        if (quantized := part.get("quantization_config")) is not None:
            method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
            raise InputError(
                f"target: the weights of `{model}` are quantized (`{method}`); wanted weights in bfloat16 or float32",
                hint="name the model that it was made from: kernels of quantized layers are in no plan and no bundle",
            )
    rope = {**text, **(text.get("rope_parameters") or {})}
    data = {
        "model": model,
        "architecture": kind,
        "num_layers": text.get("num_hidden_layers"),
        "full_attention_interval": _interval(text),
        "num_heads": text.get("num_attention_heads"),
        "num_kv_heads": text.get("num_key_value_heads"),
        "tie_embeddings": bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        "rope_theta": rope.get("rope_theta", 1e7),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 0.25),
        "intermediate_size": text.get("intermediate_size", text.get("shared_expert_intermediate_size")),
        "frozen": frozen,
        **{name: text[name] for name in _SAME_NAMES if name in text},
    }
    if text.get("num_experts"):
        data["experts"] = {
            "num": text["num_experts"],
            "per_token": text.get("num_experts_per_tok"),
            "intermediate_size": text.get("moe_intermediate_size"),
            "shared_intermediate_size": text.get("shared_expert_intermediate_size"),
        }
    faults: list[Fault] = []
    spec = TargetSpec.read(Reader(data, "", faults))
    if faults:
        reasons = [f"{fault.path}: {fault.message}" for fault in faults]
        raise InputError(f"target: the configuration of `{model}` has {len(faults)} faults", reasons=reasons)
    return spec


_SAME_NAMES = (
    "hidden_size",
    "vocab_size",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "rms_norm_eps",
)


def _interval(text: Mapping[str, Any]) -> Any:
    """Every so many layers an attention layer, read off the list of layer types where there is one.

    A list with another pattern gives its distance to the first attention layer, and ``check_layer_types`` refuses it.
    """
    types = text.get("layer_types")
    if isinstance(types, list) and "full_attention" in types:
        return types.index("full_attention") + 1
    return text.get("full_attention_interval", 4)


def check_layer_types(model: str, config: Mapping[str, Any], spec: TargetSpec) -> None:
    """Refuses a model whose layers do not alternate regularly.

    Raises:
        InputError: with the first layer that breaks the pattern.
    """
    types = config.get("text_config", config).get("layer_types")
    if types is None or tuple(types) == spec.layer_types:
        return
    wrong = next((n for n, kind in enumerate(types) if n >= spec.num_layers or kind != spec.layer_types[n]), len(types))
    interval = spec.full_attention_interval
    wanted = f"wanted attention every `{interval}` layers"
    raise InputError(f"target: layer `{wrong}` of `{model}` breaks the pattern; {wanted}")


def is_cached(model: str) -> bool:
    """Whether the Hub's local cache holds weights of the model."""
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors.index.json", "model.safetensors")
    return any(isinstance(try_to_load_from_cache(model, name), str) for name in names)


def tokenizer(model: str) -> Any:
    """transformers' tokenizer of a folder or Hub id. Loads transformers.

    Raises:
        InputError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=Path(model).is_dir() or is_cached(model))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"data: the tokenizer of `{model}` cannot be loaded ({reason})", hint=BYTES) from error


def may_have_template(model: str) -> bool:
    """Whether the tokenizer of this model may come with a chat template; of one on the Hub nobody knows yet."""
    folder = Path(model)
    if not folder.is_dir():
        return True
    try:
        own = b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        own = False
    return own or any(any(folder.glob(name)) for name in ("*chat_template*", "additional_chat_templates/*"))


def as_bytes(text: str) -> list[int]:
    """The byte-level tokenizer: the ids are the bytes of the text in UTF-8."""
    return list(text.encode())


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text → token ids, without special tokens."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return encode


def resolve(model: str, planned: TargetSpec | None) -> TargetSpec:
    """The target of a run: the manifest's with random weights, or what the named model says of itself.

    Args:
        model: ``random``, a folder or a Hub id.
        planned: what the manifest says; None where there is no manifest.

    Raises:
        InputError: as ``config_of`` and ``target_spec``; random weights without a manifest.
    """
    if model == RANDOM:
        if planned is None:
            raise InputError("target: `random`, but nothing says its shape; wanted a folder or a Hub id")
        return dataclasses.replace(planned, model=RANDOM)
    config = config_of(model)
    spec = target_spec(model, config, frozen=planned is None or planned.frozen)
    check_layer_types(model, config, spec)
    return spec
