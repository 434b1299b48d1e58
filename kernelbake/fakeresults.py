"""The layouts of operations' results, remembered: torch works them out anew for every call, at many times the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_META = torch.device("meta")
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_empty_strided = torch.ops.aten.empty_strided.default


class ResultCache:
    """The layouts of results that equal calls had before: most of a training step repeats itself, layer by layer."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, tuple[type | None, tuple[_Layout | None, ...]]] = {}
        self._templates: dict[torch.device, dict[str, Any]] = {}

    def get(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """The result of an operation on fake tensors."""
        key = _call_key(func, args, kwargs)
        known = self._known.get(key) if key is not None else None
        if known is not None:
            kind, layouts = known
            items = [layout if layout is None else self._make(layout, tensors) for layout in layouts]
            return items[0] if kind is None else kind(items)
        result = self._mode.dispatch(func, types, args, kwargs)
        if key is not None:
            self._learn(key, result, tensors)
        return result

    def _learn(self, key: Any, result: Any, tensors: list[torch.Tensor]) -> None:
        kind = type(result) if type(result) in (list, tuple) else None
        items = [result] if kind is None else list(result)
        layouts = [None if item is None else _layout(item, tensors) for item in items]
        if all(item is None or layout is not None for item, layout in zip(items, layouts, strict=True)):
            self._known[key] = (kind, tuple(layouts))

    def _make(self, layout: _Layout, tensors: list[torch.Tensor]) -> torch.Tensor:
        if layout.shares is None:
            memory = _empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META)
        else:
            storage = tensors[layout.shares].untyped_storage()
            memory = _empty_strided((), (), dtype=layout.dtype, device=_META)
            memory.set_(storage, layout.offset, layout.shape, layout.stride)
        return self._fake(memory, layout.device)

    def _fake(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor as torch's own constructor makes it; what one of its making looks like is copied."""
        template = self._templates.get(device)
        if template is None:
            made: torch.Tensor = FakeTensor(self._mode, memory, device)
            self._templates[device] = dict(made.__dict__)
            return made
        fake = torch.Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(template)
        return fake


class _Layout(NamedTuple):
    """Layout of a result; ``shares`` is the position among the tensor arguments of the one whose storage it views."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    shares: int | None


def _layout(item: Any, tensors: list[torch.Tensor]) -> _Layout | None:
    """The layout of a result, or None where it cannot be made again from its layout."""
    if type(item) is not FakeTensor or item.layout is not torch.strided or item.dtype.is_complex:
        return None
    storage = item.untyped_storage()._cdata
    sharing = [place for place, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage]
    if any(item is tensor for tensor in tensors):
        return None
    shape, stride, offset = tuple(item.shape), item.stride(), item.storage_offset()
    if not sharing and (offset or item.untyped_storage().nbytes() != extent(shape, stride) * item.element_size()):
        return None
    return _Layout(shape, stride, offset, item.dtype, item.fake_device, sharing[0] if sharing else None)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory that a strided tensor needs."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _call_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Everything that the layout of a result can depend on, or None where that cannot be told."""
    try:
        parts = [_call_part(arg) for arg in args]
        return (func, *parts, *((name, _call_part(value)) for name, value in kwargs.items()))
    except TypeError:
        return None


def _call_part(item: Any) -> Any:
    kind = type(item)
    if kind is FakeTensor:
        return (item.shape, item.stride(), item.storage_offset(), item.dtype, item.fake_device)
    if kind in _PLAIN:
        return (kind, item)
    if kind in (list, tuple):
        return tuple([_call_part(part) for part in item])
    if isinstance(item, torch._C.Generator):
        return kind
    raise TypeError(kind.__name__)
