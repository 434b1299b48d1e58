"""AdamW on fp32 masters of the drafter's weights; clipping, the schedule, and the check for non-finite gradients.

The drafter computes in its own dtype. Each gradient is added to an fp32 buffer as soon as it is complete and then
dropped, so that accumulation and averaging lose nothing and only one tensor exists twice at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dflash.config import OptimizerConfig
from kernelbake.errors import InputError


class Optimizer:
    """The masters of one drafter and their moments.

    Args:
        drafter: the module whose parameters are trained; its weights are overwritten after each step.
        config: AdamW's settings.
    """

    def __init__(self, drafter: nn.Module, config: OptimizerConfig) -> None:
        self._clip = config.clip
        self._names = [name for name, _ in drafter.named_parameters()]
        self._weights = [weight for _, weight in drafter.named_parameters()]
        self.masters = [nn.Parameter(weight.detach().to(torch.float32, copy=True)) for weight in self._weights]
        for weight, master in zip(self._weights, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(_add_to(master.grad))
        device = self.masters[0].device
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
        """Clips, updates masters and weights, and clears the gradients. Waits for nothing.

        A gradient that is not finite changes no weight and no moment.

            Returns:
                the gradient's norm before clipping, fp32 scalar on the device; not finite where nothing was updated.
        """
        grads = self.grads
        norm = torch.nn.utils.get_total_norm(grads)
        self._adamw.param_groups[0]["lr"].fill_(lr)
        self._adamw.grad_scale = (norm / self._clip).clamp(min=1.0).nan_to_num(nan=1.0, posinf=1.0)
        self._halted += norm.isfinite().logical_not()
        self._adamw.found_inf = self._halted.clamp(max=1.0)
        self._adamw.step()
        torch._foreach_copy_(self._weights, self.masters)
        torch._foreach_zero_(grads)
        return norm

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
            InputError: tensors are missing or have another shape; all of them are listed.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, master in zip(self._names, self.masters, strict=True):
            shapes.update({f"{key}.{name}": tuple(master.shape) for key in ("master", "exp_avg", "exp_avg_sq")})
            shapes[f"step.{name}"] = ()
        faults = [f"`{name}` is missing" for name in shapes if name not in tensors]
        for name in shapes.keys() & tensors.keys():
            if tuple(tensors[name].shape) != shapes[name]:
                faults.append(f"`{name}` has shape {tuple(tensors[name].shape)}; wanted {shapes[name]}")
        if faults:
            raise InputError("resume: the optimizer's state does not fit this drafter", reasons=sorted(faults))
        for name, master, weight in zip(self._names, self.masters, self._weights, strict=True):
            parts = {key: tensors[f"{key}.{name}"] for key in ("master", "step", "exp_avg", "exp_avg_sq")}
            master.copy_(parts.pop("master"))
            weight.copy_(master)
            moments = {key: tensor.to(master.device, torch.float32, copy=True) for key, tensor in parts.items()}
            self._adamw.state[master] = moments


def _add_to(total: torch.Tensor):  # type: ignore[no-untyped-def]
    def hook(weight: torch.Tensor) -> None:
        if weight.grad is not None:
            total.add_(weight.grad)
            weight.grad = None

    return hook
