"""The documents inside a bundle: strict JSON, and the shape that each has to have.

Every document is canonical JSON, so that one value has one text; writing the parsed value again and comparing bytes
rules out duplicate names, infinities, other spacing and other spellings of a number in one step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from kernelbake import digest, fingerprint, keys
from kernelbake.outcome import OK, Reason
from kernelbake.rules import MAX_VIOLATIONS

MAX_DEPTH = 32
"""Deepest nesting of a document."""
MAX_VALUES = 1_000_000
"""Most values in a document."""


def parse(data: bytes | memoryview, *, max_values: int = MAX_VALUES) -> Any:
    """Reads strict, canonical JSON.

    Args:
        data: the bytes.
        max_values: refuses, before anything is built, what could hold more values.

    Raises:
        ValueError: it is not canonical JSON, too deep or too large; the text says what was found.
    """
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at byte {error.start}") from None
    if text.count(",") + text.count("[") + text.count("{") >= max_values:
        raise ValueError(f"more than {max_values} values")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON at byte {error.pos}: {error.msg}") from None
    _check_depth(value)
    if _canonical(value) != data:
        raise ValueError(_why_not_canonical(text))
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number `{name}`, which strict JSON does not have")


def _check_depth(value: Any) -> None:
    level, depth = [value] if isinstance(value, list | dict) else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]


def _canonical(value: Any) -> bytes:
    try:
        return digest.canonical_json(value)
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no text") from None
    except ValueError:
        raise ValueError("a number beyond the range of a double") from None


def _why_not_canonical(text: str) -> str:
    duplicates: list[str] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for name, value in pairs:
            if name in built and not duplicates:
                duplicates.append(name)
            built[name] = value
        return built

    json.loads(text, object_pairs_hook=build)
    if duplicates:
        return f"the name `{duplicates[0]:.60}` twice in one object"
    return "JSON that is not canonical (sorted names, no spaces, shortest numbers)"


Faults: TypeAlias = Iterator[tuple[str, str]]
"""Path inside a document and ``found; wanted``, for everything that is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What a value has to look like. ``faults`` explains what ``fits`` refuses, and is only asked then.

    Args:
        fits: whether the value has the shape.
        faults: everything that is wrong with the value at a path.
    """

    fits: Callable[[Any], bool]
    faults: Callable[[Any, str], Faults]

    def check(self, value: Any) -> list[tuple[str, str]]:
        """What is wrong with a value, up to as much as is ever shown; empty if it fits."""
        return [] if self.fits(value) else list(itertools.islice(self.faults(value, ""), MAX_VIOLATIONS))


def _found(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    if isinstance(value, dict | list):
        return ("an object" if isinstance(value, dict) else "a list") + f" of {len(value)}"
    return f"`{value!r:.60}`"


def _at(path: str, part: str | int) -> str:
    return f"{path}.{part!s:.60}".lstrip(".")


def _leaf(wanted: str, fits: Callable[[Any], bool]) -> Shape:
    def faults(value: Any, path: str) -> Faults:
        if not fits(value):
            yield path, f"{_found(value)}; wanted {wanted}"

    return Shape(fits, faults)


TEXT = _leaf("a text", lambda value: type(value) is str)
WORD = _leaf("a text that is not empty", lambda value: type(value) is str and value != "")
FLAG = _leaf("true or false", lambda value: type(value) is bool)
COUNT = _leaf("an integer from 0 up", lambda value: type(value) is int and value >= 0)
NUMERIC = _leaf("a number", lambda value: type(value) in (int, float))
DURATION = _leaf("a number from 0 up", lambda value: type(value) in (int, float) and value >= 0)
POSITIVE = _leaf("a positive integer", lambda value: type(value) is int and value > 0)
DIGEST = _leaf("a digest", digest.is_digest)
OBJECT = _leaf("an object", lambda value: type(value) is dict)
ANYTHING = _leaf("anything", lambda value: True)


def literal(*allowed: Any) -> Shape:
    """One of these texts, numbers or truth values."""
    wanted = " or ".join(f"`{json.dumps(item)}`" for item in allowed)
    return _leaf(wanted, lambda value: any(type(value) is type(item) and value == item for item in allowed))


def optional(shape: Shape) -> Shape:
    """``null`` or the shape."""

    def faults(value: Any, path: str) -> Faults:
        if value is not None:
            yield from shape.faults(value, path)

    return Shape(lambda value: value is None or shape.fits(value), faults)


def listing(shape: Shape, *, at_least: int = 0) -> Shape:
    """A list of the shape."""

    def fits(value: Any) -> bool:
        return type(value) is list and len(value) >= at_least and all(map(shape.fits, value))

    def faults(value: Any, path: str) -> Faults:
        if type(value) is not list or len(value) < at_least:
            yield path, f"{_found(value)}; wanted a list" + (f" of at least {at_least}" if at_least else "")
            return
        for index, item in enumerate(value):
            yield from shape.faults(item, _at(path, index))

    return Shape(fits, faults)


def row(*shapes: Shape) -> Shape:
    """A list with one value of each shape."""
    tests = tuple(shape.fits for shape in shapes)

    def fits(value: Any) -> bool:
        if type(value) is not list or len(value) != len(tests):
            return False
        return all(test(item) for test, item in zip(tests, value, strict=True))

    def faults(value: Any, path: str) -> Faults:
        if type(value) is not list or len(value) != len(shapes):
            yield path, f"{_found(value)}; wanted a list of {len(shapes)}"
            return
        for index, (item, shape) in enumerate(zip(value, shapes, strict=True)):
            yield from shape.faults(item, _at(path, index))

    return Shape(fits, faults)


def mapping(shape: Shape) -> Shape:
    """An object whose values have the shape, under any name."""

    def faults(value: Any, path: str) -> Faults:
        if type(value) is not dict:
            yield path, f"{_found(value)}; wanted an object"
            return
        for key, item in value.items():
            yield from shape.faults(item, _at(path, key))

    return Shape(lambda value: type(value) is dict and all(map(shape.fits, value.values())), faults)


def fields(shapes: Mapping[str, Shape], extra: Mapping[str, Shape] | None = None, *, others: bool = False) -> Shape:
    """An object with these fields, and at most the extra ones beside them, or with ``others`` any."""
    may = {**shapes, **(extra or {})}
    tests = {name: shape.fits for name, shape in may.items()}

    def fits(value: Any) -> bool:
        if type(value) is not dict or not shapes.keys() <= value.keys():
            return False
        return all(tests[name](item) if name in tests else others for name, item in value.items())

    def faults(value: Any, path: str) -> Faults:
        if type(value) is not dict:
            yield path, f"{_found(value)}; wanted an object"
            return
        for name in sorted(shapes.keys() - value.keys()):
            yield path, f"no field `{name}`; wanted one"
        for name, item in value.items():
            if name in may:
                yield from may[name].faults(item, _at(path, name))
            elif not others:
                yield path, f"the field `{name:.60}`; wanted none of that name"

    return Shape(fits, faults)


_PLAIN = frozenset((str, int, bool, type(None)))


def _is_value(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    try:
        return bool(keys.encode(keys.decode(value)) == value)
    except (TypeError, ValueError, OverflowError):
        return False


VALUE = _leaf("the JSON form of a key's value", _is_value)
ITEMS = listing(row(TEXT, VALUE))
KERNEL = _leaf(
    "a kernel as `module:qualname`",
    lambda value: type(value) is str and value.count(":") == 1 and not value.startswith(":") and value[-1] != ":",
)
CONFIG = fields({"meta": ITEMS}, dict.fromkeys(("num_warps", "num_stages", "num_ctas", "maxnreg"), POSITIVE))
KEY = fields({"values": ITEMS, "dtypes": listing(row(TEXT, TEXT))})
PARAMETER = row(TEXT, VALUE, VALUE)
SPECIALIZATION = fields({"parameters": listing(PARAMETER), "options": ITEMS})
NUMBER = COUNT
"""The number of a row in a table."""
TABLE = fields({"parameters": listing(PARAMETER), "rows": listing(row(ITEMS, listing(NUMBER)))})
"""``specializations.json``."""
CASE = ITEMS

_FACTS = fields(
    {
        "kernel": KERNEL,
        "wrappers": listing(WORD),
        "parameters": listing(WORD),
        "key_names": listing(TEXT),
        "source_digest": DIGEST,
        "configs_digest": optional(DIGEST),
        "num_configs": COUNT,
        "hooks": listing(WORD),
        "mutated": listing(TEXT),
    }
)
_VARIANT = fields(
    {
        "specializations": listing(NUMBER, at_least=1),
        "cases": listing(TEXT),
        "grids": listing(listing(COUNT)),
    }
)
_LAUNCH = fields(
    {
        "kernel": KERNEL,
        "key": optional(KEY),
        "candidates": listing(CONFIG, at_least=1),
        "variants": listing(_VARIANT, at_least=1),
    }
)
_UNBOUNDED = fields(
    {"kernel": KERNEL, "argument": TEXT, "values": listing(ANYTHING), "axis": optional(TEXT)},
)
_PROFILE = fields(
    {
        **dict.fromkeys(("id", "name", "backend"), WORD),
        **dict.fromkeys(("sm_count", "shared_memory_bytes", "shared_memory_per_sm_bytes"), COUNT),
        **dict.fromkeys(("total_memory_bytes", "l2_bytes", "warp_size"), COUNT),
        "capability": row(COUNT, COUNT),
        "source": TEXT,
    }
)
MANIFEST = fields(
    {
        "format": literal(1),
        "name": WORD,
        "gpu": _PROFILE,
        "workload": fields({"plugin": WORD, "section": OBJECT}),
        "measure": OBJECT,
        "compile": OBJECT,
    }
)
"""``manifest.resolved.json``; what stands in the section is the plug-in's business."""
PLAN = fields(
    {
        "profile": _PROFILE,
        "versions": mapping(TEXT),
        "implementations": mapping(TEXT),
        "cases": listing(CASE),
        "skipped": listing(row(CASE, TEXT)),
        "kernels": mapping(_FACTS),
        "launches": listing(_LAUNCH),
        "unbounded": listing(_UNBOUNDED),
    }
)
_TIMES = fields(
    {},
    {**dict.fromkeys(("median_ms", "spread_ms", "runner_up_ms"), optional(DURATION)), "margin": optional(NUMERIC)},
    others=True,
)
CHOICES = listing(
    fields(
        {
            "kernel": KERNEL,
            "key": optional(KEY),
            "winner": CONFIG,
            "entries": listing(row(NUMBER, optional(DIGEST))),
            "times": _TIMES,
        }
    )
)
OUTCOMES = (OK, *(reason.value for reason in Reason))
_WRITTEN = fields(
    {"argument": TEXT, "at": COUNT, "dtype": WORD, "shape": listing(COUNT), "digest": DIGEST},
    {"norm": DURATION, "sum": NUMERIC, "not_finite": COUNT, "sketch": listing(NUMERIC)},
)
OUTPUTS = mapping(fields({"case": TEXT, "tensors": listing(_WRITTEN), "tolerance": DURATION}, {"inputs": DIGEST}))
"""What a winner's launches wrote, by digest of the specialization."""
RECORD_LINE = fields(
    {"kernel": KERNEL, "key": optional(KEY), "config": CONFIG, "outcome": literal(*OUTCOMES)},
    {
        "samples_ms": listing(DURATION),
        **dict.fromkeys(("median_ms", "spread_ms"), optional(DURATION)),
        "specializations": listing(DIGEST),
        "detail": TEXT,
        "outputs": OUTPUTS,
    },
    others=True,
)
_METADATA = fields(
    {
        "name": WORD,
        "num_warps": POSITIVE,
        "shared": COUNT,
        "target": fields({"backend": WORD, "arch": COUNT, "warp_size": POSITIVE}),
    },
    {
        **dict.fromkeys(("num_ctas", "num_stages", "tmem_size", "global_scratch_size", "profile_scratch_size"), COUNT),
        "maxnreg": optional(POSITIVE),
        "hash": WORD,
    },
    others=True,
)
_HEAD = {"kernel": KERNEL, "launcher": optional(DIGEST), "metadata": _METADATA}
ENTRY_HEAD = fields(_HEAD)
"""``kernel.json`` without its specialization."""
ENTRY = fields({**_HEAD, "specialization": SPECIALIZATION})
"""``kernel.json``: Triton's launch metadata has to hold what a loader needs; its other fields are Triton's own."""

_FIELD_VALUE = _leaf(
    "text, an integer, a truth value, null or an object of texts",
    lambda value: (
        value is None
        or type(value) in (str, int, bool)
        or (type(value) is dict and all(type(item) is str for item in value.values()))
    ),
)
FINGERPRINT = fields(
    {},
    {name: fields({"class": literal(cls.value), "value": _FIELD_VALUE}) for name, cls in fingerprint.FIELDS.items()},
)

MADE = ("measured", "compiled-only", "interpreted")
COUNTS = ("cases", "choices", "entries", "kernels", "launches", "libs", "record")
ABOUT_FIELDS = ("complete", "counts", "format", "kernelbake", "line_info", "made", "name")
"""What ``bundle.json`` says about the content of the bundle, whenever and in whatever file it was written."""
HEADER = fields(
    {
        "bundle_digest": DIGEST,
        "complete": literal(True),
        "counts": fields(dict.fromkeys(COUNTS, COUNT)),
        "format": literal(1),
        "header_digest": DIGEST,
        "kernelbake": WORD,
        "line_info": FLAG,
        "made": literal(*MADE),
        "name": WORD,
        "time": COUNT,
    }
)
INDEX = fields({"about": DIGEST, "members": mapping(row(COUNT, DIGEST))})
