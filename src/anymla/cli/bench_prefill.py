"""``anymla bench prefill``."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import click
import torch

from anymla.bench.report import Result, append_rows, table


@click.command()
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Append the rows here, one JSON object a line.",
)
@click.option(
    "--backend", default="gluon_sm90", show_default=True, help="Of attention during prefill."
)
@click.option("--long", is_flag=True, help="Also 32,768 queries at once.")
@click.option("--flash-mla", is_flag=True, help="Next to FlashMLA, which must be importable.")
def prefill(json_file: Path | None, backend: str, long: bool, flash_mla: bool) -> None:
    """Time attention during prefill on the GPU, with decoded rows as they are within a chunk.

    Beside FlashMLA also from FP8 pages to the output projection, and rows by lists alone.
    """
    from anymla.bench.environment import environment
    from anymla.bench.gpu import device_facts
    from anymla.bench.layer_rival import flash_mla_module
    from anymla.bench.prefill import CASES, LONG_CASES, flash_mla_peer, measure
    from anymla.bench.prefill_lists import SHAPES, measure_lists
    from anymla.bench.prefill_pipeline import CASES as PIPELINES
    from anymla.bench.prefill_pipeline import measure_pipelines

    if not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU on this machine")
    facts = environment("anymla bench prefill") | device_facts()
    peer = flash_mla_peer(flash_mla_module(importlib.import_module)) if flash_mla else None
    measured = measure(CASES + LONG_CASES if long else CASES, backend, peer)
    if peer is not None:
        measured = itertools.chain(
            measured,
            measure_pipelines(PIPELINES, backend, peer),
            measure_lists(SHAPES, backend, peer),
        )
    results: list[Result] = []
    for result in measured:
        results.append(result)
        if json_file is not None:
            append_rows(json_file, [result], facts)
    click.echo("\n".join(table(results)))
    if any(result.met is False for result in results):
        click.get_current_context().exit(1)
