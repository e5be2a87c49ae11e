"""Tables of text, and their form in Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Cells = list[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text with its source.

    Attributes:
        head: names of the columns.
        body: rows of cells; "!" begins a cell that Markdown shows in bold.
        source: device, date, versions, commit and command of the rows.
        note: remark that readers of the numbers need; "" for none.
    """

    head: Cells
    body: list[Cells]
    source: str
    note: str = ""


def blocks(tables: Mapping[str, Table]) -> dict[str, list[str]]:
    """Return the Markdown lines of each table that has rows, with its source below it."""
    return {
        name: [*markdown(table), "", f"({table.source})"]
        for name, table in tables.items()
        if table.body
    }


def markdown(table: Table, *, numbers: bool = False) -> list[str]:
    """Write a table in Markdown; cells after "!" are bold.

    Args:
        table: table whose head and body are written.
        numbers: True to align all columns to the right.
    """
    rule = "|--:" if numbers else "|---"
    lines = ["| " + " | ".join(table.head) + " |", rule * len(table.head) + "|"]
    for cells in table.body:
        shown = [f"**{cell[1:]}**" if cell.startswith("!") else cell for cell in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return lines
