"""The tensors of a launch, run on copies, and how far two results are apart.

Candidates never touch what the trainer holds. They run on *working copies* with guard bands around them; the trainer's
own tensors stay as they are and are what a copy is restored from. What a kernel writes is found out by looking, since
Triton does not say: bytes that changed, and elements that keep a poison they were filled with.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kernelbake.choose import Difference

GUARD_BYTES = 4096
ALIGNMENT = 512
"""Of the CUDA allocator; a copy has the same offset from it as the original, so that the code sees equal alignment."""

_GUARD_FILL = 0xA5
_CHUNK = 1 << 24

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_POISONS = {
    torch.float16: 0x7E01,
    torch.bfloat16: 0x7FC1,
    torch.float32: 0x7FDA5A01,
    torch.float64: 0x7FFA5A5A5A5A5A01,
}
"""Bit patterns of quiet NaNs with a payload that no arithmetic makes: hardware returns ``0x7fff…`` or an operand."""

_PAYLOADS = 60
"""How many patterns follow one another in every dtype; bfloat16 has 62 between the canonical ones."""

_SCALE = {torch.float16: 0.25, torch.float32: 1 / 16, torch.float64: 1e-6}
"""Tolerance of a launch relative to the policy's, by its coarsest floating dtype; 1 for bfloat16 and anything coarser.

Powers of two from the mantissas (8 bits for bfloat16, 11 for float16 and for float32 products in tf32), with room for
the longer sums that a wider dtype invites."""

_ELEMENT_FACTOR = 8
"""A single element may be this many tolerances off, relative to its own size plus the tensor's root mean square."""


