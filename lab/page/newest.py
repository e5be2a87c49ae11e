"""Choose the rows that count: a newer row of the same thing supersedes the older.

The drawings and the tables of README.md and docs all take their rows from here, so that no two
places can disagree about a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from lab.page.reading import is_number, peer_us
from lab.page.rows import Row, case_of, device_of

_DECODE = re.compile(r"sparse_attention, (\d+) tokens, (\d+) heads, 128 \+ (\d+) slots$")
_DECODE_PARTS = ("decode attention beside FlashMLA", "portable decode attention beside vLLM's")
_SELECT = re.compile(r"paged_mqa_logits( and topk_per_row 512)?, (\d+) x (\d+) keys$")
_BESIDE = re.compile(r"decode (\d+) x (\d+) x (\d+)$")


class Thing(NamedTuple):
    """Identity of a measured number, which leaves out backend, commit, versions and date.

    Attributes:
        operation: name of the operation that ran.
        shape: sizes of the call, in the same words whichever benchmark wrote the row.
        device: name of the device that ran it, or the target of a build.
        peer: other library that was timed in the same process; "" for our own number.
    """

    operation: str
    shape: str
    device: str
    peer: str


def things_of(row: Row) -> list[Thing]:
    """Return everything that a row measures: its own number first, then each comparison."""
    operation, shape = _operation(row)
    device = str(row["target"]) if "module" in row or "family" in row else device_of(row)
    made = [Thing(operation, shape, device, "")]
    made += [Thing(operation, shape, device, peer) for peer in peer_us(row)]
    if is_number(row.get("gluon_sm90_scores_us")) or is_number(row.get("triton_scores_us")):
        # A row of index selection also has the time of its first half.
        made.append(Thing(operation.replace("selection", "scores"), shape, device, ""))
    return made


def _operation(row: Row) -> tuple[str, str]:
    """Return operation and shape of a row in words that are the same for all benchmarks."""
    part, case = str(row.get("part") or row.get("file", "")), case_of(row)
    if "module" in row:  # a build
        return f"build of {row['module']}", f"{row.get('number')}, {case}"
    if "family" in row:  # a run of its tests
        return "tests", str(row["family"])
    if part == "conformance":
        return f"conformance of {row['subject']}", str(row["case_id"])
    if part in _DECODE_PARTS and is_number(row.get("extra")):
        paged = "" if row.get("page", 64) == 64 else f", pages of {row['page']}"
        ragged = ", ragged" if row.get("ragged") else ""
        size = f"{row['batch']} x {row['rows']} queries, {row['heads']} heads"
        return "decode attention", f"{size}, 128 + {row['extra']} slots{paged}{ragged}"
    if found := _DECODE.match(case):
        tokens, heads, extra = found.groups()
        return "decode attention", f"{tokens} x 1 queries, {heads} heads, 128 + {extra} slots"
    if found := _SELECT.match(case):
        what = "index selection" if found[1] else "index scores"
        return what, f"{found[2]} x 1 queries, {found[3]} keys"
    if part == "indexer" and case.startswith("prefill "):
        return "index selection of a prefill", case.removeprefix("prefill ")
    if part == "indexer" and (found := _BESIDE.match(case)) and "topk_us" in row:
        return "index selection", f"{found[1]} x {found[2]} queries, {found[3]} keys"
    return part, f"{case}, run {row['run']}" if "run" in row else case


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are the newest of anything that they measure, in the order given.

    A row is left out if each of its numbers was measured again, also by another benchmark, backend
    or commit. Of two rows of one date the later counts.
    """
    given = list(rows)
    places: dict[Thing, int] = {}
    for place, row in enumerate(given):
        for thing in things_of(row):
            known = places.get(thing)
            if known is None or _date(row) >= _date(given[known]):
                places[thing] = place
    return [given[place] for place in sorted(set(places.values()))]


def _date(row: Row) -> str:
    return str(row.get("date", ""))
