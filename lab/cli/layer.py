"""``python -m lab layer``."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import click
import torch

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.bench_rows import (
    command_line,
    gpu_facts,
    json_option,
    measure,
    require_gpu,
    tell,
)
from anymla.cli.numbers import Finite, count
from anymla.cli.run_options import device_option
from anymla.runtime.device_step import Reads
from anymla.runtime.devices import named_device
from anymla.runtime.options import DecodeMode
from lab.peers import Peer, present_peers


@commands.command(examples=["python -m lab layer --model flash --ratio 4 --batch 8 --timeline"])
@json_option
@click.option(
    "--model", "models", multiple=True, type=click.Choice(["flash", "pro"]), help="Repeatable."
)
@click.option("--ratio", "ratios", multiple=True, type=click.Choice(["0", "4", "128"]))
@count("--batch", "batches", multiple=True)
@count("--context", "contexts", multiple=True, help="Tokens.")
@count("--queries", default=1, help="Of a request.")
@count("--experts", default=32, least=6)
@count("--share", default=1, help="GPUs of tensor parallelism: one GPU's part, without their sums.")
@click.option(
    "--reads",
    "reads",
    multiple=True,
    type=click.Choice([each.name.lower() for each in Reads]),
    help="Repeatable: how several queries of a request read the rows that they share.",
)
@click.option(
    "--side-stream/--one-queue",
    default=None,
    help="Compress and index on further CUDA streams; default: where an engine does.",
)
@click.option(
    "--others",
    is_flag=True,
    help="Also from FlashMLA's and DeepGEMM's kernels.",
)
@click.option("--timeline", is_flag=True, help="Also when each kernel starts and ends.")
def layer(
    json_file: Path | None,
    models: tuple[str, ...],
    ratios: tuple[str, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    queries: int,
    experts: int,
    share: int,
    reads: tuple[str, ...],
    side_stream: bool | None,
    others: bool,
    timeline: bool,
) -> None:
    """Time one decode layer of DeepSeek-V4's real sizes on the GPU, and see where the time goes.

    The layer has random weights, FP4 experts and FP8 caches, and is replayed as a CUDA
    graph; caches are larger than the device's. Without options: every ratio of both models, 1 to
    128 requests, 4k to 512k tokens of context.
    """
    from anymla.bench.gpu_timing import GraphClock
    from anymla.bench.layer_setup import MODELS
    from lab.layer import BATCHES, CONTEXTS, RATIOS, cases, layer_cases
    from lab.peers.deep_gemm import DeepGemm
    from lab.peers.flash_mla import FlashMla
    from lab.peers.sgl_flash_mla import SglFlashMla

    require_gpu()
    chosen = cases(
        models or tuple(MODELS),
        [int(ratio) for ratio in ratios] or RATIOS,
        batches or BATCHES,
        contexts or CONTEXTS,
        queries,
        [Reads[each.upper()] for each in reads] or [Reads.SLOTS],
        experts,
        share,
    )
    peers: list[Peer] = []
    modules = None
    if others:
        # The fork's attention is the faster, 1.00 to 1.18 times on an H200.
        flash_mla, *_ = present_peers("--others", [SglFlashMla(), FlashMla()])
        deep_gemm = DeepGemm()
        modules = flash_mla, deep_gemm if deep_gemm.available() else None
        peers = [peer for peer in modules if peer is not None]
    measure(
        layer_cases(chosen, GraphClock(), beside=side_stream, others=modules, timelines=timeline),
        json_file,
        peers=peers,
        hidden=("kernels_us", "timeline_us"),
        ceilings=("copy",),
        facts={"side_stream": side_stream},
    )


@commands.command(examples=["python -m lab model --layers 4 --batch 1 --graphs-only"])
@json_option
@click.option(
    "--model", default="flash", show_default=True, type=click.Choice(["flash", "pro", "flash-41"])
)
@click.option("--kv-cache", default="fp8", show_default=True, type=click.Choice(["fp8", "nvfp4"]))
@count("--layers", default=43)
@count("--experts", default=8, least=6)
@count("--batch", "batches", multiple=True, default=(1, 8))
@count("--context", default=4096)
@click.option("--graphs-only", is_flag=True, help="Neither of the other two.")
@click.option("--ngrams", is_flag=True, help="V4.1's, read from small tables on the host.")
def model(
    json_file: Path | None,
    model: str,
    kv_cache: str,
    layers: int,
    experts: int,
    batches: tuple[int, ...],
    context: int,
    graphs_only: bool,
    ngrams: bool,
) -> None:
    """Time decode steps of a whole model of real size with random weights and few experts.

    As recorded graphs, as the same steps called directly (whose tokens must be the same), and at
    the size of the batch. Requests begin with random cache rows, nothing is prefilled.
    """
    from lab.model_steps import WHOLE, decode_steps, random_model

    published = WHOLE[model].get("text_config", WHOLE[model])["num_hidden_layers"]
    if layers > published:
        raise BadInput(f"--layers {layers}: {model} has {published}")
    if ngrams and model != "flash-41":
        raise BadInput(f"--ngrams: {model} reads none, flash-41 does")
    require_gpu()
    network = random_model(
        model, torch.device("cuda"), layers=layers, experts=experts, changes={}, ngrams=ngrams
    )
    label = f"{model}, {layers} layers, {experts} experts"
    label += f", {kv_cache} caches" * (kv_cache != "fp8") + ", n-grams" * ngrams
    facts = gpu_facts()
    modes: tuple[DecodeMode, ...] = ("graph",) if graphs_only else ("graph", "fixed", "plain")
    tell(
        decode_steps(network, label, batches, modes, context=context, kv_cache=kv_cache),
        json_file,
        facts,
    )


@commands.command(examples=["python -m lab traffic --steps 200"])
@json_option
@device_option
@count("--steps", default=10_000)
@click.option("--seconds", type=Finite(min=0, min_open=True), help="Stop after so long.")
def traffic(json_file: Path | None, device: str | None, steps: int, seconds: float | None) -> None:
    """Serve random requests with a tiny model after its warm-up.

    Nothing may be compiled any more, and no memory be taken.
    """
    from anymla.bench.environment import environment
    from lab.traffic import run

    with bad_input():
        place = named_device(device)
    facts = environment(command_line()) if place.type == "cpu" else gpu_facts()
    with tempfile.TemporaryDirectory() as directory:
        found = run(Path(directory), place, steps=steps, seconds=seconds or math.inf)
        tell(found, json_file, facts, nothing=f"--seconds {seconds}: over with the warm-up")
