"""Markdown tables of evidence on the Hopper decode kernels: repetition, racecheck, counters."""

from __future__ import annotations

from collections.abc import Sequence

from lab.page.rows import Row, case_of, of_part, source
from lab.page.table import Table, blocks

_SHARES = ("dram", "l2", "l1", "tensor", "issue")


def evidence_blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return Markdown lines of the tables that have rows, by the name of their marks."""
    return blocks(
        {
            "decode_stress": _stress(rows),
            "decode_racecheck": _racecheck(rows),
            "decode_counters": _counters(rows),
        }
    )


def _stress(rows: Sequence[Row]) -> Table:
    used = of_part(rows, "stress of decode")
    body = [
        [
            case_of(row),
            f"{row['calls']:,}",
            f"{row['blocks'] / 1e6:,.0f}" if "blocks" in row else "",
            f"{row['different']:,}",
        ]
        for row in used
    ]
    head = ["what", "calls compared", "million blocks", "different"]
    return Table(head, body, source(used))


def _racecheck(rows: Sequence[Row]) -> Table:
    used = of_part(rows, "racecheck")
    body = [[case_of(row), "some" if row["pairs"] is None else str(row["pairs"])] for row in used]
    return Table(["what", "reports"], body, source(used))


def _counters(rows: Sequence[Row]) -> Table:
    used = of_part(rows, "counters of decode")
    body = [
        [
            case_of(row),
            f"{row['microseconds']:.1f}",
            *(f"{row[name]:.1f}" if name in row else "" for name in ("bytes_us", "matrix_us")),
            *(f"{row[name + '_percent']:.0f}" for name in _SHARES),
            " ".join(list(row["stalled"])[:2]).replace("_", " "),
        ]
        for row in used
    ]
    head = ["launch", "us", "its bytes", "its products", "DRAM %", "L2 %", "L1 %", "tensor %"]
    head += ["issue %", "warps wait for"]
    return Table(head, body, source(used))
