"""AdamW on fp32 masters of the drafter's weights; clipping, the schedule, and the check for non-finite gradients.

The drafter computes in its own dtype. Each gradient is added to an fp32 buffer as soon as it is complete and then
dropped, so that accumulation and averaging lose nothing and only one tensor exists twice at a time. All of them are one
flat buffer, which is what pairs exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from dflash.config import OptimizerConfig
from kernelbake.errors import InputError

_ALIGNMENT = 32
"""Elements: a gradient starts at a multiple of 128 bytes, as a tensor of its own would."""


class Optimizer:
    """The masters of one drafter and their moments.

    Args:
        drafter: the module whose parameters are trained; its weights are overwritten after each step.
        config: AdamW's settings.
        shares: the number of elements of ``flat`` is a multiple of it: the pairs that exchange gradients.

    Attributes:
        masters: the fp32 weights.
        flat: fp32, one dimension: first what ``loss`` shows, then the gradients in the order of the parameters, with
            zeros between and behind them.
        loss: view of one element of ``flat``, for the step's loss: it is exchanged with the gradients, so that all
            pairs see a loss that is not finite, whichever of them had it. To be added to before a backward pass.
        places: (begin, end) of each gradient in ``flat``.
        on_added: called with the number of a parameter whose gradient was added to ``flat``, in the thread and on the
            stream that did it.
    """

    def __init__(self, drafter: nn.Module, config: OptimizerConfig, shares: int = 1) -> None:
        self._clip = config.clip
        self._names = [name for name, _ in drafter.named_parameters()]
        self._weights = [weight for _, weight in drafter.named_parameters()]
        self.masters = [nn.Parameter(weight.detach().to(torch.float32, copy=True)) for weight in self._weights]
        self.on_added: Callable[[int], None] | None = None
        self.places: list[tuple[int, int]] = []
        end = _ALIGNMENT
        for master in self.masters:
            self.places.append((end, end + master.numel()))
            end += -(-master.numel() // _ALIGNMENT) * _ALIGNMENT
        step = math.lcm(shares, _ALIGNMENT)
        device = self.masters[0].device
        self.flat = torch.zeros(-(-end // step) * step, dtype=torch.float32, device=device)
        self.loss = self.flat[0]
        for number, (weight, master) in enumerate(zip(self._weights, self.masters, strict=True)):
            begin, end = self.places[number]
            master.grad = self.flat[begin:end].view_as(master)
            weight.register_post_accumulate_grad_hook(self._adding(number, master.grad))
        self._halted = torch.zeros((), device=device)
        self._adamw = torch.optim.AdamW(
            self.masters,
            lr=torch.zeros((), device=device),
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @property
    def grads(self) -> list[torch.Tensor]:
        """The fp32 gradients, in the order of the parameters."""
        return [master.grad for master in self.masters if master.grad is not None]

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """Clips, updates masters and weights, and clears gradients and loss. Waits for nothing.

        A gradient or a loss that is not finite changes no weight and no moment, from then on.

            Returns:
                the gradient's norm before clipping, fp32 scalar on the device; not finite where nothing was updated.
        """
        grads = self.grads
        norm = torch.nn.utils.get_total_norm(grads)
        self._adamw.param_groups[0]["lr"].fill_(lr)
        self._adamw.grad_scale = (norm / self._clip).clamp(min=1.0).nan_to_num(nan=1.0, posinf=1.0)
        self._halted += (norm + self.loss).isfinite().logical_not()
        self._adamw.found_inf = self._halted.clamp(max=1.0)
        self._adamw.step()
        torch._foreach_copy_(self._weights, self.masters)
        self.flat.zero_()
        return norm

    def _adding(self, number: int, total: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """A hook that adds a parameter's complete gradient to its place and drops it."""

        def hook(weight: torch.Tensor) -> None:
            if weight.grad is not None:
                total.add_(weight.grad)
                weight.grad = None
                if self.on_added is not None:
                    self.on_added(number)

        return hook

    @property
    def is_halted(self) -> bool:
        """Whether a gradient or a loss was not finite, since when nothing is updated. Waits for the device."""
        return bool(self._halted)

    @torch.no_grad()
    def take_weights(self, masters: Sequence[torch.Tensor]) -> None:
        """Takes over the weights of another drafter, to the bit."""
        for master, weight, other in zip(self.masters, self._weights, masters, strict=True):
            master.copy_(other)
            weight.copy_(master)

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name: ``master.fc.weight``, ``exp_avg.fc.weight`` …; no copies."""
        tensors = {f"master.{name}": master.detach() for name, master in zip(self._names, self.masters, strict=True)}
        for name, master in zip(self._names, self.masters, strict=True):
            moments = self._adamw.state.get(master) or self._fresh(master)
            tensors.update({f"{key}.{name}": moments[key] for key in ("step", "exp_avg", "exp_avg_sq")})
        return tensors

    @staticmethod
    def _fresh(master: torch.Tensor) -> dict[str, torch.Tensor]:
        zeros = torch.zeros_like(master)
        return {"step": torch.zeros((), device=master.device), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes over what ``state`` gave.

        Raises:
            InputError: tensors are missing or have another shape or dtype; all of them are listed.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, master in zip(self._names, self.masters, strict=True):
            shapes.update({f"{key}.{name}": tuple(master.shape) for key in ("master", "exp_avg", "exp_avg_sq")})
            shapes[f"step.{name}"] = ()
        faults = [f"`{name}` is missing" for name in shapes if name not in tensors]
        for name in shapes.keys() & tensors.keys():
            if tuple(tensors[name].shape) != shapes[name]:
                faults.append(f"`{name}` has shape {tuple(tensors[name].shape)}; wanted {shapes[name]}")
            if tensors[name].dtype != torch.float32:
                faults.append(f"`{name}` is {tensors[name].dtype}; wanted {torch.float32}, as it was saved")
        if faults:
            raise InputError("resume: the optimizer's state does not fit this drafter", reasons=sorted(faults))
        for name, master, weight in zip(self._names, self.masters, self._weights, strict=True):
            parts = {key: tensors[f"{key}.{name}"] for key in ("master", "step", "exp_avg", "exp_avg_sq")}
            master.copy_(parts.pop("master"))
            weight.copy_(master)
            moments = {key: tensor.to(master.device, torch.float32, copy=True) for key, tensor in parts.items()}
            self._adamw.state[master] = moments
