"""Digests of kernels' texts, by which a record of builds is known to be of today's kernels.

Triton's key of a kernel also changes with comments, docstrings and the numbers of its lines.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import symtable
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from triton.language.core import constexpr


@functools.cache
def kernel_digest(kernel: Any) -> str:
    """Return a digest of a kernel and of all functions, classes and constants that it names.

    Args:
        kernel: Python function that ``triton.jit`` or ``gluon.jit`` decorates.
    """
    texts: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        item = waiting.pop()
        name = f"{item.__module__}.{item.__qualname__}"
        if name not in texts:
            texts[name], more = _text(item)
            waiting += more
    return hashlib.sha256("\n".join(texts[name] for name in sorted(texts)).encode()).hexdigest()


@functools.cache
def _text(item: Any) -> tuple[str, list[Any]]:
    """Return a function's or class's statements and constants, and what else it is made of."""
    source = textwrap.dedent(inspect.getsource(item))
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    names = set(_global_names(symtable.symtable(source, "kernel", "exec")))
    constants, more = [], []
    for name, value in sorted(_values(item, names, tree).items()):
        if not isinstance(value, (FunctionType, type)):
            constants.append(f"{name}={value!r}")
        elif value.__module__.startswith("anymla."):
            more.append(value)
    text = f"{item.__module__}.{item.__qualname__} {ast.dump(tree)} {constants}"
    assert " at 0x" not in text, text
    return text, more


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a piece of source refers to and does not define."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or not symbol.is_local()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _global_names(inner)


def _values(item: Any, names: set[str], tree: ast.AST) -> dict[str, Any]:
    """Return the values of names as ``item`` sees them; those of modules as "module.member"."""
    known = dict(vars(sys.modules[item.__module__]))
    if isinstance(item, FunctionType):
        known |= inspect.getclosurevars(item).nonlocals
    found = {name: known[name] for name in names if name in known}
    modules = {name: found.pop(name) for name in names if isinstance(found.get(name), ModuleType)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and module.__name__.startswith("anymla."):
                found[f"{node.value.id}.{node.attr}"] = getattr(module, node.attr)
    return {name: _undecorated(value) for name, value in found.items()}


def _undecorated(value: Any) -> Any:
    """Return the function that ``triton.jit`` and its like decorate, and a constexpr's value."""
    if isinstance(value, constexpr):
        return value.value
    inner = getattr(value, "fn", None)
    return inner if isinstance(inner, FunctionType) else value
