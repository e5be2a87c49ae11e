"""``python -m lab full-size``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import click

from anymla.cli import commands
from anymla.cli.bad_input import bad_input
from anymla.cli.bench_rows import command_line, gpu_facts, json_option, require_gpu, tell
from anymla.cli.numbers import count
from anymla.cli.run_options import all_reduce_option, as_one, device_option, shared_ranks
from anymla.model.build import shares_channels
from anymla.model.load import DTYPES
from anymla.runtime.devices import named_device
from anymla.runtime.launch import local_device

# A step of one request of V4-Flash-0731, on four GPUs or more.
_BAR_US = 8000.0


@commands.command(
    examples=[
        "python -m lab full-size --model tiny --device cpu --batch 1 --context 150 --steps 2",
        "torchrun --nproc-per-node 4 -m lab full-size",
    ]
)
@json_option
@click.option(
    "--model",
    default="flash-0731",
    show_default=True,
    type=click.Choice(["flash-0731", "pro-0813", "tiny"]),
)
@count("--layers", help="Of the backbone; default: all.")
@count("--experts", help="Routed ones; default: all.", least=6)
@device_option
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(list(DTYPES)))
@count("--batch", "batches", multiple=True, default=(1, 8, 32))
@count("--context", "contexts", multiple=True, default=(8192, 131072), help="Tokens.")
@count("--draft-tokens", help="Default: the drafter's block.")
@count("--steps", default=24, help="Timed.")
@click.option(
    "--share-experts",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "channels", "whole"]),
    help="On each rank: some channels of every routed expert (tensor parallel), or some experts "
    "(expert parallel).",
)
@all_reduce_option
def full_size(
    json_file: Path | None,
    model: str,
    layers: int | None,
    experts: int | None,
    device: str | None,
    dtype: str,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    draft_tokens: int | None,
    steps: int,
    share_experts: str,
    all_reduce: str,
) -> None:
    """Time decode steps of a whole model with random weights, on torchrun's ranks or on one.

    A step verifies a draft block and makes the next one; beside it a step without drafts. Tells
    each rank's memory, what sums over the ranks take, and where a step's time goes.
    """
    from anymla.bench.environment import environment
    from anymla.bench.report import Result
    from lab import full_size as bench
    from lab.model_steps import random_transformer

    if device is None and model != "tiny":
        require_gpu()
    with bad_input():
        here, kind = local_device(str(named_device(device))), DTYPES[dtype]
    with as_one(here), bad_input():
        config = bench.drafting_config(model, layers=layers, experts=experts)
        ranks = shared_ranks(all_reduce, here, kind)
        guessed = draft_tokens or config.default_draft_tokens
        label = f"{model}, {config.num_hidden_layers} layers, {config.n_routed_experts} experts"
        by_channels = {"channels": True, "whole": False, "auto": None}[share_experts]
        if by_channels is None:
            by_channels = shares_channels(config, ranks, here)
        label = f"{label}, {ranks.size} ranks, {dtype}"
        label += ", experts by channels" if by_channels and ranks.size > 1 else ""
        whole = model == "flash-0731" and layers is None and experts is None

        def results() -> Iterator[Result]:
            make = functools.partial(
                random_transformer,
                config,
                here,
                ranks,
                dtype=kind,
                seed=0,
                share_channels=by_channels,
            )
            network, made = bench.model_made(make, label)
            yield made
            if ranks.size > 1:
                rows = sorted({1 + guessed, *(batch * (1 + guessed) for batch in batches)})
                yield from bench.sums_over_ranks(network, rows)
            yield from bench.steps(
                network,
                label,
                batches=batches,
                contexts=contexts,
                draft_tokens=guessed,
                mode="graph" if here.type == "cuda" else "fixed",
                kv_cache="fp32" if dtype == "fp32" else "fp8",
                count=steps,
                bar_us=_BAR_US if whole and ranks.size >= 4 else None,
            )

        facts = gpu_facts() if here.type == "cuda" else environment(command_line())
        facts |= {"ranks": ranks.size, "one_shot_sums": ranks.peers is not None}
        tell(
            results(),
            None if ranks.rank else json_file,
            facts,
            hidden=("parts_us", "plain_parts_us", "draft_parts_us"),
        )
