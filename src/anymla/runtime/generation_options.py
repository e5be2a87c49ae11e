"""Keyword options of ``LLM``: their types, and the right name for a wrong one."""

from __future__ import annotations

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import ParamSpec, SupportsIndex, TypedDict, TypeVar, cast

from anymla.runtime.prompts import is_integer
from anymla.runtime.spelling import right_name

_P = ParamSpec("_P")
_R = TypeVar("_R")


class GenerationOptions(TypedDict, total=False):
    """How a text is generated; what is left out or None is as ``generation_config.json`` says.

    Attributes:
        max_new_tokens: tokens to generate, at most; 128 where the file says nothing.
        temperature: 0 takes the best token, which is also done where the file says nothing.
        top_p: choose among the best tokens that reach this probability together.
        top_k: choose among so many of the best tokens; 0 for all.
        min_p: choose among tokens that have this part of the best one's probability.
        repetition_penalty: divide positive logits of tokens that are in the prompt or the text by
            this, and multiply others.
        presence_penalty: subtract this from the logits of tokens that have been generated.
        frequency_penalty: the same, as many times as each has been generated.
        seed: names the noise, which depends on it and the token's position alone.
        stop: a string, or several, that end the text, which stops before them.
        ignore_eos: go on after an end-of-text token.
    """

    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool


_HINTS = typing.get_type_hints(GenerationOptions)
# What is not None where it is left out.
_DEFAULTS = {"seed": 0, "stop": (), "ignore_eos": False}
_PARAMETERS = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=hint
    )
    for name, hint in _HINTS.items()
]


def options_by_name(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Show a method's keyword options in its signature, and name the right one for a wrong one."""
    shown = inspect.signature(method)
    own = [each for each in shown.parameters.values() if each.kind is not each.VAR_KEYWORD]
    if len(own) < len(shown.parameters):
        own += _PARAMETERS
    shown = shown.replace(parameters=own)
    known = [each.name for each in own if each.kind is each.KEYWORD_ONLY]
    positions = len(own) - len(known)

    @functools.wraps(method)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in shown.parameters:
                said = right_name(name, known) or f"there are {', '.join(known)}"
                raise TypeError(f"{method.__qualname__}: no option {name!r}: {said}")
        if len(args) > positions:
            said = f"got {type(args[positions]).__name__} by position"
            raise TypeError(f"{method.__qualname__}: options are keywords, {said}")
        return method(*args, **kwargs)

    checked.__dict__["__signature__"] = shown
    return checked


def checked_options(options: GenerationOptions) -> GenerationOptions:
    """Check the types of options, and leave out those that are None.

    Raises:
        TypeError: a value that is not of the option's type.
    """
    checked: dict[str, object] = {}
    for name, value in options.items():
        if value is None:
            continue
        kinds = {*typing.get_args(_HINTS[name]), _HINTS[name]}
        if bool in kinds:
            right, what = isinstance(value, bool), "True or False"
        elif int in kinds:
            right, what = is_integer(value), "an integer"
            value = operator.index(cast("SupportsIndex", value)) if right else value
        elif float in kinds:
            right, what = isinstance(value, Real) and not isinstance(value, bool), "a number"
            value = float(cast("float", value)) if right else value
        else:
            texts = [value] if isinstance(value, str) else value
            right = isinstance(texts, Iterable) and all(isinstance(each, str) for each in texts)
            what = "a string or strings"
        if not right:
            raise TypeError(f"{name} must be {what}, got {value!r}")
        checked[name] = value
    return cast("GenerationOptions", checked)
