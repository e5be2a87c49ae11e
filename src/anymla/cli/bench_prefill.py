"""``anymla bench prefill``."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import click

from anymla.cli.bench_rows import gpu_facts, json_option, require_gpu, require_known, tell


@click.command()
@json_option
@click.option(
    "--backend", default="gluon_sm90", show_default=True, help="Of attention during prefill."
)
@click.option("--long", is_flag=True, help="Also 32,768 queries at once.")
@click.option("--flash-mla", is_flag=True, help="Next to FlashMLA, which must be importable.")
def prefill(json_file: Path | None, backend: str, long: bool, flash_mla: bool) -> None:
    """Time attention during prefill on the GPU, with decoded rows as they are within a chunk.

    Beside FlashMLA also from FP8 pages to the output projection, and rows by lists alone.
    """
    from anymla.bench.layer_rival import flash_mla_module
    from anymla.bench.prefill import CASES, LONG_CASES, flash_mla_peer, measure
    from anymla.bench.prefill_lists import SHAPES, measure_lists
    from anymla.bench.prefill_pipeline import CASES as PIPELINES
    from anymla.bench.prefill_pipeline import measure_pipelines
    from anymla.ops.prefill_attention import prefill_attention

    require_known("--backend", [backend], prefill_attention.backends)
    require_gpu()
    peer = flash_mla_peer(flash_mla_module(importlib.import_module)) if flash_mla else None
    measured = measure(CASES + LONG_CASES if long else CASES, backend, peer)
    if peer is not None:
        measured = itertools.chain(
            measured,
            measure_pipelines(PIPELINES, backend, peer),
            measure_lists(SHAPES, backend, peer),
        )
    tell(measured, json_file, gpu_facts("anymla bench prefill"))
