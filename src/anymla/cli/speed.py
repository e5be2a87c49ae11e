"""A line on stderr with the speed of text generation."""

from __future__ import annotations

from collections.abc import Sequence

import click

from anymla.runtime.request import Completion


def say_speed(completion: Completion, remark: str = "") -> None:
    """Print the tokens of a text, its rate, and the tokens of its prompt that were read.

    The rate is that of the tokens after the first, which belongs to the prompt's time.

    Args:
        completion: completion of the request.
        remark: further word at the end of the line.
    """
    timings = completion.timings.as_dict()
    prompt = len(completion.request.token_ids)
    new = prompt - completion.cached
    read = f"{new} new of {prompt}{_rate(new, timings['prefill_s'])}"
    count = len(completion.token_ids)
    click.echo(
        f"{_tokens(count)}{_rate(count - 1, timings['decode_s'])} (prompt: {read}){remark}",
        err=True,
    )


def say_speed_of_all(completions: Sequence[Completion], seconds: float) -> None:
    """Print the same for requests that ran together, with one rate for all.

    Args:
        completions: completions of the requests.
        seconds: duration in seconds from the first step to the last.
    """
    count = sum(len(each.token_ids) for each in completions)
    prompts = sum(len(each.request.token_ids) for each in completions)
    texts = f"{len(completions)} text{'' if len(completions) == 1 else 's'}"
    said = f"{_tokens(count)} of {texts}{_rate(count, seconds)} (prompts: {_tokens(prompts)})"
    click.echo(said, err=True)


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _rate(count: int, seconds: float) -> str:
    """Format a rate after a comma; "" if there are too few tokens for one."""
    return f", {count / seconds:.1f} tokens/s" if count > 0 and seconds > 0 else ""
