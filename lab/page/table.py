"""A table of text, and the same as Markdown."""

from __future__ import annotations

import dataclasses

Cells = list[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        head: names of the columns.
        body: rows; a cell that begins with "!" is something that fell short.
        source: device, date, versions, commit and command.
        note: remark that the reader of the numbers needs.
    """

    head: Cells
    body: list[Cells]
    source: str
    note: str = ""


def markdown(table: Table, *, numbers: bool = False) -> list[str]:
    """A table as Markdown; what fell short is bold, columns of numbers are set to the right."""
    rule = "|--:" if numbers else "|---"
    lines = ["| " + " | ".join(table.head) + " |", rule * len(table.head) + "|"]
    for cells in table.body:
        shown = [f"**{cell[1:]}**" if cell.startswith("!") else cell for cell in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return lines
