"""``python -m lab attention``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from anymla.cli import commands
from anymla.cli.bad_input import BadInput
from anymla.cli.bench_rows import (
    json_option,
    measure,
    require_cases,
    require_gpu,
    require_known,
)
from anymla.cli.numbers import count


@commands.command(
    examples=[
        "python -m lab attention --heads 64 --flash-mla",
        "python -m lab attention --fused-end --json rows.jsonl",
        "python -m lab attention --random 60 --seed 3 --seed 4 --planned --flash-mla --seconds 80",
    ]
)
@json_option
@click.option("--backend", default="gluon_sm90", show_default=True, help="Of sparse_attention.")
@click.option("--flash-mla", is_flag=True, help="Next to FlashMLA and sgl-flash-mla.")
@click.option(
    "--vllm-xpu", is_flag=True, help="Instead: portable Triton next to vLLM's path for Intel XPU."
)
@click.option(
    "--ampere", is_flag=True, help="Instead: portable Triton next to public engines for Ampere."
)
@click.option("--v32", is_flag=True, help="Instead: over the rows of DeepSeek-V3.2.")
@click.option("--v41", is_flag=True, help="Instead: over the rows of DeepSeek-V4.1, and V4's.")
@click.option("--fused-end", is_flag=True, help="Instead: with FP8 heads, fused and apart.")
@click.option("--verification", is_flag=True, help="Instead: steps that verify drafts.")
@count("--random", "drawn", help="Instead: so many shapes.")
@count(
    "--seed",
    "seeds",
    default=(0,),
    multiple=True,
    least=0,
    help="Of the random shapes; repeatable, in turn.",
)
@count("--seconds", help="No shape begins later.")
@click.option("--schedules", is_flag=True, help="Random shapes by all that could be chosen.")
@click.option("--planned", is_flag=True, help="With work shared out once for all calls.")
@count("--heads", multiple=True, help="Only these; repeatable.")
def attention(
    json_file: Path | None,
    backend: str,
    flash_mla: bool,
    vllm_xpu: bool,
    ampere: bool,
    v32: bool,
    v41: bool,
    fused_end: bool,
    verification: bool,
    drawn: int | None,
    seeds: tuple[int, ...],
    seconds: int | None,
    schedules: bool,
    planned: bool,
    heads: tuple[int, ...],
) -> None:
    """Time attention during decoding on the GPU, over the paged FP8 caches.

    Ratios are to the fastest of the other libraries that are here, installed or in a folder that
    the environment variable ANYMLA_PEERS names.
    """
    import torch

    from anymla.ops.attention import sparse_attention
    from anymla.ops.device import target_of
    from lab.cases import ampere_attention as ampere_rows
    from lab.cases import decode_schedules
    from lab.cases import sparse_attention as family
    from lab.cases import v41_attention as v41_rows
    from lab.cases import verification as steps
    from lab.peers import Peer, present_peers
    from lab.peers.ampere import ampere_engines
    from lab.peers.flash_mla import FlashMla
    from lab.peers.sgl_flash_mla import SglFlashMla
    from lab.peers.vllm import VllmXpu
    from lab.timing import begun_within

    start = time.monotonic()
    if vllm_xpu + ampere + v32 + v41 + fused_end + verification + (drawn is not None) > 1:
        raise BadInput(
            "one of --vllm-xpu, --ampere, --v32, --v41, --fused-end, --verification and --random"
        )
    if drawn is None and _was_given("seeds"):
        raise BadInput(f"--seed {seeds[0]}: is of --random")
    if schedules and (drawn is None or flash_mla or planned or backend != "gluon_sm90"):
        raise BadInput("--schedules is of --random and gluon_sm90, alone")
    if planned and (vllm_xpu or ampere or v32 or v41 or fused_end or verification):
        raise BadInput(
            "--planned is of the comparison without --vllm-xpu, --ampere, --v32, --v41, "
            "--fused-end and --verification"
        )
    if v41 and flash_mla:
        raise BadInput("--v41 is next to V4's rows alone, not --flash-mla")
    if vllm_xpu and flash_mla:
        raise BadInput("--vllm-xpu is next to vLLM's path alone, not --flash-mla")
    if ampere and flash_mla:
        raise BadInput("--ampere is next to engines for Ampere alone, not --flash-mla")
    if (vllm_xpu or ampere) and backend != "triton" and _was_given("backend"):
        option = "--vllm-xpu" if vllm_xpu else "--ampere"
        raise BadInput(f"--backend {backend}: {option} is of triton")
    require_known("--backend", [backend], sparse_attention.backends)
    shapes = family.shapes()
    if vllm_xpu:
        shapes = family.portable_shapes()
    elif ampere:
        shapes = ampere_rows.shapes()
    elif v32:
        shapes = family.v32_shapes()
    elif v41:
        shapes = v41_rows.shapes()
    elif fused_end:
        shapes = family.fp8_heads_shapes()
    elif drawn is not None:
        shapes = family.draws(drawn, seeds)
    every: list[Any] = list(steps.shapes() if verification else shapes)
    chosen = require_cases(
        " ".join(f"--heads {count}" for count in heads),
        (shape for shape in every if not heads or shape.heads in heads),
        sorted({shape.heads for shape in every}),
    )
    require_gpu()
    builds: list[FlashMla] = []
    if flash_mla:
        builds = present_peers("--flash-mla", [FlashMla(), SglFlashMla()])
    peers: list[Peer] = [*builds]
    if vllm_xpu:
        path = VllmXpu()
        path.require("--vllm-xpu")
        peers, cases = [path], family.portable_cases(chosen, path)
    elif ampere:
        engines = present_peers("--ampere", ampere_engines())
        ampere_rows.compile_ahead(chosen, engines, torch.device("cuda"))
        peers, cases = [*engines], ampere_rows.ampere_cases(chosen, engines)
    elif verification:
        cases = steps.verification_cases(chosen, backend, builds)
    elif v41:
        cases = v41_rows.v41_cases(chosen, backend)
    elif fused_end:
        cases = family.fp8_heads_cases(chosen, backend, builds)
    elif schedules:
        cases = decode_schedules.schedule_cases(chosen, target_of(torch.device("cuda")).sm_count)
    else:
        if drawn is not None:
            family.compile_ahead(chosen, backend, torch.device("cuda"), planned=planned)
        cases = family.decode_cases(chosen, backend, builds, planned=planned)
    if seconds is not None:
        cases = begun_within(cases, start + seconds)
    hidden = decode_schedules.IN_LABEL if schedules else family.IN_LABEL
    measure(cases, json_file, peers=peers, hidden=steps.IN_LABEL if verification else hidden)


def _was_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT
