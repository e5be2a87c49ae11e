"""``anymla doctor``: what this machine runs, how right and how fast."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from anymla.bench.doctor.clock import Ceilings, measure_ceilings
from anymla.bench.doctor.examine import CANNOT, Finding, all_probes, examine
from anymla.bench.doctor.machine import machine
from anymla.bench.doctor.trial import Probe
from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.device_report import report_steps, write_report
from anymla.cli.files import STANDARD, OutputFile, write_text
from anymla.cli.run_options import device_option
from anymla.runtime.devices import named_device


@commands.command(examples=["anymla doctor --no-speed", "anymla doctor --report report.zip"])
@device_option
@click.option(
    "--json",
    "json_file",
    type=OutputFile(allow_dash=True),
    metavar="FILE",
    help='Write the result as one JSON object on one line; "-" prints it instead of the table.',
)
@click.option("--family", "families", multiple=True, help="Only this family; repeatable.")
@click.option("--no-speed", is_flag=True, help="Only which backend, and whether it is right.")
@click.option(
    "--report",
    type=OutputFile(),
    metavar="FILE",
    help="Instead: this, conformance and, on a GPU, all times, in one zip to send to somebody: "
    "a minute on a CPU, a quarter of an hour or more on a GPU.",
)
@click.option("--vllm", is_flag=True, help="Show what the vLLM plugin offers here instead.")
def command(
    device: str | None,
    json_file: Path | None,
    families: tuple[str, ...],
    no_speed: bool,
    report: Path | None,
    vllm: bool,
) -> None:
    """Say what this machine is, and examine every family of operations on it.

    For each: the backend that is taken and why those before it are not, the largest error against a
    float64 oracle as a share of what is allowed, and the speed in percent of what this machine
    copies or multiplies at most. Takes half a minute, more the first time on a GPU, for which
    kernels are compiled; needs no GPU and no triton. Ends with exit code 1 if a result is wrong.
    """
    silent = json_file == STANDARD
    if report is not None and (vllm or families or no_speed or json_file is not None):
        raise BadInput("--report has all of it; only --device goes with it")
    if vllm:
        _show_plugin(json_file, silent=silent)
        return
    with bad_input():
        place = named_device(device)
    if report is not None:
        if not write_report(report, report_steps(place.type)):
            click.get_current_context().exit(1)
        return
    chosen = [probe for probe in all_probes() if not families or probe.family in families]
    unknown = sorted(set(families) - {probe.family for probe in chosen})
    if unknown:
        known = ", ".join(dict.fromkeys(probe.family for probe in all_probes()))
        raise BadInput(f"--family {', '.join(unknown)}: there are {known}")
    facts = machine(place)
    if not silent:
        click.echo("\n".join(_machine_lines(facts)))
    ceilings, findings = _examine(chosen, place, timed=not no_speed)
    right = not any(finding.right is False for finding in findings)
    result: dict[str, Any] = {"part": "doctor", **facts}
    if ceilings is not None:
        result["ceilings"] = dataclasses.asdict(ceilings)
    result |= {"ok": right, "findings": [dataclasses.asdict(each) for each in findings]}
    if silent:
        click.echo(json.dumps(result))
    else:
        click.echo("\n".join(_table(findings, ceilings)))
        if json_file is not None:
            write_text(json_file, json.dumps(result) + "\n")
    if not right:
        click.get_current_context().exit(1)


def _examine(
    chosen: list[Probe], place: torch.device, *, timed: bool
) -> tuple[Ceilings | None, list[Finding]]:
    findings = []
    count = len(chosen) + timed
    with torch.no_grad(), tqdm(total=count, unit="probe", file=sys.stderr, disable=None) as bar:
        ceilings = None
        if timed:
            bar.set_description("this machine's ceilings")
            ceilings = measure_ceilings(place)
            bar.update()
        for probe in chosen:
            bar.set_description(f"{probe.family}: {probe.label}")
            findings.append(examine(probe, place, ceilings))
            bar.update()
    return ceilings, findings


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
        lines.append(f"  {facts['busy']}: speeds come out too low")
    return lines


def _table(findings: list[Finding], ceilings: Ceilings | None) -> list[str]:
    lines = [""]
    if ceilings is not None:
        lines += [
            f"this machine copies {ceilings.bytes_per_s / 1e9:.1f} GB/s and multiplies bf16 "
            f"matrices at {ceilings.flops_per_s / 1e12:.2f} TFLOP/s",
            "",
        ]
    head = f"{'family':17} {'what':29} {'backend':10} {'how':12} {'error':>6}"
    lines.append(head + f" {'us':>9} {'rate':>15} {'of ceiling':>14}")
    for each in findings:
        line = f"{each.family:17} {each.label:29} {each.backend or '-':10} {each.how:12}"
        line += f" {_error(each):>6}"
        if each.us is not None and each.share is not None:
            computes = each.bound == "product" and each.tflop_per_s is not None
            rate = f"{each.tflop_per_s:.3f} TFLOP/s" if computes else f"{each.gb_per_s:.1f} GB/s"
            line += f" {each.us:9.1f} {rate:>15} {each.share:6.1%} {each.bound:7}"
        lines.append(line.rstrip())
        if each.problem:
            lines.append(f"    {each.problem}")
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
    lines += ["", "error: largest, as a share of what the oracle's derived bound allows"]
    wrong = [each for each in findings if each.right is False]
    cannot = [each for each in findings if each.how == CANNOT]
    if wrong:
        lines.append(f"WRONG: {', '.join(f'{each.family} ({each.label})' for each in wrong)}")
    elif cannot:
        lines.append(f"cannot run here: {', '.join(each.family for each in cannot)}")
    else:
        lines.append("every result is right")
    return lines


def _error(finding: Finding) -> str:
    if finding.right is None:
        return "-"
    if not finding.right:
        return "WRONG"
    if finding.error is None:
        return "fits"
    if finding.error == 0:
        return "exact"
    return f"{finding.error:.0%}" if finding.error >= 0.01 else "<1%"


def _show_plugin(json_file: Path | None, *, silent: bool) -> None:
    try:
        from anymla.engines.vllm.report import plugin_view
    except ModuleNotFoundError as error:
        missing = error.name or "a module"
        if missing.split(".")[0] == "vllm":
            raise BadInput("--vllm: vllm is not installed here (no module named vllm)") from error
        raise BadInput(f"--vllm: this installation has no module {missing}") from error
    try:
        rows = plugin_view()
    except ValueError as error:  # of the environment variable
        raise BadInput(f"--vllm: {error}") from error
    line = json.dumps({"part": "doctor --vllm", "parts": rows})
    if silent:
        click.echo(line)
        return
    widths = [max(len(row[key]) for row in rows) for key in ("part", "action")]
    for row in rows:
        click.echo(f"{row['part']:{widths[0]}}  {row['action']:{widths[1]}}  {row['why']}")
    if json_file is not None:
        write_text(json_file, line + "\n")