def tensors_in(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, inside tuples and lists too."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, tuple | list):
            yield from tensors_in(item)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def poison_of(dtype: torch.dtype, position: int) -> int:
    """The pattern for the argument at a position: different ones, so that a copy of an input shows as written."""
    return _POISONS[dtype] + position % _PAYLOADS


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and past-the-last byte of a tensor in its storage."""
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one != other).any()


def bits_differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether two tensors of one dtype and shape differ in any bit, as a tensor that nobody has waited for."""
    if all(_is_wide(tensor) for tensor in (one, other)):
        one, other = (tensor.reshape(-1).view(torch.int64) for tensor in (one, other))
        return _differ(one, other)
    return _differ(bits(one), bits(other))


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether its memory can be looked at in words of eight bytes."""
    size = tensor.element_size()
    aligned = tensor.storage_offset() * size % 8 == 0 and tensor.numel() * size % 8 == 0
    return bool(aligned and tensor.is_contiguous() and tensor.dim() > 0 and tensor.numel() > 0)


def _pieces(one: torch.Tensor, other: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two ranges of bytes of one length, cut so that most is compared in words of eight bytes."""
    start, size = one.storage_offset(), one.numel()
    if size < 64 or (start - other.storage_offset()) % 8:
        return [(one, other)]
    head = -start % 8
    end = head + (size - head) // 8 * 8
    middle = (one[head:end].view(torch.int64), other[head:end].view(torch.int64))
    edges = [(one[low:high], other[low:high]) for low, high in ((0, head), (end, size)) if low < high]
    return [middle, *edges]


def wait(flags: Sequence[torch.Tensor]) -> list[bool]:
    """The values of flags on one device, waited for once."""
    return torch.stack(list(flags)).tolist() if flags else []


def _window(storage: torch.UntypedStorage, dtype: torch.dtype, offset_bytes: int, shape: Any, stride: Any) -> Any:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset_bytes // itemsize, tuple(shape), tuple(stride))


class Extent:
    """A range of bytes of one storage that arguments cover, and its working copy with guard bands.

    Args:
        storage: of the trainer.
        start, end: the range in bytes.
    """

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        self._storage, self.start, self.end = storage, start, end
        self.live = _window(storage, torch.uint8, start, (end - start,), (1,))
        self._shift = GUARD_BYTES + (storage.data_ptr() + start) % ALIGNMENT
        size = self._shift + (end - start) + GUARD_BYTES
        self._buffer = torch.full((size,), _GUARD_FILL, dtype=torch.uint8, device=storage.device)
        self.work = self._buffer[self._shift : self._shift + end - start]
        self.covered: torch.Tensor | None = None
        self._compared = _pieces(self.live, self.work)
        self.guards = (self._buffer[: self._shift], self._buffer[self._shift + end - start :])
        self.restore()

    def restore(self) -> None:
        self.work.copy_(self.live)

    def changed(self) -> torch.Tensor:
        """Whether any byte differs from the trainer's, as a tensor that nobody has waited for."""
        found, *rest = (_differ(work, live) for live, work in self._compared)
        for flag in rest:
            found = found | flag
        return found

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The working copy of a tensor that lies in this range."""
        offset = self._shift + tensor.storage_offset() * tensor.element_size() - self.start
        view: torch.Tensor = _window(
            self._buffer.untyped_storage(), tensor.dtype, offset, tensor.shape, tensor.stride()
        )
        return view

    def cover(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remembers which bytes no argument covers: between the rows of a view, say."""
        if any(t.is_contiguous() and t.numel() * t.element_size() == self.end - self.start for t in tensors):
            return
        size = self._buffer.numel()
        mask = torch.zeros(size, dtype=torch.uint8, device=self._buffer.device)
        for tensor in tensors:
            offset = self._shift + tensor.storage_offset() * tensor.element_size() - self.start
            shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
            window = bits(_window(mask.untyped_storage(), tensor.dtype, offset, shape, tensor.stride()))
            window.fill_(255 if window.dtype is torch.uint8 else -1)
        inside = mask[self._shift : self._shift + self.end - self.start]
        self.covered = None if bool(inside.all()) else inside

    def strayed(self) -> torch.Tensor | None:
        """Whether bytes between arguments changed, as a tensor that nobody has waited for; None if there are none."""
        if self.covered is None:
            return None
        return ((self.work != self.live) & (self.covered == 0)).any()

    def mend(self) -> None:
        """Fills the guard bands again."""
        for guard in self.guards:
            guard.fill_(_GUARD_FILL)


def extents_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int, int]]:
    """The disjoint byte ranges that tensors cover, those of one storage that overlap or touch merged."""
    storages: dict[int, torch.UntypedStorage] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.numel():
            storages[storage.data_ptr()] = storage
            ranges.setdefault(storage.data_ptr(), []).append(_byte_range(tensor))
    found = []
    for pointer, pieces in ranges.items():
        start, end = sorted(pieces)[0]
        for low, high in sorted(pieces):
            if low > end:
                found.append((storages[pointer], start, end))
                start = low
            end = max(end, high)
        found.append((storages[pointer], start, end))
    return found


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run left behind.

    Args:
        plain: contents of every tensor that changed, by its position among the arguments.
        poisoned: contents after a run in which those of ``plain`` with a floating dtype were filled with poison.
    """

    plain: Mapping[int, torch.Tensor]
    poisoned: Mapping[int, torch.Tensor]


class Arguments:
    """Working copies of all tensors of a call.

    Args:
        names: of the parameters, for messages; one for each of ``values``.
        values: the call's arguments, bound; the tensors in them are the trainer's.
        tolerance: the policy's.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any], tolerance: float) -> None:
        self._names: list[str] = []
        self.live: list[torch.Tensor] = []
        for name, value in zip(names, values, strict=True):
            for tensor in tensors_in([value]):
                self._names.append(name)
                self.live.append(tensor.detach())
        self._extents = [Extent(*found) for found in extents_of(self.live)]
        self.work = [self._place(tensor) for tensor in self.live]
        self._inside = [
            [position for position, tensor in enumerate(self.live) if self._lies_in(tensor, extent)]
            for extent in self._extents
        ]
        for extent, inside in zip(self._extents, self._inside, strict=True):
            extent.cover([self.live[position] for position in inside])
        self._written: set[int] = set()
        floats = [tensor.dtype for tensor in self.live if tensor.dtype.is_floating_point]
        scales = [_SCALE.get(dtype, 1.0) for dtype in floats]
        self.tolerance = tolerance * max(scales, default=1.0)

    @property
    def names(self) -> Sequence[str]:
        """For each tensor the parameter that it came with."""
        return self._names

    @staticmethod
    def bytes_needed(values: Sequence[Any]) -> int:
        """Device memory that working copies of these arguments take, in bytes."""
        tensors = list(tensors_in(values))
        return sum(end - start + 2 * GUARD_BYTES + ALIGNMENT for _, start, end in extents_of(tensors))

    @staticmethod
    def _lies_in(tensor: torch.Tensor, extent: Extent) -> bool:
        low, high = _byte_range(tensor)
        same = tensor.untyped_storage().data_ptr() == extent._storage.data_ptr()
        return same and tensor.numel() > 0 and extent.start <= low and high <= extent.end

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        for extent in self._extents:
            if self._lies_in(tensor, extent):
                return extent.view(tensor)
        return torch.empty_like(tensor)

    def replaced(self, item: Any) -> Any:
        """An argument with working copies in place of the trainer's tensors."""
        if isinstance(item, torch.Tensor):
            for live, work in zip(self.live, self.work, strict=True):
                if _same_window(live, item):
                    return work
            raise LookupError("a tensor that is no argument of the call")
        if isinstance(item, tuple | list):
            parts = [self.replaced(part) for part in item]
            return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
        return item

    def restore(self) -> None:
        """Gives every working copy that any run has changed its first contents again."""
        for index in self._written:
            self._extents[index].restore()

    def changed(self) -> list[int]:
        """Positions of the tensors that differ from the trainer's; remembers them for ``restore``."""
        flags = wait([extent.changed() for extent in self._extents])
        touched = {index for index, changed in enumerate(flags) if changed}
        self._written |= touched
        suspects = sorted(position for index in touched for position in self._inside[index])
        alone = {self._inside[index][0] for index in touched if self._is_alone(index)}
        doubtful = [position for position in suspects if position not in alone]
        flags = wait([bits_differ(self.live[position], self.work[position]) for position in doubtful])
        return sorted({*alone, *(position for position, changed in zip(doubtful, flags, strict=True) if changed)})

    def _is_alone(self, index: int) -> bool:
        """Whether an extent is nothing but one tensor, which has then changed if the extent has."""
        extent, inside = self._extents[index], self._inside[index]
        size = self.live[inside[0]].numel() * self.live[inside[0]].element_size()
        return len(inside) == 1 and size == extent.end - extent.start and self.live[inside[0]].is_contiguous()

    def straying(self) -> torch.Tensor:
        """Whether bytes changed where no argument is: in guard bands, and in extents between arguments.

        A tensor that nobody has waited for.
        """
        guards = [guard for extent in self._extents for guard in extent.guards]
        if not guards:
            return torch.zeros(1, dtype=torch.bool)
        found = [_differ(torch.cat(guards), torch.full_like(guards[0][:1], _GUARD_FILL))]
        return torch.stack([*found, *(flag for extent in self._extents if (flag := extent.strayed()) is not None)])

    def strayed(self, found: torch.Tensor | None = None) -> bool:
        """Whether a run has written where no argument is; the guard bands are mended.

        Args:
            found: what ``straying`` gave after the run; asked now if None.
        """
        strayed = any((self.straying() if found is None else found).tolist())
        if strayed:
            for extent in self._extents:
                extent.mend()
        return strayed

    def contents(self, positions: Iterable[int]) -> dict[int, torch.Tensor]:
        """Copies of working copies."""
        return {position: self.work[position].clone() for position in positions}

    def poison(self, positions: Iterable[int]) -> list[int]:
        """Fills floating working copies with poison; returns which."""
        filled = []
        for position in positions:
            tensor = self.work[position]
            if tensor.dtype in _POISONS:
                bits(tensor).fill_(poison_of(tensor.dtype, position))
                filled.append(position)
        return filled

    def unpoison(self, positions: Iterable[int]) -> None:
        """Gives the working copies of these tensors their first contents again, whoever changed them."""
        for extent in self._extents:
            if any(self._lies_in(self.live[position], extent) for position in positions):
                extent.restore()

    def all_but(self, positions: Iterable[int]) -> list[int]:
        """The other positions."""
        return sorted(set(range(len(self.live))) - set(positions))

    def untouched(self, position: int) -> bool:
        """Whether a poisoned working copy is still nothing but poison."""
        tensor = self.work[position]
        return bool((bits(tensor) == poison_of(tensor.dtype, position)).all())

    def holds(self, contents: Mapping[int, torch.Tensor]) -> bool:
        """Whether working copies have just these contents, to the last bit, NaNs included."""
        return not any(wait([bits_differ(content, self.work[position]) for position, content in contents.items()]))

    def overwrites(self, result: Result) -> bool:
        """Whether a launch writes every element of what it writes and reads none of it first: then nothing has to be
        restored between two runs."""
        if result.plain.keys() != result.poisoned.keys():
            return False
        return not any(wait([bits_differ(result.plain[p], result.poisoned[p]) for p in result.plain]))

    def difference(self, one: Result, other: Result) -> Difference:
        """How far one result is from another; they agree within the tolerance or the detail says where they do not."""
        worst = Difference(0.0)
        for position in sorted({*one.plain, *other.plain}):
            name = self._names[position]
            mine, theirs = (result.plain.get(position, self.live[position]) for result in (one, other))
            worst = _worse(worst, compare(mine, theirs, self.tolerance, name))
        both = sorted(one.poisoned.keys() & other.poisoned.keys())
        flags = wait([bits_differ(one.poisoned[position], other.poisoned[position]) for position in both])
        for position in itertools.compress(both, flags):
            name = self._names[position]
            mine, theirs = one.poisoned[position], other.poisoned[position]
            worst = _worse(worst, _coverage(mine, theirs, poison_of(mine.dtype, position), name))
            worst = _worse(worst, compare(mine, theirs, self.tolerance, name))
        return worst

    def expected(self, result: Result, reference: Mapping[str, Any], tolerance: float) -> Difference:
        """How far a result is from an oracle's, for the tensors that the oracle speaks of.

        Args:
            reference: contents by parameter name.
            tolerance: the oracle's.
        """
        worst = Difference(0.0)
        for name, wanted in reference.items():
            positions = [position for position, known in enumerate(self._names) if known == name]
            if len(positions) != 1:
                worst = _worse(worst, Difference(math.inf, f"the oracle speaks of `{name}`, which is no tensor here"))
                continue
            found = result.plain.get(positions[0], self.live[positions[0]])
            worst = _worse(worst, compare(found, wanted.to(found.device), tolerance, name))
        return worst


