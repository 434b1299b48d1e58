"""Writes the launch function of a kernel: autotuner, heuristics and JIT path of its planned launches as straight code.

The function takes the kernel's parameters under their own names, checks what all planned launches have in common, and
looks up what distinguishes them. It answers only for calls of which that proves which planned launch they are; every
other call goes to the general path, which works everything out as Triton does, and is the only one that may refuse.

What a call is recognised by, per argument, is finer than or equal to Triton's specialization and autotune key: dtype,
alignment and presence of a pointer, Triton's own specialization (and, where the autotune key holds it, the exact value)
of a number, value and type of a constexpr. The sources of those rules are ``create_function_from_signature`` and
``Autotuner.run`` in Triton 3.6 to 3.9. Pure: live objects only pass through.
"""

from __future__ import annotations

import dataclasses
import keyword
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

PREFIX = "kb_"
"""All names that the written code uses for itself begin so."""


class UnsupportedShapeError(Exception):
    """A kernel whose launches the written code cannot tell apart; the general path serves it."""


class _Unset:
    def __repr__(self) -> str:
        return "<not passed>"


UNSET: Any = _Unset()


@dataclasses.dataclass(frozen=True)
class Argument:
    """One parameter of the kernel, as far as the caller is concerned.

    Args:
        name: the parameter.
        constexpr: declared as a constexpr.
        keyword_only: declared after a ``*``.
        default: its default, or ``UNSET``.
        special: the flags that Triton's binder gives to its specializer: const, specialize, align.
        annotation: the type that an annotation fixes, or "".
        optional: left out by the caller means what Triton makes of it (its default), and nothing else depends on it.
    """

    name: str
    constexpr: bool
    keyword_only: bool = False
    default: Any = UNSET
    special: tuple[bool, bool, bool] = (False, True, True)
    annotation: str = ""
    optional: bool = True


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A tensor of that dtype; ``aligned`` is None where alignment is not specialized on."""

    dtype: Any
    aligned: bool | None


@dataclasses.dataclass(frozen=True)
class Nothing:
    """None."""


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that Triton specializes as ``spec``; ``value`` where the autotune key holds it, else ``UNSET``."""

    kind: type
    spec: tuple[Any, Any]
    value: Any = UNSET


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constexpr's value, or that of a launch option; ``UNSET`` for an option that is not passed."""

    value: Any


Cell: TypeAlias = Pointer | Nothing | Number | Constant


