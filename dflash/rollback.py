"""One sequence in a hybrid target, which can take back tokens it has just read. Loads torch.

Attention layers forget tokens by cutting their keys and values. Gated-DeltaNet layers cannot: a state is a sum over all
that was read. So their states are kept from before a pass, and when only a part of the pass stays, the layers' mixers
read that part again from there; their inputs were kept too, so neither attention nor an MLP runs a second time.

Legend of shape suffixes: T tokens of a pass, S context length, E hidden size, F = E times the number of target layers,
V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dflash import devices
from dflash.target import Target

_STATEFUL = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_update",
)
"""transformers' functions that packages with GPU kernels may serve, and that decoding calls."""

_patching = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Pass:
    """What the target says about tokens it has read.

    Args:
        logits_TV: of the last tokens, as many as asked for, in fp32 or the target's wider dtype.
        features_TF: outputs of the chosen layers, side by side, for every token.
    """

    logits_TV: torch.Tensor
    features_TF: torch.Tensor


@dataclasses.dataclass
class _Mixer:
    """A Gated-DeltaNet layer: its module, its part of the cache, and what the last pass found and read."""

    module: torch.nn.Module
    cache: Any
    before: list[torch.Tensor] = dataclasses.field(default_factory=list)
    read: torch.Tensor | None = None

    def states(self) -> list[torch.Tensor]:
        """States of convolution and recurrence, which passes change in place."""
        return [
            state
            for held in (self.cache.conv_states, self.cache.recurrent_states)
            for state in held.values()
            if state is not None
        ]


class TargetSequence:
    """A growing sequence of one row.

    Args:
        target: the target; no other pass may run in it at the same time.

    Attributes:
        length: tokens read and kept.
    """

    def __init__(self, target: Target) -> None:
        from transformers import DynamicCache

        self.length = 0
        self._target = target
        self._model = target.model
        self._cache = DynamicCache(config=self._model.config)
        self._last = 0  # tokens of the last pass that can still be taken back
        layers = list(zip(self._model.model.layers, self._cache.layers, strict=True))
        self._mixers = [_Mixer(layer.linear_attn, cache) for layer, cache in layers if hasattr(layer, "linear_attn")]
        self._attention = [cache for layer, cache in layers if not hasattr(layer, "linear_attn")]
        if target.device.type == "cpu":
            _step_in_torch_on_cpu(sys.modules[type(self._model).__module__])

    def extend(self, tokens: Sequence[int], *, num_logits: int, undo: bool = False) -> Pass:
        """Reads tokens.

        Args:
            tokens: at least one.
            num_logits: for how many of the last tokens logits are made.
            undo: whether ``keep`` may take some of them back.
        """
        device, count = self._target.device, len(tokens)
        positions_1T = torch.arange(self.length, self.length + count, device=device)[None]
        if undo:
            for mixer in self._mixers:
                mixer.before = [state.clone() for state in mixer.states()]
        with torch.no_grad(), devices.current(device), self._target.capturing() as features, self._reading(undo):
            hidden_1TE = self._model.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=positions_1T,
                attention_mask={"full_attention": self._mask(count, device), "linear_attention": None},
                use_cache=True,
                **{_cache_argument(self._model.model): self._cache},
            ).last_hidden_state
            logits_TV = self._model.lm_head(hidden_1TE[0, -num_logits:])
        self.length += count
        self._last = count if undo else 0
        return Pass(logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float(), features()[0])

    def _mask(self, count: int, device: torch.device) -> torch.Tensor | None:
        """None where attention's own causality is right: at the start, or for one token."""
        if count == 1 or self.length == 0:
            return None
        before = torch.ones(count, self.length, dtype=torch.bool, device=device)
        among = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        return torch.cat((before, among), dim=1)[None, None]

    @contextlib.contextmanager
    def _reading(self, undo: bool) -> Iterator[None]:
        """Keeps what each mixer reads."""
        handles = []
        for mixer in self._mixers if undo else ():

            def keep(module: Any, args: Any, kwargs: Any, mixer: _Mixer = mixer) -> None:
                mixer.read = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

            handles.append(mixer.module.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def keep(self, count: int) -> None:
        """Keeps the first ``count`` tokens of the last pass and takes the others back.

        Raises:
            ValueError: the last pass was shorter, or was not to be undone.
        """
        if not 0 <= count <= self._last:
            raise ValueError(f"keep {count} of the last {self._last} tokens that can be taken back")
        surplus = self._last - count
        if surplus:
            with torch.no_grad(), devices.current(self._target.device):
                for mixer in self._mixers:
                    self._replay(mixer, count)
                for cache in self._attention:
                    cache.crop(-surplus)
        for mixer in self._mixers:
            mixer.before, mixer.read = [], None
        self.length -= surplus
        self._last = 0

    def _replay(self, mixer: _Mixer, count: int) -> None:
        for state, before in zip(mixer.states(), mixer.before, strict=True):
            state.copy_(before)
        if count and mixer.read is not None:
            cached = {_cache_argument(mixer.module): self._cache}
            mixer.module(hidden_states=mixer.read[:, :count], attention_mask=None, **cached)


def _cache_argument(module: torch.nn.Module) -> str:
    """How a module names its cache; newer versions of transformers have one name for all."""
    known = inspect.signature(type(module).forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in known)


def _step_in_torch_on_cpu(module: Any) -> None:
    """Makes calls that carry a state use transformers' torch implementation where tensors are on the CPU.

    With FLA installed, transformers sends them to Triton kernels, which need a GPU. Training never carries a state, so
    nothing changes for it, and what a call does depends on its arguments alone.
    """
    with _patching:
        for name in _STATEFUL:
            original = getattr(module, name, None)
            reference = inspect.unwrap(original) if callable(original) else original
            if reference is not original and not hasattr(original, "steps_on_cpu"):
                setattr(module, name, _routed(original, reference))


def _routed(original: Any, reference: Any) -> Any:
    def call(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        stateful = kwargs.get("output_final_state", True)
        serve = reference if hidden_states.device.type == "cpu" and stateful else original
        return serve(hidden_states, *args, **kwargs)

    call.steps_on_cpu = True  # type: ignore[attr-defined]
    call.original = original  # type: ignore[attr-defined]
    return call
