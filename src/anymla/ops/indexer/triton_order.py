"""Order of scores inside Triton kernels, and what all selecting kernels share.

A score becomes an int32 that orders as scores do ("key"): -0 is 0, every NaN the largest. No key is
``NOTHING``, which stands for an entry that is not there.
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_KEY = tl.constexpr(0x7F800001)  # just above +inf's bits
NOTHING = tl.constexpr(-0x80000000)
_LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(bits):
    """Keys of float32 scores, given as their bits."""
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(magnitude == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(magnitude > 0x7F800000, NAN_KEY, key)


@triton.jit
def ordered_result(x, CANONICAL: tl.constexpr):
    """Keys of float32 results; CANONICAL where arithmetic makes no NaN but the one of all ones."""
    if CANONICAL:
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        return tl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)
    else:
        return ordered(x.to(tl.int32, bitcast=True))


@triton.jit
def _as_float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _as_key(x):
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def next_probe(low, high, count_low, count_high, wanted, step):
    """A key in (low, high] to count at, when looking for the ``wanted``-th largest.

    Scores' counts fall about exponentially, so two probes of three interpolate the logarithm of the
    count between (low, count_low) and (high, count_high); the third halves, which bounds the search
    whatever the scores are.
    """
    middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
    if step % 3 != 2:
        top = tl.log2(count_low.to(tl.float32))
        bottom = tl.log2(tl.maximum(count_high.to(tl.float32), 0.5))
        share = (top - tl.log2(wanted.to(tl.float32))) / (top - bottom)
        first, last = _as_float(low), _as_float(high)
        middle = _as_key(first + (last - first) * share)
    return tl.minimum(tl.maximum(middle, low + 1), high)


@triton.jit
def kth_largest(key, count, wanted):
    """(limit, above): the ``above`` keys > limit and ``wanted - above`` of those == limit are best.

    Args:
        key: [N] int32, NOTHING where there is none.
        count: how many keys there are; more than ``wanted``.
        wanted: at least 1.
    """
    high = tl.max(key, 0)
    low = tl.min(tl.where(key == NOTHING, _LARGEST, key), 0)
    # Always: count(>= low) >= wanted > count(> high).
    count_low, count_high, step = count, tl.zeros_like(count), 0
    while low < high:
        probe = next_probe(low, high, count_low, count_high, wanted, step)
        found = tl.sum((key >= probe).to(tl.int32), 0)
        if found == wanted:
            low = probe - 1
            high = probe - 1
            count_high = found
        elif found > wanted:
            low = probe
            count_low = found
        else:
            high = probe - 1
            count_high = found
        step += 1
    return low, count_high


@triton.jit
def places(key, limit, need):
    """Where elements go that are chosen, in the order of elements, and whether they are.

    Chosen are keys > limit and the first ``need`` keys == limit. Fewer than 2^15 elements.
    """
    beyond = key > limit
    same = (key == limit) & (key != NOTHING)
    # Two counts side by side.
    running = tl.cumsum(beyond.to(tl.int32) + (same.to(tl.int32) << 16), 0)
    equal = running >> 16
    place = (running & 0xFFFF) + tl.minimum(equal, need) - 1
    return place, beyond | (same & (equal <= need))


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
def emit(
    out,
    slots,
    table,
    table_stride,
    table_pages,
    slot_page,
    entry,
    start,
    place,
    chosen,
):
    """Write entries, and their slots if there is a table, to ``place``-s of a row.

    ``out`` and ``slots`` point to the row's results, ``table`` to its request's pages.
    """
    tl.store(out + place, entry - start, mask=chosen)
    if slots is not None:
        column = entry // slot_page
        known = chosen & (column < table_pages)
        page = tl.load(table + column.to(tl.int64) * table_stride, mask=known, other=-1)
        slot = page.to(tl.int64) * slot_page + entry % slot_page
        slot = tl.where((page >= 0) & (slot < 0x80000000), slot, -1)
        tl.store(slots + place, slot.to(tl.int32), mask=chosen)


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
    emit(
        out, slots, table, table_stride, table_pages, slot_page, start + place, start, place,
        place < count,
    )  # fmt: skip
    rest = (place >= count) & (place < k)
    nothing = tl.full((KEPT,), -1, tl.int32)
    tl.store(out + place, nothing, mask=rest)
    if slots is not None:
        tl.store(slots + place, nothing, mask=rest)
