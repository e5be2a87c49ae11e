"""``anymla bench``: speed of this machine, and where measurements for makers of kernels went."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import click

import anymla
from anymla.cli import commands
from anymla.cli.bad_input import BadInput
from anymla.cli.bench_rows import LAB, json_option, measure, require_gpu, require_known

# Commands of version 0.1.0 that ``python -m lab`` has now, from a checkout; until version 0.3.0.
_OF_THE_LAB = (
    "attention", "build-matrix", "cpu", "experts", "full-size", "indexer", "layer", "linear",
    "model", "prefill", "report", "same-code", "traffic", "xpu-attention",
)  # fmt: skip


@commands.group(examples=["anymla bench gpu --family attention"])
def command() -> None:
    """Measure speed on this machine."""


@command.command(
    examples=["anymla bench gpu --json gpu.jsonl", "anymla bench gpu --family attention"]
)
@json_option
@click.option("--family", "chosen", multiple=True, help="Only this module of cases; repeatable.")
def gpu(json_file: Path | None, chosen: tuple[str, ...]) -> None:
    """Time the GPU kernels, against this device's own copy and product."""
    from anymla.bench.gpu import cases, families

    require_known("--family", chosen, families())
    require_gpu(intel=True)
    measure(
        cases(list(chosen) or families()),
        json_file,
        ceilings=("copy", "product"),
        failures_are_rows=True,
    )


def _moved(name: str) -> click.Command:
    """An old name of a command of the lab, which says the new one and runs it."""

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