@dataclasses.dataclass(frozen=True)
class Row:
    """One planned way to launch the kernel.

    Args:
        cells: what the caller passes for each argument.
        options: the launch options that the caller passes.
        target: what the launch resolves to; two rows of one pattern must have the same.
        payload: device index → the values of ``PAYLOAD`` for it, in order.
    """

    cells: Mapping[str, Cell]
    options: Mapping[str, Any]
    target: Any
    payload: Mapping[int, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the code is written from.

    Args:
        name: of the kernel, for tracebacks.
        arguments: those that the caller may pass, in the kernel's order; config and heuristics supply the rest.
        supplied: parameters, in the kernel's order, that config and heuristics supply.
        order: all parameters in the kernel's order.
        call: makes the text of the launch from the texts of its arguments; uses the names of ``PAYLOAD``.
        payload: names of the values that a row's payload holds; ``kb_kernel`` and ``kb_meta`` among them.
        check_device: whether a tensor says on which device it lies; else all lie on the current one.
    """

    name: str
    arguments: Sequence[Argument]
    supplied: Sequence[str]
    order: Sequence[str]
    call: Callable[[Sequence[str]], str]
    payload: Sequence[str]
    check_device: bool


@dataclasses.dataclass
class _Parts:
    """What the arguments contribute to the code."""

    defaults: list[str] = dataclasses.field(default_factory=list)
    before: list[str] = dataclasses.field(default_factory=list)
    aligned: list[str] = dataclasses.field(default_factory=list)
    checks: list[str] = dataclasses.field(default_factory=list)
    elements: list[str] = dataclasses.field(default_factory=list)
    keys: list[list[Any]] = dataclasses.field(default_factory=list)
    passed: list[str] = dataclasses.field(default_factory=list)
    located: bool = False
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)

    def constant(self, value: Any) -> str:
        """The name under which the code finds a value."""
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"{PREFIX}c{len(self.constants)}"
        self.constants[name] = value
        return name

    def element(self, text: str, values: Sequence[Any]) -> None:
        """Adds a part of the key, with its value for every row."""
        self.elements.append(text)
        for key, value in zip(self.keys, values, strict=True):
            key.append(value)


def write(shape: Shape, rows: Sequence[Row], runtime: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The launch function, called as ``function(grid, *args, **kwargs)``, and its namespace.

    Args:
        shape: the kernel.
        rows: its planned launches, at least one.
        runtime: the live objects that the code uses: ``kb_general`` (grid, arguments by name, options) for every call
            that is not recognised, ``kb_quiet`` (the text of a condition: nobody watches launches), ``kb_current`` (→
            the current device), ``kb_switch`` (device → context in which it is the current one), ``kb_stream_of``
            (device → stream), ``kb_hit``, ``kb_spec`` and ``kb_backend`` (Triton's specializer and its first argument).

    Raises:
        UnsupportedShapeError: the kernel cannot be served like this, with the reason.
    """
    names = [argument.name for argument in shape.arguments]
    if any(name.startswith(PREFIX) or keyword.iskeyword(name) for name in shape.order):
        raise UnsupportedShapeError("a parameter's name would be taken for one of the code's own")
    parts = _Parts(keys=[[] for _ in rows])
    columns = [(argument, [row.cells[argument.name] for row in rows]) for argument in shape.arguments]
    for argument, cells in columns:
        _argument(parts, argument, cells, shape)
    options = sorted({name for row in rows for name in row.options} - set(shape.order))
    for name in options:
        _constexpr(parts, name, [Constant(row.options.get(name, UNSET)) for row in rows])
    if len({name for row in rows for name in row.options} - set(options)):
        raise UnsupportedShapeError("a launch option has the name of a parameter")
    stepped_over = _stepped_over(shape)
    parts.checks += [f"{name} is kb_unset" for name in stepped_over]
    names += stepped_over
    source = "\n".join(_function(shape, parts, names, options, str(runtime["kb_quiet"])))
    namespace = {**runtime, **parts.constants, "kb_tables": _tables(rows, parts.keys), "kb_unset": UNSET}
    exec(compile(source, f"<launch of {shape.name}>", "exec"), namespace)
    function = namespace.pop(f"{PREFIX}function_")
    return function, namespace


def _tables(rows: Sequence[Row], keys: Sequence[Sequence[Any]]) -> dict[int, dict[tuple[Any, ...], tuple[Any, ...]]]:
    tables: dict[int, dict[tuple[Any, ...], tuple[Any, ...]]] = {}
    targets: dict[tuple[Any, ...], Any] = {}
    for row, key in zip(rows, keys, strict=True):
        try:
            if targets.setdefault(tuple(key), row.target) != row.target:
                raise UnsupportedShapeError("two planned launches differ in something that no argument shows")
        except TypeError as error:
            raise UnsupportedShapeError(f"an argument cannot be looked up ({error})") from error
        for device, payload in row.payload.items():
            tables.setdefault(device, {})[tuple(key)] = payload
    return tables


# ---------------------------------------------------------------------------------------------- arguments


def _argument(parts: _Parts, argument: Argument, cells: Sequence[Cell], shape: Shape) -> None:
    name = argument.name
    if argument.default is not UNSET and argument.optional:
        name = f"{PREFIX}a_{argument.name}"
        default = parts.constant(argument.default)
        parts.defaults.append(f"{name} = {default} if {argument.name} is kb_unset else {argument.name}")
    if argument.constexpr:
        _constexpr(parts, name, cells)
        return
    kinds = {type(cell) for cell in cells}
    if kinds == {Nothing}:
        parts.checks.append(f"{name} is None")
        parts.passed.append("None")
    elif Pointer in kinds and kinds <= {Pointer, Nothing}:
        _pointer(parts, name, cells, optional=Nothing in kinds, check_device=shape.check_device)
    elif Number in kinds and kinds <= {Number, Nothing}:
        _number(parts, name, argument, cells)
    else:
        raise UnsupportedShapeError(f"`{argument.name}` is a pointer in one launch and a value in another")


def _pointer(parts: _Parts, name: str, cells: Sequence[Cell], *, optional: bool, check_device: bool) -> None:
    number = len(parts.passed)
    address, dtype = f"{PREFIX}p{number}", f"{PREFIX}d{number}"
    pointers = [cell for cell in cells if isinstance(cell, Pointer)]
    alignments = {pointer.aligned for pointer in pointers}
    uniform = len({pointer.dtype for pointer in pointers}) == 1 and not optional
    found = [f"{address} = {name}.data_ptr()"]
    if not uniform:
        found.append(f"{dtype} = {name}.dtype")
        parts.element(dtype, [cell.dtype if isinstance(cell, Pointer) else None for cell in cells])
    else:
        parts.checks.append(f"{name}.dtype is {parts.constant(pointers[0].dtype)}")
    if check_device and not parts.located and not optional:
        parts.located = True
        parts.before.insert(0, f"kb_device = {name}.get_device()")
    elif check_device:
        found.append(f"if {name}.get_device() != kb_device: raise AttributeError")
    if alignments == {True}:
        parts.aligned.append(f"({address} or 0)" if optional else address)
    elif alignments != {None}:
        if None in alignments:
            raise UnsupportedShapeError(f"the alignment of `{name}` counts in one launch and not in another")
        text = f"None if {address} is None else not {address} & 15" if optional else f"not {address} & 15"
        parts.element(text, [cell.aligned if isinstance(cell, Pointer) else None for cell in cells])
    if optional:
        parts.before += [f"if {name} is None:", f"    {address} = {dtype} = None", "else:"]
        parts.before += [f"    {line}" for line in found]
    else:
        parts.before += found
    parts.passed.append(address)


def _number(parts: _Parts, name: str, argument: Argument, cells: Sequence[Cell]) -> None:
    parts.passed.append(name)
    kinds = {cell.kind if isinstance(cell, Number) else types.NoneType for cell in cells}
    if len(kinds) == 1:
        parts.checks.append(f"type({name}) is {parts.constant(next(iter(kinds)))}")
    else:
        parts.element(f"type({name})", [c.kind if isinstance(c, Number) else types.NoneType for c in cells])
    if any(isinstance(cell, Number) and cell.value is not UNSET for cell in cells):
        values = [cell.value if isinstance(cell, Number) else None for cell in cells]
        if UNSET in values or any(_is_awkward(value) for value in values):
            raise UnsupportedShapeError(f"the value of `{name}` is not in every autotune key, or is a zero with a sign")
        parts.element(name, values)
    if int not in kinds or argument.annotation[:2] in ("fp", "bf") or argument.annotation == "u1":
        return  # Triton does not look at the value of a truth value or a float
    const, specialize, align = argument.special
    text = f"kb_spec(kb_backend, {name}, {const}, {specialize}, {align})"
    specs: list[Any] = [cell.spec if isinstance(cell, Number) else ("constexpr", None) for cell in cells]
    if argument.annotation:
        text, specs = f"{text}[1]", [spec[1] for spec in specs]
    parts.element(text, specs)


def _constexpr(parts: _Parts, name: str, cells: Sequence[Cell]) -> None:
    values = [cell.value if isinstance(cell, Constant) else None for cell in cells]
    if any(_is_awkward(value) for value in values):
        raise UnsupportedShapeError(f"`{name}` is a zero with a sign, which compares equal to others")
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        parts.element(f"type({name})", [type(value) for value in values])
        parts.element(name, values)
        return
    kind = next(iter(kinds))
    if all(value is values[0] for value in values) and kind in (bool, types.NoneType, _Unset):
        parts.checks.append(f"{name} is {'kb_unset' if values[0] is UNSET else values[0]}")
        return
    parts.checks.append(f"type({name}) is {parts.constant(kind)}")
    if all(value == values[0] for value in values):
        parts.checks.append(f"{name} == {parts.constant(values[0])}")
    else:
        parts.element(name, values)


def _is_awkward(value: Any) -> bool:
    """A float that equals another one of different bits, or not even itself."""
    return type(value) is float and (value == 0.0 or value != value)


# ---------------------------------------------------------------------------------------------- text


def _function(shape: Shape, parts: _Parts, names: Sequence[str], options: Sequence[str], quiet: str) -> Iterator[str]:
    """The lines of the function: recognise, look up, launch."""
    yield f"def kb_function_({', '.join(_signature(shape, options))}):"
    yield "    kb_found = None"
    yield f"    if not kb_more and {quiet}:"
    yield "        try:"
    for line in parts.defaults:
        yield f"            {line}"
    if not parts.located:
        yield "            kb_device = kb_current()"
    for line in parts.before:
        yield f"            {line}"
    checks = [*parts.checks, *([f"not ({' | '.join(parts.aligned)}) & 15"] if parts.aligned else [])]
    yield f"            if {' and '.join(checks) or 'True'}:"
    yield f"                kb_found = kb_tables[kb_device].get(({''.join(f'{text}, ' for text in parts.elements)}))"
    yield "        except (AttributeError, KeyError, TypeError):"
    yield "            pass"
    yield "    if kb_found is None:"
    listed = ", ".join(f"'{name}': {name}" for name in (*names, *options))
    yield f"        return kb_general(kb_grid, {{{listed}}}, kb_more)"
    yield f"    {', '.join(shape.payload)}, = kb_found"
    yield "    if kb_grid.__class__ is not tuple and callable(kb_grid):"
    bound = ", ".join(f"'{name}': {_bound(shape, name)}" for name in shape.order)
    yield f"        kb_grid = kb_grid({{{bound}}})"
    yield "    kb_size = len(kb_grid)"
    yield "    kb_x = kb_grid[0]"
    yield "    kb_y = kb_grid[1] if kb_size > 1 else 1"
    yield "    kb_z = kb_grid[2] if kb_size > 2 else 1"
    launch = ("kb_stream = kb_stream_of(kb_device)", shape.call(_passed(shape, parts)))
    if parts.located:
        yield "    if kb_device != kb_current():"
        yield "        with kb_switch(kb_device):"
        yield from (f"            {line}" for line in launch)
        yield "        kb_hit()"
        yield "        return kb_kernel"
    yield from (f"    {line}" for line in launch)
    yield "    kb_hit()"
    yield "    return kb_kernel"


def _bound(shape: Shape, name: str) -> str:
    """Where the value of a parameter is found, for a grid that is a function of them."""
    if name in shape.supplied:
        return f"kb_meta['{name}']"
    argument = next(argument for argument in shape.arguments if argument.name == name)
    return f"{PREFIX}a_{name}" if argument.default is not UNSET and argument.optional else name


def _passed(shape: Shape, parts: _Parts) -> list[str]:
    """The launch's arguments; a text for every parameter that is no declared constexpr."""
    if len(parts.passed) != sum(not argument.constexpr for argument in shape.arguments):
        raise UnsupportedShapeError("config or heuristics supply a parameter that is no constexpr")
    return parts.passed


def _signature(shape: Shape, options: Sequence[str]) -> Iterator[str]:
    """Parameters of the function: the caller's, and the supplied ones between them."""
    keyword_only = {argument.name for argument in shape.arguments if argument.keyword_only}
    named = {argument.name for argument in shape.arguments} | set(_stepped_over(shape))
    yield "kb_grid, /"
    starred = False
    for name in shape.order:
        if name not in named:
            continue
        if name in keyword_only and not starred:
            starred = True
            yield "*"
        yield f"{name}=kb_unset"
    if options and not starred:
        yield "*"
    for name in options:
        yield f"{name}=kb_unset"
    yield "**kb_more"


def _stepped_over(shape: Shape) -> list[str]:
    """Supplied parameters with one of the caller's behind them: they hold its place in a call by position."""
    last = max((i for i, name in enumerate(shape.order) if name not in shape.supplied), default=-1)
    return [name for name in shape.order[: last + 1] if name in shape.supplied]
