"""What `train` and `preflight` refuse before anything is loaded: the same, all at once, in the time of a command."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chats
import dflashspec
import pytest

from dflash import cli, config, hub, launch, sources
from dflash.errors import DataError
from kernelbake.errors import ExitCode, InputError
from kernelbake.preflight import INTERPRETED

GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]}


@pytest.fixture(autouse=True)
def _bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = copy.deepcopy(dflashspec.TINY)
    section["axes"]["dtype"] = "float32"
    held = SimpleNamespace(plugin="dflash", section=section, made=INTERPRETED, digest="sha256:b")
    monkeypatch.setattr(launch, "workload_of", lambda *args, **options: held)
    monkeypatch.setattr(launch, "check", lambda *args: pytest.fail("the preflight began"))
    monkeypatch.chdir(tmp_path)


def settled(**options: Any) -> launch.Plan:
    run = config.load(None, (), {"bundle": "b.tar", **{name.replace("__", "."): one for name, one in options.items()}})
    return launch.settle(run, output=True)


def written(*rows: Any, name: str = "rows.jsonl") -> str:
    Path(name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return name


def refused(*rows: Any, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        settled(data__source=written(*rows), **options)
    return caught.value


@pytest.mark.parametrize("command", ["train", "preflight"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--resume", "nowhere"), "resume: `nowhere` is no checkpoint"),
        (("--resume", "latest"), "holds no checkpoint; wanted one to go on from"),
        (("--output", "rows.jsonl/run"), "output: `rows.jsonl/run` cannot be written to (Not a directory)"),
        (("--output", "other"), "output: `other` holds the run that saved `step-00000003`"),
        (("--data", "rows.jsonl"), "line 2: no JSON"),
    ],
)
def test_both_commands_refuse_the_same_before_the_preflight_begins(
    command: str, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(GOOD, "{")
    (Path("other") / "step-00000003").mkdir(parents=True)
    (Path("other") / "step-00000003" / "state.json").write_text("{}")
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--frozen-cache", "b.tar", *arguments])
    assert ended.value.code == ExitCode.INPUT
    assert said in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_every_fault_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    data = {"data__source": written(GOOD, {"a": 1}), "data__template": "absent.jinja"}
    with pytest.raises(InputError) as caught:
        settled(**data, resume="nowhere", graphs=True, tracking__wandb="drafters", devices="0:1")
    told = str(caught.value)
    for part in (
        "`wandb` cannot be imported",
        "resume: `nowhere` is no checkpoint",
        "devices: the bundle was made by the interpreter",
        "graphs: asked for",
        "data.template: `absent.jinja` cannot be read",
        "line 2: has ['a']",
    ):
        assert part in told
    assert "input: 5 faults" in told
    assert "hint: pip install" in told


@pytest.mark.parametrize("begin", [60.0, 0.0])
def test_faulty_rows_are_all_named_however_long_the_file_is(begin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BEGIN_S", begin)
    rows = [{"a": 1}, *[GOOD] * 40, "{", {"input_ids": [999], "loss_mask": [1]}, CHAT]
    told = [reason.partition(":") for reason in refused(*rows).reasons]
    assert [place for place, *_ in told] == ["line 1", "line 42", "line 43", "line 44"]
    assert "a conversation, but the tokenizer `bytes` has no chat template" in told[-1][2]


def test_a_chat_template_that_is_not_there_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _stored(monkeypatch)
    for name, template in (("plain", None), ("chatml", chats.CHATML)):
        chats.tokenizer(template).save_pretrained(name)
    options = {"data__source": written(CHAT), "data__tokenizer": "target"}
    assert refused(CHAT, target="plain").reasons == (
        "line 1: a conversation, but `plain` has no chat template; wanted `input_ids` or `text`",
    )
    settled(**options, target="chatml")
    Path("given.jinja").write_text(chats.CHATML)
    settled(**options, target="plain", data__template="given.jinja")
    settled(**options, target="owner/of-the-hub")  # nobody knows yet


def test_a_long_file_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BEGIN_S", 0.0)
    assert settled(data__source=written(GOOD, "{", name="long.jsonl")).spec.data.source == "long.jsonl"


@pytest.mark.parametrize("begin", [60.0, 0.0])
def test_a_file_without_a_sample_is_refused(begin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BEGIN_S", begin)
    _stored(monkeypatch)
    asked = {"messages": CHAT["messages"][:1]}
    error = refused(asked, {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, target="owner/model")
    assert error.message == "data: `rows.jsonl` has no sample to train on"
    assert sorted(error.reasons) == ["1 × no assistant turn (line 1)", "1 × nothing supervised (line 2)"]
    assert refused().reasons == ("it holds no row",)
    settled(data__source=written(asked, CHAT), target="owner/model")


def test_a_begin_without_a_sample_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BEGIN_S", 0.0)
    settled(data__source=written({"input_ids": [1, 2], "loss_mask": [0, 0]}, GOOD))


def _stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets by any name, of the planned dimensions."""
    monkeypatch.setattr(hub, "resolve", lambda model, planned: dataclasses.replace(planned, model=model))
