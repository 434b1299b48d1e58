"""Files and data sets as rows and samples: every fault named by its place, everything dropped counted."""

from __future__ import annotations

import builtins
import bz2
import contextlib
import copy
import dataclasses
import gzip
import importlib.util
import json
import lzma
import sys
import types
from pathlib import Path
from typing import Any

import chats
import numpy as np
import pytest
from chats import turns
from dflashspec import TINY
from hypothesis import given
from hypothesis import strategies as st

from dflash import chat, data, rows, sources
from dflash.chat import ChatRenderer
from dflash.errors import DataError
from dflash.rows import Broken, Row
from dflash.sources import Encoder, RowSource
from dflash.spec import Spec
from kernelbake.errors import InputError
from kernelbake.workload import FaultsError

PLAIN = Encoder(data.as_bytes, None, 256)


def source(path: Path | str, encoder: Encoder = PLAIN, **options: Any) -> RowSource:
    return RowSource(rows.open_rows(str(path)), encoder, **{"longest": 64, **options})


def chat_encoder(template: str = chats.CHATML) -> Encoder:
    fast = chats.tokenizer(template)
    return Encoder(lambda text: fast(text)["input_ids"], ChatRenderer(fast), len(fast))


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def texts(made: data.Source) -> list[str]:
    return [bytes(made.read(number)[0].tolist()).decode() for number in range(len(made))]


# ---------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "one"}\n{"text": "zwölf"}\n',
        '{"text": "one"}\r\n\r\n  \n{"text": "zwölf"}',
        '\ufeff{"text": "one"}\n{"text": "zwölf"}\n',
        '\ufeff\n\n {"text": "one"} \n\t{"text": "zw\\u00f6lf"}',
        '[{"text": "one"}, {"text": "zwölf"}]',
        '\ufeff \n[\n{"text": "one"}\n,\n{"text": "zwölf"}\n]\n',
    ],
)
def test_files_of_all_habits_give_the_same_samples(tmp_path: Path, text: str) -> None:
    made = source(written(tmp_path / "rows.jsonl", text))
    assert texts(made) == ["one", "zwölf"]
    ids, supervised = made.read(0)
    assert ids.dtype == np.int64
    assert supervised.tolist() == [False, True, True]
    assert (made.num_tokens, made.num_supervised) == (9, 7)
    assert made.share == 7 / 9


def test_every_broken_line_is_named_by_number_and_byte(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}\n',
        b'{"text": oops}\n',
        b"\n",
        b'{"text": "\xff"}\n',
        b"7\n",
        b'{"txt": "x"}\n',
        b'{"text": "cut',
    ]
    with pytest.raises(DataError, match="has 5 faulty rows") as caught:
        source(written(tmp_path / "rows.jsonl", b"".join(lines)))
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    assert caught.value.reasons == (
        f"line 2: no JSON (Expecting value) at byte {starts[1] + 9}",
        f"line 4: no UTF-8 at byte {starts[3] + 10}",
        "line 5: wanted an object",
        "line 6: has ['txt']; wanted `messages`, `conversations`, `input_ids` with `loss_mask`, or `text`",
        f"line 7: the file ends inside it, at byte {starts[6] + 13}",
    )


