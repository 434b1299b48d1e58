"""What identifies a launch: kernel, autotune key, config and specialization. Pure values, no Triton.

Triton looks an autotune key up in a dict, where ``1``, ``True`` and ``1.0`` are one key, and compiles one binary per
specialization, which is finer than the key and independent of it. Both are kept apart here, and every value has a
*token*: a canonical text in which values of different types differ. Tokens are what is compared, hashed and stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kernelbake import digest


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """A value that lives in another library: a Triton dtype (``dtype``, ``bf16``) or a device function (``jit``).

    A device function's text is ``module:qualname``.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


Value: TypeAlias = "bool | int | float | str | Symbol | tuple[Value, ...] | None"


def encode(value: Value) -> Any:
    """The JSON form of a value; ``decode`` gives the value back with its type.

    Raises:
        TypeError: the value has a type that no key may hold (an object known only by its address, say).
    """
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, Symbol):
        return {value.kind: value.text}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    raise TypeError(f"a value of type `{type(value).__name__}` cannot stand in a key")


def decode(data: Any) -> Value:
    """The value whose JSON form this is.

    Raises:
        TypeError: the data is not the JSON form of any value.
    """
    if data is None or isinstance(data, bool | str) or type(data) is int:
        return data
    if isinstance(data, dict) and len(data) == 1:
        [(kind, body)] = data.items()
        if kind == "float" and isinstance(body, str):
            return float.fromhex(body)
        if kind == "tuple" and isinstance(body, list):
            return tuple(decode(item) for item in body)
        if kind in ("dtype", "jit") and isinstance(body, str):
            return Symbol(kind, body)
    raise TypeError(f"`{data!r:.60}` is not the JSON form of a key's value")


class Tokened:
    """Compares and hashes by token, so that ``1``, ``True`` and ``1.0`` stay three values."""

    def to_json(self) -> Any:
        """The JSON form; ``from_json`` gives the value back."""
        raise NotImplementedError

    @functools.cached_property
    def token(self) -> str:
        """Canonical text of the value."""
        return digest.canonical_json(self.to_json()).decode()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)


Items: TypeAlias = tuple[tuple[str, Value], ...]


def _encode_items(items: Items) -> list[list[Any]]:
    return [[name, encode(value)] for name, value in items]


