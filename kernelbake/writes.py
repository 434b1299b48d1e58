"""Which of its pointer arguments a kernel may write to, read off its source. Errs on the side of writing.

A shadow run launches nothing, so what a kernel would have written is unknown afterwards, while what it only reads stays
as it was. A pointer is followed through assignments and into device functions; a value that was loaded is no pointer.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_STORES = ("store", "atomic_")
_LOADS = frozenset({"load", "load_tensor_descriptor", "program_id", "num_programs", "arange"})
_LANGUAGE = frozenset({"tl", "language", "tldevice", "libdevice", "math", "triton", "gl"})
"""Names under which kernels use Triton's own functions, of which only stores and atomics write."""

Resolve = Callable[[str], Any]
"""Gives the device function of a name, as Python function, or None."""


def written_parameters(function: Any, resolve: Resolve | None = None) -> frozenset[str]:
    """The parameters through which a kernel may write.

    Args:
        function: the kernel's Python function.
        resolve: finds the device functions that it calls; by its globals where None.
    """
    return _Analysis().parameters(function, resolve or _by_globals(function))


def _by_globals(function: Any) -> Resolve:
    def resolve(name: str) -> Any:
        found = function.__globals__.get(name)
        return getattr(found, "fn", found) if found is not None else None

    return resolve


class _Analysis:
    """Follows calls; a function that is met again on its own path adds nothing."""

    def __init__(self) -> None:
        self._done: dict[Any, frozenset[str]] = {}

    def parameters(self, function: Any, resolve: Resolve) -> frozenset[str]:
        if function in self._done:
            return self._done[function]
        self._done[function] = frozenset()
        tree = _parse(function)
        names = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        flows = _flows(tree, names)
        written: set[str] = set()
        for call in _calls(tree):
            written |= self._written_by(call, flows, resolve)
        self._done[function] = frozenset(written)
        return self._done[function]

    def _written_by(self, call: ast.Call, flows: dict[str, set[str]], resolve: Resolve) -> set[str]:
        name, owner = _name_of(call.func)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if name.startswith(_STORES):
            methods = [owner] if owner is not None and not _is_language(owner) else []
            return _roots([*methods, *arguments[:1]], flows)
        if owner is not None:  # a function of Triton's, or a method of a value
            return set()
        callee = resolve(name)
        if callee is None or not inspect.isfunction(callee) or callee.__module__.startswith("triton"):
            return set()
        written = self.parameters(callee, _by_globals(callee))
        return _roots(list(_passed_to(written, callee, call)), flows)


def _parse(function: Any) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name_of(function: ast.expr) -> tuple[str, ast.expr | None]:
    """The called name and, for ``owner.name``, the owner."""
    if isinstance(function, ast.Attribute):
        return function.attr, function.value
    return (function.id if isinstance(function, ast.Name) else ""), None


def _is_language(owner: ast.expr) -> bool:
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    return isinstance(owner, ast.Name) and owner.id in _LANGUAGE


def _passed_to(parameters: Iterable[str], callee: Any, call: ast.Call) -> Iterator[ast.expr]:
    order = list(inspect.signature(callee).parameters)
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        yield from call.args
        return
    for name in parameters:
        if order.index(name) < len(call.args):
            yield call.args[order.index(name)]
        yield from (keyword.value for keyword in call.keywords if keyword.arg == name)


def _flows(tree: ast.FunctionDef, parameters: Iterable[str]) -> dict[str, set[str]]:
    """Name → the parameters from which its value may have been made, to a fixed point."""
    flows = {name: {name} for name in parameters}
    assignments = [(_names([target]), _names([value])) for target, value in _assignments(tree)]
    changed = True
    while changed:
        changed = False
        for targets, sources in assignments:
            found = set().union(*(flows.get(name, ()) for name in sources))
            for name in targets:
                known = flows.setdefault(name, set())
                changed = changed or not found <= known
                known |= found
    return flows


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AugAssign | ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value):
            yield node.target, node.value  # type: ignore[misc]
        elif isinstance(node, ast.For):
            yield node.target, node.iter


def _roots(expressions: Iterable[ast.expr], flows: dict[str, set[str]]) -> set[str]:
    """The parameters from which expressions may be made, what they load aside."""
    return set().union(*(flows.get(name, ()) for name in _names(expressions)))


def _names(expressions: Iterable[ast.expr]) -> set[str]:
    """The names in expressions, those of what is loaded aside."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(expressions)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif not (isinstance(node, ast.Call) and _name_of(node.func)[0] in _LOADS):
            waiting += ast.iter_child_nodes(node)
    return found
