"""Options of how tokens are chosen; what is not given is as the checkpoint says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import click

from anymla.model.generation import GenerationDefaults
from anymla.runtime.sampler import Sampling


@dataclasses.dataclass(frozen=True)
class AskedSampling:
    """What the command line says; None where it says nothing."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int

    def sampling(self, said: GenerationDefaults) -> Sampling:
        """Together with what the checkpoint says.

        Raises:
            ValueError: values that cannot be meant.
        """
        return Sampling(
            temperature=said.temperature if self.temperature is None else self.temperature,
            top_p=said.top_p if self.top_p is None else self.top_p,
            seed=self.seed,
            top_k=said.top_k if self.top_k is None else self.top_k,
            min_p=said.min_p if self.min_p is None else self.min_p,
        )


_OPTIONS = (
    click.option(
        "--temperature",
        type=float,
        help="0 takes the best token.  [default, as of the next three: what the checkpoint's "
        "generation_config.json says, else 0]",
    ),
    click.option("--top-p", type=float, help="Choose among the best that reach this mass."),
    click.option("--top-k", type=int, help="Choose among so many; 0 for all."),
    click.option(
        "--min-p", type=float, help="Choose among those that have this part of the best's mass."
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
