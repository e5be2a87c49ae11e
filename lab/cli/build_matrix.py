"""``python -m lab build-matrix``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from tqdm import tqdm

from anymla.bench.environment import environment
from anymla.bench.report import append_lines
from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.bench_rows import command_line, json_option, require_known
from anymla.cli.files import write_text
from anymla.cli.numbers import count


@commands.command(examples=["python -m lab build-matrix --first file --target sm_90"])
@json_option
@click.option("--target", "chosen", multiple=True, help="Only this target; repeatable.")
@click.option("--module", default="", help="Only kernel files whose name contains this.")
@click.option(
    "--first",
    "first_of",
    type=click.Choice(["kernel", "file"]),
    default=None,
    help="Only the first build of each kernel, or file of kernels, and target.",
)
@count("--workers", default=os.cpu_count() or 1, help="Processes.")
def build_matrix(
    json_file: Path | None,
    chosen: tuple[str, ...],
    module: str,
    first_of: str | None,
    workers: int,
) -> None:
    """Build every Triton kernel for every GPU target; needs no GPU.

    Asserts that each builds (or fails where expected), fits the target's shared memory, spills no
    more than declared, and has matrix instructions where they are meant. With --json, what the file
    says of kernels that have not changed since is taken from there; where all kernels of a target
    are built, its other rows are removed. Targets that the installed Triton does not compile for
    are left out: Intel's GPUs have one of their own.
    """
    import triton  # noqa: F401  # which of its back ends are there is asked without importing it

    from anymla.ops.device import TARGETS
    from lab.build_matrix import jobs, problem_of, recorded, run
    from lab.page.rows import rows_of

    require_known("--target", chosen, TARGETS)
    problems = {name: problem_of(TARGETS[name]) for name in chosen or TARGETS}
    targets = [name for name, problem in problems.items() if not problem]
    for name, problem in problems.items():
        if problem:
            click.echo(f"{name}: not built, {problem}")
    if chosen and len(targets) < len(problems):
        raise BadInput("--target names what cannot be built here")
    work = list(jobs(targets, first_of=first_of or "", modules=(module,)))
    if not work:
        raise BadInput(
            f"--module {module}: no such kernel file has builds for {', '.join(targets)}"
        )
    whole = not (module or first_of)
    with bad_input():
        old = [] if json_file is None else rows_of(json_file)
    known = recorded(old)
    missing = [job for job in work if job.key not in known]
    made = environment(command_line())
    made = {name: made[name] for name in ("date", "command", "commit")}
    fresh = {}
    built = tqdm(
        run(missing, workers), total=len(missing), desc="building", unit="kernel", disable=None
    )
    for job, row in zip(missing, built, strict=True):
        fresh[job.key] = row = {**row, **made}
        if json_file is not None:
            append_lines(json_file, [row])
    rows = [{**(known.get(job.key) or fresh[job.key]), **job.row} for job in work]
    if json_file is not None and whole:
        kept = [row for row in old if row["target"] not in targets]
        write_text(json_file, "".join(json.dumps(row) + "\n" for row in kept + rows))
    bad = [row for row in rows if not row["ok"]]
    for row in bad:
        click.echo(f"{row['target']} {row['module']} {row['label']}: {row['problem']}")
    click.echo(f"{len(work)} builds, {len(work) - len(bad)} as they should be, {len(bad)} not")
    if bad:
        click.get_current_context().exit(1)
