"""``anymla bench experts``."""

from __future__ import annotations

from pathlib import Path

import click

from anymla.cli.bench_rows import json_option, measure, require_gpu


@click.command()
@json_option
@click.option(
    "--model", "models", multiple=True, type=click.Choice(["flash", "pro"]), default=("flash",)
)
@click.option("--experts", "count", default=32, show_default=True, type=click.IntRange(min=6))
@click.option("--tokens", "tokens", multiple=True, type=click.IntRange(min=1), help="Repeatable.")
@click.option("--backend", "backends", multiple=True, help="Beside what is chosen; repeatable.")
def experts(
    json_file: Path | None,
    models: tuple[str, ...],
    count: int,
    tokens: tuple[int, ...],
    backends: tuple[str, ...],
) -> None:
    """Time grouped MXFP4 experts of DeepSeek-V4's sizes.

    Weights are random and more than the device's cache holds; calls are replayed as a CUDA graph,
    each with other tokens. ``share_of_copy`` is the bytes of the visited experts over the time,
    as a share of the measured copy bandwidth; without options 1 to 4096 tokens. A backend that is
    named is timed on the same inputs, and its ``_distance`` is that of its result from the chosen
    one's, relative to it.
    """
    from anymla.bench.cases.moe import TOKENS, cases

    require_gpu()
    measure(
        cases(models, count, tokens or TOKENS, backends),
        json_file,
        hidden=("kernels_us",),
        ceilings=("copy", "product"),
    )
