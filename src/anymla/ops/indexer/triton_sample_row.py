"""What a program does with a row of scores of which it has samples, or nothing.

A threshold from samples, the choice among what passes it, and the choice without either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops.indexer.triton_emit import places
from anymla.ops.indexer.triton_order import NOTHING, kth_largest, narrow, ordered

_RUN = tl.constexpr(8)  # samples side by side
_EACH = tl.constexpr(4)  # neighbours that a thread loads at once
_LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_keys_at(scores, at, start, end, TILE: tl.constexpr):
    """Entries [at, at + TILE), neighbours in a line, and their keys; NOTHING outside of the row's.

    ``at`` is a multiple of 4. Whole lines are read, which rows are padded to: masks by lines leave
    loads wide.
    """
    line = at + tl.arange(0, TILE // _EACH)[:, None] * _EACH
    entry = line + tl.arange(0, _EACH)[None, :]
    key = ordered(tl.load(scores + entry, mask=line < end, other=0))
    return entry, tl.where((entry >= start) & (entry < end), key, NOTHING)


@triton.jit
def threshold_of(scores, count, k, SAMPLES: tl.constexpr):
    """A key that at least k of a row's are likely to reach, and not many more.

    ``scores`` points to the first of ``count``.
    """
    number = tl.arange(0, SAMPLES)
    at = (number // _RUN).to(tl.int64) * (count // (SAMPLES // _RUN)) + number % _RUN
    key = ordered(tl.load(scores + at))
    expected = k.to(tl.float32) * SAMPLES / count
    # Three and a half standard deviations above what k of count would be among the samples.
    rank = (expected + 3.5 * tl.sqrt(expected) + 4.0).to(tl.int32)
    low = tl.full((), NOTHING + 1, tl.int32)
    if rank < SAMPLES:
        every = tl.full((), SAMPLES, tl.int32)
        low, _reach, _above = narrow(key, every, rank, rank // 8 + 1, True)
    return low


@triton.jit
def finish(
    keys,
    entries,
    found,
    total,
    k,
    start,
    out,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Select from ``total`` candidates, at most CAPACITY; part p has found[p] from p * CAPACITY."""
    element = tl.arange(0, CAPACITY // _EACH)[:, None] * _EACH + tl.arange(0, _EACH)[None, :]
    at = element
    if PARTS > 1:
        end = 0
        for part in tl.static_range(PARTS - 1):
            here = tl.load(found + part)
            end += here
            at += tl.where(element >= end, CAPACITY - here, 0)
    there = element < total
    entry = tl.load(entries + at, mask=there, other=0)
    key = tl.where(there, tl.load(keys + at, mask=there, other=0), NOTHING)
    limit = tl.full((), NOTHING, tl.int32)
    above = k
    if total > k:
        limit, above = kth_largest(key, total, k, False)
    place, taken = places(key, limit, k - above)
    tl.store(out + place, entry - start, mask=taken)


@triton.jit
def count_through(scores, start, end, k, out, TILE: tl.constexpr):
    """Select by halving the range of keys, reading the row every time: any row, slowly."""
    low = tl.full((), NOTHING + 1, tl.int32)
    high = tl.full((), _LARGEST, tl.int32)
    begin = start // _EACH * _EACH
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        reach = 0
        for at in range(begin, end, TILE):
            entry, key = load_keys_at(scores, at, start, end, TILE)
            reach += tl.sum((key >= middle).to(tl.int32))
        if reach >= k:
            low = middle
        else:
            high = middle - 1
    above = 0
    for at in range(begin, end, TILE):
        entry, key = load_keys_at(scores, at, start, end, TILE)
        above += tl.sum((key > low).to(tl.int32))
    need = k - above
    written = 0
    for at in range(begin, end, TILE):
        entry, key = load_keys_at(scores, at, start, end, TILE)
        place, taken = places(key, low, need)
        tl.store(out + written + place, entry - start, mask=taken)
        written += tl.sum(taken.to(tl.int32))
        need -= tl.minimum(tl.sum((key == low).to(tl.int32)), need)
