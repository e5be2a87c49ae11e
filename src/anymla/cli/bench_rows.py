"""What the benchmarks share: where their rows go, and what they were measured on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch

from anymla.bench.report import Result, append_rows, line
from anymla.cli.files import OutputFile

_CASE_WIDTH = 44

json_option = click.option(
    "--json",
    "json_file",
    type=OutputFile(),
    metavar="FILE",
    help="Append the rows here, one JSON object a line.",
)


def require_gpu() -> None:
    """Raise UsageError where torch sees none."""
    if not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU on this machine")


def gpu_facts(command: str) -> dict[str, Any]:
    """Of this machine and its GPU, for every row of a command."""
    from anymla.bench.environment import environment
    from anymla.bench.gpu import device_facts

    return environment(command) | device_facts()


def tell(
    results: Iterable[Result],
    json_file: Path | None,
    facts: dict[str, Any],
    hidden: tuple[str, ...] = (),
) -> None:
    """Print and store results as they come; end with exit code 1 if one misses its target.

    Args:
        results: measured while they are taken from it.
        json_file: to append rows to, or None.
        facts: of every row.
        hidden: values that only rows have.
    """
    missed, part = False, None
    for result in results:
        missed |= result.met is False
        if json_file is not None:
            append_rows(json_file, [result], facts)
        if result.part != part:
            part = result.part
            click.echo(part)
        shown = {name: value for name, value in result.values.items() if name not in hidden}
        click.echo(line(dataclasses.replace(result, values=shown), _CASE_WIDTH))
    if missed:
        click.get_current_context().exit(1)
