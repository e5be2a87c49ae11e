"""``anymla doctor``: what this machine is, which backends run on it, and whether they are right."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from tqdm import tqdm

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.device_report import report_steps, write_report
from anymla.cli.files import STANDARD, OutputFile, write_text
from anymla.cli.machine import machine
from anymla.cli.run_options import device_option
from anymla.runtime.devices import named_device
from anymla.runtime.threads import threads

if TYPE_CHECKING:
    from anymla.testing.conformance.registry import Case
    from anymla.testing.conformance.runner import Outcome

NATIVE, FALLBACK, CANNOT = "native", "fallback", "cannot"
_GENERAL = ("torch", "reference")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One operation, by one backend, in the cases that called it.

    Attributes:
        family: package of ``anymla.ops``.
        operation: name of the operation.
        backend: name of the backend that ``backend=None`` took; None if none can run the call.
        how: NATIVE, FALLBACK (a general backend on an accelerator) or CANNOT.
        why_not: reasons against the backends that rank before, by name.
        cases: ids of the cases that called it.
        right: True if all of these cases passed; None if none could run.
    """

    family: str
    operation: str
    backend: str | None
    how: str
    why_not: dict[str, str]
    cases: list[str]
    right: bool | None


@commands.command(examples=["anymla doctor", "anymla doctor --report report.zip"])
@device_option
@click.option(
    "--json",
    "json_file",
    type=OutputFile(allow_dash=True),
    metavar="FILE",
    help='Write the result as one JSON object on one line; "-" prints it instead of the table.',
)
@click.option("--family", "families", multiple=True, help="Only cases of this family; repeatable.")
@click.option("--no-speed", is_flag=True, hidden=True)
@click.option(
    "--report",
    type=OutputFile(),
    metavar="FILE",
    help="Write this, all of conformance and, on a GPU, all times into one zip to send to "
    "somebody instead: a minute on a CPU, a quarter of an hour or more on a GPU.",
)
@click.option("--vllm", is_flag=True, help="Show what the vLLM plugin offers here instead.")
@click.option("--sglang", is_flag=True, help="Show what the SGLang plugin offers here instead.")
def command(
    device: str | None,
    json_file: Path | None,
    families: tuple[str, ...],
    no_speed: bool,
    report: Path | None,
    vllm: bool,
    sglang: bool,
) -> None:
    """Say what this machine is, and judge every family of operations on it.

    Runs the quick cases of `anymla conformance`, which compare with a float64 oracle, and shows the
    backend that each operation takes here, why those before it are not taken, and the largest
    error as a share of what is allowed. Takes some ten seconds, more the first time, when kernels
    are compiled; needs no GPU and no triton. Ends with exit code 1 if a result is wrong.
    """
    silent = json_file == STANDARD
    if report is not None and (vllm or sglang or families or no_speed or json_file is not None):
        raise BadInput("--report has all of it; only --device goes with it")
    if no_speed:
        click.echo("--no-speed: doctor times nothing; `anymla bench` does", err=True)
    if vllm and sglang:
        raise BadInput("--vllm and --sglang: one of them at a time")
    if vllm or sglang:
        _show_plugin("vllm" if vllm else "sglang", json_file, silent=silent)
        return
    with bad_input():
        place = named_device(device)
    if report is not None:
        if not write_report(report, report_steps(place.type)):
            click.get_current_context().exit(1)
        return
    cases = _quick_cases(families)
    facts = machine(place)
    if not silent:
        click.echo("\n".join(_machine_lines(facts)))
    outcomes, findings = _examine(cases, families, place)
    right = all(outcome.status != "failed" for outcome in outcomes)
    result: dict[str, Any] = {"part": "doctor", **facts, "ok": right}
    result["findings"] = [dataclasses.asdict(each) for each in findings]
    result["cases"] = [dataclasses.asdict(each) for each in outcomes]
    if silent:
        click.echo(json.dumps(result))
    else:
        click.echo("\n".join([*_table(findings), *_verdict(outcomes)]))
        if json_file is not None:
            write_text(json_file, json.dumps(result) + "\n")
    if not right:
        click.get_current_context().exit(1)


def _quick_cases(families: Sequence[str]) -> list[Case]:
    """Return the quick cases that call an operation of the families, or of any without families."""
    from anymla.testing.conformance.calls import family_of
    from anymla.testing.conformance.ops import all_operations
    from anymla.testing.conformance.registry import load_cases

    by_name = {name: family_of(operation) for name, operation in all_operations().items()}
    unknown = sorted(set(families) - set(by_name.values()))
    if unknown:
        known = ", ".join(dict.fromkeys(by_name.values()))
        raise BadInput(f"--family {', '.join(unknown)}: there are {known}")
    return [
        case
        for case in load_cases().values()
        if case.quick
        and (
            not families
            or not {by_name[each] for each in (*case.operations, *case.also)}.isdisjoint(families)
        )
    ]


