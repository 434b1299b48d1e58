"""From what a bundle holds for a kernel to the rows by which the fused launch function recognises its calls."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kernelbake import fused
from kernelbake.fused import UNSET, Argument, Cell, Constant, Nothing, Number, Pointer, Row, UnsupportedShapeError
from kernelbake.keys import Parameter, Specialization
from kernelbake.lookup import Typed
from kernelbake.plan import Choice

if TYPE_CHECKING:
    from kernelbake.dispatch import FrozenKernel

_NUMBERS = {"i32": int, "i64": int, "u64": int, "u1": bool, "fp32": float}


def fuse(kernel: FrozenKernel, on_tensors: bool, names: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The fused launch function of a kernel's outermost object, and its namespace.

    Args:
        kernel: with its entries loaded.
        on_tensors: whether a tensor says on which device it lies.
        names: live objects for the function, by the names that ``fused.write`` asks for.

    Raises:
        UnsupportedShapeError: calls of this kernel cannot be told apart by the written code.
    """
    from kernelbake import triton_api

    view = _View(kernel)
    rows = [row for choice in view.choices() for row in view.rows(choice)]
    if not rows:
        raise UnsupportedShapeError("nothing is planned that is launched through the outermost object")
    live = {**names, "kb_jit": kernel.function}
    live["kb_spec"], live["kb_backend"] = triton_api.specializer(view.gpu_target)
    live["kb_quiet"] = triton_api.quiet_condition(live, "kb_jit")
    shape = fused.Shape(
        name=kernel.held.kernel.name,
        arguments=view.arguments,
        supplied=view.supplied,
        order=kernel.names,
        call=triton_api.direct_call,
        payload=("kb_kernel", "kb_function", "kb_meta", "kb_launch", *triton_api.DIRECT_NAMES),
        check_device=on_tensors,
    )
    return fused.write(shape, rows, live)


