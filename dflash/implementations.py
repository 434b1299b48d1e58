"""Which implementation serves the calls that could be rerouted: packages, fallbacks, hub kernels. Loads torch.

What runs is looked up in the live objects, not guessed from what is installed, since any exception while
importing a package makes transformers fall back without an error.
"""

from __future__ import annotations

from typing import Any

from dflash import target
from dflash.spec import TargetSpec

_CALLS = {
    "gated_delta_rule": ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
    "causal_conv1d": ("causal_conv1d_fn",),
}


def of(spec: TargetSpec) -> dict[str, str]:
    """Name of each call → the module that serves it."""
    module = target.modeling(spec.architecture)
    served = {call: _served_by(module, names) for call, names in _CALLS.items()}
    prefix = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}[spec.architecture]
    norm = getattr(module, f"{prefix}RMSNormGated")
    return {
        **served,
        "causal_conv1d with document boundaries": "fla.modules.causal_conv1d",
        "gated norm": f"{norm.__module__}.{norm.__qualname__}",
        "hub kernels": "off",
        **_fla_back_ends(),
    }


def _served_by(module: Any, names: tuple[str, ...]) -> str:
    """The module of the function that a call ends in, through transformers' wrappers."""
    function = next(getattr(module, name) for name in names if hasattr(module, name))
    function = getattr(function, "original", function)
    for cell in getattr(function, "__closure__", None) or ():
        implementation = cell.cell_contents
        if callable(implementation) and getattr(implementation, "__name__", "").endswith(names[-1]):
            function = implementation
            if not implementation.__module__.startswith("transformers."):
                break
    module_name: str = function.__module__
    return "torch (transformers)" if module_name.startswith("transformers.") else module_name


def _fla_back_ends() -> dict[str, str]:
    """For each family of FLA's operations that the target uses: the back ends that would take calls from Triton's."""
    from fla import backends

    registries = getattr(backends, "_operation_registries", {})
    found = {}
    for operation in ("common", "gated_delta_rule"):
        known = registries[operation]._backends if operation in registries else {}
        usable = [name for name, backend in sorted(known.items()) if type(backend).can_use()]
        found[f"fla {operation}"] = ", ".join(usable) or "triton"
    return found
