"""The import rules of docs/architecture.md, kept by parsing the source of both packages."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernelbake", "dflash")
HEAVY = {"torch", "triton", "fla", "transformers", "numpy"}

MAY_LOAD_HEAVY = {
    "kernelbake.shadow",
    "kernelbake.compile",
    "kernelbake.livesite",
    "kernelbake.measure",
    "kernelbake.dispatch",
    "kernelbake.triton_api",
    # parts of a shadow run
    "kernelbake.fakedevice",
    "kernelbake.fakepatches",
    "kernelbake.fakeresults",
    "kernelbake.faketensors",
    "kernelbake.recorder",
    # parts of measuring
    "kernelbake.numerics",
    "kernelbake.replay",
    "kernelbake.runners",
    "kernelbake.summaries",
    "kernelbake.touched",
    # parts of the frozen launch path
    "kernelbake.calls",
    "kernelbake.devices",
}
"""Modules of kernelbake that may load torch or Triton when they are imported; others load them inside functions."""

DFLASH_LIGHT = {
    "dflash",
    "dflash.capturable",
    "dflash.cli",
    "dflash.config",
    "dflash.errors",
    "dflash.folder",
    "dflash.placement",
    "dflash.ranks",
    "dflash.recipe",
    "dflash.render",
    "dflash.saved",
    "dflash.schema",
    "dflash.spec",
    "dflash.tracking",
    "dflash.workload",
}
"""Modules of dflash that load no torch: what ``dflash --help``, a manifest and the preflight need."""

THIRD_PARTY = {
    "kernelbake.cli": {"click"},
    "kernelbake.journal": {"filelock"},
    "kernelbake.manifest": {"pydantic"},
    "dflash.cli": {"click"},
}
"""What a light module may load at import beside the standard library."""

DFLASH_MAY_USE = {"kernelbake." + name for name in ("errors", "freeze", "keys", "preflight", "terminal", "workload")}

MAY_IMPORT_CLICK = {"kernelbake.cli", "dflash.cli", "kernelbake.terminal"}
MAY_IMPORT_RICH = {"kernelbake.terminal", "dflash.render"}

CHILDREN = {
    "kernelbake.compile": "forked compilers end with `os._exit`, so that nothing of the parent runs twice",
    "kernelbake.probe": "the process that looks at the GPU: it ends without destructors",
    "kernelbake.selfcheck": "the process that checks a packed bundle: it answers with its exit status",
    "kernelbake.worker_main": "the measuring process: its streams are the parent's pipes",
    "kernelbake.worker": "the child that a time limit kills ends with `os._exit`",
    "kernelbake.shadow": "the child of a planner: stdout is the parent's pipe, its exit status the parent's answer",
}
"""Modules that run as a process of their own and may therefore write to their streams and exit."""


def _path(module: str) -> Path:
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _modules() -> list[str]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


MODULES = _modules()


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(), filename=str(_path(module)))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not the bodies of functions, not what only type checkers see."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inner: list[ast.AST] = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    elif isinstance(node, ast.Lambda) or _is_type_checking(node):
        inner = []
    else:
        inner = list(ast.iter_child_nodes(node))
    for child in inner:
        yield from _at_import(child)


def _imported(module: str, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full names of imported modules; ``from a import b`` gives ``a.b`` where that is a module of ours."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import on line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def _all_imports(module: str) -> set[str]:
    return set(_imported(module, ast.walk(_tree(module))))


@functools.cache
def _direct(module: str) -> frozenset[str]:
    found = set(_imported(module, _at_import(_tree(module))))
    parents = {name.rpartition(".")[0] for name in found if name.rpartition(".")[0] in MODULES}
    return frozenset((found | parents) - {module})


@functools.cache
def _closure(module: str) -> frozenset[str]:
    """Everything that importing a module imports, followed through our own modules."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        for name in _direct(waiting.pop()):
            if name not in seen:
                seen.add(name)
                waiting += [name] if name in MODULES else []
    return frozenset(seen)


def _light() -> list[str]:
    return [name for name in MODULES if name in DFLASH_LIGHT or (name.startswith("kernelbake") and not _heavy(name))]


