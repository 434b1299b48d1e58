"""Documents: links lead somewhere, every page is listed, and what they say of commands and files is so."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from kernelbake import cli, manifest

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/adr", "benchmarks/results")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", page.read_text())
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose)
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


def test_every_page_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not [name for name in sorted(pages) if f"({name})" not in listed]


def test_the_readme_names_commands_and_manifests_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert isinstance(cli.cli, click.Group)
    named = set(re.findall(r"^kernelbake ([a-z]+)", text, flags=re.MULTILINE))
    assert named <= set(cli.cli.commands)
    assert named >= {"plan", "build", "verify", "show", "explain", "coverage", "diff"}
    assert all(f"`{name}`" in text for name in manifest.names())


def test_every_target_that_is_named_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
        assert named <= targets, page.name


def test_every_decision_has_a_number_of_its_own() -> None:
    numbers = [page.name[:4] for page in sorted((ROOT / "docs" / "adr").glob("*.md"))]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]
