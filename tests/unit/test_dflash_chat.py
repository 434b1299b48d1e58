"""Conversations as ids and mask, for chat templates of several families."""

from __future__ import annotations

import signal
import types
import unicodedata
from typing import Any

import chats
import pytest
from chats import turns
from hypothesis import given
from hypothesis import strategies as st

from dflash import chat
from dflash.chat import ChatRenderer, Dropped, Tokenized
from dflash.errors import DataError, ExitCode
from dflash.stop import Interrupted, Stop

TALK = turns("hello", "fine, thanks", "and now?", "Über 日本語\n\n!")
THOUGHTS = turns("hello", "<think>\nwhy\n</think>\n\nfine", "and now?", "<think>\nhm\n</think>\n\nanswer")


def spans(template: str, messages: list[dict[str, str]], **options: Any) -> list[str]:
    """The supervised text, run by run."""
    renderer = ChatRenderer(chats.tokenizer(template), options=options)
    rendering = renderer.render({"messages": messages})
    assert isinstance(rendering, chat.Rendering), rendering
    return [rendering.text[start:end] for start, end in rendering.spans]


def one(template: str, row: dict[str, Any], **options: Any) -> Tokenized | Dropped:
    [item] = ChatRenderer(chats.tokenizer(template), options=options).tokenize([row])
    return item


def supervised_text(item: Tokenized | Dropped) -> str:
    assert isinstance(item, Tokenized), item
    ids = [token for token, flag in zip(item.ids, item.supervised, strict=True) if flag]
    return str(chats.tokenizer(None).decode(ids))


@pytest.mark.parametrize(
    ("template", "messages", "wanted"),
    [
        (chats.CHATML, TALK, ["fine, thanks<|im_end|>", "Über 日本語\n\n!<|im_end|>"]),
        (chats.MARKED, TALK, ["fine, thanks<|im_end|>", "Über 日本語\n\n!<|im_end|>"]),
        (chats.BARE, TALK, ["fine, thanks </s>", "Über 日本語\n\n! </s>"]),
        (chats.MERGED_SYSTEM, TALK, ["fine, thanks<end_of_turn>", "Über 日本語\n\n!<end_of_turn>"]),
        (
            chats.MERGED_SYSTEM,
            turns("hello", " fine ", system="be brief"),
            ["fine<end_of_turn>"],
        ),
        (chats.THINKING, THOUGHTS, ["fine<|im_end|>", "<think>\nhm\n</think>\n\nanswer<|im_end|>"]),
        (chats.THINKING, TALK, ["fine, thanks<|im_end|>", "<think>\n\n</think>\n\nÜber 日本語\n\n!<|im_end|>"]),
    ],
)
def test_only_what_the_assistant_writes_is_supervised(
    template: str, messages: list[dict[str, str]], wanted: list[str]
) -> None:
    assert spans(template, messages) == wanted


def test_what_the_prompt_already_says_is_not_supervised() -> None:
    wanted = ["fine, thanks<|im_end|>", "Über 日本語\n\n!<|im_end|>"]
    assert spans(chats.THINKING, TALK, enable_thinking=False) == wanted


@pytest.mark.parametrize("name", ["CHATML", "MARKED", "BARE", "MERGED_SYSTEM", "THINKING", "TOOLS"])
def test_ids_are_those_of_the_plain_rendering(name: str) -> None:
    template = getattr(chats, name)
    item = one(template, {"messages": THOUGHTS})
    assert isinstance(item, Tokenized)
    plain = chats.tokenizer(template).apply_chat_template(THOUGHTS, tokenize=True, return_dict=False)
    assert item.ids == plain
    assert len(item.supervised) == len(item.ids)


_WRITTEN = {
    "CHATML": lambda text: text + "<|im_end|>",
    "MARKED": lambda text: text + "<|im_end|>",
    "BARE": lambda text: text + " </s>",
    "MERGED_SYSTEM": lambda text: text.strip() + "<end_of_turn>",
}


@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12), min_size=2, max_size=5),
    st.sampled_from(sorted(_WRITTEN)),
)
def test_any_text_is_masked_as_it_is_rendered(texts: list[str], name: str) -> None:
    messages, renderer = turns(*texts), ChatRenderer(chats.tokenizer(getattr(chats, name)))
    rendering = renderer.render({"messages": messages})
    assert isinstance(rendering, chat.Rendering)
    wanted = [_WRITTEN[name](text) for text in texts[1::2]]
    assert [rendering.text[start:end] for start, end in rendering.spans] == wanted
    [item] = renderer.tokenize([{"messages": messages}])
    fast = chats.tokenizer(getattr(chats, name))
    assert isinstance(item, Tokenized)
    assert item.ids == fast.apply_chat_template(messages, tokenize=True, return_dict=False)
    if all(text[0].isalnum() for text in texts):  # no token then reaches over the border before a turn
        assert supervised_text(item) == unicodedata.normalize("NFC", "".join(wanted))


