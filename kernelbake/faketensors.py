"""Fake tensors that know their device, their layout and, where a shape may depend on it, their content.

A shadow run executes a training step on tensors without memory. Three things are added to torch's own fake tensors:

- **Values.** Tensors of integers, and small ones of floats, carry their content beside them as long as it follows from
  known content (``cu_seqlens``, chunk indices, step counters). Operations whose result has a shape that depends on
  content are carried out on it; where it is not known they raise ``UnknownValueError`` instead of guessing.
- **Backward without a device.** torch's autograd engine asks the accelerator's runtime for streams. To torch's C++ code
  the tensors therefore name the CPU as their device, to Python and to the dispatcher CUDA.
- **Stand-ins.** ``stand_in`` gives what Triton's binder reads of a tensor: dtype, alignment and extent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._subclasses.fake_tensor as torch_fakes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

INTEGER_LIMIT = 1 << 22
FLOAT_LIMIT = 1 << 16
"""The most elements of a tensor whose content is followed."""

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_CUDA = torch.device("cuda", 0)
_AUTOCAST = torch._C.DispatchKey.AutocastCUDA
_DEVICE_QUERY = torch.ops.prim.device.default
"""How torch's C++ code asks a tensor for its device; Python's ``tensor.device`` does not come this way."""
_NAMED_AFTER = re.compile(r"^new_|_like$")
"""Operations that make a tensor on the device of another one."""
_EMPTY = frozenset(
    {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default}
)
_OVERWRITES = frozenset({_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default})
"""In-place operations whose result does not depend on what was there."""
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class UnknownValueError(RuntimeError):
    """The step asks for the content of a tensor that has none in a shadow run."""


@dataclasses.dataclass(frozen=True)
class StandIn:
    """What Triton's binder reads of a tensor.

    Args:
        dtype: the tensor's.
        address: its distance in bytes from an aligned base; torch's allocators align to at least 64 bytes.
        num_bytes: extent of the memory behind it.
    """

    dtype: torch.dtype
    address: int
    num_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.num_bytes


def stand_in(tensor: torch.Tensor) -> StandIn:
    """The stand-in of a fake tensor."""
    size = tensor.element_size()
    return StandIn(tensor.dtype, tensor.storage_offset() * size, tensor.untyped_storage().nbytes())


# ---------------------------------------------------------------------------------------------- content


def content(tensor: torch.Tensor) -> torch.Tensor | None:
    """The content of a tensor as a real CPU tensor that shares memory with what is known of its storage, or None."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.device.type == "cpu" else None
    memory = getattr(tensor.untyped_storage(), "_content", None)
    if memory is None:
        return None
    with _disable_current_modes():
        blank = torch.empty(0, dtype=tensor.dtype)
        return blank.set_(memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def forget(tensor: torch.Tensor) -> None:
    """Drops what is known of the content of a tensor's storage; a kernel may have written to it."""
    if isinstance(tensor, FakeTensor):
        tensor.untyped_storage()._content = None


def is_followed(tensor: torch.Tensor) -> bool:
    """Whether the content of tensors of this type and size is followed at all."""
    limit = FLOAT_LIMIT if tensor.dtype.is_floating_point or tensor.dtype.is_complex else INTEGER_LIMIT
    return tensor.numel() <= limit


def _remember(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Makes a real tensor the known content of a fake one of the same shape that owns its storage."""
    storage = fake.untyped_storage()
    if real.stride() != fake.stride() or real.storage_offset() != fake.storage_offset():
        whole = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        laid_out = torch.empty(0, dtype=real.dtype).set_(whole, fake.storage_offset(), fake.shape, fake.stride())
        laid_out.copy_(real)
        real = laid_out
    storage._content = real.untyped_storage()


# ---------------------------------------------------------------------------------------------- the mode


class ShadowMode(FakeTensorMode):
    """Makes every tensor of the process fake while it is entered."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.autocasts = False
        self.moving = False
        self._awaiting_history: set[int] = set()

    @property
    def avoid_device_init(self) -> bool:
        return True

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation on fake tensors and, where all content is known, on the content too."""
        kwargs = dict(kwargs or {})
        if func is _DEVICE_QUERY:
            return self.device_for_cpp(args[0])
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            kwargs["device"] = self._destination(args[0], kwargs["device"])
        elif _NAMED_AFTER.search(func._opname) and isinstance(args[0], FakeTensor) and "device" in kwargs:
            kwargs["device"] = args[0].fake_device  # the default that C++ code filled in is what it believes
        tensors = _tensors(args, kwargs)
        self._adopt(tensors)
        if any(tag in _DYNAMIC for tag in func.tags) and func is not _aten.lift_fresh.default:
            handled, result = self._dynamic(func, args, kwargs, tensors)
            if handled:
                return result
        if func._schema.is_mutable and not func._schema.returns:
            result = None  # writes into tensors whose layout it leaves alone; many have no kernel for fakes
        else:
            result = super().dispatch(func, types, args, kwargs)
        if func not in _EMPTY:
            self._follow(func, args, kwargs, tensors, result)
        if self.autocasts:
            recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            self._awaiting_history = {id(item) for item in _tensors((result,), {})} if recorded else set()
        return result

    def _destination(self, tensor: torch.Tensor, device: torch.device) -> torch.device:
        """Where a copy goes: C++ code names the CPU when it means the device that the tensor is on."""
        if _is_meta(device):  # so does the borrowed guard call the current device
            return _CUDA
        return device if self.moving or not isinstance(tensor, FakeTensor) else tensor.fake_device

    def device_for_cpp(self, tensor: FakeTensor) -> torch.device:
        """The device that torch's C++ code is told: the CPU, so that backward asks for no streams.

        Autocast must see CUDA to cast. Its kernels switch their own key off while they look at their arguments; there,
        autograd's one look at the result of the operation last made is told from autocast's.
        """
        if self.in_kernel_invocation:
            return torch.device("meta")
        if tensor.fake_device.type != "cuda":
            return tensor.fake_device
        if not self.autocasts or not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOCAST):
            return _CPU
        if id(tensor) in self._awaiting_history:
            self._awaiting_history.discard(id(tensor))
            return _CPU
        return tensor.fake_device

    def _adopt(self, tensors: list[torch.Tensor]) -> None:
        """A real tensor from outside is known: its fake twin gets its memory."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                twin = self.from_tensor(tensor)
                if is_followed(tensor):
                    twin.untyped_storage()._content = tensor.untyped_storage()

    def _dynamic(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[bool, Any]:
        """An operation whose result's shape, or whose result altogether, depends on content."""
        if func is _aten.index.Tensor:
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if not masks:
                return False, None
            if all(content(mask) is not None for mask in masks) and content(args[0]) is None:
                with self:
                    return True, _aten.index.Tensor(args[0], self._without_masks(args[1]))
        if func is _aten.masked_select.default and content(args[1]) is not None and content(args[0]) is None:
            with self:
                return True, args[0].new_empty(int(_real(args[1]).expand(args[0].shape).sum()))
        if any(content(tensor) is None for tensor in tensors):
            raise UnknownValueError(
                f"`{func}` needs the content of a tensor of shape {tuple(tensors[0].shape)} and dtype "
                f"`{tensors[0].dtype}`, which no shadow run knows"
            )
        with _disable_current_modes():
            real = func(*_to_real(args), **_to_real(kwargs))
        device = tensors[0].device
        return True, pytree.tree_map_only(torch.Tensor, lambda item: self._fake(item, device), real)

    def _without_masks(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        plain: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                plain.append(index)
                continue
            with _disable_current_modes():
                places = _real(index).nonzero(as_tuple=True)
            plain += [self._fake(place, index.device) for place in places]
        return plain

    def _fake(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        with self:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        with _disable_current_modes():
            _remember(fake, real)
        return fake

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], result: Any) -> None:
        """Carries content from the arguments of an operation to its result, or drops what it has made unknown."""
        written = _written(func, args, kwargs) if func._schema.is_mutable else []
        if not self._can_compute(func, args, kwargs, tensors, written, result):
            for tensor in written:
                forget(tensor)
            return
        for tensor in written:
            if content(tensor) is None:
                with _disable_current_modes():
                    blank = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
                tensor.untyped_storage()._content = blank.untyped_storage()
        with _disable_current_modes():
            real = func(*_to_real(args), **_to_real(kwargs))
            known = {id(tensor.untyped_storage()) for tensor in tensors}
            for fake, value in zip(_tensors((result,), {}), _tensors((real,), {}), strict=True):
                if id(fake.untyped_storage()) not in known and is_followed(fake):
                    _remember(fake, value)

    def _can_compute(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], written: list[torch.Tensor], result: Any
    ) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_known_draw(kwargs, result):
            return False
        results = _tensors((result,), {})
        if not results and not written:
            return False
        if not all(is_followed(item) for item in results) or (not tensors and any(map(_is_meta, results))):
            return False
        overwritten = written[0] if func in _OVERWRITES and written and _owns_storage(written[0]) else None
        return all(tensor is overwritten or content(tensor) is not None for tensor in tensors)


def _is_known_draw(kwargs: Mapping[str, Any], result: Any) -> bool:
    """A draw is known where it comes from the CPU and from a generator of its own."""
    generator = kwargs.get("generator")
    tensors = _tensors((result,), {})
    return (
        generator is not None
        and not getattr(generator, "on_device", False)
        and all(tensor.device.type == "cpu" for tensor in tensors)
    )


def _is_meta(item: Any) -> bool:
    """Whether a device, or the device of a tensor, is the meta device."""
    device = item.device if isinstance(item, torch.Tensor) else item
    return device is not None and torch.device(device).type == "meta"


def _owns_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to, by its schema."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            item = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors((item,), {})
    return found


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """All tensors among arguments, those in lists included."""
    found: list[torch.Tensor] = []
    for item in (*args, *kwargs.values()):
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += [inner for inner in item if isinstance(inner, torch.Tensor)]
    return found


def _real(tensor: torch.Tensor) -> torch.Tensor:
    value = content(tensor)
    assert value is not None, "asked for unknown content"
    return value


def _to_real(item: Any) -> Any:
    """Arguments with tensors replaced by their content and devices by the CPU."""
    if isinstance(item, torch.Tensor):
        return _real(item)
    if isinstance(item, torch.device):
        return _CPU
    if isinstance(item, list | tuple):
        return type(item)(_to_real(inner) for inner in item)
    if isinstance(item, dict):
        return {name: _to_real(inner) for name, inner in item.items()}
    return item


# ---------------------------------------------------------------------------------------------- installation


@contextlib.contextmanager
def entered(mode: ShadowMode) -> Iterator[None]:
    """Runs a block on fake tensors: the mode, and the few places where torch itself must treat them as real."""
    torch.autograd.set_multithreading_enabled(False)
    with contextlib.ExitStack() as stack:
        _replace(stack, torch_fakes, "init_gpu_context", lambda device: None)
        _replace(stack, torch._functorch.config, "fake_tensor_prefer_device_type", "cuda")
        _replace(stack, torch.nn.Module, "_apply", _apply)
        _replace(stack, torch, "set_autocast_enabled", _noting(mode, torch.set_autocast_enabled))
        _replace(stack, functional, "scaled_dot_product_attention", _attention(mode))
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
        "cpu": lambda self, memory_format=torch.preserve_format: _moved(self, _CPU, None, False, memory_format),
        "cuda": lambda self, device=None, non_blocking=False, memory_format=torch.preserve_format: _moved(
            self, _CUDA, None, False, memory_format
        ),
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


def _answering_device(original: Any) -> Any:
    """``FakeTensor.__torch_dispatch__`` that tells torch's C++ code that a CUDA tensor's device is the CPU."""

    def torch_dispatch(
        cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_QUERY:
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
        return tensor  # type: ignore[no-any-return]
    mode = tensor.fake_mode
    mode.moving, before = True, mode.moving
    try:
        moved: torch.Tensor = _aten._to_copy.default(tensor, dtype=dtype, device=device, memory_format=memory_format)
    finally:
        mode.moving = before
    return moved


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
