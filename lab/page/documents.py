"""Markdown tables of README.md and the documents, and the marks between which they stand."""

from __future__ import annotations

from collections.abc import Sequence

from lab.page.decode import decode_blocks
from lab.page.evidence import evidence_blocks
from lab.page.intel import intel_peer_table, intel_table
from lab.page.layers import layer_table
from lab.page.peers import decode_by_heads, peer_table
from lab.page.prefill import prefill_blocks
from lab.page.rows import Row
from lab.page.table import markdown
from lab.page.verdicts import conformance, failures
from lab.support_matrix import support_table


def readme_blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the lines between ``<!-- name: begin -->`` and ``<!-- name: end -->``, by name.

    Args:
        rows: recorded rows without superseded ones; see ``newest``.
    """
    blocks = {"support": support_table(rows)}
    decode = decode_by_heads(rows)
    if decode.body:
        blocks["decode"] = markdown(decode, numbers=True)
    if built := intel_table(rows):
        blocks["intel"] = built
    if beside := intel_peer_table(rows):
        blocks["intel_peer"] = beside
    if layers := layer_table(rows):
        blocks["layer"] = layers
    blocks |= prefill_blocks(rows) | decode_blocks(rows) | evidence_blocks(rows)
    judged = conformance(rows)
    if judged.body:
        blocks["conformance"] = [
            *markdown(judged),
            "",
            f"{judged.note} ({judged.source})",
            "",
            *failures(rows),
        ]
    compared = peer_table(rows)
    if compared.body:
        blocks["peers"] = [*markdown(compared), "", f"({compared.source})"]
    return blocks


def with_blocks(text: str, blocks: dict[str, list[str]]) -> str:
    """Replace the lines between a text's marks; blocks whose marks it lacks are ignored."""
    for name, lines in blocks.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text and end in text:
            before, rest = text.split(begin, 1)
            _, after = rest.split(end, 1)
            text = "\n".join([before + begin, *lines, end + after])
    return text
