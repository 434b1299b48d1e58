"""Files and data sets → rows, in the order in which they stand there. Loads no torch.

Rows come from a JSONL file, one JSON array, parquet files, a folder saved by ``datasets``, or a data set of the Hub.
"""

from __future__ import annotations

import array
import codecs
import collections
import contextlib
import dataclasses
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from dflash.errors import DataError

_CHUNK_BYTES = 1 << 20
_LONGEST_RECORD = 1 << 28
"""Characters after which a record that does not parse is taken for broken; bytes from which on a line is."""

_OTHERS = (
    (codecs.BOM_UTF32_LE, "is in UTF-32; wanted UTF-8"),  # begins like UTF-16
    (codecs.BOM_UTF32_BE, "is in UTF-32; wanted UTF-8"),
    (codecs.BOM_UTF16_LE, "is in UTF-16; wanted UTF-8"),
    (codecs.BOM_UTF16_BE, "is in UTF-16; wanted UTF-8"),
    (b"\x1f\x8b", "is compressed with gzip; wanted it unpacked"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; wanted it unpacked"),
    (b"\xfd7zXZ\x00", "is compressed with xz; wanted it unpacked"),
    (b"BZh", "is compressed with bzip2; wanted it unpacked"),
    (b"PK\x03\x04", "is a ZIP archive; wanted what is in it"),
    (b"PAR1", "is a parquet file; wanted its name to end in `.parquet`"),
)
"""First bytes of files that are no JSON in UTF-8, and what to say of them."""

_BLANKS = " \t\r\n"
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?:@(?P<revision>[^:]+))?(?::(?P<split>.+))?")
_DECODER = json.JSONDecoder()


@dataclasses.dataclass(frozen=True)
class Row:
    """One row.

    Args:
        key: what ``Rows.at`` wants to read it again.
        place: where it stands, for people.
        data: its columns; anything but a mapping is faulty.
    """

    key: int
    place: str
    data: Any


@dataclasses.dataclass(frozen=True)
class Broken:
    """What could not be read as a row; of an array that is no JSON there, all that follows is lost too."""

    place: str
    why: str


class Rows(Protocol):
    """Rows in their order, which can also be read one by one.

    Attributes:
        name: for people.
    """

    name: str

    def __iter__(self) -> Iterator[Row | Broken]: ...

    def at(self, key: int) -> Any:
        """The data of the row with this key."""
        ...


def check_named(source: str) -> None:
    """Whether ``open_rows`` has something to open, as far as that can be told at once and without a network.

    Raises:
        DataError: as ``open_rows``.
    """
    kind = _kind(source)
    if kind is not _json_rows and importlib.util.find_spec("datasets") is None:
        raise _no_library(source)


def is_json(source: str) -> bool:
    """Whether this is a JSON or JSONL file, which this module reads by itself.

    Raises:
        DataError: there is no such thing.
    """
    return _kind(source) is _json_rows


def open_rows(source: str) -> Rows:
    """The rows of a path or a Hub id.

    Args:
        source: a JSONL or JSON file, a parquet file or a folder of them, a folder saved by ``datasets``, or a Hub id
            ``owner/name[/subset][@revision][:split]`` (split ``train`` where none is given).

    Raises:
        DataError: there is no such thing, or the package that reads it is missing.
    """
    return _kind(source)(source)


def _kind(source: str) -> Callable[[str], Rows]:
    """What opens this source.

    Raises:
        DataError: there is no such thing.
    """
    path = Path(source)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise DataError(f"data: `{source}` cannot be read ({error.strerror}); wanted a file or a Hub id") from error
    if is_folder:
        return _folder_rows
    if path.suffix == ".parquet":
        if not is_file:
            raise DataError(f"data: `{source}` is no file; wanted a parquet file")
        return _parquet_rows
    if is_file:
        return _json_rows
    if _HUB.fullmatch(source) is None or path.suffix in (".json", ".jsonl", ".ndjson"):
        raise DataError(
            f"data: `{source}` is no file and no Hub id; wanted a JSONL, JSON or parquet file, or `owner/name`"
        )
    return _hub_rows


