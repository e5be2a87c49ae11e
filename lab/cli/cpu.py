"""``python -m lab cpu``."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from anymla.bench.environment import environment
from anymla.bench.report import append_rows, table
from anymla.cli import commands
from anymla.cli.bad_input import BadInput
from anymla.cli.bench_rows import command_line, json_option
from anymla.cli.run_options import threads_option
from lab.cpu import parts
from lab.decode import PeerMissing

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
    missed, left_out = False, []
    for name, run in parts(quick).items():
        if chosen and name not in chosen:
            continue
        try:
            results = run()
        except PeerMissing as missing:
            click.echo(f"\n{name}: not measured: {missing}")
            left_out.append(name)
            continue
        click.echo("\n" + "\n".join(table(results)))
        missed |= any(result.met is False for result in results)
        if json_file is not None:
            append_rows(json_file, results, measured)
    if left_out and set(left_out) >= set(chosen or _PARTS):
        raise BadInput(f"--part {' --part '.join(left_out)}: nothing was measured")
    if missed:
        click.get_current_context().exit(1)
