"""Keyword options of ``LLM``: their types, and suggestions for unknown names."""

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
    """Options of generation; missing or None takes the value of ``generation_config.json``.

    Attributes:
        max_new_tokens: most tokens to generate; 128 if the file does not say.
        temperature: divisor of the logits; 0 takes the best token, the default if the file does not
            say.
        top_p: keep the fewest best tokens whose probabilities sum to this, 0 to 1.
        top_k: number of best tokens to keep; 0 for all.
        min_p: keep tokens with at least this fraction of the best one's probability.
        repetition_penalty: divisor of positive logits and factor of negative ones, for tokens in
            the prompt or the text.
        presence_penalty: amount subtracted from the logits of tokens that have been generated.
        frequency_penalty: amount subtracted from a token's logit for each time that it has been
            generated.
        seed: integer that determines the noise, together with a token's position.
        stop: string, or several, that end the text, which stops before them.
        ignore_eos: True to continue after an end-of-text token.
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
# Defaults that are not None.
_DEFAULTS = {"seed": 0, "stop": (), "ignore_eos": False}
_PARAMETERS = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=hint
    )
    for name, hint in _HINTS.items()
]


def options_by_name(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Show a method's keyword options in its signature, and suggest names for unknown ones."""
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
    """Check the types of options, and drop those that are None.

    Raises:
        TypeError: a value is not of its option's type.
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