def _parquet_rows(source: str) -> Rows:
    return DatasetRows(source, lambda datasets: datasets.load_dataset("parquet", data_files=source, split="train"))


def _hub_rows(source: str) -> Rows:
    hub = _HUB.fullmatch(source)
    assert hub is not None
    return DatasetRows(
        source,
        lambda datasets: datasets.load_dataset(
            hub["name"], hub["subset"], revision=hub["revision"], split=hub["split"] or "train"
        ),
    )


def _folder_rows(source: str) -> Rows:
    folder = Path(source)
    if (folder / "state.json").is_file():
        return DatasetRows(str(folder), lambda datasets: datasets.load_from_disk(str(folder)))
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    if not files:
        raise DataError(f"data: `{folder}` holds no parquet file; wanted some, or a folder saved by `datasets`")
    return DatasetRows(str(folder), lambda datasets: datasets.load_dataset("parquet", data_files=files, split="train"))


def _json_rows(source: str) -> Rows:
    path = Path(source)
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise DataError(f"data: `{path}` cannot be read ({error.strerror}); wanted a JSONL file") from error
    for first, what in _OTHERS:
        if start.startswith(first):
            raise DataError(f"data: `{path}` {what}")
    start = start.removeprefix(codecs.BOM_UTF8).lstrip(_BLANKS.encode())
    return JsonArray(path) if start.startswith(b"[") else JsonLines(path)


# ---------------------------------------------------------------------------------------------- JSON


class _Decoder:
    """Decodes JSON, and says which names stand twice in an object, of which Python would lose the first value.

    Attributes:
        repeated: such names of the newest value.
    """

    def __init__(self) -> None:
        self.repeated: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def whole(self, text: str) -> Any:
        """The value that the text is.

        Raises:
            ValueError: it is none.
        """
        self.repeated.clear()
        return self._decoder.decode(text)

    def first(self, text: str, begin: int) -> tuple[Any, int]:
        """The value that begins there, and where it ends.

        Raises:
            ValueError: there is none.
        """
        self.repeated.clear()
        return self._decoder.raw_decode(text, begin)

    def why(self) -> str:
        """What is wrong with the newest value; empty where nothing is."""
        names = list(dict.fromkeys(self.repeated))
        return f"`{'`, `'.join(names)}` stands twice in an object" if names else ""

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            counts = collections.Counter(name for name, _ in pairs)
            self.repeated += [name for name, count in counts.items() if count > 1]
        return made


