"""``anymla conformance``: the suite's cases, against a backend or another library."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from tqdm import tqdm

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.files import OutputFile, write_text
from anymla.cli.numbers import Finite, count
from anymla.cli.run_options import device_option
from anymla.runtime.devices import named_device
from anymla.testing.devices import prepare

if TYPE_CHECKING:
    from anymla.testing.conformance.registry import Case
    from anymla.testing.conformance.runner import Outcome, Subject


@commands.command(
    examples=[
        "anymla conformance --backend torch --case A1 --case A4",
        "anymla conformance --against flash_mla",
        "anymla conformance --list",
    ]
)
@click.option("--backend", metavar="NAME", help="Of the operations; the best of each by default.")
@click.option(
    "--against",
    metavar="LIBRARY",
    help="flash_mla, deep_gemm, cudnn_frontend, vllm_xpu, compat, or module:function[=operation]: "
    "judge it instead.",
)
@click.option("--case", "chosen", metavar="ID", multiple=True, help="Only this case; repeatable.")
@click.option(
    "--family",
    "families",
    metavar="NAME",
    multiple=True,
    help="Only cases of operations in this folder of anymla/ops; repeatable.",
)
@device_option
@click.option(
    "--compiled",
    is_flag=True,
    help="With --backend triton on a CPU: kernels compiled by Intel's compiler instead of "
    "interpreted; docs/intel.md says what it needs.",
)
@click.option("--list", "only_list", is_flag=True, help="List the cases and run nothing.")
@count(
    "--jobs",
    help="Processes of their own for the cases; 0 runs them in this one, so that a crash ends it. "
    "By default 1 with --against, else 0.",
    least=0,
)
@click.option(
    "--timeout",
    type=Finite(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds a case may take, with --jobs.",
)
@click.option("--junit", type=OutputFile(), metavar="FILE")
@click.option(
    "--json",
    "json_file",
    type=OutputFile(),
    metavar="FILE",
    help="Append a row a case here.",
)
@click.option(
    "--mutations",
    is_flag=True,
    help="Instead, break operations on purpose and show which cases notice.",
)
@click.option(
    "--write",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --mutations: put that table, and the list of cases, into this Markdown file.",
)
@click.option(
    "--end-to-end",
    "checkpoint",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Instead, hide passkeys in --text and ask this checkpoint for them.",
)
@click.option(
    "--engine",
    type=click.Choice(["anymla", "vllm"]),
    default="anymla",
    show_default=True,
    help="With --end-to-end: who is asked. vllm: with the plugin and, on a GPU, without it, too.",
)
@click.option(
    "--text", type=click.Path(path_type=Path), metavar="FILE", help="With --end-to-end: the text."
)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    default=(512, 2048, 8192),
    show_default=True,
    help="With --end-to-end: tokens of a text; repeatable.",
)
@click.option(
    "--depth",
    "depths",
    type=Finite(min=0, max=1),
    multiple=True,
    default=(0, 0.25, 0.5, 0.75, 1),
    show_default=True,
    help="With --end-to-end: where the passkey stands, 0 to 1; repeatable.",
)
@click.option(
    "--faults", is_flag=True, help="With --end-to-end: ask again with one thing broken at a time."
)
def command(
    checkpoint: Path | None,
    engine: str,
    text: Path | None,
    lengths: tuple[int, ...],
    depths: tuple[float, ...],
    faults: bool,
    backend: str | None,
    against: str | None,
    chosen: tuple[str, ...],
    families: tuple[str, ...],
    device: str | None,
    compiled: bool,
    only_list: bool,
    jobs: int | None,
    timeout: float,
    junit: Path | None,
    json_file: Path | None,
    mutations: bool,
    write: Path | None,
) -> None:
    """Run the conformance cases: what has gone wrong in real implementations of this attention.

    Each case is a line: its id, what must hold, and whether it does. Ends with exit code 1 if one
    fails, or if none of them could be judged. Another library is judged through an adapter that
    translates its documented contract; what of a case it does not claim to do is said.
    """
    torch.set_num_threads(1)
    if (checkpoint is None) != (text is None):
        raise BadInput("--end-to-end and --text go together")
    if checkpoint is not None and text is not None:
        if against or chosen or families or mutations or junit or only_list:
            raise BadInput("--end-to-end goes with --backend, --device and --json only")
        from anymla.cli import end_to_end

        if engine == "vllm":
            if faults or backend or device:
                raise BadInput("--engine vllm goes without --faults, --backend and --device")
            end_to_end.ask_vllm_for_passkeys(
                checkpoint, text, lengths=lengths, depths=depths, json_file=json_file
            )
            return
        end_to_end.ask_for_passkeys(
            checkpoint,
            text,
            lengths=lengths,
            depths=depths,
            faults=faults,
            backend=backend,
            device=device,
            json_file=json_file,
        )
        return
    if write is not None and (chosen or families or not mutations):
        raise BadInput("--write goes with --mutations, of all cases")
    if mutations and (backend or against or junit or json_file):
        raise BadInput("--mutations goes without --backend, --against, --junit and --json")
    with bad_input():
        place = str(named_device(device))
        if compiled and (backend != "triton" or place != "cpu"):
            raise BadInput("--compiled goes with --backend triton, on a CPU")
        prepare(place, compiled=compiled)
    cases = _cases(chosen, families)
    if families and not cases:
        click.echo(f"{', '.join(families)}: no case judges an operation of it")
        return
    if only_list:
        for case in cases:
            click.echo(f"{case.case_id:4} {case.story}")
        return
    if mutations:
        _show_mutations(cases, write)
        return
    with bad_input():
        from anymla.testing.conformance.setup import subject_of

        subject = subject_of(backend, against, place)
    if subject.adapter is not None and subject.adapter.translates:
        click.echo(f"{subject.name}: the adapter translates")
        click.echo("".join(f"  - {line}\n" for line in subject.adapter.translates), nl=False)
    jobs = (1 if against else 0) if jobs is None else jobs
    words = (backend, against, place, compiled)
    running = _run(cases, subject, words, jobs, timeout)
    if json_file is not None:
        named = f"--against {against}" if against else f"--backend {backend}" if backend else ""
        running = _recorded(running, json_file, subject, named, compiled=compiled)
    outcomes = list(_shown(running, cases))
    counts = dict.fromkeys(("passed", "failed", "not applicable"), 0)
    for outcome in outcomes:
        counts[outcome.status] += 1
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    click.echo(f"{subject.name} on {place}: {summary}")
    if junit is not None:
        from anymla.testing.conformance.report import junit_xml

        write_text(junit, junit_xml(outcomes))
    if not counts["passed"] and not counts["failed"]:
        raise click.ClickException("no case could be judged")
    if counts["failed"]:
        click.get_current_context().exit(1)


def _cases(chosen: tuple[str, ...], families: tuple[str, ...]) -> list[Case]:
    """Return the cases of these ids that judge an operation of one of these families.

    Args:
        chosen: ids of cases in either case; empty for all of them.
        families: names of packages of ``anymla.ops``; empty for all of them.
    """
    from anymla.testing.conformance.ops import operations_by_family
    from anymla.testing.conformance.registry import load_cases

    known, by_family = load_cases(), operations_by_family()
    unknown = [case_id for case_id in chosen if case_id.upper() not in known]
    if unknown:
        raise BadInput(f"--case {', '.join(unknown)}: there are {', '.join(known)}")
    unknown = [family for family in families if family not in by_family]
    if unknown:
        raise BadInput(f"--family {', '.join(unknown)}: there are {', '.join(by_family)}")
    cases = [known[case_id.upper()] for case_id in chosen] or list(known.values())
    if not families:
        return cases
    judged = {name for family in families for name in by_family[family]}
    return [case for case in cases if judged & {*case.operations, *case.also}]


def _run(
    cases: list[Case],
    subject: Subject,
    words: tuple[str | None, str | None, str, bool],
    jobs: int,
    timeout: float,
) -> Iterator[Outcome]:
    if not jobs:
        from anymla.testing.conformance.runner import run_cases

        return run_cases(cases, subject)
    from anymla.testing.conformance.isolated import Request, run_isolated

    request = Request(*words, cases=())
    return run_isolated(cases, request, subject.name, jobs=jobs, timeout_s=timeout)


def _shown(outcomes: Iterable[Outcome], cases: list[Case]) -> Iterator[Outcome]:
    """Print each outcome above the progress bar."""
    words = {"passed": "ok", "failed": "FAIL", "not applicable": "n/a"}
    with tqdm(total=len(cases), desc="conformance", unit="case", leave=False, disable=None) as bar:
        for outcome in outcomes:
            seconds = f" ({outcome.seconds:.1f} s)" if outcome.seconds >= 1 else ""
            line = f"{words[outcome.status]:5}{outcome.case_id:4} {outcome.story}{seconds}"
            details = [outcome.detail] if outcome.detail else []
            text = "".join(f"\n          {each}" for each in [*details, *outcome.notes])
            bar.write(line + text)
            bar.update()
            yield outcome


def _recorded(
    outcomes: Iterable[Outcome], path: Path, subject: Subject, words: str, *, compiled: bool
) -> Iterator[Outcome]:
    """Append a row for each outcome as it arrives."""
    from anymla.bench.environment import environment
    from anymla.bench.report import append_lines
    from anymla.ops.device import triton_version

    facts: dict[str, Any] = environment(
        f"anymla conformance {words}{' --compiled' * compiled}".rstrip()
    )
    if subject.device.type in ("cuda", "xpu"):
        from anymla.bench.gpu import device_facts

        facts |= device_facts()
    version = subject.adapter.version if subject.adapter is not None else ""
    if compiled:
        version = f"by Triton {metadata.version('triton-xpu')} for Intel's GPUs, run on a CPU"
    elif subject.backend == "triton" and subject.device.type == "cpu":
        version = f"in the interpreter of Triton {triton_version()}"
    for outcome in outcomes:
        row = {"part": "conformance", **dataclasses.asdict(outcome), "version": version}
        if compiled:  # in addition to the interpreter's rows, not instead of them
            row["subject"] += ", compiled"
        append_lines(path, [row | facts])
        yield outcome


def _show_mutations(cases: list[Case], write: Path | None) -> None:
    """Print or store the table; exit with code 1 if a fault escapes the cases meant for it."""
    from anymla.testing.conformance.mutations import caught, mutation_table, write_tables

    found = caught(cases)
    if not found:
        raise click.ClickException("no fault is meant for, or may be noticed by, these cases")
    if write is not None:
        with bad_input():
            write_tables(write, found)
    else:
        click.echo("\n".join(mutation_table(found)))
    chosen = {case.case_id for case in cases}
    missed = [fault.words for fault, ids in found if chosen & {*fault.cases} - {*ids}]
    if missed:
        raise click.ClickException(f"not noticed: {', '.join(missed)}")
