"""Bytes and floating-point operations that a row's call must move and do."""

from __future__ import annotations

import dataclasses
import re

from anymla.formats.page_layout import MAIN_FP8, get_layout
from lab.page.reading import is_number, own_us
from lab.page.rows import Row, case_of

_WINDOW, _CHANNELS, _INDEX_BYTES = 128, 512, 4
_PREFILL = re.compile(r"\bh(\d+) T=(\d+) of (\d+)$")


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one call.

    Attributes:
        flops: floating-point operations.
        bytes_moved: bytes read and written.
    """

    flops: float
    bytes_moved: float

    def share(self, us: float, copy: float, product: float) -> float:
        """Least time over time taken.

        Args:
            us: microseconds that it took.
            copy: bytes/s of the device.
            product: flop/s of the device.
        """
        return max(self.flops / product, self.bytes_moved / copy) / (us * 1e-6)


def work_of(row: Row) -> Work | None:
    """What a row says itself, or what its shape says; None if neither does."""
    us = own_us(row)
    if us is None:
        return None
    if is_number(row.get("tflops")) and row.get("gb_per_s"):
        return Work(row["tflops"] * us * 1e6, row["gb_per_s"] * us * 1e3)
    if "extra" in row and "heads" in row and not row.get("ragged"):
        return _decode(row)
    if is_number(row.get("teraflops")) and is_number(row.get("rows")):
        return _prefill(row, us)
    return None


def _decode(row: Row) -> Work:
    """Full lists: each query reads its own rows of the FP8 caches."""
    queries, heads = row["batch"] * row["rows"], row["heads"]
    slots = _WINDOW + row["extra"]
    read = slots * (get_layout(MAIN_FP8).entry_bytes + _INDEX_BYTES)
    return Work(
        4.0 * queries * heads * slots * _CHANNELS,
        float(queries * (read + _queries_and_outputs(heads))),
    )


def _prefill(row: Row, us: float) -> Work | None:
    """A chunk over bfloat16 rows, which all of its queries share."""
    shape = _PREFILL.search(case_of(row))
    if shape is None:
        return None
    heads, queries = int(shape[1]), int(shape[2])
    moved = row["rows"] * _CHANNELS * 2 + queries * _queries_and_outputs(heads)
    return Work(row["teraflops"] * us * 1e6, float(moved))


def _queries_and_outputs(heads: int) -> int:
    """Bytes of a token in bfloat16, and its float32 lse."""
    return heads * (2 * 2 * _CHANNELS + 4)
