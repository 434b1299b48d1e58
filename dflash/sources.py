"""Rows → numbered samples. Loads no torch.

Each row is read and checked once, before training. What cannot be a sample is either *faulty* (the file is broken or no
data of any known kind: refused, with every place) or *dropped* (a sample that cannot be used: counted by reason).
"""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dflash import anchors, hub, rows
from dflash.anchors import Flags, Integers
from dflash.chat import (
    ASSISTANT,
    MALFORMED,
    NO_ASSISTANT,
    NOT_SUPERVISED,
    ChatRenderer,
    Dropped,
    Tokenized,
    is_unicode,
    messages_of,
)
from dflash.errors import DataError, Faults
from dflash.hub import as_bytes
from dflash.rows import Broken, Row, Rows, open_rows
from dflash.spec import RANDOM, STDLIB, DataSpec, Spec

if TYPE_CHECKING:
    from dflash import data

REFUSE, SKIP = "refuse", "skip"
"""What happens to broken lines and records: refuse the file, or leave them out and count them."""

BROKEN = "a broken line or record"
SKIP_HINT = "with `data.broken=skip`, what cannot be parsed is left out and counted"
_SHOWN = 50
_AT_ONCE = 256

_BEGIN_S = 1.0
"""How long rows are looked at before a run begins; what is behind them is checked when its data are opened."""


@dataclasses.dataclass(frozen=True)
class Faulty:
    """A row that is no data of any known kind."""

    why: str


class Chat(Protocol):
    """What makes samples of conversations."""

    def tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[Tokenized | Dropped]: ...


