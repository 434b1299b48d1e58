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

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from kernelbake.fakeresults import ResultCache
from kernelbake.footprint import Ledger

INTEGER_LIMIT = 1 << 22
FLOAT_LIMIT = 1 << 16
"""The most elements of a tensor whose content is followed."""

_aten = torch.ops.aten
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
_META = torch.device("meta")
_AUTOCAST = torch._C.DispatchKey.AutocastCUDA
DEVICE_QUERY = torch.ops.prim.device.default
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


def is_known(tensor: torch.Tensor) -> bool:
    """Whether the content of a tensor is known."""
    if type(tensor) is not FakeTensor:
        return bool(tensor.device.type == "cpu")
    return getattr(tensor.untyped_storage(), "_content", None) is not None


def forget(tensor: torch.Tensor) -> None:
    """Drops what is known of the content of a tensor's storage; a kernel may have written to it."""
    if isinstance(tensor, FakeTensor):
        tensor.untyped_storage()._content = None


def is_followed(tensor: torch.Tensor) -> bool:
    """Whether the content of tensors of this type and size is followed at all."""
    limit = FLOAT_LIMIT if tensor.dtype.is_floating_point or tensor.dtype.is_complex else INTEGER_LIMIT
    return bool(tensor.numel() <= limit)


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Operation:
    """What is asked about an operation each time it runs.

    Args:
        dynamic: the shape of its result, or all of it, depends on content.
        silent: it writes into its arguments and returns nothing.
        in_place: it returns its first argument, whose layout it leaves alone.
        writes: it writes into some argument.
        random: its result is drawn.
        overwrites: its result does not depend on what its first argument held.
        uninitialised: its result holds nothing.
        places: its ``device`` needs a second look.
    """

    dynamic: bool
    silent: bool
    in_place: bool
    writes: bool
    random: bool
    overwrites: bool
    uninitialised: bool
    places: bool


def _learn(func: Any) -> _Operation:
    schema, tags = func._schema, func.tags
    first = schema.arguments[0].alias_info if schema.arguments else None
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    in_place = first is not None and first.is_write and returned is not None and returned.is_write
    return _Operation(
        dynamic=any(tag in _DYNAMIC for tag in tags) and func is not _aten.lift_fresh.default,
        silent=schema.is_mutable and not schema.returns,
        in_place=in_place and torch.Tag.inplace_view not in tags and func._opname.endswith("_"),
        writes=schema.is_mutable,
        random=torch.Tag.nondeterministic_seeded in tags,
        overwrites=func in _OVERWRITES,
        uninitialised=func in _EMPTY,
        places=func is _aten._to_copy.default or _NAMED_AFTER.search(func._opname) is not None,
    )


