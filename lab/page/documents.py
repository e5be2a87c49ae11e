"""Markdown tables of README.md and the documents, and the marks between which they stand."""

from __future__ import annotations

from collections.abc import Sequence

from lab.page.decode import decode_blocks
from lab.page.evidence import evidence_blocks
from lab.page.intel import intel_peer_table, intel_table
from lab.page.layers import experts_table, layer_table
from lab.page.peers import decode_by_heads, peer_table
from lab.page.prefill import prefill_blocks
from lab.page.rows import Row
from lab.page.support import support_table
from lab.page.table import blocks, markdown
from lab.page.verdicts import conformance, failures


def readme_blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the lines between ``<!-- name: begin -->`` and ``<!-- name: end -->``, by name.

    Args:
        rows: recorded rows without superseded ones; see ``newest``.
    """
    decode, judged = decode_by_heads(rows), conformance(rows)
    made = {
        "support": support_table(rows),
        "decode": markdown(decode, numbers=True) if decode.body else [],
        "intel": intel_table(rows),
        "intel_peer": intel_peer_table(rows),
        "layer": layer_table(rows),
        "layer_experts": experts_table(rows),
        **prefill_blocks(rows),
        **decode_blocks(rows),
        **evidence_blocks(rows),
        **blocks({"peers": peer_table(rows)}),
    }
    if judged.body:
        note = f"{judged.note} ({judged.source})"
        made["conformance"] = [*markdown(judged), "", note, "", *failures(rows)]
    return {name: lines for name, lines in made.items() if lines}


def with_blocks(text: str, made: dict[str, list[str]]) -> str:
    """Replace the lines between a text's marks; blocks whose marks it lacks are ignored."""
    for name, lines in made.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text and end in text:
            before, rest = text.split(begin, 1)
            _, after = rest.split(end, 1)
            text = "\n".join([before + begin, *lines, end + after])
    return text