class JsonLines:
    """One JSON object a line; empty lines count as lines only. A key is the line's offset in bytes."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def __iter__(self) -> Iterator[Row | Broken]:
        decoder = _Decoder()
        with self._path.open("rb") as file:
            offset = 0
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_RECORD), b""), 1):
                if len(line) == _LONGEST_RECORD and not line.endswith(b"\n"):
                    yield Broken(f"line {number}", f"longer than {_LONGEST_RECORD} bytes, from byte {offset} on")
                    while (more := file.readline(_CHUNK_BYTES)) and not more.endswith(b"\n"):
                        pass
                    offset = file.tell()
                    continue
                if offset == 0 and line.startswith(codecs.BOM_UTF8):
                    offset, line = len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
                if line.strip(_BLANKS.encode()):
                    yield _row_of(decoder, line, offset, f"line {number}")
                offset += len(line)

    def at(self, key: int) -> Any:
        with self._path.open("rb") as file:
            file.seek(key)
            return _DECODER.decode(file.readline().decode().strip(_BLANKS))


def _row_of(decoder: _Decoder, line: bytes, offset: int, place: str) -> Row | Broken:
    try:
        data = decoder.whole(line.decode().strip(_BLANKS))
    except (ValueError, RecursionError) as error:
        return Broken(place, _why(error, line, offset, cut=not line.endswith(b"\n")))
    return Broken(place, decoder.why()) if decoder.repeated else Row(offset, place, data)


def _why(error: ValueError | RecursionError, text: bytes, offset: int, *, cut: bool) -> str:
    """What is wrong with a line, and at which byte of the file.

    Args:
        error: of decoding it, as UTF-8 or as JSON.
        text: the line.
        offset: its first byte in the file.
        cut: whether the file ends with it.
    """
    if cut and _is_cut(error):
        return f"the file ends inside it, at byte {offset + len(text)}"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {offset + error.start}"
    if not isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error})"
    lead = len(text) - len(text.lstrip(_BLANKS.encode()))
    return f"no JSON ({error.msg}) at byte {offset + lead + len(error.doc[: error.pos].encode())}"


def _is_cut(error: ValueError | RecursionError) -> bool:
    """Whether more text could have made it right."""
    if isinstance(error, UnicodeDecodeError):
        return error.reason == "unexpected end of data"
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = error.doc[error.pos :].rstrip(_BLANKS)
    if error.msg.startswith("Unterminated string") or not rest:
        return True
    if error.msg.startswith("Invalid \\uXXXX escape"):
        return len(rest) < len(r"\uXXXX")
    return any(literal.startswith(rest) for literal in ("null", "true", "false", "NaN", "Infinity", "-Infinity"))


class JsonArray:
    """One JSON array of objects, read record by record; a key is the record's number.

    A file that ends inside the array yields its whole records, then ``Broken``.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._starts = array.array("q")
        self._ends = array.array("q")

    def __iter__(self) -> Iterator[Row | Broken]:
        self._starts, self._ends = array.array("q"), array.array("q")
        with self._path.open("rb") as file:
            text = _Text(file)
            try:
                yield from self._records(text)
            except _EncodingError as error:
                yield Broken(f"record {len(self._starts)}", f"no UTF-8 at byte {error.offset}")

    def _records(self, text: _Text) -> Iterator[Row | Broken]:
        text.take()  # the bracket that made this an array
        first = True
        while True:
            place = f"record {len(self._starts)}"
            mark = text.peek()
            if mark == "]" and (first or not text.comma):
                text.take()
                if text.peek() or not text.ended:
                    yield Broken(place, f"something follows the array, at byte {text.offset}")
                return
            if not first and not text.comma:
                why = f"no comma before it, at byte {text.offset}" if mark else f"the file ends, at byte {text.offset}"
                yield Broken(place, why)
                return
            start = text.offset
            try:
                data = text.value()
            except (ValueError, RecursionError) as error:
                yield Broken(place, text.why(error))
                return
            self._starts.append(start)
            self._ends.append(text.offset)
            repeated = text.decoder.why()
            yield Broken(place, repeated) if repeated else Row(len(self._starts) - 1, place, data)
            first = False
            text.skip_comma()

    def at(self, key: int) -> Any:
        with self._path.open("rb") as file:
            file.seek(self._starts[key])
            return json.loads(file.read(self._ends[key] - self._starts[key]))