class ShadowMode(FakeTensorMode):
    """Makes every tensor of the process fake while it is entered.

    Args:
        ledger: is told of every result.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._ledger = ledger
        self._depth = 0
        self.cache_enabled = False  # for a faster one
        self.autocasts = False
        self.moving = False
        self._recording = False
        self._awaiting_history: set[int] = set()
        self._operations: dict[Any, _Operation] = {}
        self._results = ResultCache(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper would cost as much as the work

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation on fake tensors and, where all content is known, on the content too."""
        if func is DEVICE_QUERY:
            return self.device_for_cpp(args[0])
        self._depth += 1  # what an operation is made of is nothing that a kernel would allocate
        try:
            result = self._run(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        if self._ledger is not None and not self._depth:
            self._ledger.note(result)
        return result

    def _run(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        operation = self._operations.get(func)
        if operation is None:
            operation = self._operations[func] = _learn(func)
        if operation.places and "device" in kwargs:
            kwargs = {**kwargs, "device": self._place(func, args[0], kwargs["device"])}
        tensors = _tensors(args, kwargs)
        foreign = [tensor for tensor in tensors if type(tensor) is not FakeTensor]
        for tensor in foreign:
            self._adopt(tensor)
        if operation.dynamic:
            handled, result = self._dynamic(func, args, kwargs, tensors)
            if handled:
                return result
        if operation.silent:
            result = None  # many such operations have no kernel for fakes
        elif operation.in_place and not foreign:
            result = args[0]
            if func is not _aten.copy_.default:
                _relabel(result, tensors)
        elif foreign:
            result = self.dispatch(func, types, args, kwargs)
        else:
            result = self._results.get(func, types, args, kwargs, tensors)
        if not operation.uninitialised:
            self._follow(operation, func, args, kwargs, tensors, result)
        if self.autocasts:
            recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            self._awaiting_history = {id(item) for item in _tensors((result,), {})} if recorded else set()
        return result

    def _place(self, func: Any, tensor: torch.Tensor, device: torch.device | None) -> torch.device | None:
        """Where a result goes: C++ code names the CPU when it means the device that a tensor is on."""
        if device is None:
            return None
        if _is_meta(device) and func is _aten._to_copy.default:  # so does the borrowed guard call the current device
            return CUDA
        meant_here = device.type == "cpu" and isinstance(tensor, FakeTensor) and not self.moving
        return tensor.fake_device if meant_here else device

    def device_for_cpp(self, tensor: FakeTensor) -> torch.device:
        """The device that torch's C++ code is told: the CPU, so that backward asks for no streams.

        Autocast must see CUDA to cast. Its kernels switch their own key off while they look at their arguments; there,
        autograd's looks at a leaf and at the result of the operation last made are told from autocast's.
        """
        if self.in_kernel_invocation:
            return _META
        if tensor.fake_device.type != "cuda":
            return tensor.fake_device
        if not self.autocasts or self._recording or not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOCAST):
            return CPU
        if id(tensor) in self._awaiting_history:
            self._awaiting_history.discard(id(tensor))
            return CPU
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            self._record_leaf(tensor)
        return tensor.fake_device

    def _record_leaf(self, tensor: FakeTensor) -> None:
        """Has autograd take its one look at a leaf now, while the answer is the CPU."""
        if "_accumulator" in tensor.__dict__:
            return
        self._recording = True
        try:
            with self:
                tensor.__dict__["_accumulator"] = torch.autograd.graph.get_gradient_edge(tensor).node
        finally:
            self._recording = False

    def _adopt(self, tensor: torch.Tensor) -> None:
        """A real tensor from outside is known: its fake twin gets its memory."""
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
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

    def _follow(
        self,
        operation: _Operation,
        func: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        result: Any,
    ) -> None:
        """Carries content from the arguments of an operation to its result, or drops what it has made unknown."""
        written = _written(func, args, kwargs) if operation.writes else []
        if not self._can_compute(operation, kwargs, tensors, written, result):
            for tensor in written:
                forget(tensor)
            return
        for tensor in written:
            if content(tensor) is None:
                with _disable_current_modes():
                    blank = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
                tensor.untyped_storage()._content = blank.untyped_storage()
        with _disable_current_modes():
            real = func(*_to_real(args), **_to_real(dict(kwargs)))
            known = {id(tensor.untyped_storage()) for tensor in tensors}
            for fake, value in zip(_tensors((result,), {}), _tensors((real,), {}), strict=True):
                if id(fake.untyped_storage()) not in known and is_followed(fake):
                    _remember(fake, value)

    def _can_compute(
        self,
        operation: _Operation,
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        written: list[torch.Tensor],
        result: Any,
    ) -> bool:
        overwritten = written[0] if operation.overwrites and written and _owns_storage(written[0]) else None
        if not all(tensor is overwritten or is_known(tensor) for tensor in tensors):
            return False
        if operation.random and not _is_known_draw(kwargs, result):
            return False
        results = _tensors((result,), {})
        if not results and not written:
            return False
        return all(map(is_followed, results)) and (bool(tensors) or not any(map(_is_meta, results)))


def _relabel(result: FakeTensor, tensors: list[torch.Tensor]) -> None:
    """Puts a tensor that C++ code has made for tensors on CUDA there, too; two devices would be refused for real."""
    if result.fake_device.type == "cpu" and any(item.dim() and item.fake_device.type == "cuda" for item in tensors):
        result.fake_device = CUDA


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
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


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
        return CPU
    if isinstance(item, list | tuple):
        return type(item)(_to_real(inner) for inner in item)
    if isinstance(item, dict):
        return {name: _to_real(inner) for name, inner in item.items()}
    return item