def _examine(
    cases: list[Case], families: Sequence[str], place: torch.device
) -> tuple[list[Outcome], list[Finding]]:
    """Run the cases, and list what each operation of the families (of none, all) ran on."""
    from anymla.testing.conformance.calls import Watch, family_of
    from anymla.testing.conformance.ops import all_operations
    from anymla.testing.conformance.runner import FAILED, NOT_APPLICABLE, Subject, run_case

    watch, outcomes = Watch(), []
    bar = tqdm(total=len(cases), unit="case", file=sys.stderr, leave=False, disable=None)
    # Few tokens: threads would wait for each other.
    with watch.watching(), bar, threads(1):
        for case in cases:
            bar.set_description(case.case_id)
            watch.case_id = case.case_id
            outcomes.append(run_case(case, Subject(device=place)))
            bar.update()
    failed = {each.case_id for each in outcomes if each.status == FAILED}
    findings = [
        Finding(
            each.family,
            each.operation,
            each.backend,
            _how(each.backend, place),
            each.why_not,
            each.cases,
            failed.isdisjoint(each.cases),
        )
        for each in watch.calls.values()
    ]
    ran = {each.operation for each in findings}
    impossible = {each.case_id for each in outcomes if each.status == NOT_APPLICABLE}
    lacking: dict[str, list[str]] = {}
    for case in cases:
        if case.case_id in impossible:
            for name in set(case.operations) - ran:
                lacking.setdefault(name, []).append(case.case_id)
    findings += [
        Finding(family_of(all_operations()[name]), name, None, CANNOT, {}, ids, None)
        for name, ids in lacking.items()
    ]
    order = list(all_operations())
    findings.sort(key=lambda each: order.index(each.operation))
    return outcomes, [each for each in findings if not families or each.family in families]


def _how(backend: str, place: torch.device) -> str:
    return FALLBACK if place.type != "cpu" and backend in _GENERAL else NATIVE


def _machine_lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{facts['device']} ({facts['kind']})"]
    if facts["memory_bytes"] is not None:
        lines[0] += f", {facts['memory_bytes'] / 2**30:.0f} GiB"
    drivers = [facts["runtime"], facts["driver"] and f"driver {facts['driver']}"]
    versions = [f"torch {facts['torch']}", f"triton {facts['triton']}", f"Python {facts['python']}"]
    lines.append("  " + ", ".join(each for each in (*versions, *drivers) if each))
    if facts["shared_memory_bytes"] is not None:
        lines.append(f"  shared memory {facts['shared_memory_bytes'] // 1024} KiB a program")
    lines += [f"  FP8: {facts['fp8']}", f"  matrix instructions: {facts['matrix']}"]
    if facts["intel"]:
        lines.append(f"  Intel's GPUs: {facts['intel']}")
    lines.append(f"  {facts['threads']} thread(s); anymla {facts['anymla']}")
    if facts["busy"]:
        lines.append(f"  {facts['busy']}")
    return lines


def _table(findings: list[Finding]) -> list[str]:
    """Format a line for each operation and backend, then why backends were not taken."""
    width = max((len(each.operation) for each in findings), default=0)
    lines = ["", f"{'family':18} {'operation':{width}} {'backend':11} cases"]
    for each in findings:
        backend = each.backend or "-"
        words = "" if each.how == NATIVE else f"  {each.how}"
        if each.right is False:
            words += "  WRONG"
        line = f"{each.family:18} {each.operation:{width}} {backend:11} {' '.join(each.cases)}"
        lines.append(line + words)
    reasons: dict[str, set[str]] = {}
    for each in findings:
        for name, why in each.why_not.items():
            reasons.setdefault(f"{name}: {why}", set()).add(each.family)
    if reasons:
        lines += ["", "not taken"]
        families = {each.family for each in findings}
        for why, where in reasons.items():
            lines.append(
                f"  {why}" + ("" if where == families else f" ({', '.join(sorted(where))})")
            )
    return lines


def _verdict(outcomes: list[Outcome]) -> list[str]:
    """Format a line for each case with its largest error, then a summary."""
    words = {"passed": "ok", "failed": "WRONG", "not applicable": "cannot"}
    lines = ["", "case  error of what is allowed"]
    for each in outcomes:
        line = f"{each.case_id:5} {_error(each):>6} {words[each.status]:6} {each.story}"
        lines += [line, *([f"      {each.detail}"] if each.detail else [])]
    wrong = [each.case_id for each in outcomes if each.status == "failed"]
    cannot = [each.case_id for each in outcomes if each.status == "not applicable"]
    lines.append("")
    if wrong:
        lines += [
            f"WRONG: {', '.join(wrong)}",
            "a fault of this package or of a compiler: `anymla doctor --report report.zip` makes "
            "a file to send; docs/your-own-gpu.md says where",
        ]
    elif cannot:
        lines.append(f"cannot run here: {', '.join(cannot)}")
    else:
        lines.append("every result is right; `anymla conformance` runs all cases")
    return lines


def _error(outcome: Outcome) -> str:
    if outcome.status != "passed":
        return "-"
    if not outcome.error:
        return "" if outcome.error is None else "exact"
    return f"{outcome.error:.0%}" if outcome.error >= 0.01 else "<1%"


def _show_plugin(engine: str, json_file: Path | None, *, silent: bool) -> None:
    try:
        plugin_view = importlib.import_module(f"anymla.engines.{engine}.report").plugin_view
    except ModuleNotFoundError as error:
        missing = error.name or "a module"
        if missing.split(".")[0] == engine:
            raise BadInput(
                f"--{engine}: {engine} is not installed here (no module named {engine})"
            ) from error
        raise BadInput(f"--{engine}: this installation has no module {missing}") from error
    try:
        rows = plugin_view()
    except ValueError as error:  # of the environment variable
        raise BadInput(f"--{engine}: {error}") from error
    line = json.dumps({"part": f"doctor --{engine}", "parts": rows})
    if silent:
        click.echo(line)
        return
    widths = [max(len(row[key]) for row in rows) for key in ("part", "action")]
    for row in rows:
        click.echo(f"{row['part']:{widths[0]}}  {row['action']:{widths[1]}}  {row['why']}")
    if json_file is not None:
        write_text(json_file, line + "\n")
