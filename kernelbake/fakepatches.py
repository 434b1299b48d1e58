"""Where torch itself must treat fake tensors as real ones while a shadow run goes on, and where it is undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._subclasses.fake_tensor as torch_fakes
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from kernelbake.faketensors import CPU, CUDA, DEVICE_QUERY, ShadowMode, UnknownValueError, content

_aten = torch.ops.aten


@contextlib.contextmanager
def entered(mode: ShadowMode) -> Iterator[None]:
    """Runs a block on fake tensors: the mode, and the few places where torch itself must treat them as real."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        _replace(stack, torch_fakes, "init_gpu_context", lambda device: None)
        _replace(stack, torch._functorch.config, "fake_tensor_prefer_device_type", "cuda")
        _replace(stack, torch.nn.Module, "_apply", _apply)
        _replace(stack, torch, "set_autocast_enabled", _noting(mode, torch.set_autocast_enabled))
        _replace(stack, functional, "scaled_dot_product_attention", _attention(mode))
        _replace(stack, functional, "rms_norm", _rms_norm(mode))
        for name, value in _methods().items():
            _replace(stack, FakeTensor, name, value)
        stack.enter_context(mode)
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    missing = object()
    old = vars(owner).get(name, missing) if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(delattr, owner, name) if old is missing else stack.callback(setattr, owner, name, old)


def _methods() -> dict[str, Any]:
    """Methods of fake tensors that answer from what Python and the content say, not from what C++ code believes."""
    return {
        "__torch_dispatch__": _answering_device(FakeTensor.__torch_dispatch__),
        "is_cuda": property(lambda self: self.device.type == "cuda"),
        "is_cpu": property(lambda self: self.device.type == "cpu"),
        "to": _to,
        "cpu": lambda self, memory_format=torch.preserve_format: _moved(self, CPU, None, False, memory_format),
        "cuda": lambda self, device=None, non_blocking=False, memory_format=torch.preserve_format: _moved(
            self, CUDA, None, False, memory_format
        ),
        "new_tensor": _new_tensor,
        "pin_memory": lambda self, device=None: self,
        "is_pinned": lambda self, device=None: False,
        "__deepcopy__": _deepcopy,
        "tolist": _tolist,
        "numpy": _numpy,
        "__array__": _array,
    }


def _noting(mode: ShadowMode, original: Any) -> Any:
    """``torch.set_autocast_enabled``, which says what is on where torch's own question cannot: inside a kernel."""

    def set_autocast_enabled(*args: Any) -> None:
        original(*args)
        mode.autocasts = torch.is_autocast_enabled("cuda")

    return set_autocast_enabled


def _attention(mode: ShadowMode) -> Any:
    """Attention that casts first: builds with CUDA ask the device which kernel to take when they are told CUDA."""
    original = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not mode.autocasts:
            return original(query, key, value, *args, **kwargs)
        dtype = torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", enabled=False):
            return original(query.to(dtype), key.to(dtype), value.to(dtype), *args, **kwargs)

    return scaled_dot_product_attention


def _rms_norm(mode: ShadowMode) -> Any:
    """The norm as one operation, which C++ code chooses only for tensors on CUDA: it keeps no copies in fp32."""
    original = functional.rms_norm

    def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if mode.autocasts or input.device.type != "cuda" or (weight is not None and weight.dtype != input.dtype):
            return original(input, normalized_shape, weight, eps)
        return _aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]

    return rms_norm


def _answering_device(original: Any) -> Any:
    """``FakeTensor.__torch_dispatch__`` that tells torch's C++ code that a CUDA tensor's device is the CPU."""

    def torch_dispatch(
        cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_QUERY:
            return args[0].fake_mode.device_for_cpp(args[0])
        return original(func, types, args, kwargs or {})

    return classmethod(torch_dispatch)


def _to(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to`` in all its forms."""
    if self.fake_mode.in_kernel_invocation:
        return torch.Tensor.to(self, *args, **kwargs)
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    elif "other" in kwargs:
        other = kwargs.pop("other")
        args = (other.device, other.dtype)
    copy = kwargs.pop("copy", False)
    if len(args) > 1 and isinstance(args[-1], bool):  # …, non_blocking, copy
        flags = [arg for arg in args if isinstance(arg, bool)]
        copy = copy or (len(flags) > 1 and flags[1])
        args = args[: len(args) - len(flags)]
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return _moved(self, device, dtype, copy, memory_format)


def _moved(
    tensor: Any, device: torch.device | None, dtype: torch.dtype | None, copy: bool, memory_format: Any
) -> torch.Tensor:
    here = tensor.fake_device
    device = here if device is None or device.type == here.type else device
    dtype = dtype or tensor.dtype
    memory_format = memory_format or torch.preserve_format
    laid_out = memory_format is torch.preserve_format or tensor.is_contiguous(memory_format=memory_format)
    if device == here and dtype == tensor.dtype and laid_out and not copy:
        return tensor
    mode = tensor.fake_mode
    mode.moving, before = True, mode.moving
    try:
        moved: torch.Tensor = _aten._to_copy.default(tensor, dtype=dtype, device=device, memory_format=memory_format)
    finally:
        mode.moving = before
    return moved


def _new_tensor(self: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
    return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(self) not in memo:
        with torch.no_grad():
            copied = self.clone(memory_format=torch.preserve_format)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
    return memo[id(self)]


def _tolist(self: torch.Tensor) -> Any:
    value = _asked(self, "tolist")
    with _disable_current_modes():
        return value.tolist()


def _numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    value = _asked(self, "numpy")
    with _disable_current_modes():
        return value.clone().numpy()


def _array(self: torch.Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    array = _numpy(self)
    return array if dtype is None else array.astype(dtype)


def _asked(tensor: torch.Tensor, method: str) -> torch.Tensor:
    value = content(tensor)
    if value is None:
        raise UnknownValueError(
            f"`{method}` needs the content of a tensor of shape {tuple(tensor.shape)} and dtype `{tensor.dtype}`, "
            "which no shadow run knows"
        )
    return value


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """``Module._apply``, which moves parameters in place; torch's own cannot with fake ones."""
    if recurse:
        for child in module.children():
            child._apply(function)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            _set_data(parameter, function(parameter))
            if parameter.grad is not None:
                _set_data(parameter.grad, function(parameter.grad))
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value``, which torch does not offer for fakes of two devices: the insides are exchanged."""
    if value is tensor:
        return
    other = value.detach().requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, other)
    mine, theirs = dict(tensor.__dict__), dict(other.__dict__)
    tensor.__dict__.update(theirs)
    other.__dict__.update({name: mine[name] for name in theirs if name in mine})
