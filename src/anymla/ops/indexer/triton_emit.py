"""What all selecting kernels share: a row's bounds, and writing what it chose."""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops.indexer.triton_order import NOTHING


@triton.jit
def row_bounds(
    lengths, starts, owners, row, live, first_row, per_request, requests, covered
):  # fmt: skip
    """Request and entries [start, end) of rows; (0, 0) where there is nothing to see."""
    if owners is None:
        request = ((first_row + row) // per_request).to(tl.int32)
    else:
        request = tl.load(owners + row, mask=live, other=-1)
    end = tl.minimum(tl.load(lengths + row, mask=live, other=0), covered)
    if starts is None:
        start = tl.zeros_like(end)
    else:
        start = tl.maximum(tl.load(starts + row, mask=live, other=0), 0)
    sees = (request >= 0) & (request < requests) & (start < end)
    return request, tl.where(sees, start, 0), tl.where(sees, end, 0)


@triton.jit
def places(key, limit, need):
    """Where elements go that are chosen, in the order of elements, and whether they are.

    Chosen are keys > limit and the first ``need`` keys == limit.

    Args:
        key: [LINES, EACH] int32, fewer than 2^15, neighbours in a line.
        limit: a key, or NOTHING.
        need: keys == limit that are chosen.
    """
    beyond = key > limit
    same = (key == limit) & (key != NOTHING)
    # Two counts side by side.
    pair = beyond.to(tl.int32) + (same.to(tl.int32) << 16)
    line = tl.sum(pair, 1)
    running = (tl.cumsum(line, 0) - line)[:, None] + tl.cumsum(pair, 1)
    equal = running >> 16
    place = (running & 0xFFFF) + tl.minimum(equal, need) - 1
    return place, beyond | (same & (equal <= need))


@triton.jit
def emit_slots(
    out,
    slots,
    table,
    table_stride,
    table_pages,
    slot_page,
    start,
    count,
    k,
    KEPT: tl.constexpr,
):
    """The slots of ``count`` entries that a row has been given, then -1.

    ``out`` and ``slots`` point to the row's results, ``table`` to its request's pages.
    """
    place = tl.arange(0, KEPT)
    there = place < count
    entry = start + tl.load(out + place, mask=there, other=0)
    column = entry // slot_page
    page = tl.load(
        table + column.to(tl.int64) * table_stride, mask=there & (column < table_pages), other=-1
    )
    slot = page.to(tl.int64) * slot_page + entry % slot_page
    slot = tl.where((page >= 0) & (slot < 0x80000000), slot, -1)
    tl.store(slots + place, slot.to(tl.int32), mask=place < k)


@triton.jit
def emit_all(
    out,
    slots,
    table,
    table_stride,
    table_pages,
    slot_page,
    start,
    count,
    k,
    KEPT: tl.constexpr,
):
    """The row of a token with at most k entries: all of them, then -1."""
    place = tl.arange(0, KEPT)
    tl.store(out + place, tl.where(place < count, place, -1), mask=place < k)
    if slots is not None:
        # Written by other threads of this program.
        tl.debug_barrier()
        emit_slots(out, slots, table, table_stride, table_pages, slot_page, start, count, k, KEPT)
