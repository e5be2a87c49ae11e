"""Markdown tables of prefill attention beside FlashMLA."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lab.page.reading import flash_mla_us, microseconds
from lab.page.rows import Row, case_of, of_part, source
from lab.page.table import Table, blocks

_CASE = re.compile(r"(\w+)(?: top (\d+))? h(\d+) T=(\d+) of (\d+)$")
_LAYERS = {"window": "window", "selected": "C4", "scattered": "C4, scattered", "all": "C128"}
_ATTENTION = "attention during prefill"
_PIPELINE = "prefill from FP8 pages to {} heads"
_LISTS = "flash_mla_sparse_fwd"


def prefill_blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return Markdown lines of the tables that have rows, by the name of their marks."""
    return blocks(
        {
            "prefill": _attention(rows),
            "prefill_pipeline": _pipeline(rows),
            "prefill_lists": _lists(rows),
        }
    )


def _attention(rows: Sequence[Row]) -> Table:
    used = [row for row in of_part(rows, _ATTENTION) if flash_mla_us(row) and _shape(row)]
    shares = all("roofline_us" in row for row in used)
    body = [
        [
            *(_shape(row) or ()),
            f"{microseconds(row['us'])} ({row['teraflops']:.0f})",
            *([f"{row['roofline_us'] / row['us']:.0%}"] if shares else []),
            microseconds(_theirs(row)),
            _times(row["ratio"], row.get("target")),
            f"{row['error']:.2e}, {_their_error(row):.2e}",
            microseconds(row["fp8_us"]),
            microseconds(_theirs(row) + row["pass_us"]),
            _times(row["fp8_ratio"]),
        ]
        for row in used
    ]
    head = ["layer", "heads", "queries of context", "us (TFLOP/s)"]
    head += ["of roofline"] if shares else []
    head += ["FlashMLA us", "times", "error, both"]
    head += ["us, FP8 output", "FlashMLA + pass us", "times"]
    return Table(head, body, source(used))


def _pipeline(rows: Sequence[Row]) -> Table:
    ends: dict[str, dict[str, Row]] = {
        end: {case_of(row): row for row in of_part(rows, _PIPELINE.format(end))}
        for end in ("bf16", "fp8")
    }
    body, used = [], []
    for case, plain in ends["bf16"].items():
        shape, quantised = _shape(plain), ends["fp8"].get(case)
        if shape is None or quantised is None:
            continue
        used += [plain, quantised]
        cells = [
            text
            for row in (plain, quantised)
            for text in (
                microseconds(row["us"]),
                microseconds(_theirs(row)),
                _times(row["ratio"], row.get("target")),
            )
        ]
        body.append([*shape, *cells])
    head = ["layer", "heads", "queries of context"]
    head += ["us to bfloat16 heads", "gather, FlashMLA us", "times"]
    head += ["us to FP8 heads", "gather, FlashMLA, pass us", "times"]
    return Table(head, body, source(used))


def _lists(rows: Sequence[Row]) -> Table:
    used = [row for row in of_part(rows, _LISTS) if flash_mla_us(row)]
    body = [
        [
            case_of(row),
            microseconds(row["us"]),
            microseconds(_theirs(row)),
            _times(row["ratio"], row.get("target")),
        ]
        for row in used
    ]
    head = ["rows by lists", "us", "FlashMLA us", "times"]
    return Table(head, body, source(used))


def _theirs(row: Row) -> float:
    us = flash_mla_us(row)
    assert us is not None
    return us


def _their_error(row: Row) -> float:
    return float(row["peer_error" if "peer_error" in row else "sgl_flash_mla_error"])


def _shape(row: Row) -> list[str] | None:
    found = _CASE.match(case_of(row))
    if found is None:
        return None
    kind, topk, heads, tokens, context = found.groups()
    layer = _LAYERS.get(kind, kind) + (f" top {topk}" if topk else "")
    return [layer, heads, f"{int(tokens):,} of {int(context):,}"]


def _times(ratio: float, target: object = None) -> str:
    """Write a speed ratio; "!" marks one below its target, which is then named."""
    short = isinstance(target, str) and ratio < float(target.removesuffix("x"))
    return f"!{ratio:.2f} of {target}" if short else f"{ratio:.2f}"
