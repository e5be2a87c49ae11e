"""``python -m lab linear``."""

from __future__ import annotations

from pathlib import Path

import click

from anymla.cli import commands
from anymla.cli.bench_rows import json_option, measure, require_gpu
from anymla.cli.numbers import count


@commands.command(examples=["python -m lab linear --model flash --tokens 1 --tokens 128"])
@json_option
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(["flash", "pro", "flash-41"]),
    default=("flash",),
)
@count("--tokens", "tokens", multiple=True, help="Repeatable.")
def linear(json_file: Path | None, models: tuple[str, ...], tokens: tuple[int, ...]) -> None:
    """Time the FP8 products of a decode layer, of activations that come quantised (V4.1's do not).

    Weights are random and more than the device's cache holds; calls are replayed as a CUDA graph.
    "layer" is all products of a layer, one after the other; ``others_us`` is what the backends
    besides Hopper's take, ``share_of_copy`` the weights' bytes over the time, as a share of the
    measured copy bandwidth. Without options 1 to 128 tokens.
    """
    from lab.cases.linear import TOKENS, cases

    require_gpu()
    chosen = cases(models, tokens or TOKENS)
    measure(chosen, json_file, ceilings=("copy",))
