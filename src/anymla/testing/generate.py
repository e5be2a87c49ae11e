"""Hostile inputs: caches full of poison, scattered pages, and invalid indices.

Numbers are drawn from torch's global generator, so that a seeded test draws the same ones again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.formats.pages import PageLayout

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
# Bytes before a guarded cache's first page, and between a page's padded end and the next page.
_OFFSET, _GAP = 512, 4096


def hostile_indices(limit: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Draw indices outside [0, limit): INT_MIN, -2, -1, limit, limit + 1 and INT_MAX."""
    choices = torch.tensor([INT32_MIN, -2, -1, limit, limit + 1, INT32_MAX], dtype=dtype)
    return choices[torch.randint(len(choices), shape)]


def scatter_hostile(indices: Tensor, extra: int, limit: int) -> Tensor:
    """Mix ``extra`` hostile columns into int32 [T, K], at positions that differ by row."""
    tokens, width = indices.shape
    mixed = torch.cat((indices, hostile_indices(limit, tokens, extra)), 1)
    order = torch.rand(tokens, width + extra).argsort(1)
    return mixed.gather(1, order)


@dataclasses.dataclass(frozen=True)
class GuardedCache:
    """A cache inside a larger buffer, whose other bytes must not change.

    Attributes:
        cache: [P, B, row] cache with a page stride larger than the page.
        layout: layout of the cache.
        buffer: uint8 bytes around the cache.
        before: copy of the buffer.
    """

    cache: Tensor
    layout: PageLayout
    buffer: Tensor
    before: Tensor

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store rows [n, channels] at int64 slots [n] as part of the expected contents."""
        self.layout.write(self.cache, slots, rows)
        self.before.copy_(self.buffer)

    def changed(self) -> Tensor:
        """Return positions in the buffer, int64, that differ from the expected contents."""
        return (self.buffer != self.before).nonzero().flatten()

    def entry_bytes(self, slot: int) -> set[int]:
        """Return positions in the buffer of an entry's values and scales."""
        entries, stride = self.cache.shape[1], self.cache.stride(0) * self.layout.dtype.itemsize
        page, offset = divmod(slot, entries)
        start = self.cache.storage_offset() * self.layout.dtype.itemsize + page * stride
        data, scales = self.layout.data_bytes, self.layout.scale_bytes
        if self.layout.interleaved:
            start += offset * (data + scales)
            return set(range(start, start + data + scales))
        places = set(range(start + offset * data, start + (offset + 1) * data))
        start += entries * data
        return places | set(range(start + offset * scales, start + (offset + 1) * scales))


def guarded_cache(layout_id: str, pages: int, entries: int) -> GuardedCache:
    """Allocate a cache whose pages lie apart, full of 0xFF bytes.

    These bytes are NaN as e4m3, as bfloat16, as float32 and as ue8m0, so any read of unwritten
    memory shows.

    Args:
        layout_id: layout id of the cache.
        pages: P, number of pages.
        entries: B, number of entries per page.
    """
    layout = get_layout(layout_id)
    item = layout.dtype.itemsize
    stride = layout.page_stride_bytes(entries) + _GAP
    buffer = torch.full((_OFFSET + pages * stride,), 0xFF, dtype=torch.uint8)
    cache = buffer.view(layout.dtype).as_strided(
        (pages, entries, layout.row_elements),
        (stride // item, layout.row_elements, 1),
        _OFFSET // item,
    )
    return GuardedCache(cache, layout, buffer, buffer.clone())


def scattered_pages(lengths: Sequence[int], entries: int, *, spare: int = 3) -> tuple[Tensor, int]:
    """Build block tables of requests whose pages are in random order among unused ones.

    Page 0 is never used (engines keep it as the null page). Entries of the table after a request's
    last page are hostile.

    Args:
        lengths: number of entries of each request.
        entries: number of entries per page.
        spare: number of pages that belong to no request.

    Returns:
        Block table int32 [R, P], two columns wider than the longest request needs, and the number
        of pages of the cache.
    """
    counts = [-(-length // entries) for length in lengths]
    total = 1 + sum(counts) + spare
    pages = (1 + torch.randperm(total - 1)).int()
    table = hostile_indices(total, len(counts), max(counts, default=0) + 2)
    used = 0
    for request, count in enumerate(counts):
        table[request, :count] = pages[used : used + count]
        used += count
    return table, total


def slots_of(table: Tensor, request: int, numbers: Tensor, entries: int) -> Tensor:
    """Return int64 slots of a request's entries ``numbers`` (int64 [n]) from its block table."""
    return table[request].long()[numbers // entries] * entries + numbers % entries
