"""Other libraries in the same process: how many times as fast as they, as figures and tables."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from lab.page.figure import Figure, Point, Series, line, short
from lab.page.reading import (
    batch_of,
    in_order,
    is_number,
    microseconds,
    own_us,
    part_of,
    peer_us,
    series_of,
)
from lab.page.rows import Row, case_of, device_of, name_of, source
from lab.page.table import Table, slug

# What stands beside a whole layer is put together from several libraries.
_ASSEMBLY = "FlashMLA + DeepGEMM"


def peer_figure(rows: list[Row]) -> Figure | None:
    """Times as fast as the fastest other library, a line a kind of call, over its size.

    What was measured at one size only is left to the tables.
    """
    groups: dict[str, list[Point]] = defaultdict(list)
    others: set[str] = set()
    compared = []
    if any(word in part_of(row) for row in rows for word in ("other lengths", "random shapes")):
        return (
            None  # the same shapes with other random lengths, and shapes of which no two are alike
        )
    for row in rows:
        mine, batch, whole = own_us(row), batch_of(row), whole_peers(row)
        if mine is None or batch is None or not whole:
            continue
        name = min(whole, key=whole.__getitem__)
        label = f"{name_of(row)}: {mine:.4g} us, {name} {whole[name]:.4g} us"
        groups[_series_name(row)].append(Point(batch, whole[name] / mine, label))
        others.add(name)
        compared.append(row)
    groups = {name: points for name, points in groups.items() if len({p.x for p in points}) > 1}
    if not groups:
        return None
    series = [line(name, groups[name]) for name in sorted(groups, key=in_order)]
    xs = [point.x for points in groups.values() for point in points]
    even = Series("equal", (Point(min(xs), 1, ""), Point(max(xs), 1, "")), limit=True)
    part = part_of(compared[0])
    shown = re.sub(r" beside (FlashMLA|vLLM's)", "", part)
    shown = shown.removesuffix(" a request").replace("indexer", "index selection")
    return Figure(
        key="peers-" + re.sub(r"\W+", "-", part.lower()),
        title=f"{shown[0].upper()}{shown[1:]}, beside {' or '.join(sorted(others))}",
        x_label=_drawn_over(compared[0]),
        source=source(compared),
        note="In the same process, on the same inputs. Below 1 the other library is faster.",
        y_label="times as fast",
        series=(*series, even),
    )


def _drawn_over(row: Row) -> str:
    if "kind" in row:
        return "tokens of context"
    return "queries" if case_of(row).startswith("prefill") else "requests"


def whole_peers(row: Row) -> dict[str, float]:
    """Microseconds of other libraries that do all of what is timed here, by name."""
    return {name: us for name, us in peer_us(row).items() if "scores only" not in name}


def others_of(row: Row) -> dict[str, float]:
    """Microseconds of what an engine would use instead: one library, or several together."""
    if row.get("part") == "decode layer" and is_number(row.get("others_us")):
        return {_ASSEMBLY: float(row["others_us"])}
    return whole_peers(row)


def _series_name(row: Row) -> str:
    """What tells a row from those beside it in one plot."""
    if is_number(row.get("extra")) and is_number(row.get("heads")):
        short_lists = ", short lists" if row.get("ragged") else ""
        usual = 1024 if row["heads"] == 128 else 512
        width = "" if row["extra"] == usual else f", 128 + {row['extra']}"
        return f"{row['heads']} heads{width}{short_lists}"
    if is_number(row.get("width")):
        return f"{row['heads']} heads, {row['width']} slots"
    if found := re.match(r"decode \d+ x \d+ x (\d+)$", case_of(row)):
        return f"{short(float(found[1]))} entries"
    if found := re.match(r"prefill \d+ x (\d+)$", case_of(row)):
        return f"{short(float(found[1]))} entries"
    return series_of(row)


def peer_table(rows: Sequence[Row]) -> Table:
    """Every shape beside every other library; the device where it is not most rows' own."""
    used = [row for row in rows if own_us(row) is not None and peer_us(row)]
    devices = Counter(device_of(row) for row in used).most_common(1)
    body = []
    for row in used:
        mine, others = own_us(row), peer_us(row)
        assert mine is not None
        where = "" if device_of(row) == devices[0][0] else f", {device_of(row)}"
        for name, theirs in others.items():
            ratio = theirs / mine
            shown = f"{ratio:.2f}" if ratio >= 1 else f"!{ratio:.2f} slower"
            if "scores only" in name:
                shown = "-"
            body.append(
                [name_of(row) + where, name, shown, microseconds(mine), microseconds(theirs)]
            )
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


def decode_rows(rows: Sequence[Row]) -> list[Row]:
    """Decode attention beside FlashMLA, one query a request, at the models' usual lists."""
    return [
        row
        for row in rows
        if (row.get("rows"), row.get("page")) == (1, 64)
        and row.get("extra") == (1024 if row.get("heads") == 128 else 512)
        and not row.get("ragged")
        and "flash_mla_microseconds" in row
        and "same_bytes" not in row  # with FP8 heads
        and "draw" not in row  # a random shape
    ]


def decode_by_heads(rows: Sequence[Row]) -> Table:
    """Decode attention of one query a request, heads down and requests across.

    Each cell has microseconds, and in brackets how many times as fast as FlashMLA.
    """
    found: dict[int, dict[int, str]] = defaultdict(dict)
    used = decode_rows(rows)
    for row in used:
        us, ratio = row["microseconds"], row["flash_mla_microseconds"] / row["microseconds"]
        found[row["heads"]][row["batch"]] = f"{us:.1f} ({ratio:.2f})"
    batches = sorted({batch for cells in found.values() for batch in cells})
    first, *rest = map(str, batches or [1])
    head = ["heads", f"{first} request", *rest]
    body = [
        [str(heads), *(found[heads].get(batch, "-") for batch in batches)]
        for heads in sorted(found, reverse=True)
    ]
    note = "Microseconds by heads and requests; in brackets times as fast as FlashMLA."
    return Table("decode-heads", "Decode attention", head, body, source(used), note)
