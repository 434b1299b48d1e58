"""Checkpoints: everything to go on, written at once or not at all; and the drafter as engines serve it.

A checkpoint is a folder ``step-00000050`` with ``state.json``, ``optimizer.safetensors`` (fp32 masters and moments) and
nothing else. Random generators need no bytes: every draw is a function of the seed and of the position in the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash import devices
from dflash.drafter import Drafter
from dflash.errors import ResumeError, TrainingStoppedError
from dflash.folder import foreign
from dflash.saved import (
    BEGUN,
    LATEST,
    PREFIX,
    STATE,
    State,
    digest_of,
    displaced,
    final_name,
    find,
    folder,
    name_of,
    newest_state,
    read,
    whole,
)
from dflash.served import CONFIG, WEIGHTS
from dflash.spec import Spec
from kernelbake.errors import InputError

__all__ = [
    "LATEST",
    "PREFIX",
    "State",
    "check_same_run",
    "export",
    "find",
    "folder",
    "load",
    "newest_state",
    "remains",
    "save",
    "served_config",
]

_TENSORS = "optimizer.safetensors"
_PATHS = ("data.source", "data.template")
"""What may have moved: the digest of the samples says whether it is the same."""

_CHUNK = 1 << 17
"""Words of eight bytes that are added up to one number of a tensor's digest."""


