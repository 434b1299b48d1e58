"""A strict reader of small YAML 1.2 files: plain data, and the line of every value. Every fault at once.

Scalars follow the JSON schema of YAML 1.2: ``no``, ``12:30``, ``0x120`` and ``010`` are text, ``6e-4`` is a number.
What makes a file dangerous or ambiguous is refused while it is read, before anything is built from it: anchors and
aliases, tags, duplicate keys, keys that are no text, more than one document, infinities, deep nesting, large files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 64 * 1024
MAX_DEPTH = 20

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_STRANGE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that cannot be seen, that some readers take for the end of a line, or that are none."""

_WORDS = {"null": None, "~": None, "": None, "true": True, "false": False}

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing wrong with a file.

    Args:
        line: counted from 1.
        path: the keys and list positions that lead to it.
        message: what was found and what was wanted.
    """

    line: int
    path: Path
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}" + (f", {dotted(self.path)}" if self.path else "")
        return f"{where}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Document:
    """What a file holds.

    Args:
        data: the plain data.
        lines: line of each value by its path; that of a mapping's value is the line of its key.
        scalars: how each plain scalar that is no text was written, by its path (``3.10``, ``6e-4``).
        faults: what was refused. With faults the data may be incomplete.
    """

    data: Any
    lines: dict[Path, int]
    scalars: dict[Path, str]
    faults: tuple[Fault, ...]

    def line(self, path: Path) -> int:
        """The line of a path, or of the nearest thing around it that the file holds."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def dotted(path: Path) -> str:
    """``workload.axes.buckets.2``."""
    return ".".join(str(part) for part in path)


def read(text: bytes) -> Document:
    """Reads a file's bytes; never raises for what they hold."""
    if len(text) > MAX_BYTES:
        return _refused(1, f"{len(text):,} bytes; wanted at most {MAX_BYTES:,}")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        return _refused(line, f"the byte `0x{text[error.start]:02x}` is not UTF-8; wanted a text file in UTF-8")
    if match := _STRANGE.search(decoded):
        line = decoded.count("\n", 0, match.start()) + 1
        return _refused(line, f"the character `U+{ord(match[0]):04X}`; wanted it escaped, inside double quotes")
    return _Reader().read(decoded)


def _refused(line: int, message: str) -> Document:
    return Document(None, {}, {}, (Fault(line, (), message),))


class _Stop(Exception):
    """Reading on makes no sense."""


class _Reader:
    """Builds plain data from the events of one document."""

    def __init__(self) -> None:
        self._lines: dict[Path, int] = {}
        self._scalars: dict[Path, str] = {}
        self._faults: list[Fault] = []

    def read(self, text: str) -> Document:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        data = None
        try:
            data = self._document(iter(YAML(typ="safe", pure=True).parse(text)))
        except _Stop:
            pass
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._fault(mark, (), f"{error.problem or error.context}; wanted YAML 1.2")
        except (YAMLError, ValueError) as error:
            self._fault(None, (), f"{' '.join(str(error).split())}; wanted YAML 1.2")
        return Document(data, self._lines, self._scalars, tuple(self._faults))

    def _fault(self, mark: Any, path: Path, message: str) -> None:
        self._faults.append(Fault(mark.line + 1 if mark is not None else 1, path, message))

    def _document(self, events: Iterator[Any]) -> Any:
        data, documents = None, 0
        for event in events:
            name = type(event).__name__
            if name == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    self._fault(event.start_mark, (), "a second document; wanted one")
                    raise _Stop
                if event.version is not None and tuple(event.version) != (1, 2):
                    version = ".".join(map(str, event.version))
                    self._fault(event.start_mark, (), f"YAML `{version}`; wanted YAML 1.2")
                    raise _Stop
            elif name not in ("StreamStartEvent", "StreamEndEvent", "DocumentEndEvent", "CommentEvent"):
                data = self._node(event, events, ())
        return data

    def _node(self, event: Any, events: Iterator[Any], path: Path) -> Any:
        if path not in self._lines:
            self._lines[path] = event.start_mark.line + 1
        self._refuse_indirection(event, path)
        name = type(event).__name__
        if name == "ScalarEvent":
            return self._scalar(event, path)
        if name == "AliasEvent":
            return None
        if len(path) >= MAX_DEPTH:
            self._fault(event.start_mark, (), f"nested deeper than {MAX_DEPTH} levels; wanted fewer")
            raise _Stop
        return self._mapping(events, path) if name == "MappingStartEvent" else self._sequence(events, path)

    def _refuse_indirection(self, event: Any, path: Path) -> None:
        if getattr(event, "anchor", None) is not None:
            sign = "*" if type(event).__name__ == "AliasEvent" else "&"
            self._fault(event.start_mark, path, f"`{sign}{event.anchor}`; wanted no anchors and no aliases")
        if getattr(event, "tag", None) is not None:
            self._fault(event.start_mark, path, f"the tag `{event.tag}`; wanted no tags")

    def _mapping(self, events: Iterator[Any], path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in events:
            if type(event).__name__ == "MappingEndEvent":
                break
            key = self._key(event, events, path)
            inner = (*path, key)
            if key in found:
                message = f"the key stands twice; the first is on line {self._lines[inner]}"
                self._fault(event.start_mark, inner, message)
                inner = (*path, f"{key} (again)")
            self._lines[inner] = event.start_mark.line + 1
            value = self._node(next(events), events, inner)
            found.setdefault(key, value)
        return found

    def _key(self, event: Any, events: Iterator[Any], path: Path) -> str:
        if type(event).__name__ != "ScalarEvent":
            self._fault(event.start_mark, path, "a key that is no text; wanted text")
            raise _Stop
        self._refuse_indirection(event, (*path, ascii(event.value)[1:-1]))
        if event.style is None and not isinstance(_plain(event.value), str):
            self._fault(event.start_mark, (*path, event.value), f"the key `{event.value}` is no text; wanted it quoted")
        return self._text(event, path)

    def _text(self, event: Any, path: Path) -> str:
        """The text of a scalar; a pair of escaped surrogates, as JSON has them, becomes the character it stands for."""
        try:
            return str(event.value).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self._fault(event.start_mark, path, "half of a pair of surrogates; wanted text in Unicode")
            return ""

    def _sequence(self, events: Iterator[Any], path: Path) -> list[Any]:
        found: list[Any] = []
        for event in events:
            if type(event).__name__ == "SequenceEndEvent":
                break
            found.append(self._node(event, events, (*path, len(found))))
        return found

    def _scalar(self, event: Any, path: Path) -> Any:
        if event.style is not None:
            return self._text(event, path)
        if _NOT_FINITE.fullmatch(event.value):
            self._fault(event.start_mark, path, f"`{event.value}` is not finite; wanted a number or quoted text")
            return None
        value = _plain(event.value)
        if not isinstance(value, str):
            self._scalars[path] = event.value
        if isinstance(value, str):
            return self._text(event, path)
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            self._fault(event.start_mark, path, f"`{event.value}` is too large; wanted a finite number")
            return None
        return value


def _plain(text: str) -> Any:
    """The value of an unquoted scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) <= 20:
        return int(text)
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]+", text) and not re.fullmatch(r"\+?[0-9]+", text):
        return float(text)
    return text