def _decode_items(data: Any) -> Items:
    return tuple((str(name), decode(value)) for name, value in data)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One ``@triton.jit`` function, named by where it is found: ``fla.ops.common.chunk_o`` and ``chunk_fwd_kernel_o``.

    The short name alone is not enough: eleven names are shared by several modules of flash-linear-attention 0.6.0.
    """

    module: str
    qualname: str

    @property
    def name(self) -> str:
        """Module and qualified name, ``module.qualname``."""
        return f"{self.module}.{self.qualname}"

    def to_json(self) -> str:
        return f"{self.module}:{self.qualname}"

    @classmethod
    def from_json(cls, data: str) -> Kernel:
        module, _, qualname = data.partition(":")
        return cls(module, qualname)


@dataclasses.dataclass(frozen=True, eq=False)
class AutotuneKey(Tokened):
    """What Triton's autotuner looks up: the values of its ``key=`` arguments, then the dtypes of tensor arguments.

    Args:
        values: (argument, value) in the order of ``key=``, for those present in the call.
        dtypes: (argument, dtype as ``torch.float32``) of every argument that has a dtype, in call order.
    """

    values: Items
    dtypes: tuple[tuple[str, str], ...]

    def triton_key(self) -> tuple[Value | str, ...]:
        """The flat tuple under which Triton files it."""
        return (*(value for _, value in self.values), *(dtype for _, dtype in self.dtypes))

    def to_json(self) -> dict[str, Any]:
        return {"values": _encode_items(self.values), "dtypes": [list(pair) for pair in self.dtypes]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AutotuneKey:
        return cls(_decode_items(data["values"]), tuple((str(name), str(dtype)) for name, dtype in data["dtypes"]))

    def __str__(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in self.values)
        dtypes = ",".join(f"{name}:{dtype.removeprefix('torch.')}" for name, dtype in self.dtypes)
        return f"{values} [{dtypes}]".strip()


NOT_TUNED = "(not tuned)"
"""In the place of a key, for people, where nothing is tuned."""


def key_text(key: AutotuneKey | None) -> str:
    """A key on one line, for people."""
    return NOT_TUNED if key is None else str(key)


@dataclasses.dataclass(frozen=True, eq=False)
class Config(Tokened):
    """What is tuned: meta-parameters and the options that change code.

    Args:
        meta: (meta-parameter, value), in the order in which the kernel declares them.
        num_warps, num_stages, num_ctas, maxnreg: Triton's launch options; None leaves Triton's default.
    """

    meta: Items = ()
    num_warps: int | None = None
    num_stages: int | None = None
    num_ctas: int | None = None
    maxnreg: int | None = None

    def options(self) -> dict[str, int]:
        """The launch options that are set."""
        fields = {name: getattr(self, name) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
        return {name: value for name, value in fields.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        return {"meta": _encode_items(self.meta), **self.options()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        options = {name: data.get(name) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
        return cls(_decode_items(data["meta"]), **options)

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in (*self.meta, *self.options().items())]
        return " ".join(parts) or "(default)"


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter(Tokened):
    """One parameter of a specialization, as Triton's binder sees the argument.

    Args:
        name: the parameter.
        type: Triton's type (``*bf16``, ``i32``, ``constexpr``), nested for tuples.
        key: what was specialized on: ``D`` for divisible by 16, ``""`` or None for nothing, the value for a constexpr.
    """

    name: str
    type: Value
    key: Value

    def to_json(self) -> list[Any]:
        return [self.name, encode(self.type), encode(self.key)]

    def __str__(self) -> str:
        if self.type == "constexpr":
            return f"{self.name}={self.key}"
        return f"{self.name}:{self.type}" + (f"%{self.key}" if self.key else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Specialization(Tokened):
    """Facts about a call's arguments and options for which Triton compiles a binary of its own.

    Args:
        parameters: every parameter of the kernel, in its order; meta-parameters and heuristics included.
        options: the launch options as passed (``num_warps`` …), sorted by name.
    """

    parameters: tuple[Parameter, ...]
    options: Items = ()

    @property
    def digest(self) -> str:
        return digest.of_text(self.token)

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "options": _encode_items(self.options),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Specialization:
        parameters = tuple(Parameter(str(name), decode(type_), decode(key)) for name, type_, key in data["parameters"])
        return cls(parameters, _decode_items(data["options"]))

    def differences(self, other: Specialization, mine: str, theirs: str) -> tuple[str, ...]:
        """Where another specialization of the same kernel differs, one line each: ``name: mine `…`; theirs `…```.

        Args:
            other: the other one.
            mine, theirs: what to call the two sides.
        """
        others = {p.name: p for p in other.parameters}
        lines = [
            f"{p.name}: {mine} `{p}`; {theirs} `{others[p.name]}`"
            for p in self.parameters
            if p != others.get(p.name, p)
        ]
        if encode(self.options) != encode(other.options):
            lines.append(f"options: {mine} `{dict(self.options)}`; {theirs} `{dict(other.options)}`")
        return tuple(lines)

    def __str__(self) -> str:
        return " ".join(str(parameter) for parameter in self.parameters)


@dataclasses.dataclass(frozen=True, eq=False)
class Case(Tokened):
    """One static shape of the workload: a value on every axis (bucket, anchors, batch size, layout …)."""

    axes: Items

    @functools.cached_property
    def id(self) -> str:
        """``bucket=2048 anchors=256 …``: unique within a manifest, and what messages name."""
        return " ".join(f"{name}={value}" for name, value in self.axes)

    def __getitem__(self, axis: str) -> Value:
        for name, value in self.axes:
            if name == axis:
                return value
        raise KeyError(axis)

    def to_json(self) -> list[list[Any]]:
        return _encode_items(self.axes)

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Case:
        return cls(_decode_items(data))

    def __str__(self) -> str:
        return self.id
