"""Options of the choice of tokens; the checkpoint's values are the defaults."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import click

from anymla.model.generation import GenerationDefaults
from anymla.runtime.sampler import DEFAULTED, Sampling, sampling_of


@dataclasses.dataclass(frozen=True)
class AskedSampling:
    """Sampling options of the command line; None for those that are not given."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int

    def sampling(self, said: GenerationDefaults) -> Sampling:
        """Combine the options with the checkpoint's defaults.

        Raises:
            ValueError: a value is out of range.
        """
        asked = {name: getattr(self, name) for name in DEFAULTED}
        return sampling_of(said, self.seed, asked)


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
    """Add the options to a command, which receives them as an ``AskedSampling`` named ``asked``."""
    names = [field.name for field in dataclasses.fields(AskedSampling)]

    @functools.wraps(function)
    def command(**parameters: object) -> None:
        asked = AskedSampling(**{name: parameters.pop(name) for name in names})  # type: ignore[arg-type]
        function(asked=asked, **parameters)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command