def _heavy(module: str) -> bool:
    return module in MAY_LOAD_HEAVY


def test_the_lists_name_modules_that_exist() -> None:
    named = MAY_LOAD_HEAVY | DFLASH_LIGHT | set(THIRD_PARTY) | set(CHILDREN)
    named |= DFLASH_MAY_USE | MAY_IMPORT_CLICK | MAY_IMPORT_RICH
    assert named <= set(MODULES), f"no such module: {sorted(named - set(MODULES))}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("kernelbake")])
def test_kernelbake_knows_no_trainer(module: str) -> None:
    assert not [name for name in _all_imports(module) if name.split(".")[0] == "dflash"]
    spelled = [
        node.value
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"dflash(\.\w+)*", node.value)
    ]
    assert not spelled, "a name of dflash in a text that could be imported"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("dflash")])
def test_dflash_uses_only_the_public_part_of_kernelbake(module: str) -> None:
    used = {name for name in _all_imports(module) if name.split(".")[0] == "kernelbake"}
    assert used <= DFLASH_MAY_USE


@pytest.mark.parametrize("module", MODULES)
def test_only_the_command_line_imports_rich_and_click(module: str) -> None:
    roots = {name.split(".")[0] for name in _all_imports(module)}
    assert "rich" not in roots or module in MAY_IMPORT_RICH
    assert "click" not in roots or module in MAY_IMPORT_CLICK


def _calls(module: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield node.lineno, "raise " + ast.unparse(node.exc).split("(")[0]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "kernelbake.terminal"])
def test_only_one_module_writes_to_the_terminal(module: str) -> None:
    if module in CHILDREN:
        return
    printing = [(line, name) for line, name in _calls(module) if name in ("print", "pprint", "warnings.warn", "input")]
    streams = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr", "sys.stdin")
    ]
    assert not printing + streams


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[-1] != "cli"])
def test_only_cli_exits(module: str) -> None:
    if module in CHILDREN:
        return
    exits = ("sys.exit", "exit", "quit", "os._exit", "raise SystemExit")
    assert not [(line, name) for line, name in _calls(module) if name in exits]


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reads_the_environment_while_it_is_imported(module: str) -> None:
    reads = [
        (node.lineno, ast.unparse(node))
        for node in _at_import(_tree(module))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv")
    ]
    names = [name for name in _direct(module) if name == "os.environ"]
    assert not reads + names


@pytest.mark.parametrize("module", MODULES)
def test_no_import_cycle(module: str) -> None:
    assert module not in _closure(module)


@pytest.mark.parametrize("module", _light())
def test_light_modules_load_the_standard_library_and_what_is_listed(module: str) -> None:
    foreign = {name.split(".")[0] for name in _direct(module)} - set(PACKAGES) - set(sys.stdlib_module_names)
    assert foreign <= THIRD_PARTY.get(module, set())


@pytest.mark.parametrize("module", _light())
def test_light_modules_reach_nothing_heavy(module: str) -> None:
    assert not {name.split(".")[0] for name in _closure(module)} & HEAVY


def test_light_modules_load_nothing_heavy_in_a_real_process() -> None:
    """What the parsed source cannot show: an import inside a function that runs at import, or by a dependency."""
    program = (
        "import importlib, sys\n"
        f"for name in {_light()!r}:\n"
        "    if not name.endswith('__main__'):\n"
        "        importlib.import_module(name)\n"
        f"    loaded = sorted(set(sys.modules) & {HEAVY!r})\n"
        "    assert not loaded, f'{name} loaded {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for package in PACKAGES:
        section = text.partition(f"## Rooms of {package}")[2].partition("\n## ")[0]
        named = set(re.findall(r"`([a-z_]+)(?:\.py|/)`", section))
        present = {module.split(".")[1] for module in MODULES if module.startswith(f"{package}.")}
        assert present - named == set(), f"{package}: rooms without a line"
        heavy = set(re.findall(r"`([a-z_]+)\.py` \(heavy\)", section))
        listed = {module.split(".")[1] for module in MAY_LOAD_HEAVY if module.startswith(f"{package}.")}
        assert heavy == listed
