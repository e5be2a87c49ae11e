"""Shared parts of the benchmark commands: choice of cases, facts of the machine, stored rows."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import torch

from anymla.bench.report import Result, append_rows, line
from anymla.cli.bad_input import BadInput
from anymla.cli.files import OutputFile

if TYPE_CHECKING:
    from anymla.bench.runner import Case, Versioned

# Prefix of the commands that only a checkout has, besides ``anymla bench``.
LAB = "python -m lab"
_CASE_WIDTH = 44
_Case = TypeVar("_Case")

json_option = click.option(
    "--json",
    "json_file",
    type=OutputFile(),
    metavar="FILE",
    help="Append the rows here, one JSON object a line.",
)


def require_known(option: str, given: Iterable[str], choices: Collection[str]) -> None:
    """Raise BadInput for the first of the given names that is none of the choices."""
    for name in given:
        if name not in choices:
            raise BadInput(f"{option} {name}: there are {', '.join(choices)}")


def require_cases(filters: str, cases: Iterable[_Case], without: Sequence[object]) -> list[_Case]:
    """Return the cases that filters leave; BadInput if there are none."""
    selected = list(cases)
    if not selected:
        raise BadInput(f"{filters}: no case is of that; there are {', '.join(map(str, without))}")
    return selected


def require_gpu(*, intel: bool = False) -> None:
    """Raise BadInput where torch sees none; ``intel``: one of Intel's will do."""
    if torch.cuda.is_available() or (intel and torch.xpu.is_available()):
        return
    if torch.xpu.is_available():
        raise BadInput("needs CUDA; on Intel's GPUs there are anymla bench run and doctor")
    raise BadInput("torch sees no GPU on this machine")


def command_line() -> str:
    """Return the command that reproduces the rows, with file names for paths and without --json."""
    words, given = ["anymla"], sys.argv[1:]
    context = click.get_current_context(silent=True)
    if context is not None and context.find_root().info_name == LAB:
        words, given = LAB.split(), given[given[:1] == ["bench"] :]
    rest = iter(given)
    for word in rest:
        if word == "--json":
            next(rest, None)
        elif not word.startswith("--json="):
            option, equals, value = word.rpartition("=")
            words.append(option + equals + (value if value.startswith("-") else Path(value).name))
    return shlex.join(words)


def gpu_facts(peers: Iterable[Versioned] = ()) -> dict[str, Any]:
    """Return facts of this machine, its GPU and the peers, for every row of a command."""
    from anymla.bench.gpu import device_facts
    from anymla.bench.runner import facts

    return facts(command_line(), device_facts(), peers)


def measure(
    cases: Iterable[Case],
    json_file: Path | None,
    *,
    peers: Iterable[Versioned] = (),
    hidden: tuple[str, ...] = (),
    ceilings: tuple[str, ...] = (),
    facts: dict[str, Any] | None = None,
    failures_are_rows: bool = False,
) -> None:
    """Run cases on the GPU, or where there is none on the CPU, and tell their rows.

    Args:
        cases: cases to measure, in this order.
        json_file: to append rows to, or None.
        peers: whose versions rows say.
        hidden: values that only rows have.
        ceilings: ceilings of the device to measure first: "copy", "product".
        facts: more of every row.
        failures_are_rows: a case that raises is one, and does not end the command.
    """
    from anymla.bench.cpu_clock import CpuClock
    from anymla.bench.gpu_timing import gpu_clock
    from anymla.bench.runner import ceilings as measured
    from anymla.bench.runner import run

    gpu = torch.cuda.is_available() or torch.xpu.is_available()
    clock = gpu_clock() if gpu else CpuClock()
    rows = run(cases, clock, failures_are_rows=failures_are_rows)
    common = gpu_facts(peers) | (facts or {})
    tell(itertools.chain(measured(clock, ceilings), rows), json_file, common, hidden)


def tell(
    results: Iterable[Result],
    json_file: Path | None,
    facts: dict[str, Any],
    hidden: tuple[str, ...] = (),
    nothing: str = "nothing was measured",
) -> None:
    """Print and store results as they come; end with exit code 1 if one misses its target.

    Args:
        results: measured while they are taken from it.
        json_file: to append rows to, or None.
        facts: fields that every row has.
        hidden: values that only rows have.
        nothing: message of the error if there are no results.

    Raises:
        BadInput: there are no results.
    """
    missed, part, unseen = False, None, (*hidden, "seed")
    for result in results:
        missed |= result.met is False
        if json_file is not None:
            append_rows(json_file, [result], facts)
        if result.part != part:
            part = result.part
            click.echo(part)
        shown = {name: value for name, value in result.values.items() if name not in unseen}
        click.echo(line(dataclasses.replace(result, values=shown), _CASE_WIDTH))
    if part is None:
        raise BadInput(nothing)
    if missed:
        click.get_current_context().exit(1)