class _View:
    """One kernel, seen from a caller of its outermost object."""

    def __init__(self, kernel: FrozenKernel) -> None:
        from kernelbake import triton_api

        self.kernel = kernel
        self.autotuner = triton_api.autotuner_of(kernel.launchable)
        self.tests = dict(_tests(kernel.launchable))
        metas = {name for config in kernel.configs.values() for name in config.kwargs}
        if any(set(config.kwargs) != metas for config in kernel.configs.values()):
            raise UnsupportedShapeError("the configs do not all set the same meta-parameters")
        supplied = metas | set(self.tests)
        self.supplied = [name for name in kernel.names if name in supplied]
        self.arguments = [argument for argument in self._arguments() if argument.name not in supplied]
        if any(config.pre_hook is not None for config in kernel.configs.values()):
            raise UnsupportedShapeError("a config has a `pre_hook`, which may change the arguments")
        callers = {argument.name for argument in self.arguments if not argument.constexpr}
        if not {tested for tested, _ in self.tests.values()} <= callers:
            raise UnsupportedShapeError("a heuristic looks at a value that is not an argument of the caller")
        self.gpu_target = next(iter(next(iter(kernel.entries.values())).values())).metadata.target
        self._dtypes = triton_api.dtypes_by_type()

    def _arguments(self) -> Iterator[Argument]:
        from kernelbake import triton_api

        keys = set(self.autotuner.keys) if self.autotuner is not None else set()
        tested = {name for name, _ in self.tests.values()}
        try:
            for facts in triton_api.parameter_facts(self.kernel.function):
                yield Argument(**facts, optional=facts["name"] not in keys | tested)
        except TypeError as error:
            raise UnsupportedShapeError(str(error)) from error

    def choices(self) -> Iterator[Choice]:
        """Those made through the outermost object: with a key exactly where an autotuner chooses."""
        from kernelbake import triton_api

        tuned = triton_api.is_tuned(self.autotuner)
        for choice in self.kernel.held.choices:
            if tuned == (choice.key is not None) and (self.autotuner is None or choice.id in self.kernel.configs):
                yield choice

    def rows(self, choice: Choice) -> Iterator[Row]:
        """A row for each specialization of a choice that a caller of this object can reach."""
        for typed, specialization in self.kernel.held.reached[choice.id]:
            row = self._row(choice, typed, specialization)
            if row is not None:
                yield row

    def _row(self, choice: Choice, typed: Typed, specialization: Specialization) -> Row | None:
        from kernelbake import triton_api

        config = self.kernel.configs.get(choice.id)
        own = config.all_kwargs() if config is not None else {}
        parameters = {parameter.name: parameter for parameter in specialization.parameters}
        options = {name: triton_api.from_value(value) for name, value in specialization.options}
        settled = {name: value for name, value in own.items() if name not in parameters and value is not None}
        if any(options.get(name) != value for name, value in settled.items()):
            return None
        values, dtypes = (dict(choice.key.values), dict(choice.key.dtypes)) if choice.key is not None else ({}, None)
        cells = {
            argument.name: self._cell(parameters[argument.name], argument, values.get(argument.name, UNSET))
            for argument in self.arguments
        }
        if dtypes is not None and dtypes != {n: str(c.dtype) for n, c in cells.items() if isinstance(c, Pointer)}:
            return None
        for name, (tested, present) in self.tests.items():
            if parameters[name].key is not ((cells[tested] == Nothing()) is not present):
                return None
        meta = {name: triton_api.from_value(parameters[name].key) for name in self.supplied}
        callers = {name: value for name, value in options.items() if name not in settled}
        return Row(cells, callers, typed, self._payload(typed, meta))

    def _payload(self, typed: Typed, meta: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
        from kernelbake import triton_api

        loaded = {device: entries[typed] for device, entries in self.kernel.entries.items()}
        direct = triton_api.direct_launch(next(iter(loaded.values())))
        if direct is None:
            raise UnsupportedShapeError("a launch needs memory of its own, or takes its arguments apart in Python")
        return {device: (one, one.function, meta, direct.launch, *direct.fixed) for device, one in loaded.items()}

    def _cell(self, parameter: Parameter, argument: Argument, value: Any) -> Cell:
        """What the caller passes, given what Triton made of it and the value in the autotune key, if there."""
        from kernelbake import triton_api

        type_, key = parameter.type, parameter.key
        if argument.constexpr:
            return Constant(triton_api.from_value(key))
        if type_ == "constexpr" and key is None:
            return Nothing()
        if type_ == "constexpr" and type(key) is int:
            return Number(int, ("constexpr", key), value)
        if isinstance(type_, str) and type_.startswith("*") and not argument.annotation:
            dtype = self._dtypes.get(f"*{type_.removeprefix('*k').removeprefix('*')}")
            if dtype is not None:
                return Pointer(dtype, key == "D" if key is not None and argument.special[2] else None)
        kind = _NUMBERS.get(str(type_)) or _NUMBERS["fp32" if str(type_)[:2] in ("fp", "bf") else "i32"]
        if isinstance(type_, str) and (type_ in _NUMBERS or argument.annotation == type_):
            return Number(kind, (type_, key), value)
        raise UnsupportedShapeError(f"`{parameter}` has a type that the written code does not know")


def _tests(launchable: Any) -> Iterator[tuple[str, tuple[str, bool]]]:
    """For every heuristic: the parameter that it supplies, and which argument's presence (or absence) is its value.

    Raises:
        UnsupportedShapeError: a heuristic that does more than look whether an argument is None.
    """
    from kernelbake import triton_api

    for level in triton_api.levels(launchable):
        for name, heuristic in getattr(level, "values", {}).items():
            test = presence_test(heuristic)
            if test is None:
                raise UnsupportedShapeError(f"the heuristic of `{name}` does more than ask whether an argument is None")
            yield name, test


def presence_test(heuristic: Any) -> tuple[str, bool] | None:
    """The argument whose presence a heuristic returns, and True, or False if it returns the absence; None if neither.

    It is proved by the code itself: it has to be, instruction for instruction, that of
    ``lambda args: args['name'] is not None`` (or ``is None``) in this Python.
    """
    if type(heuristic) is not types.FunctionType or heuristic.__closure__ or heuristic.__defaults__:
        return None
    for name in heuristic.__code__.co_consts:
        if isinstance(name, str):
            for text, present in (("is not", True), ("is", False)):
                if _same_code(heuristic.__code__, eval(f"lambda args: args[{name!r}] {text} None").__code__):
                    return name, present
    return None


_KINDS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
"""Flags that say what calling the code does; the rest say where it was written."""


def _same_code(code: types.CodeType, other: types.CodeType) -> bool:
    facts = ("co_code", "co_consts", "co_names", "co_argcount", "co_kwonlyargcount", "co_nlocals", "co_exceptiontable")
    same = all(getattr(code, fact) == getattr(other, fact) for fact in facts)
    return same and code.co_flags & _KINDS == other.co_flags & _KINDS
