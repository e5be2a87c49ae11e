"""``anymla replay``: a second judgement of a case that an audit has dumped."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from anymla.audit.auditor import describe
from anymla.audit.case import load_case
from anymla.audit.checks import Finding
from anymla.audit.replay import replay
from anymla.cli import commands
from anymla.cli.bad_input import bad_input
from anymla.cli.run_options import device_option
from anymla.cli.terminal import one_line
from anymla.runtime.devices import named_device


@commands.command(examples=["anymla replay attention.safetensors"])
@click.argument("dump", type=click.Path(path_type=Path))
@device_option
def command(*, dump: Path, device: str | None) -> None:
    """Judge a case that an audit dumped, and compute it again on anymla's own backends.

    Each line is a result and how far it is from float64, in units of what is allowed. Exit code 1
    if the engine's result is not within its bound, as when it was dumped.
    """
    with bad_input(), torch.inference_mode():
        place = named_device(device)
        case, was = load_case(dump)
        verdicts = replay(case, place)
    digest = case.digest()
    made_by = ", ".join(f"{name} {value}" for name, value in case.made_by.items())
    click.echo(one_line(f"{case.method} of {case.layer}, step {case.step}, inputs {digest}"))
    if made_by:
        click.echo(one_line(f"made by {made_by}"))
    for name, said in {"what": "when dumped", "first": "first", "looks": "looks"}.items():
        if was.get(name):
            click.echo(one_line(f"{said}: {was[name]}"))
    for verdict in verdicts:
        said = verdict.why if verdict.found is None else _line(verdict.found)
        click.echo(one_line(f"{verdict.who}: {said}"))
    engine = verdicts[0].found
    assert engine is not None
    if not engine.ok:
        click.echo(one_line(describe(case, engine)), err=True)
        raise SystemExit(1)


def _line(found: Finding) -> str:
    verdict = "ok" if found.ok else "WRONG"
    return f"{verdict}, {found.worst:.3g} of what is allowed: {found.what or 'nothing differs'}"