def save(output: Path, state: State, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes a checkpoint below the output folder; readers see all of it or nothing.

    Returns:
        its folder.

    Raises:
        TrainingStoppedError: it cannot be written: no room, no right; or a number in it is not finite, and nobody could
            go on from it. What stood there before is still whole.
    """
    final = folder(output, state.step)
    cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if broken := [f"`{name}`" for name, tensor in cpu.items() if not _is_finite(tensor)]:
        raise TrainingStoppedError(
            f"checkpoint: step {state.step} left {len(broken)} of {len(cpu)} tensors with numbers that are not finite; "
            "wanted a state to go on from",
            reasons=broken,
            hint=f"{remains(output)}; a lower --lr or optimizer.weight_decay may help",
        )
    state = dataclasses.replace(state, digests={name: _digest(tensor) for name, tensor in cpu.items()})
    told = state.to_json()
    told["digests"] = {**told["digests"], STATE: digest_of(told)}
    try:
        with _replacing(final) as place:
            save_file(cpu, place / _TENSORS)
            (place / STATE).write_text(json.dumps(told, indent=1))
    except (OSError, SafetensorError) as error:
        raise TrainingStoppedError(
            f"checkpoint: `{final}` cannot be written ({error}); wanted room for {devices.gib(_bytes(cpu))}",
            hint=remains(output),
        ) from error
    return final


def remains(output: Path) -> str:
    """What a run that stopped can be gone on from, for people."""
    found = whole(output)
    return f"--resume latest goes on from `{found[-1]}`" if found else "no checkpoint was saved before"


def _digest(tensor: torch.Tensor) -> str:
    """Differs for every changed word of a tensor on the CPU; made at the speed of memory, as there may be many GB.

    SHA-256 over the sums of each MiB's words, which wrap around, and what is left over.
    """
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    whole = len(data) // 8 * 8
    words = data[:whole].view(np.uint64)
    sums = np.add.reduceat(words, range(0, len(words), _CHUNK)) if len(words) else words
    return hashlib.sha256(sums.tobytes() + data[whole:].tobytes()).hexdigest()[:16]


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are, in one pass and without a copy: neither end is where one is not."""
    return not tensor.is_floating_point() or not tensor.numel() or all(map(math.isfinite, map(float, tensor.aminmax())))


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class _replacing:
    """A folder under another name that takes the final one's place when the block ends well."""

    def __init__(self, final: Path) -> None:
        self._final = final
        self._folder = final.with_name(f".{final.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        _put_back(self._final.parent)
        for left_over in self._final.parent.glob(f".{self._final.name.partition('-')[0]}*"):
            shutil.rmtree(left_over, ignore_errors=True)  # of a run that was killed while it wrote
        self._folder.mkdir(parents=True)
        return self._folder

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        for path in self._folder.iterdir():
            _sync(path)
        _sync(self._folder)
        old = self._final.with_name(f".{self._final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self._final.exists():
            self._final.rename(old)
        self._folder.rename(self._final)
        _sync(self._final.parent)
        shutil.rmtree(old, ignore_errors=True)


def _put_back(output: Path) -> None:
    """Gives folders their names back that a run was replacing when it was killed between two renames."""
    for old in displaced(output):
        old.rename(final_name(old))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(folder: Path) -> tuple[State, dict[str, torch.Tensor]]:
    """Reads a checkpoint.

    Raises:
        InputError: a part is missing, broken or of a later format.
    """
    try:
        state, tensors = read(folder), load_file(folder / _TENSORS)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise InputError(f"resume: `{folder}` is broken ({error}); wanted a complete checkpoint") from error
    if folder.name.startswith(PREFIX) and folder.name != name_of(state.step):
        raise InputError(
            f"resume: `{folder}` holds step `{state.step}`; wanted it to be called `{name_of(state.step)}`, as "
            f"`{LATEST}` goes by names"
        )
    made = {name: _digest(tensor) for name, tensor in tensors.items()}
    said = made if state.digests is None else state.digests
    damaged = [f"`{name}`" for name, digest in made.items() if said.get(name) != digest]
    if damaged:
        raise InputError(
            f"resume: `{folder}` is damaged: {len(damaged)} of {len(made)} tensors are not what was saved",
            reasons=damaged,
            hint="move it away, and --resume latest goes on from the checkpoint before",
        )
    return state, tensors


def check_same_run(
    state: State,
    spec: Spec,
    seed: int,
    bundle: str | None,
    step_batches: int,
    samples: str,
    *,
    other_bundle: bool,
) -> None:
    """Refuses to go on with what another run left, naming everything that differs.

    How many pairs and ranks share the batches of a step is no difference: the steps are the same.

    Raises:
        ResumeError: another drafter, seed, data or number of batches in a step; or another bundle and nobody said that
            it may be.
    """
    now = spec.to_json()
    pairs = [("seed", state.seed, seed)]
    moved = _PATHS if state.samples == samples else ()
    for part in ("target", "drafter", "axes", "data"):
        theirs = state.spec.get(part, {})
        names = sorted({*now[part], *theirs})
        pairs += [(f"{part}.{name}", theirs.get(name), now[part].get(name)) for name in names]
    pairs = [one for one in pairs if one[0] not in moved]
    reasons = [f"{name}: `{before}`; now `{here}`" for name, before, here in pairs if before != here]
    if state.samples not in (None, samples) and state.spec.get("data") == now["data"]:
        reasons.append(f"samples of `{spec.data.source}`: `{state.samples:.12}`; now `{samples:.12}`, other contents")
    then = state.step_batches if state.step_batches is not None else state.run.get("batch", {}).get("accumulate")
    if then != step_batches:
        reasons.append(
            f"batches of a step: `{then}`; now `{step_batches}`, ranks × pairs × accumulation: --accumulate can keep it"
        )
    unequal = len(spec.axes.buckets) > 1 and spec.axes.layouts != ("packed",)
    if BEGUN not in state.loader and step_batches > 1 and unequal:
        reasons.append(
            "order of the data: batches of any lengths in a step; now of one bucket: only older releases go on"
        )
    if state.bundle != bundle and not other_bundle:
        reasons.append(f"bundle: `{state.bundle}`; now `{bundle}`; --other-bundle allows it")
    if reasons:
        raise ResumeError("resume: the checkpoint belongs to another run", reasons=reasons)


# ---------------------------------------------------------------------------------------------- the served drafter


def export(folder: Path, drafter: Drafter, spec: Spec) -> None:
    """Writes ``config.json`` and ``model.safetensors`` as z-lab's models are laid out, which serving engines load.

    Names have no ``model.`` prefix; embedding, head and rotary tables are the target's and not in it; weights are bf16.

    Raises:
        TrainingStoppedError: it cannot be written, or other files stand there. What stood there before is still whole.
    """
    if others := foreign(folder):
        raise TrainingStoppedError(
            f"drafter: `{folder}` holds `{'`, `'.join(others)}`, which no exported drafter has; wanted to write it",
            hint="all steps are saved; move it away, and --resume latest writes the drafter",
        )
    weights = drafter.named_parameters()
    tensors = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights}
    try:
        with _replacing(folder) as target:
            save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
            (target / CONFIG).write_text(json.dumps(served_config(spec), indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise TrainingStoppedError(
            f"drafter: `{folder}` cannot be written ({error}); wanted room for {devices.gib(_bytes(tensors))}",
            hint="all steps are saved; --resume latest writes the drafter",
        ) from error


def served_config(spec: Spec) -> dict[str, Any]:
    """``config.json`` of the served drafter. A block of K positions speculates K − 1 tokens: the first is given."""
    drafter, target = spec.drafter, spec.target
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": drafter.block_size,
        "num_speculative_tokens": drafter.block_size - 1,
        "dflash_config": {
            "mask_token_id": drafter.mask_token_id,
            "target_layer_ids": list(drafter.target_layer_ids),
            "block_size": drafter.block_size,
            "causal": drafter.is_causal,
            "num_target_layers": target.num_layers,
        },
        "num_target_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": drafter.num_layers,
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "vocab_size": target.vocab_size,
        "rope_theta": drafter.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": drafter.rope_theta},
        "rope_scaling": None,
        "layer_types": list(drafter.layer_types),
        "sliding_window": drafter.sliding_window,
        "use_sliding_window": drafter.sliding_window is not None,
        "max_window_layers": drafter.num_layers,
        "is_causal": drafter.is_causal,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": drafter.rms_norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
