"""Options of the choice of tokens; the checkpoint's values are the defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable

import click

from anymla.runtime.sampler import DEFAULTED

_OPTIONS = (
    click.option(
        "--temperature",
        type=float,
        help="0 takes the best token.  [default, as of the next six: what the checkpoint's "
        "generation_config.json says, else 0]",
    ),
    click.option("--top-p", type=float, help="Choose among the best that reach this mass."),
    click.option("--top-k", type=int, help="Choose among so many; 0 for all."),
    click.option(
        "--min-p", type=float, help="Choose among those that have this part of the best's mass."
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Divide positive logits of tokens that are in the prompt or the text by this, and "
        "multiply others; 1 for none.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        help="Subtract this from the logits of tokens that have been generated.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help="The same, as many times as each has been generated.",
    ),
    click.option("-s", "--seed", default=0, show_default=True, help="Same seed, same tokens."),
)


def sampling_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which receives them by name as ``asked``; None: not given."""

    @functools.wraps(function)
    def command(**parameters: object) -> None:
        asked = {name: parameters.pop(name) for name in (*DEFAULTED, "seed")}
        function(asked=asked, **parameters)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command
