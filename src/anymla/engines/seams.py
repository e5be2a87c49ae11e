"""The check, without an import, that an engine's source has the names that a plugin relies on."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Seam:
    """One name in an engine's package that a plugin relies on.

    Attributes:
        place: dotted location, ``module:name`` or ``module:class.method``.
        parameters: names of its first parameters, without ``self``; () if they do not matter.
        attributes: names that a class's body defines or its methods assign.
        optional: True if the plugin can do without it.
    """

    place: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    optional: bool = False


def seam(place: str, parameters: str = "", attributes: str = "", *, optional: bool = False) -> Seam:
    """Build a seam from names that are separated by spaces."""
    return Seam(place, tuple(parameters.split()), tuple(attributes.split()), optional)


def source_of(package: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def missing(root: Path, seams: Iterable[Seam]) -> list[str]:
    """List the seams that are missing or have other parameters, one line each.

    Args:
        root: folder of the engine's package.
        seams: names that are looked up in its source.
    """
    return [line for each in seams if (line := _missing(root, each))]


def _missing(root: Path, seam: Seam) -> str | None:
    module, _, place = seam.place.partition(":")
    owner, _, method = place.partition(".")
    names = _names(root, module)
    if names is None:
        return f"there is no module {module}"
    if owner not in names:
        return f"{module} has no {owner}"
    node = names[owner]
    if method:
        members = _members(node)
        if method not in members:
            return None if seam.optional else f"{module}:{owner} has no {method}"
        node = members[method]
    if seam.parameters and _parameters(node)[: len(seam.parameters)] != seam.parameters:
        return f"{seam.place} does not take ({', '.join(seam.parameters)})"
    for name in seam.attributes:
        if name not in _members(node):
            return f"{seam.place} has no {name}"
    return None


@functools.cache
def _names(root: Path, module: str) -> dict[str, ast.AST] | None:
    """Return the names that a module defines or imports; None if there is no such module."""
    path = root.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return None
    return dict(_bound(ast.parse(file.read_text(encoding="utf-8")).body))


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield names that statements bind, including statements inside conditions."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from ((t.id, node) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.If | ast.Try):
            yield from _bound([*node.body, *node.orelse])


@functools.cache
def _members(node: ast.AST) -> dict[str, ast.AST]:
    """Return names that a class's body binds, or its methods assign or register on ``self``."""
    if not isinstance(node, ast.ClassDef):
        return {}
    found = dict(_bound(node.body))
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        ):
            found.setdefault(each.attr, each)
        if (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "register_buffer"
            and isinstance(each.args[0], ast.Constant)
        ):
            found.setdefault(str(each.args[0].value), each)
    return found


def _parameters(node: ast.AST) -> tuple[str, ...]:
    """Return the parameters' names, without ``self`` and ``cls``."""
    if not isinstance(node, ast.FunctionDef):
        return ()
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [each.arg for each in every]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)
