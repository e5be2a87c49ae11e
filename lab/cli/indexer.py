"""``python -m lab indexer``."""

from __future__ import annotations

from pathlib import Path

import click
from tqdm import tqdm

from anymla.cli import commands
from anymla.cli.bench_rows import json_option, measure, require_cases, require_gpu, require_known
from anymla.cli.numbers import count


@commands.command(examples=["python -m lab indexer --shapes decode"])
@json_option
@click.option(
    "--backend",
    "chosen",
    multiple=True,
    help="Only this backend of select_topk; repeatable. [default: all for GPUs]",
)
@click.option(
    "--shapes",
    type=click.Choice(("all", "decode", "prefill")),
    default="all",
    show_default=True,
    help="Decoding, prefill, or both.",
)
@count(
    "--most-keys",
    default=262_144,
    help="Leave out longer contexts (entries, a quarter of the tokens).",
    least=64,
)
@click.option(
    "--topk-library",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="vLLM's compiled operations, to time its top-k kernels as well.",
)
def indexer(
    json_file: Path | None,
    chosen: tuple[str, ...],
    shapes: str,
    most_keys: int,
    topk_library: Path | None,
) -> None:
    """Time index scores and selection, next to DeepGEMM with other top-k kernels.

    DeepGEMM is taken where Python finds it; its first calls compile for half a minute.
    """
    from anymla.ops.indexer.shapes import DECODES, PREFILLS
    from lab.cases.indexer import SCORES, cases
    from lab.peers.deep_gemm import DeepGemm
    from lab.peers.vllm import VllmTopk

    require_known("--backend", chosen, SCORES)
    wanted = {"decode": DECODES, "prefill": PREFILLS, "all": (*DECODES, *PREFILLS)}[shapes]
    selected = require_cases(
        f"--shapes {shapes} --most-keys {most_keys}",
        (shape for shape in wanted if shape.keys <= most_keys),
        sorted({shape.keys for shape in wanted}),
    )
    require_gpu()
    peers = [peer for peer in (DeepGemm(),) if peer.available()]
    deep_gemm, vllm = peers[0] if peers else None, None
    if topk_library is not None:
        DeepGemm().require("--topk-library")  # whose scores vLLM's kernels select from
        vllm = VllmTopk(topk_library)
    found = cases(selected, chosen or tuple(SCORES), deep_gemm, vllm)
    watched = tqdm(found, total=len(selected), disable=None)
    measure(watched, json_file, peers=peers)
