"""Keys in pages: where those of a tile are, and their scores.

A tile of keys [KEYS, D] is multiplied with the heads of a few rows, [rows x heads, D], and the
products of a row's heads are summed: scores [KEYS, rows].
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops.indexer.triton_operands import (
    head_sums,
    load_operand,
    load_packed,
    load_queries,
)


@triton.jit
def load_keys(
    cache,
    at,
    scales_at,
    there,
    first,
    CODEC: tl.constexpr,
    MATH: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Channels [first, first + PART) of keys at byte offsets [KEYS]; scales of FP8 are left."""
    WIDTH: tl.constexpr = CODEC.channels
    if CODEC.kind == "row_mxfp4":
        return load_packed(cache + at, cache + scales_at, there, first, MATH, WIDTH, PADDED, PART)
    elif CODEC.kind == "row_fp8":
        return load_operand(cache + at, there, first, "e4m3", MATH, WIDTH, PADDED, PART, NATIVE)
    elif CODEC.kind == "bf16":
        rows = (cache + at).to(tl.pointer_type(tl.bfloat16))
        return load_operand(rows, there, first, "bf16", MATH, WIDTH, PADDED, PART, NATIVE)
    else:
        tl.static_assert(CODEC.kind == "fp32")
        rows = (cache + at).to(tl.pointer_type(tl.float32))
        return load_operand(rows, there, first, "fp32", MATH, WIDTH, PADDED, PART, NATIVE)


@triton.jit
def locate(
    table,
    table_stride,
    at,
    stop,
    pages,
    page_stride,
    KEYS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Where keys [at, at + KEYS) are; ``at`` is a multiple of KEYS, below ``stop``.

    Returns byte offsets of their pages [KEYS] int64, their places there, and whether they exist;
    those that do not are given a page that does. Whole pages cost the fewest instructions.
    """
    number = tl.arange(0, KEYS)
    wide = tl.full((), 1, tl.int64)
    if ENTRIES % KEYS == 0:
        page = tl.load(table + wide * (at // ENTRIES) * table_stride)
        known = (page >= 0) & (page < pages)
        page_at = tl.where(known, page, 0).to(tl.int64) * page_stride
        place = at % ENTRIES + number
        there = tl.full((KEYS,), 1, tl.int1) & known
        return page_at + tl.zeros((KEYS,), tl.int64), place, there
    elif KEYS == 2 * ENTRIES:
        cell = table + wide * (at // ENTRIES) * table_stride
        first = tl.load(cell)
        second = tl.load(cell + table_stride, mask=at + ENTRIES < stop, other=-1)
        first_known = (first >= 0) & (first < pages)
        second_known = (second >= 0) & (second < pages)
        first_at = tl.where(first_known, first, 0).to(tl.int64) * page_stride
        second_at = tl.where(second_known, second, 0).to(tl.int64) * page_stride
        front = number < ENTRIES
        there = (front & first_known) | ((number >= ENTRIES) & second_known)
        return tl.where(front, first_at, second_at), number % ENTRIES, there
    else:
        key = at + number
        page = tl.load(
            table + (key // ENTRIES).to(tl.int64) * table_stride, mask=key < stop, other=-1
        )
        there = (page >= 0) & (page < pages)
        return tl.where(there, page, 0).to(tl.int64) * page_stride, key % ENTRIES, there


@triton.jit
def tile_scores(
    cache,
    table,
    table_stride,
    at,
    stop,
    pages,
    page_stride,
    queries,
    q,
    q_scales,
    line,
    weight,
    exists,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    Q_KIND: tl.constexpr,
    MATH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Scores [KEYS, ROWS] of entries [at, at + KEYS), -inf where they are absent.

    ``table`` is the request's line of the block table, ``stop`` the first entry that no row sees.
    ``queries`` are [ROWS * PADDED_HEADS, PADDED] where whole rows are multiplied (PART == PADDED);
    ``line``, ``weight`` and ``exists`` come from ``query_lines``.

    Every entry of the cache may be read; what is not meant is left out of the results, which costs
    less than a mask on every load.
    """
    page_at, place, there = locate(table, table_stride, at, stop, pages, page_stride, KEYS, ENTRIES)
    scales_at = page_at + ENTRIES * CODEC.data_bytes + place * CODEC.scale_bytes
    values_at = page_at + place * CODEC.data_bytes
    everywhere = tl.full((KEYS,), 1, tl.int1)
    if PART == PADDED:
        keys = load_keys(
            cache, values_at, scales_at, everywhere, 0, CODEC, MATH, PADDED, PART, NATIVE
        )
        dots = tl.dot(keys, tl.trans(queries))
    else:
        dots = tl.zeros((KEYS, ROWS * PADDED_HEADS), tl.float32)
        for part in range(0, PADDED, PART):
            some = load_queries(
                q, q_scales, line, exists, part, Q_KIND, MATH, CODEC.channels, PADDED, PART, NATIVE
            )
            keys = load_keys(
                cache, values_at, scales_at, everywhere, part, CODEC, MATH, PADDED, PART, NATIVE
            )
            dots = tl.dot(keys, tl.trans(some), dots, input_precision="ieee")
    sums = head_sums(dots, weight, exists, ROWS, PADDED_HEADS, HEADS == PADDED_HEADS)
    if CODEC.kind == "row_fp8":
        pointers = (cache + scales_at).to(tl.pointer_type(tl.float32))
        sums = sums * tl.load(pointers)[:, None]
    return tl.where(there[:, None], sums, float("-inf"))
