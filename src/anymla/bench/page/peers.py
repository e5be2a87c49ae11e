"""Other libraries in the same process: how many times as fast as they, as figures and tables."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence

from anymla.bench.page.figure import Figure, Point, Series, line
from anymla.bench.page.reading import (
    batch_of,
    in_order,
    microseconds,
    own_us,
    part_of,
    peer_us,
    series_of,
)
from anymla.bench.page.rows import Row, case_of, source
from anymla.bench.page.table import Table, slug


def peer_figure(rows: list[Row]) -> Figure | None:
    """A line a kind of call, over its size."""
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    compared = []
    for row in rows:
        mine, batch = own_us(row), batch_of(row)
        if mine is None or batch is None:
            continue
        for name, theirs in peer_us(row).items():
            if "scores only" in name:
                continue  # half of what is timed here
            label = f"{case_of(row)}: {mine:.4g} us, {name} {theirs:.4g} us"
            groups[name, series_of(row)].append(Point(batch, theirs / mine, label))
            compared.append(row)
    if not groups:
        return None
    others = sorted({name for name, _ in groups})
    named = {
        name if len(others) == 1 else f"{other}: {name}": points
        for (other, name), points in groups.items()
    }
    series = [line(name, named[name]) for name in sorted(named, key=in_order)]
    xs = [point.x for points in groups.values() for point in points]
    even = Series(
        "as fast as the other", (Point(min(xs), 1, ""), Point(max(xs), 1, "")), limit=True
    )
    part = part_of(compared[0])
    shown, than = re.sub(r" beside [^,]+", "", part), others[0]
    if len(others) > 1:
        shown, than = part, "others"
    return Figure(
        "peers-" + re.sub(r"\W+", "-", part.lower()),
        f"Times as fast as {than}: {shown}",
        "tokens of context" if "kind" in compared[0] else "batch: tokens or requests",
        "their time / ours",
        (*series, even),
        source(compared),
        note="In the same process, on the same inputs. Below 1 the other library is faster.",
        log_y=False,
    )


def peer_table(rows: Sequence[Row]) -> Table:
    """Every shape beside every other library."""
    body, used = [], []
    for row in rows:
        mine, others = own_us(row), peer_us(row)
        if mine is None or not others:
            continue
        used.append(row)
        for name, theirs in others.items():
            ratio = theirs / mine
            shown = f"{ratio:.2f}" if ratio >= 1 else f"!{ratio:.2f} slower"
            if "scores only" in name:
                shown = "-"
            body.append([case_of(row), name, shown, microseconds(mine), microseconds(theirs)])
    head = ["case", "other", "times", "us", "its us"]
    note = "times: how many times as fast as the other. Below 1 the other is faster."
    return Table("against", "Against other libraries", head, body, source(used), note)


def tables_by_peer(rows: Sequence[Row]) -> list[Table]:
    """A table for each other library, narrow enough for a phone."""
    made = []
    for name in dict.fromkeys(name for row in rows for name in peer_us(row)):
        table = peer_table([row for row in rows if name in peer_us(row)])
        body = [[case, *rest] for case, other, *rest in table.body if other == name]
        key, head = f"against-{slug(name)}", [word for word in table.head if word != "other"]
        made.append(
            dataclasses.replace(
                table, key=key, title=f"Against {name}", head=head, body=body, folded=len(body) > 16
            )
        )
    return made


def decode_by_heads(rows: Sequence[Row]) -> list[str]:
    """Markdown: decode attention of one query a request, heads down and requests across.

    Each cell has microseconds, and in brackets how many times as fast as FlashMLA.
    """
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for row in rows:
        is_usual = row.get("rows") == 1 and row.get("page") == 64 and not row.get("ragged")
        entries = 1024 if row.get("heads") == 128 else 512
        if not is_usual or row.get("extra") != entries or "flash_mla_microseconds" not in row:
            continue
        if "same_bytes" in row:  # with FP8 heads
            continue
        us, ratio = row["microseconds"], row["flash_mla_microseconds"] / row["microseconds"]
        found[row["heads"]][row["batch"]] = f"{us:.1f} ({ratio:.2f})"
    if not found:
        return []
    batches = sorted({batch for cells in found.values() for batch in cells})
    first, *rest = (str(batch) for batch in batches)
    lines = [f"| heads | {first} request | " + " | ".join(rest) + " |"]
    lines.append("|--:" * (len(batches) + 1) + "|")
    for heads in sorted(found, reverse=True):
        cells = [found[heads].get(batch, "-") for batch in batches]
        lines.append(f"| {heads} | " + " | ".join(cells) + " |")
    return lines
