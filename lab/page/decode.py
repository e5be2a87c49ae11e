"""Markdown tables of decode attention over V3.2's and V4.1's rows, and with FP8 heads."""

from __future__ import annotations

from collections.abc import Sequence

from lab.page.reading import flash_mla_us
from lab.page.rows import Row, case_of, of_part, source
from lab.page.table import Table, blocks

_V32 = "decode attention over V3.2's rows beside FlashMLA"
_V41 = "decode attention over V4.1's rows beside V4's"
_END = "decode attention with FP8 heads"


def decode_blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return Markdown lines of the tables that have rows, by the name of their marks."""
    return blocks({"decode_v32": _v32(rows), "decode_v41": _v41(rows), "decode_end": _end(rows)})


def _v32(rows: Sequence[Row]) -> Table:
    used = [row for row in of_part(rows, _V32) if "ratio" in row]
    body = [
        [
            case_of(row),
            f"{flash_mla_us(row):.1f}",
            f"{row['microseconds']:.1f}",
            f"{'' if row.get('met') else '!'}{row['ratio']:.2f}",
            f"{row['teraflops']:.0f}",
            f"{row['flash_mla_error']:.2e}",
            f"{row['error']:.2e}",
        ]
        for row in used
    ]
    head = ["shape", "FlashMLA us", "us", "times", "TFLOP/s", "error FlashMLA", "error"]
    return Table(head, body, source(used))


def _v41(rows: Sequence[Row]) -> Table:
    used = of_part(rows, _V41)
    # Kernels have changed since other devices were measured.
    device = max(used, key=lambda row: str(row.get("date", ""))).get("device") if used else None
    used = [row for row in used if row.get("device") == device]
    body = [
        [
            case_of(row),
            *(
                f"{row[name]:.1f}" if name in row else "-"
                for name in ("v4_us", "fp8_us", "nvfp4_us")
            ),
            f"{row['v4_us'] / row['fp8_us']:.2f}" if "fp8_us" in row else "-",
            f"{'' if row.get('met') else '!'}{row['ratio']:.2f}",
        ]
        for row in used
    ]
    head = ["shape", "584 us", "528 + 528", "528 + 288", "584 / 528 + 528", "584 / 528 + 288"]
    return Table(head, body, source(used))


def _end(rows: Sequence[Row]) -> Table:
    used = of_part(rows, _END)
    names = ("attention_microseconds", "apart_microseconds", "microseconds")
    body = [
        [case_of(row), *(f"{row[name]:.1f}" for name in names), _peer(row)]
        for row in used
        if row.get("same_bytes")
    ]
    head = ["shape", "attention us", "then FP8 us", "at once us", "FlashMLA, then FP8 us"]
    return Table(head, body, source(used))


def _peer(row: Row) -> str:
    peer = flash_mla_us(row)
    return "" if peer is None else f"{peer:.1f}"