class _EncodingError(Exception):
    """The file is no UTF-8 from this byte on."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class _Text:
    """A window on a UTF-8 file that knows the byte at which it starts.

    Attributes:
        offset: byte in the file of the next character.
        comma: whether ``skip_comma`` has just passed one.
        decoder: of its values.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._read = 0
        self._pending = b""  # the first bytes of a character whose others are not read yet
        self._fault: int | None = None  # the byte at which the file stops being UTF-8
        self._text = ""
        self._at = 0  # the next character in the window
        self._chunk = _CHUNK_BYTES
        self.offset = 0
        self.comma = False
        self.decoder = _Decoder()
        if self._more() and self._text.startswith("\ufeff"):
            self._pass(1)

    def peek(self) -> str:
        """The next character that is no blank; empty at the end of the file."""
        while True:
            here = self._at
            while here < len(self._text) and self._text[here] in _BLANKS:
                here += 1
            self._pass(here - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    @property
    def ended(self) -> bool:
        """Whether nothing is left, not even a part of a character."""
        return self._at == len(self._text) and not self._pending

    def take(self) -> None:
        """Passes the next character that is no blank."""
        if self.peek():
            self._pass(1)

    def skip_comma(self) -> None:
        self.comma = self.peek() == ","
        if self.comma:
            self._pass(1)

    def value(self) -> Any:
        """The next JSON value.

        Raises:
            ValueError: there is none, or the file ends inside it.
        """
        self.peek()
        self._chunk = _CHUNK_BYTES
        while True:
            try:
                data, end = self.decoder.first(self._text, self._at)
            except json.JSONDecodeError:
                if len(self._text) - self._at > _LONGEST_RECORD or not self._more():
                    raise
                continue
            if end == len(self._text) and self._more():  # a number may go on
                continue
            self._pass(end - self._at)
            return data

    def why(self, error: ValueError | RecursionError) -> str:
        """What is wrong with the value that ``value`` could not read."""
        if _is_cut(error) and not self._more():
            return f"the file ends inside it, at byte {self._read}"
        if not isinstance(error, json.JSONDecodeError):
            return f"no JSON ({error}) from byte {self.offset} on"
        return f"no JSON ({error.msg}) at byte {self.offset + len(error.doc[self._at : error.pos].encode())}"

    def _pass(self, count: int) -> None:
        self.offset += len(self._text[self._at : self._at + count].encode())
        self._at += count

    def _more(self) -> bool:
        """Reads on, twice as much each time within one value; False at the end of the file."""
        if self._fault is not None:
            raise _EncodingError(self._fault)
        data = self._file.read(self._chunk)
        if not data:
            return False
        self._read += len(data)
        self._chunk *= 2
        raw = self._pending + data
        try:
            text, used = codecs.utf_8_decode(raw, "strict", False)
        except UnicodeDecodeError as error:  # what stands before it can still be used
            self._fault = self._read - len(raw) + error.start
            text, used = raw[: error.start].decode(), len(raw)
        self._pending = raw[used:]
        self._text = self._text[self._at :] + text
        self._at = 0
        return True


# ---------------------------------------------------------------------------------------------- datasets


def _no_library(name: str) -> DataError:
    return DataError(
        f"data: reading `{name}` needs the package `datasets`; it is not installed",
        hint="pip install 'kernelbake[data]', or give a JSONL file",
    )


class DatasetRows:
    """Rows that the ``datasets`` library reads; a key is a row's number.

    Args:
        name: what was asked for.
        load: gives the data set from the imported library.

    Raises:
        DataError: the library is missing, or what it loads is missing, broken or not one split.
    """

    def __init__(self, name: str, load: Callable[[Any], Any]) -> None:
        self.name = name
        try:
            import datasets
        except ImportError as error:
            raise _no_library(name) from error
        datasets.disable_progress_bars()
        try:
            self._rows = load(datasets)
        except Exception as error:  # the library raises its own, Arrow's, the Hub client's and the system's errors
            raise DataError(f"data: `{name}` cannot be loaded ({_reason(error)}); wanted a data set") from error
        if isinstance(self._rows, Mapping):
            splits = ", ".join(f"`{split}`" for split in self._rows)
            raise DataError(f"data: `{name}` has the splits {splits}; wanted one of them as `{name}:split`")

    def __iter__(self) -> Iterator[Row | Broken]:
        number, left = 0, iter(self._rows)
        while True:
            with self._reading(number):
                data = next(left, None)
            if data is None:
                return
            yield Row(number, f"row {number}", data)
            number += 1

    def at(self, key: int) -> Any:
        with self._reading(key):
            return self._rows[key]

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """Says which row the library cannot read: of a damaged file, or of a column that needs another package."""
        try:
            yield
        except Exception as error:  # of any kind, as above
            raise DataError(f"data: row {number} of `{self.name}` cannot be read ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """The first line of an error, and of what caused it: the library hides the one behind the other."""
    reasons = []
    cause: BaseException | None = error
    while cause is not None:
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        if reason not in reasons:
            reasons.append(reason)
        cause = cause.__cause__
    return ": ".join(reasons)