class Encoder:
    """Rows → ids and mask: conversations, ``input_ids`` with ``loss_mask``, or ``text``.

    Args:
        encode: text → token ids.
        chat: renders conversations; None where they cannot be.
        vocab_size: of the target; ids must be below it.
        why_no_chat: why they cannot be.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        chat: Chat | None,
        vocab_size: int,
        *,
        why_no_chat: str = "there is no chat template",
    ) -> None:
        self._encode = encode
        self._chat = chat
        self._vocab_size = vocab_size
        self._why_no_chat = why_no_chat

    def __call__(self, rows: Sequence[Any]) -> list[Tokenized | Dropped | Faulty]:
        """What each row gives, in their order."""
        found: list[Tokenized | Dropped | Faulty | None] = [self._plain(row) for row in rows]
        chats = [row for row, item in zip(rows, found, strict=True) if item is None]
        rendered: Iterator[Tokenized | Dropped] = iter(self._chat.tokenize(chats) if self._chat and chats else ())
        return [self._checked(next(rendered) if item is None else item) for item in found]

    def _plain(self, row: Any) -> Tokenized | Dropped | Faulty | None:
        """A row that needs no chat template; None for one that does."""
        if not isinstance(row, Mapping):
            return Faulty("wanted an object")
        given = {name for name, value in row.items() if value is not None}
        if "input_ids" in given:
            return _pretokenized(row)
        if given & {"messages", "conversations"}:
            if self._chat is None:
                return Faulty(f"a conversation, but {self._why_no_chat}; wanted `input_ids` or `text`")
            return None
        if "text" in given:
            if not isinstance(row["text"], str):
                return Faulty("`text` is no text")
            if not is_unicode(row["text"]):
                return Dropped(MALFORMED, "half of a surrogate pair")
            ids = self._encode(row["text"])
            return Tokenized(ids, [index > 0 for index in range(len(ids))])
        known = "`messages`, `conversations`, `input_ids` with `loss_mask`, or `text`"
        return Faulty(f"has {sorted(map(str, row))}; wanted {known}")

    def _checked(self, item: Tokenized | Dropped | Faulty) -> Tokenized | Dropped | Faulty:
        if isinstance(item, Tokenized) and item.ids and not 0 <= min(item.ids) <= max(item.ids) < self._vocab_size:
            return Faulty(f"an id outside the target's vocabulary of `{self._vocab_size}`")
        return item


def _pretokenized(row: Mapping[str, Any]) -> Tokenized | Faulty:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list):
        return Faulty("wanted `input_ids` and `loss_mask`, both as lists")
    if len(ids) != len(mask):
        return Faulty(f"`{len(ids)}` input_ids and `{len(mask)}` loss_mask; wanted as many")
    if any(type(item) is not int for item in ids):
        return Faulty("an input id that is no whole number")
    if any(item not in (0, 1) for item in mask):
        return Faulty("a loss_mask other than 0 and 1")
    return Tokenized(ids, [bool(item) for item in mask])


class RowSource:
    """Samples of rows; implements ``data.Source``. A sample is rendered again whenever it is read.

    Args:
        rows: where they come from.
        encoder: what makes samples of them.
        longest: length of the largest bucket, in tokens.
        truncate: whether longer samples are cut rather than dropped.
        broken: ``refuse`` or ``skip``.

    Attributes:
        dropped: samples left out, by reason.
        examples: reason → the first sample left out for it, for people.
        num_tokens, num_supervised: of the samples that are used.
        digest: of their ids and masks.

    Raises:
        DataError: faulty rows, all with their places; or no sample at all, with the reasons.
    """

    def __init__(
        self, rows: Rows, encoder: Encoder, *, longest: int, truncate: bool = False, broken: str = REFUSE
    ) -> None:
        self.name = rows.name
        self.dropped: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, str] = {}
        self.num_tokens = 0
        self.num_supervised = 0
        self._rows = rows
        self._encoder = encoder
        self._longest = longest
        self._truncate = truncate
        self._keys = array.array("q")
        self._lengths = array.array("q")
        self._hash = hashlib.sha256()
        self._unparsed = False
        faults: list[tuple[str, str]] = []
        self._num_faults = 0
        try:
            for batch in _batches(rows):
                self._scan(batch, faults, broken)
        except OSError as error:
            raise DataError(f"data: `{self.name}` cannot be read ({error.strerror or error})") from error
        self.digest = self._hash.hexdigest()
        if faults:
            raise _faulty(self.name, faults, self._num_faults, broken=self._unparsed)
        if not self._keys:
            why = [f"{count} × {reason}{self._example(reason)}" for reason, count in self.dropped.items()]
            raise DataError(f"data: `{self.name}` has no sample to train on", reasons=why or ["it holds no row"])

    def _scan(self, batch: Sequence[Row | Broken], faults: list[tuple[str, str]], broken: str) -> None:
        encoded = iter(self._encoder([row.data for row in batch if isinstance(row, Row)]))
        for row in batch:
            if isinstance(row, Broken):
                if broken == SKIP:
                    self._drop(Dropped(BROKEN, row.why), row.place)
                else:
                    self._refuse(faults, row.place, row.why)
                    self._unparsed = True
                continue
            item = next(encoded)
            if isinstance(item, Faulty):
                self._refuse(faults, row.place, item.why)
            elif isinstance(item, Dropped):
                self._drop(item, row.place)
            else:
                self._add(item, row)

    def _add(self, item: Tokenized, row: Row) -> None:
        supervised = np.array(item.supervised[: self._longest], np.bool_)
        if len(item.ids) > self._longest and not self._truncate:
            self._drop(Dropped(f"longer than the largest bucket, {self._longest}"), row.place)
        elif not any(item.supervised):
            self._drop(Dropped(NOT_SUPERVISED), row.place)
        elif not len(anchors.valid_positions(supervised)):
            self._drop(Dropped("no supervised token that a block could draft"), row.place)
        else:
            self._keys.append(row.key)
            self._lengths.append(len(supervised))
            ids = np.array(item.ids[: self._longest], np.int64)
            for part in (np.int64(len(ids)), ids, supervised):
                self._hash.update(part.tobytes())
            self.num_tokens += len(supervised)
            self.num_supervised += int(supervised.sum())

    def _refuse(self, faults: list[tuple[str, str]], place: str, why: str) -> None:
        """Takes a fault in; what will not be shown is only counted: a wrong file may have one in every line."""
        self._num_faults += 1
        if self._num_faults <= _SHOWN:
            faults.append((place, why))

    def _drop(self, item: Dropped, place: str) -> None:
        self.dropped[item.reason] += 1
        self.examples.setdefault(item.reason, f"{place}: {item.detail}".removesuffix(": "))

    def _example(self, reason: str) -> str:
        return f" ({self.examples[reason]})"

    @property
    def share(self) -> float:
        """Share of the tokens that are supervised."""
        return self.num_supervised / self.num_tokens

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, number: int) -> tuple[Integers, Flags]:
        try:
            [item] = self._encoder([self._rows.at(self._keys[number])])
        except (OSError, ValueError, RecursionError) as error:
            raise self._changed(number) from error
        if not isinstance(item, Tokenized):
            raise self._changed(number)
        ids, supervised = np.array(item.ids, np.int64), np.array(item.supervised, np.bool_)
        return ids[: self._longest], supervised[: self._longest]

    def length(self, number: int) -> int | None:
        return self._lengths[number]

    def _changed(self, number: int) -> DataError:
        return DataError(
            f"data: `{self.name}` has changed while it was in use, at sample `{number}`; wanted it as it was checked"
        )


def _batches(rows: Rows) -> Iterator[list[Row | Broken]]:
    batch: list[Row | Broken] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _faulty(name: str, faults: list[tuple[str, str]], count: int, *, broken: bool) -> DataError:
    """Every place with what is wrong there; places with the same fault in one line."""
    places: dict[str, list[str]] = {}
    for place, why in faults:
        places.setdefault(why, []).append(place)
    shown = [f"{_runs(found)}: {why}" for why, found in places.items()]
    if count > len(faults):
        shown.append(f"and {count - len(faults)} more")
    rows = f"{count} faulty row{'s' if count > 1 else ''}"
    return DataError(f"data: `{name}` has {rows}", reasons=shown, hint=SKIP_HINT if broken else None)


def _runs(places: Sequence[str]) -> str:
    """Places in their order, those that follow one another as one: ``line 1 to line 20, line 23``."""
    runs: list[list[str]] = []
    for place in places:
        kind, _, number = place.rpartition(" ")
        if runs and number.isdecimal() and runs[-1][-1] == f"{kind} {int(number) - 1}":
            runs[-1].append(place)
        else:
            runs.append([place])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


# ---------------------------------------------------------------------------------------------- what a run names


def open_source(spec: Spec) -> data.Source:
    """The samples that a section names. Loads torch, and transformers where the target's tokenizer is wanted.

    Raises:
        InputError: the tokenizer, the chat template or the data cannot be loaded or used.
    """
    from dflash import data

    tokenizer = None if _is_bytes(spec) else hub.tokenizer(spec.target.model)
    encode = as_bytes if tokenizer is None else hub.encoder(tokenizer)
    if spec.data.source == STDLIB:
        return data.PythonSources(encode, spec.axes.buckets, packed=spec.axes.layouts == ("packed",))
    chat, why = _renderer(tokenizer, spec.data)
    return _of_rows(spec, open_rows(spec.data.source), Encoder(encode, chat, spec.target.vocab_size, why_no_chat=why))


def check(spec: Spec) -> None:
    """Refuses what can be told of a section's data at once, without their tokenizer and without a network.

    The rows of a JSON file are looked at as ``open_source`` does, for a second, or all of them once there is a fault.

    Raises:
        InputError: there is no such thing, its rows are faulty or none can be used, or the chat template is not there.
    """
    if spec.data.source == STDLIB:
        return
    faults = Faults()
    faults.of(lambda: _template(spec.data))
    faults.of(lambda: _check_rows(spec))
    faults.refuse()


def _check_rows(spec: Spec) -> None:
    rows.check_named(spec.data.source)
    if not rows.is_json(spec.data.source):
        return
    why = ""
    if _is_bytes(spec):
        why = NO_TEMPLATE_OF_BYTES
    elif spec.data.template is None and not hub.may_have_template(spec.target.model):
        why = f"`{spec.target.model}` has no chat template"
    encode = as_bytes if _is_bytes(spec) else _stand_in
    encoder = Encoder(encode, None if why else _StandIn(), spec.target.vocab_size, why_no_chat=why)
    every = open_rows(spec.data.source)
    begin = _Begin(every)
    try:
        _of_rows(spec, begin, encoder)
    except DataError:
        if not begin.is_cut:
            raise
        _of_rows(spec, every, encoder)


def _of_rows(spec: Spec, found: Rows, encoder: Encoder) -> RowSource:
    cut = spec.data.too_long == "truncate"
    return RowSource(found, encoder, longest=spec.axes.buckets[-1], truncate=cut, broken=spec.data.broken)


def _is_bytes(spec: Spec) -> bool:
    return (spec.data.tokenizer or ("bytes" if spec.target.model == RANDOM else "target")) == "bytes"


NO_TEMPLATE_OF_BYTES = "the tokenizer `bytes` has no chat template (another --target has one, or data.tokenizer)"


def _renderer(tokenizer: Any, data_spec: DataSpec) -> tuple[ChatRenderer | None, str]:
    """What renders conversations, or why nothing does: that is a fault only if there are conversations."""
    template = _template(data_spec)
    if tokenizer is None:
        return None, NO_TEMPLATE_OF_BYTES
    try:
        return ChatRenderer(tokenizer, template=template, options=dict(data_spec.template_options)), ""
    except DataError as error:
        return None, error.message.removeprefix("data: ").partition(";")[0]


def _template(data_spec: DataSpec) -> str | None:
    """The chat template that is named, if one is.

    Raises:
        DataError: it cannot be read.
    """
    if data_spec.template is None:
        return None
    try:
        return Path(data_spec.template).read_text()
    except (OSError, ValueError) as error:
        raise DataError(f"data.template: `{data_spec.template}` cannot be read ({error})") from error


class _Begin:
    """The first rows of others, for ``_BEGIN_S``.

    Attributes:
        is_cut: whether there may be more.
    """

    def __init__(self, every: Rows) -> None:
        self.name = every.name
        self.at = every.at
        self.is_cut = False
        self._every = every

    def __iter__(self) -> Iterator[Row | Broken]:
        end = time.monotonic() + _BEGIN_S
        for row in self._every:
            yield row
            if time.monotonic() > end:
                self.is_cut = True
                return


_IDS = [0, 0, 0]
_SUPERVISED = [False, True, True]
"""The shortest sample that a block can be drafted in, of ids that every vocabulary has."""


def _stand_in(text: str) -> list[int]:
    """In place of a tokenizer: what it gives is taken for a sample that can be used, if there is any text."""
    return _IDS if text else []


class _StandIn:
    """In place of a chat template: a conversation with a turn of the assistant's is taken for a sample."""

    def tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[Tokenized | Dropped]:
        return [self._one(row) for row in rows]

    def _one(self, row: Mapping[str, Any]) -> Tokenized | Dropped:
        messages = messages_of(row)
        if isinstance(messages, Dropped):
            return messages
        if not any(message["role"] == ASSISTANT for message in messages):
            return Dropped(NO_ASSISTANT)
        return Tokenized(_IDS, _SUPERVISED)