def test_marks_in_a_macro_are_found_where_the_text_ends_up() -> None:
    assert spans(chats.MARKED_IN_MACRO, TALK) == ["fine, thanks", "Über 日本語\n\n!"]


def test_marks_that_would_change_the_rendering_are_not_used() -> None:
    assert spans(chats.MARKED_AND_TRIMMED, turns("hello", " fine ")) == ["fine</s>"]


def test_a_template_that_marks_nothing_gives_nothing() -> None:
    template = chats.CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert one(template, {"messages": TALK}) == Dropped(chat.NOT_SUPERVISED)


def test_a_turn_that_changes_the_text_around_it_drops_the_sample() -> None:
    template = "{% for m in messages %}{{ m.content | length }}:{{ m.content }};{% endfor %}"
    item = one(template, {"messages": TALK})
    assert isinstance(item, Dropped)
    assert item.reason == chat.NOT_LOCATED
    assert "message 1" in item.detail


def test_a_turn_rendered_twice_drops_the_sample() -> None:
    item = one("{% for m in messages %}{{ m.content }};{{ m.content }}{% endfor %}", {"messages": TALK})
    assert item == Dropped(chat.NOT_LOCATED, "message 1 is rendered 2 times")


def test_a_turn_that_the_template_leaves_out_is_no_label() -> None:
    template = "{% for m in messages[-2:] %}{{ m.role + m.content + '</s>' }}{% endfor %}"
    assert spans(template, TALK) == ["Über 日本語\n\n!</s>"]


def test_tool_calls_are_written_by_the_assistant() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [*turns("add"), {"role": "assistant", "content": None, "tool_calls": [call]}, *turns("hm", "two")]
    first, second = spans(chats.TOOLS, messages)
    assert first == '\n<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call><|im_end|>'
    assert second == "two<|im_end|>"


def test_a_token_across_a_border_is_not_supervised() -> None:
    item = one("{% for m in messages %}{{ m.content }}{% endfor %}", {"messages": turns("th", "e user")})
    assert isinstance(item, Tokenized)
    fast = chats.tokenizer(None)
    pieces = [fast.decode([token]) for token in item.ids]
    assert pieces[0] == "the"
    assert not item.supervised[0]
    assert all(item.supervised[1:])


def test_columns_and_roles_of_shared_conversations() -> None:
    shared = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine, thanks"}]
    assert one(chats.CHATML, {"conversations": shared}) == one(chats.CHATML, {"messages": TALK[:2]})
    system = [{"from": "system", "value": "be brief"}, *shared]
    assert one(chats.CHATML, {"conversations": system}) == one(
        chats.CHATML, {"messages": turns("hello", "fine, thanks", system="be brief")}
    )
    assert one(chats.CHATML, {"messages": None, "conversations": TALK}) == one(chats.CHATML, {"messages": TALK})


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": turns("hello")}, Dropped(chat.NO_ASSISTANT)),
        ({"messages": []}, Dropped(chat.NO_ASSISTANT, "`messages` is empty")),
        ({"messages": "hello"}, Dropped(chat.MALFORMED, "`messages` is no list of messages")),
        ({"messages": [3]}, Dropped(chat.MALFORMED, "message 0 is no object")),
        ({"messages": [{"content": "x"}]}, Dropped(chat.MALFORMED, "message 0 has no role")),
        ({"messages": [{"role": "user"}]}, Dropped(chat.MALFORMED, "message 0 has no text")),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            Dropped(chat.MALFORMED, "message 0 has no text"),
        ),
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            Dropped(chat.MALFORMED, "message 0 is from `alien`"),
        ),
        ({"messages": turns("hello", "\ud800")}, Dropped(chat.MALFORMED, "half of a surrogate pair")),
    ],
)
def test_what_cannot_be_a_sample_says_why(row: dict[str, Any], wanted: Dropped) -> None:
    assert one(chats.CHATML, row) == wanted


