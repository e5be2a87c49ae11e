"""Drawing at the top of README.md: speed of all recorded shapes against other libraries."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from lab.page.figure import Range, Ranges
from lab.page.peers import others_of
from lab.page.reading import own_us
from lab.page.rows import Row, case_of


def comparisons(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """Return speed ratios to other libraries by (family, library), then by case.

    A ratio is the other's time over ours. A row with several libraries counts for the fastest.
    """
    made: dict[tuple[str, str], dict[str, float]] = {}
    for name, belongs in _FAMILIES.items():
        for row in rows:
            mine, others = own_us(row), others_of(row)
            if mine is None or not others or not belongs(row):
                continue
            peer = min(others, key=others.__getitem__)
            cases = made.setdefault((name, peer), {})
            cases[f"{row.get('part')}: {case_of(row)}"] = others[peer] / mine
    return made


def _part(pattern: str, **values: object) -> Callable[[Row], bool]:
    """Return a test that is True for rows whose whole part matches and that have these values."""

    def belongs(row: Row) -> bool:
        if not re.fullmatch(pattern, str(row.get("part", ""))):
            return False
        return all(row.get(key) == value for key, value in values.items())

    return belongs


def _layers_of(model: str) -> Callable[[Row], bool]:
    return lambda row: row.get("part") == "decode layer" and case_of(row).startswith(model)


_FAMILIES: dict[str, Callable[[Row], bool]] = {
    "Decode attention, one query": _part("decode attention beside FlashMLA", rows=1),
    "Decode attention, two queries": _part("decode attention beside FlashMLA", rows=2),
    "Decode, random shapes": _part("decode attention of random shapes beside FlashMLA"),
    "Prefill attention": _part("attention during prefill|flash_mla_sparse_fwd"),
    "Prefill from FP8 pages": _part("prefill from FP8 pages to .*"),
    "Index selection": _part("indexer"),
    "V4-Flash decode layer": _layers_of("flash"),
    "V4-Pro decode layer": _layers_of("pro"),
    "Decode, V3.2's rows": _part("decode attention over V3.2's rows.*"),
}


def headline(rows: Sequence[Row]) -> Ranges | None:
    """Plot each family's speed ratios to each library over all shapes; None without any.

    Args:
        rows: recorded rows without superseded ones; see ``newest``.
    """
    found = comparisons(rows)
    if not found:
        return None
    ranges = []
    for (name, peer), cases in found.items():
        low, high, middle = min(cases.values()), max(cases.values()), mean(cases.values())
        text = f"{middle:.2f} × {peer}"
        ranges.append(Range(name, low, middle, high, text))
    return Ranges(
        key="headline",
        title="Times as fast as the libraries that engines use today",
        x_label="times as fast: least, geometric mean, greatest",
        ranges=tuple(ranges),
        even=1.0,
    )


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean of numbers above 0."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
