"""Conversations → token ids, and which of them the model itself writes. Loads no torch.

The ids are those of the plain rendering of the whole conversation; only the mask needs to be found. Three ways, each
checked against that rendering, and where none holds the conversation is dropped with its reason:

1. The template marks what the assistant writes with ``{% generation %}``. The text between two marks is found by
   rendering with a character before and one after it, which must give the plain rendering once they are taken out.
2. A turn ends where the text after it begins. That text is what follows in a rendering in which the turn says
   something else, and the plain rendering must end with it.
3. A turn begins where the prompt for it ends: the rendering of the messages before with a generation prompt, if the
   plain rendering starts with that; else the text before the turn in the rendering in which it says something else.

So templates that rewrite earlier turns (reasoning taken out, a system message moved into the first turn) are masked as
they are rendered. If a special token stands right after a turn, it ends the turn and belongs to it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dflash.anchors import Integers
from dflash.errors import DataError

Message = dict[str, Any]
Span = tuple[int, int]

ASSISTANT = "assistant"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""``from`` of a ``conversations`` row → role."""

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OPEN, _CLOSE = "\ue000", "\ue001"
_STAND_IN = "\ue002stand-in\ue003"


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """A sample as ids.

    Args:
        ids: token ids.
        supervised: whether the model itself writes the token.
    """

    ids: list[int]
    supervised: list[bool]


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A sample that cannot be used.

    Args:
        reason: the kind, by which samples are counted.
        detail: what was found in this one.
    """

    reason: str
    detail: str = ""


NO_ASSISTANT = "no assistant turn"
NOT_SUPERVISED = "nothing supervised"
NOT_LOCATED = "an assistant turn cannot be located in the rendering"
NOT_MAPPED = "the tokenizer's offsets do not cover the text"
REFUSED = "the chat template refuses it"
MALFORMED = "malformed"


class _Drop(Exception):
    """Carries a ``Dropped`` out of the search."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.value = Dropped(reason, detail)


def _no_date(pattern: str) -> str:
    """In place of the function by which transformers gives templates today's date.

    Raises:
        ValueError: always: samples that change at midnight are not those that were checked, and runs could not go on.
    """
    raise ValueError("it asks for today's date; wanted a template with a fixed one (data.template)")


def messages_of(row: Mapping[str, Any]) -> list[Message] | Dropped:
    """The messages of a row: ``messages`` with role and content, or ``conversations`` with from and value.

    Fields other than those (tool calls, reasoning) are kept for the template.
    """
    column = "messages" if row.get("messages") is not None else "conversations"
    turns = row.get(column)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        return Dropped(MALFORMED, f"`{column}` is no list of messages")
    if not turns:
        return Dropped(NO_ASSISTANT, f"`{column}` is empty")
    try:
        return [_message(turn, number) for number, turn in enumerate(turns)]
    except _Drop as drop:
        return drop.value


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise _Drop(MALFORMED, f"message {number} is no object")
    fields = {name: value for name, value in turn.items() if value is not None}
    if "role" not in fields and "from" in fields:
        role = _ROLES.get(str(fields.pop("from")).lower())
        if role is None:
            raise _Drop(MALFORMED, f"message {number} is from `{turn['from']}`")
        fields = {**fields, "role": role, "content": fields.pop("value", None)}
    if not isinstance(fields.get("role"), str):
        raise _Drop(MALFORMED, f"message {number} has no role")
    content = fields.get("content")
    if content is None and fields["role"] == ASSISTANT and len(fields) > 1 + ("content" in fields):
        fields["content"] = ""  # a turn of tool calls alone
    elif not _is_text(content):
        raise _Drop(MALFORMED, f"message {number} has no text")
    return fields


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON may hold halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_text(content: Any) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


@dataclasses.dataclass(frozen=True)
class Rendering:
    """A conversation as text.

    Args:
        text: the plain rendering.
        spans: what the model writes, as ascending character ranges.
    """

    text: str
    spans: tuple[Span, ...]


