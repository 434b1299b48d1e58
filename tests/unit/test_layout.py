"""What is printed on terminals: folded to their width, with nothing lost, and keys in parts."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import samples
from hypothesis import example, given
from hypothesis import strategies as st

from kernelbake import bundle, inspect, layout, words
from kernelbake.errors import InputError
from kernelbake.keys import AutotuneKey, Config, Kernel
from kernelbake.plan import Choice
from kernelbake.words import counted

ROOT = Path(__file__).parents[2]
NAME = "fla.ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel"
TENSORS = ("q_ptr", "k_ptr", "v_ptr", "grad_ptr", "lse_ptr", "delta_ptr", "dq_ptr", "dk_ptr", "dv_ptr")


def key(size_class: int) -> AutotuneKey:
    """One as long as those of real kernels: 234 characters."""
    values = (("HEAD_DIM", 64), ("ITEM_BYTES", 4), ("BLOCK_SIZE", 4), ("CAUSAL", False), ("size_class", size_class))
    dtypes = (*((name, "torch.float32") for name in TENSORS), ("bounds_ptr", "torch.int32"))
    return AutotuneKey(values, dtypes)


def choice(size_class: int | None) -> Choice:
    wanted = None if size_class is None else key(size_class)
    return Choice(Kernel(*NAME.rsplit(".", 1)), wanted, Config((("TILE_M", 64),), 4), {"token": "sha256:"}, {})


# ---------------------------------------------------------------------------------------------- folding


@given(st.text(alphabet="ab .,_:/\u00fc", max_size=300), st.integers(10, 130), st.integers(0, 20))
@example("digest     sha256:" + "a" * 64, 80, 11)
@example(" " * 90 + "a", 80, 4)
def test_a_folded_line_fits_and_lacks_only_spaces(text: str, width: int, hang: int) -> None:
    lines = words.fold(text, width, hang)
    assert all(len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(line.startswith(" " * min(hang, width // 2)) for line in lines[1:])


@given(st.text(max_size=300))
def test_without_a_terminal_a_line_stays_whole(text: str) -> None:
    assert words.fold(text, None) == [text]


def test_words_are_broken_behind_a_mark_and_numbers_keep_their_unit() -> None:
    assert words.fold(f"  {NAME}", 50, 4) == [
        "  fla.ops.gated_delta_rule.chunk_fwd.chunk_gated_",
        "    delta_rule_fwd_kkt_solve_kernel",
    ]
    assert words.fold("winner  a=1 b=2: 0.5000 ms", 24, 8) == ["winner  a=1 b=2:", "        0.5000 ms"]
    assert words.fold("digest " + "sha256:" + "f" * 64, 76, 7) == ["digest sha256:", " " * 7 + "f" * 64]


@pytest.mark.parametrize("width", [80, 120])
def test_a_wide_table_is_folded_into_its_widest_columns(width: int) -> None:
    rows = [(NAME, 1, "x" * 30), ("short", 22, "y")]
    lines = layout.table(("kernel", "keys", "value"), rows, right=(1,), width=width)
    assert all(len(line) <= width for line in lines)
    assert "".join(line[: len(lines[0].partition("keys")[0])].strip() for line in lines[1:-1]) == NAME
    assert layout.table(("kernel", "keys", "value"), rows, right=(1,), width=200) == layout.table(
        ("kernel", "keys", "value"), rows, right=(1,)
    )


# ---------------------------------------------------------------------------------------------- keys


def test_what_the_keys_of_a_kernel_share_is_apart_from_what_is_their_own() -> None:
    [(name, shared, members)] = layout.by_kernel([choice(0), choice(1)])
    assert (name, len(members)) == (NAME, 2)
    assert list(layout.field_lines(shared)) == [
        "HEAD_DIM=64 ITEM_BYTES=4 BLOCK_SIZE=4 CAUSAL=False",
        f"float32: {' '.join(TENSORS)}",
        "int32: bounds_ptr",
    ]
    assert [layout.own_lines(member.key, shared) for member in members] == [["size_class=0"], ["size_class=1"]]


def test_a_single_key_and_one_beside_launches_without_a_key_are_whole() -> None:
    for choices in ([choice(0)], [choice(None), choice(0)]):
        [(_, shared, members)] = layout.by_kernel(choices)
        assert shared == []
        assert layout.own_lines(members[-1].key, shared)[0].endswith("CAUSAL=False size_class=0")
    assert layout.own_lines(None, ()) == ["(not tuned)"]


def test_values_of_other_types_are_not_shared() -> None:
    one, other = (AutotuneKey((("NB", value),), ()) for value in (1, True))
    assert layout.own_lines(one, layout.fields(other)) == ["NB=1"]


# ---------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("noun", "several"),
    [
        ("key", "2 keys"),
        ("entry", "2 entries"),
        ("binary", "2 binaries"),
        ("launch", "2 launches"),
        ("class", "2 classes"),
    ],
)
def test_counts_have_the_right_ending(noun: str, several: str) -> None:
    assert [counted(1, noun), counted(2, noun)] == [f"1 {noun}", several]
    assert counted(0, noun) == several.replace("2", "0")


def test_a_phrase_says_both_of_its_forms() -> None:
    assert [counted(n, "field differs", "fields differ") for n in (1, 1234)] == [
        "1 field differs",
        "1,234 fields differ",
    ]


def test_messages_quote_the_names_of_bundles_and_kernels() -> None:
    unquoted = [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "kernelbake").glob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\b(bundle|kernel|case|key|GPU) \{(?!counted)", line)
    ]
    assert unquoted == []


# ---------------------------------------------------------------------------------------------- a terminal


def on_terminal(columns: int, *arguments: str) -> list[str]:
    """What the command prints on a terminal of that many columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "kernelbake", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        text = b""
        while part := _read(ours):
            text += part
        assert process.stderr is not None
        said = process.stderr.read()
    os.close(ours)
    assert (process.returncode, said) == (0, b"")
    return text.decode().splitlines()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end was closed
        return b""


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "command", [["show"], ["verify", "--for", "sm_90", "--device", "NVIDIA H200"], ["explain", "k"]]
)
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, columns: int, command: list[str]) -> None:
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents())
    name, *options = command
    arguments = [name, *options, str(path)] if name == "explain" else [name, str(path), *options]
    lines = on_terminal(columns, *arguments)
    assert lines
    assert max(map(len, lines)) <= columns
    piped = subprocess.run(
        [sys.executable, "-m", "kernelbake", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert max(map(len, piped)) > 80  # a line of a pipe is whole
    if name == "show":
        assert len([line for line in piped if line.startswith("sample.module0.kernel0 n=512 ")]) == 1
        assert lines.count("sample.module0.kernel0") == 1


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("nothing",), "it holds `sample.module1.kernel1`"),
        (("kernel1", "nothing"), "`sample.module1.kernel1` has `n=1024 dtype=bf16 [x:bfloat16]`"),
    ],
)
def test_what_could_have_been_asked_for_stands_on_lines_of_its_own(
    tmp_path: Path, arguments: tuple[str, ...], wanted: str
) -> None:
    path = tmp_path / "bundle.tar"
    bundle.write(path, samples.contents())
    with pytest.raises(InputError) as caught:
        inspect.explain(path, *arguments)
    assert wanted in caught.value.reasons
    assert len(caught.value.reasons) == 2
