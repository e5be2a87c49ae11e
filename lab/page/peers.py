"""Tables of speed against other libraries that were timed in the same process."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from lab.page.reading import (
    flash_mla_us,
    is_number,
    microseconds,
    own_us,
    peer_us,
)
from lab.page.rows import Row, device_of, name_of, source
from lab.page.table import Table

# A whole layer is compared with one that is put together from several libraries.
_ASSEMBLY = "FlashMLA + DeepGEMM"


def whole_peers(row: Row) -> dict[str, float]:
    """Return microseconds by name of the libraries that do all of the timed work."""
    return {name: us for name, us in peer_us(row).items() if "scores only" not in name}


def others_of(row: Row) -> dict[str, float]:
    """Return microseconds by name of an engine's alternatives: one library or several together."""
    if row.get("part") == "decode layer" and is_number(row.get("others_us")):
        return {_ASSEMBLY: float(row["others_us"])}
    return whole_peers(row)


def peer_table(rows: Sequence[Row]) -> Table:
    """Tabulate each shape beside each library; a device is named unless it is most rows' own.

    Random shapes are left out: ``lab.ratios`` sums them up.
    """
    used = [row for row in rows if own_us(row) is not None and peer_us(row) and "draw" not in row]
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
    return Table(head, body, source(used))


def decode_rows(rows: Sequence[Row]) -> list[Row]:
    """Return decode attention beside FlashMLA of one query per request over usual lists."""
    return [
        row
        for row in rows
        if (row.get("rows"), row.get("page")) == (1, 64)
        and row.get("extra") == (1024 if row.get("heads") == 128 else 512)
        and not row.get("ragged")
        and flash_mla_us(row)
        and "same_bytes" not in row  # with FP8 heads
        and "draw" not in row  # a random shape
    ]


def decode_by_heads(rows: Sequence[Row]) -> Table:
    """Tabulate decode attention of one query per request: heads down, requests across.

    Each cell has microseconds and, in brackets, the time of FlashMLA's fastest build over ours.
    """
    found: dict[int, dict[int, str]] = defaultdict(dict)
    used = decode_rows(rows)
    for row in used:
        us = row["microseconds"]
        ratio = (flash_mla_us(row) or 0) / us
        found[row["heads"]][row["batch"]] = f"{us:.1f} ({ratio:.2f})"
    batches = sorted({batch for cells in found.values() for batch in cells})
    first, *rest = map(str, batches or [1])
    head = ["heads", f"{first} request", *rest]
    body = [
        [str(heads), *(found[heads].get(batch, "-") for batch in batches)]
        for heads in sorted(found, reverse=True)
    ]
    return Table(head, body, source(used))
