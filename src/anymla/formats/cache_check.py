"""Checks of a cache's bytes for values that no writer can have stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from anymla.formats.interchange import FnuzIndexLayout, FnuzMainLayout
from anymla.formats.pages import PageLayout
from anymla.formats.records import (
    InlineFp8Layout,
    PlainRowsLayout,
    RowFp8Layout,
    RowMxfp4Layout,
    RowNvfp4Layout,
    SplitFp8Layout,
)

# Range of scale bytes that the quantisers write: from the floor 1e-4 / 448 to the largest bfloat16.
_LOWEST, _HIGHEST = 105, 247
# The largest code of a block with the smallest scale that fits is above half of 448.
_HALF_OF_LARGEST = 0x76
# An e4m3 scale is so close to amax / 6 that the largest e2m1 code is always in use, except below
# three times the smallest scale, where rounding is coarser.
_E2M1_LARGEST, _NVFP4_FITTED = 7, 3


@dataclasses.dataclass(frozen=True)
class Problem:
    """A fault in a cache's bytes.

    Attributes:
        kind: kind of fault: "NaN", "scale", "padding", "stale" ...
        count: number of rows or bytes with the fault.
        first: slot (or byte) of the first fault.
        text: description in words.
        harmless: True if no reader that respects the lengths reads it.
    """

    kind: str
    count: int
    first: int
    text: str
    harmless: bool = False


def check_cache_bytes(cache: Tensor, layout: PageLayout, rows: int) -> list[Problem]:
    """Check every byte of a cache.

    Args:
        cache: [P, B, row_elements], pages in ``layout``.
        layout: layout of the cache.
        rows: number of final slots; later slots are undefined.

    Returns:
        Faults, the serious ones first.
    """
    found = [*_rows(cache, layout, rows), *_scales(cache, layout, rows)]
    found += [*_stale(cache, layout, rows), *_page_padding(cache, layout)]
    return sorted(found, key=lambda problem: problem.harmless)


def _problem(bad: Tensor, kind: str, text: str, *, harmless: bool = False) -> Iterator[Problem]:
    """Yield one problem if any element of ``bad`` [n] is true."""
    count = int(bad.sum())
    if count:
        yield Problem(kind, count, int(bad.nonzero()[0]), text, harmless)


def _rows(cache: Tensor, layout: PageLayout, rows: int) -> Iterator[Problem]:
    decoded = layout.read(cache, torch.arange(rows), torch.float64)
    yield from _problem(decoded.isnan().any(1), "NaN", "rows that decode to NaN")
    yield from _problem(decoded.isinf().any(1), "infinity", "rows that decode to an infinity")


def _scales(cache: Tensor, layout: PageLayout, rows: int) -> Iterator[Problem]:
    data, plane = (_rows_of(each, rows) for each in layout.planes(cache))
    if data is None or isinstance(layout, PlainRowsLayout):
        return
    if isinstance(layout, SplitFp8Layout | FnuzMainLayout):
        base = layout if isinstance(layout, SplitFp8Layout) else layout.base
        assert plane is not None
        blocks = base.nope // base.block
        more = 1 if isinstance(layout, FnuzMainLayout) else 0
        scale = plane[:, :blocks].int() - more
        yield from _problem(
            ((scale < _LOWEST) | (scale > _HIGHEST)).any(1),
            "scale",
            f"rows with a scale byte outside {_LOWEST + more}..{_HIGHEST + more}, which the "
            "quantiser cannot write",
        )
        yield from _problem(
            (plane[:, blocks:] != 0).any(1), "padding", "rows whose last scale byte is not 0"
        )
        largest = (data[:, : base.nope] & 0x7F).unflatten(1, (blocks, base.block)).amax(2)
        loose = (largest < _HALF_OF_LARGEST) & (scale > _LOWEST)
        yield from _problem(
            loose.any(1),
            "loose scale",
            "rows with a scale larger than their values need: written by another quantiser",
            harmless=True,
        )
    elif isinstance(layout, RowMxfp4Layout):
        assert plane is not None
        yield from _problem((plane == 255).any(1), "scale", "rows with a scale byte of NaN")
    elif isinstance(layout, RowNvfp4Layout):
        assert plane is not None
        # Valid e4m3 scale bytes are those of positive numbers: no zero, no NaN, no sign.
        yield from _problem(
            ((plane < 1) | (plane > 0x7E)).any(1),
            "scale",
            "rows with a scale byte outside 1..126, which the quantiser cannot write",
        )
        largest = torch.maximum(data & 7, (data >> 4) & 7).unflatten(1, (plane.shape[1], -1))
        loose = (largest.amax(2) < _E2M1_LARGEST) & (plane >= _NVFP4_FITTED)
        yield from _problem(
            loose.any(1),
            "loose scale",
            "rows with a scale larger than their values need: written by another quantiser",
            harmless=True,
        )
    elif isinstance(layout, RowFp8Layout | FnuzIndexLayout | InlineFp8Layout):
        held = plane
        if isinstance(layout, InlineFp8Layout):
            held = data[:, layout.nope : layout.rope_start]
        assert held is not None
        scale = held.contiguous().view(torch.float32)
        yield from _problem(
            ~(scale.isfinite() & (scale > 0)).all(1),
            "scale",
            "rows with a scale that is not a positive number",
        )
        yield from _problem(
            ((scale.view(torch.int32) & 0x7FFFFF) != 0).any(1),
            "loose scale",
            "rows with a scale that is no power of two: written by another quantiser",
            harmless=True,
        )


def _stale(cache: Tensor, layout: PageLayout, rows: int) -> Iterator[Problem]:
    data, _ = layout.planes(cache)
    behind = (data.flatten(0, 1)[rows:] != 0).any(1)
    for problem in _problem(behind, "stale", "slots behind the last final row hold bytes"):
        yield dataclasses.replace(problem, first=problem.first + rows, harmless=True)


def _page_padding(cache: Tensor, layout: PageLayout) -> Iterator[Problem]:
    """Check the bytes between a page's last entry and the next page."""
    pages, entries = cache.shape[:2]
    stride = cache.stride(0) * layout.dtype.itemsize
    used = entries * layout.entry_bytes
    if pages < 1 or stride <= used:
        return
    start = cache.storage_offset() * layout.dtype.itemsize
    held = cache.untyped_storage().nbytes() - start
    whole = min(pages, held // stride)  # the last page of a view may end before its padding
    flat = cache.view(torch.uint8).as_strided((whole, stride - used), (stride, 1), start + used)
    yield from _problem(
        (flat != 0).flatten(), "page padding", "bytes of page padding are not 0", harmless=True
    )


def _rows_of(plane: Tensor | None, rows: int) -> Tensor | None:
    return None if plane is None else plane.flatten(0, 1)[:rows]