def _same_window(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(
        (
            one.data_ptr() == other.data_ptr(),
            one.dtype == other.dtype,
            one.shape == other.shape,
            one.stride() == other.stride(),
        )
    )


def _worse(one: Difference, other: Difference) -> Difference:
    """The one that disagrees, or the larger."""
    if one.agrees != other.agrees:
        return other if one.agrees else one
    return other if other.error > one.error else one


def _coverage(mine: torch.Tensor, theirs: torch.Tensor, poison: int, name: str) -> Difference:
    """Whether two poisoned runs left the same elements unwritten."""
    kept, also = bits(mine) == poison, bits(theirs) == poison
    left = int((kept & ~also).sum())
    if left:
        return Difference(math.inf, f"leaves {left} of {mine.numel()} elements of `{name}` unwritten")
    extra = int((also & ~kept).sum())
    if extra:
        return Difference(math.inf, f"writes {extra} elements of `{name}` that the others leave alone")
    return Difference(0.0)


def compare(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, name: str) -> Difference:
    """How far one tensor is from another of the same shape.

    Two tests, since the norm alone hides a single wrong tile in a large tensor: ``‖a − b‖ / ‖b‖`` over all elements,
    and ``|a − b| / (|b| + rms(b))`` for each. Equal infinities and NaNs in both are equal; integers must be equal.
    """
    if found.shape != wanted.shape:
        return Difference(math.inf, f"`{name}` has shape {tuple(found.shape)}; wanted {tuple(wanted.shape)}")
    if not found.numel() or (found.dtype == wanted.dtype and not wait([bits_differ(found, wanted)])[0]):
        return Difference(0.0)
    if not found.dtype.is_floating_point:
        wrong = int((found != wanted).sum())
        return Difference(math.inf, f"{wrong} elements of `{name}` differ")
    squares, gaps, largest, odd = _measured(found.reshape(-1), wanted.reshape(-1))
    if odd:
        return Difference(math.inf, f"{odd} elements of `{name}` are finite in one and not in the other")
    norm = math.sqrt(squares)
    error = math.sqrt(gaps) / norm if norm else (0.0 if gaps == 0.0 else math.inf)
    if error > tolerance:
        return Difference(error, f"`{name}` is off by {error:.2e} of its norm; allowed {tolerance:.0e}")
    if largest > tolerance * _ELEMENT_FACTOR:
        return Difference(error, f"an element of `{name}` is off by {largest:.2e} of its size; error {error:.2e}")
    return Difference(error)


def _measured(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float, float, int]:
    """``‖b‖²``, ``‖a − b‖²``, the largest ``|a − b| / (|b| + rms(b))``, and how many are finite in one only.

    In float32 for everything narrower: sums over a chunk are made pairwise and added up in double. Of several chunks
    none is kept, since a tensor may take up much of the device: they are made again for the largest.
    """
    work = torch.float64 if torch.float64 in (found.dtype, wanted.dtype) else torch.float32
    pairs = list(zip(found.split(_CHUNK), wanted.split(_CHUNK), strict=True))
    kept = [_gaps(*pairs[0], work)] if len(pairs) == 1 else None
    sums = []
    for gap, size, odd in kept or (_gaps(*pair, work) for pair in pairs):
        sums.append((size.square().sum().double(), gap.square().sum().double(), odd.sum().double()))
    squares, gaps, number = (torch.stack(column).sum() for column in zip(*sums, strict=True))
    rms = math.sqrt(float(squares) / found.numel())
    tiny = torch.finfo(work).tiny
    ratios = [
        (gap / (size + rms).clamp_min(tiny)).max().double()
        for gap, size, _ in kept or (_gaps(*pair, work) for pair in pairs)
    ]
    norm, total, largest, many = torch.stack([squares, gaps, torch.stack(ratios).max(), number]).tolist()
    return norm, total, largest, int(many)


def _gaps(
    found: torch.Tensor, wanted: torch.Tensor, work: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``|a − b|``, ``|b|``, both 0 where not both are finite, and where just one is."""
    a, b = found.to(work), wanted.to(work)
    both = torch.isfinite(a) & torch.isfinite(b)
    odd = ~both & ~((a == b) | (a.isnan() & b.isnan()))
    return torch.where(both, (a - b).abs(), 0.0), torch.where(both, b.abs(), 0.0), odd
