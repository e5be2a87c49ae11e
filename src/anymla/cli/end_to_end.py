"""``anymla conformance --end-to-end``: passkeys in a long text, at several lengths and depths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from anymla.bench.environment import environment
from anymla.bench.report import Result, append_rows
from anymla.cli.bad_input import bad_input
from anymla.cli.files import read_text
from anymla.runtime.llm import LLM
from anymla.testing.devices import named_device
from anymla.testing.retrieval import FAULTS, survey

PART = "retrieval of a passkey"
_WIDTH = 22


def ask_for_passkeys(
    checkpoint: Path,
    text: Path,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    faults: bool,
    backend: str | None,
    device: str | None,
    json_file: Path | None,
) -> None:
    """Print a line a length and fault, a mark a depth; append rows to a file.

    Raises:
        BadInput: no such checkpoint, text or device, or a text that is too short.
        click.ClickException: a passkey that was not found with nothing broken.
    """
    with bad_input():
        words = read_text(text)
        place = named_device(device)
        llm = LLM(checkpoint, device=place, backend=backend)
    shown = " ".join(f"{depth:g}" for depth in depths)
    click.echo(f"passkeys in {text.name}, at depths {shown}: + found, - not")
    rows, missed = [], 0
    names = ["none", *(fault.name for fault in FAULTS if faults)]
    for length in lengths:
        marks = dict.fromkeys(names, "")
        with bad_input():
            for found in survey(llm, words, [length], depths, FAULTS if faults else ()):
                marks[found.fault] += "+" if found.answer.found else "-"
                missed += found.fault == "none" and not found.answer.found
                case = f"{length} tokens, depth {found.depth:g}, {found.fault}"
                rows.append(Result(PART, case, found.as_dict()))
        for name in names:
            label = f"{length} tokens" if name == "none" else f"  {name}"
            click.echo(f"{label:{_WIDTH}} {' '.join(marks[name])}")
    if json_file is not None:
        with bad_input():
            append_rows(json_file, rows, environment("anymla conformance --end-to-end"))
    if missed:
        raise click.ClickException(f"{missed} passkeys were not found")
