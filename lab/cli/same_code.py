"""``python -m lab same-code``: whether two states of the kernels compile to the same code."""

from __future__ import annotations

import json
from pathlib import Path

import click
from tqdm import tqdm

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.bench_rows import require_known
from anymla.cli.files import write_text
from anymla.cli.numbers import count

_FILE = click.Path(dir_okay=False, path_type=Path)


@commands.group(
    "same-code",
    examples=[
        "python -m lab same-code record before.jsonl",
        "python -m lab same-code compare before.jsonl after.jsonl",
    ],
)
def same_code() -> None:
    """Compare the PTX and AMD assembly of two states of the kernels; needs no GPU."""


@same_code.command(examples=["python -m lab same-code record before.jsonl --target sm_90"])
@click.argument("output", type=_FILE)
@click.option("--target", "chosen", multiple=True, help="Repeatable. [default: sm_90, gfx942]")
@click.option("--module", multiple=True, help="Only files whose dotted name has this; repeatable.")
@count("--workers", default=2)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that remembers the code of kernels whose source did not change.",
)
def record(
    output: Path, chosen: tuple[str, ...], module: tuple[str, ...], workers: int, cache: Path | None
) -> None:
    """Compile every build of this state and write digests of the code to OUTPUT, a row each."""
    from anymla.ops.device import TARGETS
    from lab import same_code as code
    from lab.build_matrix import jobs

    known = [name for name, target in TARGETS.items() if target.backend != "xpu"]
    require_known("--target", chosen, known)
    work = list(jobs(list(chosen or code.DEFAULT_TARGETS), modules=module or ("",)))
    if not work:
        raise BadInput(f"--module {' --module '.join(module)}: no builds are of that")
    rows = tqdm(code.record(work, workers, cache), total=len(work), unit="build", disable=None)
    write_text(output, "".join(json.dumps(row) + "\n" for row in rows))
    click.echo(f"{len(work)} builds")


@same_code.command(examples=["python -m lab same-code compare before.jsonl after.jsonl"])
@click.argument("before", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.argument("after", type=click.Path(dir_okay=False, exists=True, path_type=Path))
def compare(before: Path, after: Path) -> None:
    """Name the builds whose code only one of two records has; exit code 1 if there are any."""
    from anymla.bench.report import read_lines
    from lab import same_code as code

    with bad_input():
        found = code.compare(read_lines(before), read_lines(after))
    for sign, labels in (("-", found.only_before), ("+", found.only_after)):
        for label in labels:
            click.echo(f"{sign} {label}")
    changed = len(found.only_before), len(found.only_after)
    click.echo(f"{found.same} builds with the same code, {changed[0]} gone, {changed[1]} new")
    if any(changed):
        click.get_current_context().exit(1)
