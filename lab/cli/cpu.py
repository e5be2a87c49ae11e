"""``python -m lab cpu``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch

from anymla.bench.environment import environment
from anymla.bench.report import Result
from anymla.cli import commands
from anymla.cli.bench_rows import command_line, json_option, tell
from anymla.cli.run_options import threads_option
from lab.cpu.decode import PeerMissing
from lab.cpu.parts import parts

_PARTS = ("machine", "attention", "packed", "selection", "decode", "context", "memory")


@commands.command(
    examples=["python -m lab cpu --quick --part selection", "python -m lab cpu --json cpu.jsonl"]
)
@json_option
@click.option("--quick", is_flag=True, help="Fewer repetitions, shorter contexts.")
@click.option(
    "--part",
    "chosen",
    multiple=True,
    type=click.Choice(_PARTS),
    help="Only this part; may be given several times.",
)
@threads_option(text="CPU threads.", default=1, show_default=True)
def cpu(json_file: Path | None, quick: bool, chosen: tuple[str, ...], threads: int) -> None:
    """Run the CPU suite: attention, packed weights, selection, a whole tiny model, context, memory.

    Everything is compared with something measured in the same process: matrix products, or
    transformers on the same checkpoint. Ends with exit code 1 if a target is missed.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    measured = environment(command_line())
    click.echo(f"{measured['cpu']}, {threads} thread(s), torch {measured['torch']}")

    def results() -> Iterator[Result]:
        for name, run in parts(quick).items():
            try:
                yield from run() if not chosen or name in chosen else ()
            except PeerMissing as missing:
                click.echo(f"{name}: not measured: {missing}")

    nothing = f"--part {' --part '.join(chosen)}: nothing was measured"
    tell(results(), json_file, measured, nothing=nothing)
