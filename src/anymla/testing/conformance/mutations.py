"""The table in docs/conformance.md of the deliberate faults that each case detects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from anymla.testing.conformance.adapters import Adapter
from anymla.testing.conformance.faults import load_faults
from anymla.testing.conformance.faults.fault import Fault
from anymla.testing.conformance.registry import Case, load_cases
from anymla.testing.conformance.runner import FAILED, Subject, run_case

CASES_BEGIN, CASES_END = "<!-- cases: begin -->", "<!-- cases: end -->"
BEGIN, END = "<!-- mutations: begin -->", "<!-- mutations: end -->"

# Whole models and very large inputs take long, so they run only with faults meant for them.
_ONLY_IF_MEANT = ("C5", "C6", "C7", "C11", "C12", "L4", "A8")


Caught = list[tuple[Fault, list[str]]]


def caught_by(fault: Fault, cases: Iterable[Case] | None = None) -> list[str]:
    """Return ids of the cases that fail with a fault in place, of those that may detect it."""
    subject = Subject("torch")
    if not fault.owners:
        subject = Subject(adapter=Adapter(fault.name, {fault.operation: fault.run}))
    with fault.in_place():
        return [
            case.case_id
            for case in _noticing(fault, cases)
            if run_case(case, subject).status == FAILED
        ]


def caught(cases: Iterable[Case] | None = None) -> Caught:
    """Run every fault that one of the cases (by default of all) may detect."""
    cases = list(load_cases().values() if cases is None else cases)
    return [
        (fault, caught_by(fault, cases)) for fault in load_faults() if any(_noticing(fault, cases))
    ]


def _noticing(fault: Fault, cases: Iterable[Case] | None) -> Iterator[Case]:
    for case in load_cases().values() if cases is None else cases:
        if fault.owners:
            if case.case_id in fault.cases:
                yield case
            continue
        if case.gpu or fault.operation not in (*case.operations, *case.also):
            continue
        if case.case_id not in _ONLY_IF_MEANT or case.case_id in fault.cases:
            yield case


def row(fault: Fault, cases: list[str]) -> str:
    """Format a line of the table."""
    return f"| {fault.words} | `{fault.operation}` | {', '.join(cases) or '**nothing**'} |"


def mutation_table(found: Caught) -> list[str]:
    """Format the faults as lines of a Markdown table."""
    head = ["| fault | in | caught by |", "|---|---|---|"]
    return head + [row(fault, cases) for fault, cases in found]


def case_table() -> list[str]:
    """Format all cases as lines of a Markdown table."""
    lines = ["| case | what must hold | operations |", "|---|---|---|"]
    for case in load_cases().values():
        names = ", ".join(f"`{name}`" for name in (*case.operations, *case.also)) or "-"
        where = " (on a GPU)" if case.gpu else ""
        lines.append(f"| {case.case_id} | {case.story}{where} | {names} |")
    return lines


def write_tables(path: Path, found: Caught) -> None:
    """Write both tables between their marks in a Markdown file.

    Raises:
        ValueError: the file has no such marks.
    """
    text = path.read_text(encoding="utf-8")
    for begin, end, lines in (
        (CASES_BEGIN, CASES_END, case_table()),
        (BEGIN, END, mutation_table(found)),
    ):
        before, first, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if not first or not last:
            raise ValueError(f"{path}: has no {begin} with {end} behind it")
        text = "\n".join([before + begin, *lines, end + after])
    path.write_text(text, encoding="utf-8")