def test_byte_places_count_bytes_not_characters(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        source(written(tmp_path / "rows.jsonl", '\ufeff{"text": "日本"}\n  {"text": "ü" oops}\n'))
    at = len('\ufeff{"text": "日本"}\n  {"text": "ü" '.encode())
    assert caught.value.reasons == (f"line 2: no JSON (Expecting ',' delimiter) at byte {at}",)


def test_broken_lines_are_left_out_only_when_asked(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", '{"text": "good"}\n{"text": \n{"text": "fine"}\n{"te')
    made = source(path, broken=sources.SKIP)
    assert texts(made) == ["good", "fine"]
    assert made.dropped == {sources.BROKEN: 2}
    assert made.examples[sources.BROKEN].startswith("line 2: no JSON")
    with pytest.raises(DataError, match="2 faulty rows"):
        source(path)


REPEATED = '{"text": "abc"}, {"text": "one", "x": 1, "text": "two", "x": 2}, {"x": {"y": 1, "y": 2}}, {"text": "abcd"}'


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [("r.jsonl", REPEATED.replace("}, {", "}\n{"), "line"), ("r.json", f"[{REPEATED}]", "record")],
)
def test_a_name_that_stands_twice_in_an_object_loses_no_value_silently(
    name: str, text: str, kind: str, tmp_path: Path
) -> None:
    path, first = written(tmp_path / name, text), 2 if kind == "line" else 1
    with pytest.raises(DataError, match="has 2 faulty rows") as caught:
        source(path)
    assert caught.value.reasons == (
        f"{kind} {first}: `text`, `x` stands twice in an object",
        f"{kind} {first + 1}: `y` stands twice in an object",
    )
    made = source(path, broken="skip")
    assert texts(made) == ["abc", "abcd"]
    assert made.dropped == {sources.BROKEN: 2}


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a file that is no text at all."""
    monkeypatch.setattr(rows, "_LONGEST_RECORD", 64)
    monkeypatch.setattr(rows, "_CHUNK_BYTES", 16)
    good = '{"text": "abc"}\n'
    path = written(tmp_path / "long.jsonl", good + "x" * 64 + "\n" + good + "x" * 63 + "\n" + "\0" * 1000)
    with pytest.raises(DataError, match="has 3 faulty rows") as caught:
        source(path)
    at = len(good)
    assert caught.value.reasons[0] == f"line 2: longer than 64 bytes, from byte {at} on"
    assert caught.value.reasons[2] == f"line 5: longer than 64 bytes, from byte {2 * at + 129} on"
    made = source(path, broken="skip")
    assert texts(made) == ["abc", "abc"]


def test_a_file_of_another_format_is_called_by_its_name(tmp_path: Path) -> None:
    text = b'{"text": "abc"}\n'
    contents = {
        "compressed with gzip": gzip.compress(text),
        "compressed with bzip2": bz2.compress(text),
        "compressed with xz": lzma.compress(text),
        "in UTF-32": text.decode().encode("utf-32"),
        "in UTF-16": text.decode().encode("utf-16"),
        "a parquet file; wanted its name to end in `.parquet`": b"PAR1" + bytes(20),
    }
    for what, content in contents.items():
        with pytest.raises(DataError, match=f"rows.jsonl` is {what}"):
            source(written(tmp_path / "rows.jsonl", content), broken="skip")


def test_faults_that_are_not_shown_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, faulty = [], sources._faulty

    def counting(name: str, faults: list[tuple[str, str]], *rest: Any, **more: Any) -> DataError:
        kept.append(len(faults))
        return faulty(name, faults, *rest, **more)

    monkeypatch.setattr(sources, "_faulty", counting)
    with pytest.raises(DataError, match="has 999 faulty rows"):
        source(written(tmp_path / "wrong.jsonl", "x\n" * 999))
    assert kept == [sources._SHOWN]


def test_many_faults_are_counted_and_the_first_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 300 faulty rows") as caught:
        source(written(tmp_path / "rows.jsonl", "x\n" * 300))
    assert len(caught.value.reasons) == 51
    assert caught.value.reasons[-1] == "and 250 more"


def test_rows_with_the_same_fault_share_a_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 60 faulty rows") as caught:
        source(written(tmp_path / "rows.jsonl", '{"words": 1}\n[2]\n' * 30))
    one, two, more = caught.value.reasons
    assert one.startswith("line 1, line 3, line 5, ")
    assert one.endswith(
        "line 49: has ['words']; wanted `messages`, `conversations`, `input_ids` with `loss_mask`, or `text`"
    )
    assert two.startswith("line 2, line 4, ")
    assert more == "and 10 more"
    assert caught.value.hint is None


def test_rows_that_follow_one_another_with_the_same_fault_are_one_place(tmp_path: Path) -> None:
    lines = ['{"text": "good"}', *["[1]"] * 3, '{"text": "good"}', "[1]", '{"text"', *["[1]"] * 2]
    with pytest.raises(DataError) as caught:
        source(written(tmp_path / "rows.jsonl", "\n".join([*lines, ""])))
    same, unparsed = caught.value.reasons
    assert same == "line 2 to line 4, line 6, line 8 to line 9: wanted an object"
    assert unparsed.startswith("line 7: no JSON")
    assert caught.value.hint == sources.SKIP_HINT


def test_an_array_cut_in_the_middle(tmp_path: Path) -> None:
    whole = json.dumps([{"text": "one"}, {"text": "two"}, {"text": "three"}])
    cut = whole[: whole.index("ree")]
    path = written(tmp_path / "rows.json", cut)
    with pytest.raises(DataError) as caught:
        source(path)
    assert caught.value.reasons == (f"record 2: the file ends inside it, at byte {len(cut)}",)
    made = source(path, broken=sources.SKIP)
    assert texts(made) == ["one", "two"]
    assert made.dropped == {sources.BROKEN: 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[{"text": "one"}', "record 1: the file ends, at byte 16"),
        ('[{"text": "one"},', "record 1: the file ends inside it, at byte 17"),
        ('[{"text": "one"},]', "record 1: no JSON (Expecting value) at byte 17"),
        ('[{"text": "one"} {"text": "two"}]', "record 1: no comma before it, at byte 17"),
        ('[{"text": "one"}] x', "record 1: something follows the array, at byte 18"),
        ('[{"text": one}]', "record 0: no JSON (Expecting value) at byte 10"),
        (b'[{"text": "one"}, {"text": "\xff"}]', "record 1: no UTF-8 at byte 28"),
        ('[{"text": "one"}, 7]', "record 1: wanted an object"),
        ('[{"text": ' + "9" * 5000 + "}]", "record 0: no JSON (Exceeds the limit (4300 digits)"),
        ('[{"text": "one"}, ' + "[" * 200_000, "record 1: no JSON ("),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 20, 3])
def test_faults_of_an_array(
    tmp_path: Path, text: str | bytes, why: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_CHUNK_BYTES", chunk)
    with pytest.raises(DataError) as caught:
        source(written(tmp_path / "rows.json", text))
    assert caught.value.reasons[0].startswith(why)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.text(max_size=4), _JSON, max_size=3), max_size=5),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.data(),
)
def test_an_array_read_in_pieces_and_cut_anywhere(
    records: list[dict[str, Any]], chunk: int, ascii_only: bool, indent: int | None, drawn: st.DataObject
) -> None:
    import tempfile

    whole = json.dumps(records, ensure_ascii=ascii_only, indent=indent).encode()
    cut = drawn.draw(st.integers(1, len(whole)))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_CHUNK_BYTES", chunk)
        opened = rows.JsonArray(written(Path(folder) / "rows.json", whole[:cut]))
        found = list(opened)
        read = [row for row in found if isinstance(row, Row)]
        assert [row.data for row in read] == records[: len(read)]
        assert [opened.at(row.key) for row in read] == records[: len(read)]
    broken = [row for row in found if isinstance(row, Broken)]
    assert len(broken) == (0 if cut == len(whole) else 1)
    if broken:
        assert f"at byte {cut}" in broken[0].why
        assert found[-1] is broken[0]


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is in UTF-16; wanted UTF-8"):
        rows.open_rows(str(written(tmp_path / "rows.jsonl", "{}\n".encode("utf-16"))))
    with pytest.raises(DataError, match="is no file and no Hub id"):
        rows.open_rows(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="is no file and no Hub id"):
        rows.open_rows("data/rows.jsonl")
    with pytest.raises(DataError, match="is no file; wanted a parquet file"):
        rows.open_rows(str(tmp_path / "absent.parquet"))
    with pytest.raises(DataError, match="holds no parquet file"):
        rows.open_rows(str(tmp_path))
    with pytest.raises(DataError, match="no sample to train on") as caught:
        source(written(tmp_path / "empty.jsonl", ""))
    assert caught.value.reasons == ("it holds no row",)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", '{"text": "one"}\n')
    made = source(path)
    written(path, '{"txet": "one"}\n')
    with pytest.raises(DataError, match="has changed while it was in use, at sample `0`"):
        made.read(0)


# ---------------------------------------------------------------------------------------------- samples


def test_rows_of_ids(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", '{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, true, 1]}\n')
    ids, supervised = source(path).read(0)
    assert ids.tolist() == [5, 6, 7, 8]
    assert supervised.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, "`2` input_ids and `1` loss_mask; wanted as many"),
        ({"input_ids": [1, 2]}, "wanted `input_ids` and `loss_mask`, both as lists"),
        ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "an input id that is no whole number"),
        ({"input_ids": [1, True], "loss_mask": [1, 1]}, "an input id that is no whole number"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "a loss_mask other than 0 and 1"),
        ({"input_ids": [1, 256], "loss_mask": [1, 1]}, "an id outside the target's vocabulary of `256`"),
        ({"input_ids": [-1, 2], "loss_mask": [1, 1]}, "an id outside the target's vocabulary of `256`"),
        (
            {"messages": turns("hello", "fine")},
            "a conversation, but there is no chat template; wanted `input_ids` or `text`",
        ),
        ({"text": 3}, "`text` is no text"),
    ],
)
def test_rows_that_are_no_data(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError) as caught:
        source(written(tmp_path / "rows.jsonl", json.dumps(row)))
    assert caught.value.reasons == (f"line 1: {why}",)


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    fast = chats.tokenizer(chats.CHATML)
    small = Encoder(lambda text: fast(text)["input_ids"], ChatRenderer(fast), 20)
    with pytest.raises(DataError) as caught:
        source(written(tmp_path / "rows.jsonl", json.dumps({"messages": turns("hello", "fine")})), small)
    assert caught.value.reasons == ("line 1: an id outside the target's vocabulary of `20`",)


def test_what_is_dropped_is_counted_by_reason_with_an_example(tmp_path: Path) -> None:
    listed = [
        {"messages": turns("hello", "fine")},
        {"messages": turns("hello")},
        {"conversations": [{"from": "human", "value": "x"}]},
        {"conversations": [{"from": "alien", "value": "x"}]},
        {"messages": turns("hello", "x" * 200)},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
        {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0]},
        {"text": "\ud800"},
    ]
    made = source(written(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, listed))), chat_encoder())
    assert len(made) == 1
    assert made.dropped == {
        chat.NO_ASSISTANT: 2,
        chat.MALFORMED: 2,
        "longer than the largest bucket, 64": 1,
        chat.NOT_SUPERVISED: 1,
        "no supervised token that a block could draft": 1,
    }
    assert made.examples[chat.NO_ASSISTANT] == "line 2"
    assert made.examples[chat.MALFORMED] == "line 4: message 0 is from `alien`"


def test_a_set_with_nothing_supervised_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    listed = [{"messages": turns("hello", "fine")}] * 3
    with pytest.raises(DataError, match="has no sample to train on") as caught:
        source(written(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, listed))), chat_encoder(template))
    assert caught.value.reasons == (f"3 × {chat.NOT_SUPERVISED} (line 1)",)
    assert caught.value.exit_code == 2


def test_long_samples_are_cut_when_asked(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", json.dumps({"text": "x" * 100}))
    ids, supervised = source(path, truncate=True).read(0)
    assert len(ids) == len(supervised) == 64
    late = {"input_ids": [1] * 100, "loss_mask": [0] * 90 + [1] * 10}
    with pytest.raises(DataError) as caught:
        source(written(path, json.dumps(late)), truncate=True)
    assert caught.value.reasons == ("1 × no supervised token that a block could draft (line 1)",)


def test_conversations_of_every_form_read_again_are_the_same(tmp_path: Path) -> None:
    listed = [{"messages": turns("hello", f"fine {number}")} for number in range(600)]
    made = source(written(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, listed))), chat_encoder())
    encoder = chat_encoder()
    for number in (0, 255, 256, 599):
        [wanted] = encoder([listed[number]])
        assert isinstance(wanted, chat.Tokenized)
        ids, supervised = made.read(number)
        assert ids.tolist() == wanted.ids
        assert supervised.tolist() == wanted.supervised


# ---------------------------------------------------------------------------------------------- datasets


class FakeLibrary(types.ModuleType):
    """Stands for the package ``datasets``; remembers what it was asked for."""

    def __init__(self, rows: Any) -> None:
        super().__init__("datasets")
        self.rows = rows
        self.asked: list[tuple[Any, ...]] = []

    def disable_progress_bars(self) -> None:
        self.asked.append(("quiet",))

    def load_dataset(self, name: str, subset: str | None = None, **options: Any) -> Any:
        self.asked.append((name, subset, options))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows

    def load_from_disk(self, folder: str) -> Any:
        self.asked.append((folder,))
        return self.rows


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary([{"text": "one", "messages": None}, {"text": "two", "messages": None}])
    monkeypatch.setitem(sys.modules, "datasets", made)
    return made


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("owner/name", ("owner/name", None, {"revision": None, "split": "train"})),
        ("owner/name:test", ("owner/name", None, {"revision": None, "split": "test"})),
        ("owner/name/small", ("owner/name", "small", {"revision": None, "split": "train"})),
        (
            "owner/na.me-2/small@v1.0:train[:100]",
            ("owner/na.me-2", "small", {"revision": "v1.0", "split": "train[:100]"}),
        ),
    ],
)
def test_hub_ids(library: FakeLibrary, name: str, asked: tuple[Any, ...]) -> None:
    made = source(name)
    assert library.asked == [("quiet",), asked]
    assert texts(made) == ["one", "two"]


def test_parquet_and_saved_folders(library: FakeLibrary, tmp_path: Path) -> None:
    file = written(tmp_path / "b.parquet", "")
    other = written(tmp_path / "a.parquet", "")
    assert texts(source(file)) == ["one", "two"]
    assert texts(source(tmp_path)) == ["one", "two"]
    saved = tmp_path / "saved"
    saved.mkdir()
    written(saved / "state.json", "{}")
    assert texts(source(saved)) == ["one", "two"]
    asked = [item for item in library.asked if item != ("quiet",)]
    assert asked == [
        ("parquet", None, {"data_files": str(file), "split": "train"}),
        ("parquet", None, {"data_files": [str(other), str(file)], "split": "train"}),
        (str(saved),),
    ]


def test_what_the_library_cannot_load(library: FakeLibrary) -> None:
    library.rows = ConnectionError("Couldn't reach it\nmore")
    with pytest.raises(DataError, match=r"`owner/name` cannot be loaded \(Couldn't reach it\); wanted a data set"):
        rows.open_rows("owner/name")
    library.rows = {"train": [], "test": []}
    with pytest.raises(DataError, match="has the splits `train`, `test`; wanted one of them as `owner/name:split`"):
        rows.open_rows("owner/name")
    library.rows = [{"text": 7}]
    with pytest.raises(DataError) as caught:
        source("owner/name")
    assert caught.value.reasons == ("row 0: `text` is no text",)


class DamagedRows(list[Any]):
    """The library finds damage, or a column that it cannot decode, when it comes to a row."""

    def __iter__(self) -> Any:
        yield self[0]
        yield self[1]

    def __getitem__(self, key: Any) -> Any:
        if key == 1:
            raise ImportError("To support decoding images, please install 'Pillow'.")
        return super().__getitem__(key)


def test_a_row_that_the_library_cannot_read_is_named_with_the_cause(library: FakeLibrary) -> None:
    library.rows = DamagedRows([{"text": "one"}, {"text": "two"}])
    with pytest.raises(DataError, match=r"row 1 of `owner/name` cannot be read \(To support decoding images"):
        source("owner/name")
    with pytest.raises(DataError, match="row 1 of `owner/name` cannot be read"):
        rows.open_rows("owner/name").at(1)
    library.rows = RuntimeError("An error occurred while generating the dataset")
    library.rows.__cause__ = OSError("Unexpected end of stream\nmore")
    with pytest.raises(
        DataError, match=r"\(An error occurred while generating the dataset: Unexpected end of stream\)"
    ):
        rows.open_rows("owner/name")


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "absent", "a/b/c/d", "x" * 300])
def test_what_is_not_there_is_known_at_once(name: str) -> None:
    with pytest.raises(DataError, match=r"is no file|cannot be read"):
        rows.check_named(name)


def test_a_library_that_is_not_there_is_missed_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows.check_named(str(written(tmp_path / "rows.jsonl", "{}")))
    for there in (False, True):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: object() if there else None)
        with contextlib.nullcontext() if there else pytest.raises(DataError, match="needs the package `datasets`"):
            rows.check_named("owner/name")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    real = builtins.__import__

    def refusing(name: str, *args: Any, **options: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(DataError, match="needs the package `datasets`") as caught:
        rows.open_rows("owner/name")
    assert caught.value.hint == "pip install 'kernelbake[data]', or give a JSONL file"


# ---------------------------------------------------------------------------------------------- what a run names


def section(**changes: Any) -> Spec:
    made = copy.deepcopy(TINY)
    made["data"] = {"source": changes.pop("source"), **changes}
    made["target"]["vocab_size"] = 500
    return Spec.parse(made)


def model_folder(folder: Path, template: str | None) -> str:
    """A folder with a tokenizer, as of a model."""
    chats.tokenizer(template).save_pretrained(folder)
    return str(folder)


def opened(spec: Spec, model: str) -> data.Source:
    return sources.open_source(dataclasses.replace(spec, target=dataclasses.replace(spec.target, model=model)))


def test_a_run_s_conversations_through_the_target_s_tokenizer(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", json.dumps({"messages": turns("hello", "fine, thanks")}) + "\n{")
    model = model_folder(tmp_path / "model", chats.THINKING)
    made = opened(section(source=str(path), broken="skip"), model)
    [wanted] = chat_encoder(chats.THINKING)([{"messages": turns("hello", "fine, thanks")}])
    assert isinstance(wanted, chat.Tokenized)
    ids, supervised = made.read(0)
    assert (ids.tolist(), supervised.tolist()) == (wanted.ids, wanted.supervised)
    assert made.dropped == {sources.BROKEN: 1}
    quiet = opened(section(source=str(path), broken="skip", template_options={"enable_thinking": False}), model)
    assert quiet.share < made.share
    template = written(tmp_path / "plain.jinja", chats.CHATML)
    other = opened(section(source=str(path), broken="skip", template=str(template)), model)
    assert len(other.read(0)[0]) < len(ids)


def test_conversations_that_nothing_can_render(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", json.dumps({"messages": turns("hello", "fine")}))
    with pytest.raises(DataError) as caught:
        opened(section(source=str(path)), model_folder(tmp_path / "model", None))
    assert "has no chat template; wanted `input_ids` or `text`" in caught.value.reasons[0]
    with pytest.raises(DataError) as caught:
        opened(section(source=str(path), tokenizer="bytes"), "random")
    assert "a conversation, but the tokenizer `bytes` has no chat template" in caught.value.reasons[0]
    with pytest.raises(DataError, match=r"data.template: `.*absent` cannot be read"):
        opened(section(source=str(path), template=str(tmp_path / "absent")), str(tmp_path / "model"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="the tokenizer of `.*nothing` cannot be loaded"):
        opened(section(source=str(path)), str(tmp_path / "nothing"))


def test_rows_of_ids_need_no_template(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", '{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}\n')
    assert len(opened(section(source=str(path)), model_folder(tmp_path / "model", None))) == 1
    assert len(opened(section(source=str(path)), "random")) == 1


def test_samples_held_out_are_never_trained_on(tmp_path: Path) -> None:
    made = source(written(tmp_path / "rows.jsonl", "".join(f'{{"text": "row {n}"}}\n' for n in range(10))))
    trained, held = data.hold_out(made, 3)
    assert texts(held) == ["row 1", "row 5", "row 8"]
    assert sorted(texts(trained) + texts(held)) == sorted(texts(made))
    assert not set(texts(trained)) & set(texts(held))
    assert held.share == made.share
    with pytest.raises(DataError, match="`10` samples to hold out of `10`"):
        data.hold_out(made, 10)


@pytest.mark.parametrize("value", [3, [["a", 1]], {"a": [1]}, {1: "a"}])
def test_template_options_are_names_with_values(value: Any) -> None:
    with pytest.raises(FaultsError, match="1 fault") as caught:
        section(source="x", template_options=value)
    assert caught.value.faults[0].path == "data.template_options"


def test_a_section_survives_as_plain_data() -> None:
    made = section(source="x", template_options={"enable_thinking": False}, held_out=4, broken="skip")
    assert Spec.parse(json.loads(json.dumps(made.to_json()))) == made


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be read"):
        rows.open_rows("x" * 5000 + ".jsonl")