def test_a_template_may_refuse_a_conversation() -> None:
    item = one(chats.MERGED_SYSTEM, {"messages": [*turns("hello", "fine"), {"role": "assistant", "content": "more"}]})
    assert isinstance(item, Dropped)
    assert item.reason == chat.REFUSED
    assert "roles must alternate" in item.detail


def test_content_in_parts() -> None:
    template = chats.CHATML.replace(
        "message.content", "(message.content if message.content is string else message.content[0].text)"
    )
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in TALK]
    assert one(template, {"messages": parts}) == one(template, {"messages": TALK})


def test_many_rows_keep_their_order() -> None:
    rows = [{"messages": turns("hello", text)} for text in ("a", "b")]
    bad = {"messages": turns("hello")}
    items = ChatRenderer(chats.tokenizer(chats.CHATML)).tokenize([rows[0], bad, rows[1], bad])
    assert items == [one(chats.CHATML, rows[0]), Dropped(chat.NO_ASSISTANT), one(chats.CHATML, rows[1]), items[1]]


def test_the_prompt_of_messages() -> None:
    renderer = ChatRenderer(chats.tokenizer(chats.CHATML))
    text = chats.tokenizer(None).decode(renderer.prompt(turns("hello")))
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(DataError, match="the chat template refuses it"):
        ChatRenderer(chats.tokenizer(chats.MERGED_SYSTEM)).prompt([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    "template", ["a\n{% for", "{% generation %}\n{% for", "a\n{% generation %}", "a\n{% nothing %}"]
)
def test_a_template_that_does_not_compile_is_refused_with_its_line(template: str) -> None:
    with pytest.raises(DataError, match=r"chat template is no Jinja \(line 2: .*wanted one that compiles"):
        ChatRenderer(chats.tokenizer(chats.CHATML), template=template)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="has no chat template"):
        ChatRenderer(chats.tokenizer(None))
    assert ChatRenderer(chats.tokenizer(None), template=chats.MARKED).has_marks
    assert not ChatRenderer(chats.tokenizer(chats.CHATML)).has_marks


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(DataError, match=r"`Slow` gives no offsets of its tokens; wanted a fast tokenizer"):
        ChatRenderer(Slow())


@pytest.mark.parametrize(
    ("offsets", "wanted"),
    [
        ([(0, 2), (2, 5)], [(0, 2), (2, 5)]),
        ([(0, 1), (0, 1), (1, 5)], [(0, 1), (0, 1), (1, 5)]),
        ([(0, 2), (3, 5)], [(0, 2), (2, 5)]),
        ([(0, 2), (4, 5)], None),
        ([(0, 2), (2, 2), (2, 5)], None),
        ([(0, 2), (0, 0), (2, 5)], None),
        ([(0, 2), (2, 4)], None),
        ([(0, 5), (0, 2)], None),
        ([], None),
    ],
)
def test_offsets_must_cover_the_text(offsets: list[tuple[int, int]], wanted: list[tuple[int, int]] | None) -> None:
    ranges_T2 = chat._ranges("ab cd", offsets)
    assert (ranges_T2 if ranges_T2 is None else list(map(tuple, ranges_T2.tolist()))) == wanted


def test_a_signal_while_a_template_renders_is_not_taken_for_a_fault_of_the_template() -> None:
    """The sample would be dropped, and the run go on."""
    stop, fast = Stop(), chats.tokenizer(chats.CHATML)
    renderer = ChatRenderer(fast)

    def interrupted(*args: Any, **options: Any) -> str:
        stop._on(signal.SIGINT, None)
        return "not reached"

    renderer._tokenizer = types.SimpleNamespace(apply_chat_template=interrupted)
    with pytest.raises(Interrupted, match="train: stopped by SIGINT; no step was made yet") as caught:
        renderer.tokenize([{"messages": TALK}])
    assert caught.value.error.exit_code == ExitCode.INTERRUPTED


@pytest.mark.parametrize("mark", ["{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"])
def test_a_template_that_asks_for_the_date_is_refused(mark: str) -> None:
    """Its samples would be others on the next day: other tokens in use than were checked, and no way to resume."""
    dated = "{% if asks %}{{ strftime_now('%d %b') }}{% endif %}{% for message in messages %}<" + mark + ">{% endfor %}"
    item = one(dated, {"messages": TALK}, asks=True)
    assert isinstance(item, Dropped)
    assert item.reason == chat.REFUSED
    assert "it asks for today's date; wanted a template with a fixed one" in item.detail
    assert isinstance(one(dated, {"messages": TALK}, asks=False), Tokenized)
