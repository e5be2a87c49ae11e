"""``python -m lab prefill``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import click

from anymla.cli import commands
from anymla.cli.bad_input import BadInput
from anymla.cli.bench_rows import (
    json_option,
    measure,
    require_gpu,
    require_known,
)


@commands.command(examples=["python -m lab prefill --flash-mla"])
@json_option
@click.option(
    "--backend", default="gluon_sm90", show_default=True, help="Of attention during prefill."
)
@click.option("--long", is_flag=True, help="Also 32,768 queries at once.")
@click.option("--kinds", is_flag=True, help="Instead: one shape of each kind, twelve of them.")
@click.option("--flash-mla", is_flag=True, help="Next to FlashMLA and sgl-flash-mla.")
def prefill(json_file: Path | None, backend: str, long: bool, kinds: bool, flash_mla: bool) -> None:
    """Time attention during prefill on the GPU, with decoded rows as they are within a chunk.

    Ratios are to the fastest of the builds of FlashMLA that are here, installed or in a folder that
    the environment variable ANYMLA_PEERS names. Beside them also from FP8 pages to the output
    projection, and rows by lists alone.
    """
    from anymla.bench.runner import Case
    from anymla.ops.attention import prefill_attention
    from lab.cases import prefill_attention as family
    from lab.peers import present_peers
    from lab.peers.flash_mla import FlashMla
    from lab.peers.sgl_flash_mla import SglFlashMla

    if long and kinds:
        raise BadInput("one of --long and --kinds")
    require_known("--backend", [backend], prefill_attention.backends)
    require_gpu()
    peers: list[FlashMla] = []
    if flash_mla:
        peers = present_peers("--flash-mla", [FlashMla(), SglFlashMla()])
    rows = family.prefill_peers(peers)
    shapes = family.SHAPES + family.LONG_SHAPES if long else family.SHAPES
    if kinds:
        shapes = family.KINDS
    cases: Iterator[Case] = family.cases(shapes, backend, rows)
    if kinds:
        cases = itertools.chain(cases, family.listed_cases(family.LISTED_KINDS, backend, rows))
    elif rows:
        cases = itertools.chain(
            cases,
            family.pipeline_cases(family.PIPELINES, backend, rows),
            family.listed_cases(family.LISTED, backend, rows),
        )
    measure(cases, json_file, peers=peers)
