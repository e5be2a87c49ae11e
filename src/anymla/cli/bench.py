"""``anymla bench``: speed of this machine, and where measurements for makers of kernels went."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import click
import torch

import anymla
from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.bench_rows import LAB, json_option, measure, require_gpu, require_known
from anymla.cli.run_options import ptx_target_option

# Commands of version 0.1.0 that ``python -m lab`` has now, from a checkout; until version 0.3.0.
_OF_THE_LAB = (
    "attention", "build-matrix", "cpu", "experts", "full-size", "indexer", "layer", "linear",
    "model", "prefill", "report", "same-code", "traffic", "xpu-attention",
)  # fmt: skip


@commands.group(examples=["anymla bench run", "anymla bench run attention"])
def command() -> None:
    """Time operations, layers and steps on this machine."""


@command.command(
    examples=[
        "anymla bench run",
        "anymla bench run cache/rope-1-tokens --json rows.jsonl",
        "anymla bench run attention decoder/layer-of-v4-flash-ratio-4-8-requests",
    ]
)
@click.argument("names", metavar="[CASE]...", nargs=-1)
@json_option
@ptx_target_option
def run(names: tuple[str, ...], json_file: Path | None) -> None:
    """Time cases of operations, layers and steps on this machine's GPU, or on its CPU.

    CASE is a case's name, a family's for all of its cases, or "all"; without one the names are
    listed. Inputs are random and rotate, so that no cache holds them; times are medians, beside
    this device's own copy and matrix product.
    """
    from anymla.bench.gpu import cases, chosen_cases, families, name_of

    if not names:
        for case in cases(families()):
            click.echo(name_of(case))
        return
    with bad_input():
        chosen = chosen_cases(names)
    gpu = torch.cuda.is_available() or torch.xpu.is_available()
    ceilings = ("copy", "product") if gpu else ("copy",)
    measure(chosen, json_file, ceilings=ceilings, failures_are_rows=True)


@command.command(examples=["anymla bench gpu --family attention"], hidden=True)
@json_option
@click.option("--family", "families", multiple=True, help="Only these families' cases; repeatable.")
@click.pass_context
def gpu(context: click.Context, json_file: Path | None, families: tuple[str, ...]) -> None:
    """Run what is ``anymla bench run`` now, and say so."""
    from anymla.bench.gpu import families as every

    require_known("--family", families, every())
    require_gpu(intel=True)
    names = families or ("all",)
    click.echo(f"anymla bench gpu is now anymla bench run {' '.join(names)}", err=True)
    context.invoke(run, names=names, json_file=json_file)


def _moved(name: str) -> click.Command:
    """Name the new command for an old name of a lab command, and run it."""

    @click.pass_context
    def run(context: click.Context, words: tuple[str, ...]) -> None:
        new = f"{LAB} {name}"
        checkout = Path(anymla.__file__).parents[2]
        if (checkout / "lab" / "__main__.py").is_file() and str(checkout) not in sys.path:
            sys.path.insert(0, str(checkout))
        if importlib.util.find_spec("lab") is None:
            raise BadInput(f"it is now {new}, which a checkout of the repository has, not a wheel")
        click.echo(f"anymla bench {name} is now {new}", err=True)
        main: click.Group = importlib.import_module("lab.__main__").main
        main.main([name, *words], prog_name=LAB)

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        hidden=True,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )


for _name in _OF_THE_LAB:
    command.add_command(_moved(_name))