class ChatRenderer:
    """Renders conversations by a tokenizer's chat template.

    Args:
        tokenizer: of transformers, one with offsets (a fast one).
        template: another template than the tokenizer's own.
        options: names for the template, such as ``enable_thinking``.

    Raises:
        DataError: the tokenizer has no offsets, or there is no template, or it is none.
    """

    def __init__(
        self, tokenizer: Any, *, template: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._options = {"strftime_now": _no_date, **(options or {})}
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"data: `{type(tokenizer).__name__}` gives no offsets of its tokens; wanted a fast tokenizer",
                hint="without offsets the tokens of the assistant's turns cannot be told from the others",
            )
        try:
            self._template = tokenizer.get_chat_template(template)
        except ValueError as error:
            raise DataError(
                f"data: `{tokenizer.name_or_path or type(tokenizer).__name__}` has no chat template;"
                " wanted one for rows of messages",
                hint="give the template of the instruction-tuned model as a file",
            ) from error
        self._marked = _marked(self._template)
        self._end_of_turn = _special_tokens(tokenizer)

    @property
    def has_marks(self) -> bool:
        """Whether the template says itself what the assistant writes."""
        return self._marked is not None

    def tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[Tokenized | Dropped]:
        """The samples of many rows at once, in their order."""
        found: list[Tokenized | Dropped | None] = []
        renderings: list[Rendering] = []
        for row in rows:
            rendering = self.render(row)
            found.append(rendering if isinstance(rendering, Dropped) else None)
            if isinstance(rendering, Rendering):
                renderings.append(rendering)
        tokenized = iter(self._tokenized(renderings))
        return [next(tokenized) if item is None else item for item in found]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages with a generation prompt.

        Raises:
            DataError: the template refuses them.
        """
        try:
            text = self._text(messages, prompt=True)
        except _Drop as drop:
            raise DataError(f"data: {drop.value.reason}: {drop.value.detail}") from drop
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def render(self, row: Mapping[str, Any]) -> Rendering | Dropped:
        """The text of a row and what of it the model writes."""
        messages = messages_of(row)
        if isinstance(messages, Dropped):
            return messages
        tools = row.get("tools")
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            return Dropped(NO_ASSISTANT)
        try:
            text = self._text(messages, tools)
            spans = self._marked_spans(self._marked, messages, tools, text) if self._marked else None
            if spans is None:
                located = (self._locate(messages, tools, number, text) for number in turns)
                spans = [span for span in located if span is not None]
            return Rendering(text, _checked(spans, text))
        except _Drop as drop:
            return drop.value

    # ------------------------------------------------------------------------------------------ text

    def _text(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools or None,
                chat_template=self._template,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # a template may raise anything: its own errors, missing keys, wrong types
            raise _Drop(REFUSED, f"{type(error).__name__}: {error}") from error
        if not is_unicode(text):
            raise _Drop(MALFORMED, "half of a surrogate pair")
        return text

    def _marked_spans(
        self, template: _MarkedTemplate, messages: Sequence[Message], tools: Any, text: str
    ) -> list[Span] | None:
        """Spans between the template's marks; None where the marks change what is rendered."""
        names = {**self._tokenizer.special_tokens_map, **self._options}
        try:
            marked = template.render(messages, tools or None, names)
        except Exception as error:
            raise _Drop(REFUSED, f"{type(error).__name__}: {error}") from error
        spans: list[Span] = []
        plain, opened = 0, -1
        for part in re.split(f"([{_OPEN}{_CLOSE}])", marked):
            if part == _OPEN and opened < 0:
                opened = plain
            elif part == _CLOSE and opened >= 0:
                spans.append((opened, plain))
                opened = -1
            elif part in (_OPEN, _CLOSE):
                return None
            else:
                plain += len(part)
        unmarked = marked.replace(_OPEN, "").replace(_CLOSE, "")
        return spans if unmarked == text and opened < 0 else None

    def _locate(self, messages: Sequence[Message], tools: Any, number: int, text: str) -> Span | None:
        """Where a turn stands in the rendering; None if the template leaves it out."""
        content = messages[number]["content"]
        stand_in = _STAND_IN if isinstance(content, str) else [{"type": "text", "text": _STAND_IN}]
        other: list[Message] = [*messages]
        other[number] = {"role": ASSISTANT, "content": stand_in}
        parts = self._text(other, tools).split(_STAND_IN)
        if parts == [text]:
            return None
        if len(parts) != 2 or _STAND_IN in text:
            raise _Drop(NOT_LOCATED, f"message {number} is rendered {len(parts) - 1} times")
        before, after = parts
        start = self._start(messages[:number], tools, before, text)
        if start is None or not text.endswith(after) or start > len(text) - len(after):
            raise _Drop(NOT_LOCATED, f"the text around message {number} depends on what it says")
        end = len(text) - len(after)
        ending = self._end_of_turn.match(text, end)
        return start, ending.end() if ending else end

    def _start(self, before: Sequence[Message], tools: Any, text_before: str, text: str) -> int | None:
        fallback = len(text_before) if text.startswith(text_before) else None
        if not before:
            return fallback
        try:
            prompt = self._text(before, tools, prompt=True)
            if not text.startswith(prompt):
                return fallback
            asks = len(prompt) == fallback or prompt != self._text(before, tools)
        except _Drop:  # a template may refuse a conversation cut here; the whole one it has accepted
            return fallback
        return len(prompt) if asks else fallback

    # ------------------------------------------------------------------------------------------ tokens

    def _tokenized(self, renderings: Sequence[Rendering]) -> list[Tokenized | Dropped]:
        if not renderings:
            return []
        encoded = self._tokenizer(
            [rendering.text for rendering in renderings],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [
            _mask(rendering, ids, offsets)
            for rendering, ids, offsets in zip(renderings, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]


def _mask(rendering: Rendering, ids: list[int], offsets: Sequence[Span]) -> Tokenized | Dropped:
    """Characters → tokens. A token is supervised if all of its text is; one across a border is not."""
    ranges_T2 = _ranges(rendering.text, offsets)
    if ranges_T2 is None:
        return Dropped(NOT_MAPPED)
    supervised_T = np.zeros(len(ids), np.bool_)
    for start, end in rendering.spans:
        first = np.searchsorted(ranges_T2[:, 0], start, side="left")
        supervised_T[first : np.searchsorted(ranges_T2[:, 1], end, side="right")] = True
    if not supervised_T.any():
        return Dropped(NOT_SUPERVISED)
    return Tokenized(ids, supervised_T.tolist())


def _ranges(text: str, offsets: Sequence[Span]) -> Integers | None:
    """The text of each token [T, 2], with blanks that a tokenizer leaves out of its offsets given to the token after.

    None if offsets go backwards, are empty, or leave anything else out. Tokens of one character, such as its bytes,
    share its range.
    """
    ranges_T2 = np.array(offsets, np.int64).reshape(-1, 2)
    ends_T = ranges_T2[:, 1]
    before_T = np.concatenate(([0], ends_T[:-1])) if len(ends_T) else ends_T
    for token in np.flatnonzero(ranges_T2[:, 0] > before_T):
        if text[before_T[token] : ranges_T2[token, 0]].strip():
            return None
    ranges_T2[:, 0] = np.minimum(ranges_T2[:, 0], before_T)
    forward = (np.diff(ranges_T2, axis=0) >= 0).all() and (ranges_T2[:, 0] < ends_T).all()
    covered = int(ends_T[-1]) if len(ends_T) else 0
    return ranges_T2 if forward and not text[covered:].strip() else None


def _checked(spans: Iterable[Span], text: str) -> tuple[Span, ...]:
    """Spans in order, inside the text, none over another; empty ones are left out."""
    checked: list[Span] = []
    for start, end in spans:
        if not 0 <= start <= end <= len(text) or (checked and start < checked[-1][1]):
            raise _Drop(NOT_LOCATED, "turns overlap in the rendering")
        if start < end:
            checked.append((start, end))
    if not checked:
        raise _Drop(NOT_SUPERVISED)
    return tuple(checked)


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """A special token, blanks before it allowed."""
    known = {str(token) for token in tokenizer.all_special_tokens}
    known |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    choices = "|".join(re.escape(token) for token in sorted(known, key=len, reverse=True) if token)
    return re.compile(rf"\s*(?:{choices})" if choices else r"(?!)")


def _marked(template: str) -> _MarkedTemplate | None:
    """The template with marks; None for one that has none.

    Raises:
        DataError: it is no template.
    """
    from jinja2 import TemplateError

    try:
        made = _MarkedTemplate(template)
    except TemplateError as error:
        place = f"line {lineno}: " if (lineno := getattr(error, "lineno", None)) else ""
        raise DataError(f"data: the chat template is no Jinja ({place}{error}); wanted one that compiles") from error
    return made if _MARKS.search(template) else None


class _MarkedTemplate:
    """A template that renders a character before and after what ``{% generation %}`` encloses.

    transformers counts the characters rendered so far, which is wrong in a macro; a character in the text is right
    wherever the text ends up.
    """

    def __init__(self, template: str) -> None:
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from transformers.utils import chat_template_utils

        class Marks(Extension):
            tags = {"generation"}  # noqa: RUF012 - declared by jinja2
            priority = 1000  # above transformers' own extension of this tag

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                opening = nodes.Output([nodes.TemplateData(_OPEN)], lineno=line)
                closing = nodes.Output([nodes.TemplateData(_CLOSE)], lineno=line)
                return nodes.Scope([opening, *body, closing], lineno=line)

        environment = chat_template_utils._compile_jinja_template(template).environment
        self._template = environment.overlay(extensions=[Marks]).from_string(template)

    def render(self, messages: Sequence[Message], tools: Any, names: Mapping[str, Any]) -> str:
        return str(
            self._template.render(
                messages=list(messages), tools=tools, documents=None, add_generation_prompt=False, **names
            )
        )
