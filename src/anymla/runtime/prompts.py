"""Prompts as callers give them: a text, token ids in any array, or several of these."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array: TypeAlias = "Tensor | npt.NDArray[np.integer[Any]]"
Prompt: TypeAlias = "str | Sequence[int | np.integer[Any]] | Array"
_A_PROMPT = "a text, token ids (integers), or a list of these"


def read_prompts(given: Prompt | Iterable[Prompt]) -> tuple[bool, list[str | list[int]]]:
    """List the prompts in a caller's argument.

    Args:
        given: a text; integers in a sequence, or in an array [T]; an array [prompts, T]; or several
            texts and sequences of integers.

    Returns:
        True if there is one prompt; and the prompts, each a text or its token ids.

    Raises:
        TypeError: the argument is no prompt; the message says where it may hold one.
    """
    if isinstance(given, str):
        return True, [given]
    if isinstance(given, Tensor | np.ndarray):
        if given.ndim not in (1, 2):
            raise TypeError(f"prompts must be [T] or [prompts, T], got {list(given.shape)}")
        given = cast("list[int] | list[list[int]]", given.tolist())
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"prompts must be {_A_PROMPT}, got {type(given).__name__}{_hint(given)}")
    several = list(given)
    if several and all(map(is_integer, several)):
        return True, [_ids(several)]
    return False, [each if isinstance(each, str) else _ids(each) for each in several]


def read_messages(given: str | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """List the messages of a dialogue; a text is one message of the user.

    Raises:
        TypeError: the argument is neither a text nor a list of mappings.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, Sequence) or not all(isinstance(each, Mapping) for each in given):
        expected = 'a text or a list of {"role": ..., "content": ...}'
        raise TypeError(f"messages must be {expected}, got {given!r}")
    return cast("Sequence[Mapping[str, Any]]", given)


def is_integer(value: object) -> bool:
    """True for an integer of Python, numpy or torch, but not for a bool."""
    if isinstance(value, bool | Sequence) or getattr(value, "ndim", 0) != 0:
        return False
    try:
        operator.index(cast("SupportsIndex", value))
    except TypeError:
        return False
    return True


def _ids(prompt: object) -> list[int]:
    if isinstance(prompt, Tensor | np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping | bytes | str) or not isinstance(prompt, Iterable):
        raise TypeError(f"a prompt must be {_A_PROMPT}, got {type(prompt).__name__}{_hint(prompt)}")
    ids = list(prompt)
    for each in ids:
        if not is_integer(each):
            raise TypeError(f"token ids must be integers, got {type(each).__name__}")
    return [operator.index(each) for each in ids]


def _hint(prompt: object) -> str:
    """Name the part of another library's prompt object that holds the text or ids."""
    if not isinstance(prompt, Mapping):
        return ""
    if "role" in prompt:
        return ": messages go to LLM.chat"
    for key in ("prompt_token_ids", "input_ids", "prompt"):
        if key in prompt:
            return f": give what is under {key!r}"
    return ""
