"""Schemas of operations in the language of torch.library."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from torch import Tensor

_SCALARS = {int: "SymInt", float: "float", bool: "bool", str: "str"}


def schema_of(contract: Callable[..., Any], mutates: tuple[str, ...]) -> str:
    """The schema of a contract function, without its name; its results are written arguments.

    Args:
        contract: annotated with Tensor, int, float, bool, str, their optionals, or list[Tensor].
        mutates: names of the tensor arguments that are written.
    """
    hints = typing.get_type_hints(contract)
    words: list[str] = []
    keyword_only = False
    alias = iter("abcdefghijklmnopqrstuvwxyz")
    for name, parameter in inspect.signature(contract).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            words.append("*")
        mark = f"({next(alias)}!)" if name in mutates else ""
        word = f"{_schema_type(hints[name], mark)} {name}"
        default = parameter.default
        if default is not inspect.Parameter.empty:
            word += f"={_schema_default(default)}"
        words.append(word)
    if not keyword_only:
        words.append("*")
    words += ["str? backend=None", f"Tensor({next(alias)}!)[] results"]
    return f"({', '.join(words)}) -> ()"


def _schema_type(hint: Any, mark: str) -> str:
    optional = ""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
        optional = "?"
    if typing.get_origin(hint) is list:
        (member,) = typing.get_args(hint)
        return f"{_schema_type(member, mark)}[]{optional}"
    if hint is Tensor:
        return f"Tensor{mark}{optional}"
    return _SCALARS[hint] + optional


def _schema_default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
