"""The numbers of the document are those of the code, in the same order, and there is one way to read a bundle."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from kernelbake import agreement, consistency, describe, documents, fingerprint, members, rules, verify

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "bundle-format.md").read_text()


def test_document_and_rules_have_the_same_numbers():
    stated = [(int(number), name) for number, name in re.findall(r"^\*\*MUST (\d+) · `(\w+)`\*\*", DOCUMENT, re.M)]
    assert stated == [(int(rule), rule.name) for rule in rules.Rule]
    assert [number for number, _ in stated] == list(range(1, len(stated) + 1))


def _first_use(module) -> list[int]:
    """The rules of a module in the order in which its source first names them as `MUST n` beside a check."""
    numbers = re.findall(r"MUST (\d+)", inspect.getsource(module).split('"""', 2)[2])
    return list(dict.fromkeys(int(number) for number in numbers))


@pytest.mark.parametrize(
    ("modules", "first", "last"), [((verify, describe), 1, 20), ((consistency,), 21, 30), ((agreement,), 31, 46)]
)
def test_every_rule_is_checked_in_its_module(modules, first, last):
    used = {
        node.attr
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Rule"
    }
    wanted = {rule.name for rule in rules.Rule if first <= rule <= last}
    assert wanted <= used
    assert used <= wanted | ({"STRICT_JSON", "COUNTS"} if consistency in modules else set())


@pytest.mark.parametrize("module", [consistency, agreement])
def test_the_checks_of_meaning_stand_in_the_order_of_the_document(module):
    numbers = [number for number in _first_use(module) if number >= 21]
    assert numbers == sorted(numbers)


def test_document_and_code_agree_on_bounds_and_fields():
    for name, cls in fingerprint.FIELDS.items():
        row = next(line for line in DOCUMENT.splitlines() if line.startswith("| ") and f"`{name}`" in line)
        assert row.split("|")[2].strip() == cls.value
    assert f"{members.MAX_MEMBERS:,}".replace(",", " ") in DOCUMENT
    assert f"{members.MAX_BYTES // 512:,}".replace(",", " ") in DOCUMENT
    assert f"{documents.MAX_VALUES:,}".replace(",", " ") in DOCUMENT
    assert f"at most {documents.MAX_DEPTH}" in DOCUMENT
    for name in members.DOCUMENTS:
        assert f"`{name}`" in DOCUMENT


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names |= {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
    return names


def test_nothing_reads_a_bundle_but_the_reader():
    """Only `bundle` calls the stages of the reader, and nothing in the product unpacks an archive in another way."""
    stages = {
        f"kernelbake.{name}"
        for name in ("verify", "consistency", "agreement", "describe", "archive", "members", "tables")
    }
    own = {"verify.py", "consistency.py", "agreement.py", "describe.py", "bundle.py"}
    paths = [*(ROOT / "kernelbake").glob("*.py"), *(ROOT / "dflash").rglob("*.py")]
    for path in paths:
        imported = _imported(path)
        assert not {name.split(".")[0] for name in imported} & {"tarfile", "zipfile"}, path
        if path.name not in own:
            assert not imported & stages, path
