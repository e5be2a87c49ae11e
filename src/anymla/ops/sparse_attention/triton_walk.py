"""A walk over some of a token's listed rows, inside kernels.

Blocks of ``BN`` columns of the token's lists, first those of one cache, then those of the other,
with a running maximum, sums of probabilities and five accumulators (128 + 128 + 128 + 64 + 64
channels for V4's rows), or four where the last tile is no value (V3.2's rows). Scores are sums of
one product a tile. The slots of the next block are read while this one is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.formats.triton_cast import exp2_int
from anymla.ops.sparse_attention.triton_rows import (
    LIFT,
    coded_tile,
    inline_tile,
    narrow,
    plain_tile,
    tail_tile,
)
from anymla.ops.sparse_attention.triton_sides import (
    across,
    largest_of,
    load_heads,
    score,
    weigh,
    zeros,
)

LOG2E = tl.constexpr(1.4426950408889634)
_NO_MAXIMUM = tl.constexpr(-1e30)
# float16 probabilities are at most 2^15, so that they keep their precision down to 2^-29.
_SHIFT = tl.constexpr(15.0)


@triton.jit
def _next_slots(
    block, blocks0, n0, n1, list0, list1, limit0, limit1, BN: tl.constexpr, TWO: tl.constexpr
):
    """Slots of a block of columns, -1 where there is none."""
    if TWO:
        here = block < blocks0
        column = tl.where(here, block, block - blocks0) * BN + tl.arange(0, BN)
        slots = tl.load(
            tl.where(here, list0, list1) + column, mask=column < tl.where(here, n0, n1), other=-1
        )
        limit = tl.where(here, limit0, limit1)
    else:
        column = block * BN + tl.arange(0, BN)
        slots = tl.load(list0 + column, mask=column < n0, other=-1)
        limit = limit0
    return tl.where((slots >= 0) & (slots < limit), slots, -1)


@triton.jit
def walk(
    q, q_stride, heads, H, scale, first, last, blocks0, n0, n1, list0, list1, limit0, limit1,
    kv0, kv1, page0, page1, entries0, entries1, row_stride,
    BH: tl.constexpr, BN: tl.constexpr, KEYS_FIRST: tl.constexpr, TWO: tl.constexpr,
    FP8: tl.constexpr, BLOCK: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr,
    CHANNELS: tl.constexpr, W3: tl.constexpr, W4: tl.constexpr, KEY: tl.constexpr,
    MODE: tl.constexpr, NATIVE: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Blocks first .. last: (highest score, its reference, sum of p, five sums of p times rows).

    Scores are in units of log 2; ``KEY`` leaves the last sum at 0.
    """
    T3: tl.constexpr = 384 + W3
    q0 = load_heads(q, q_stride, heads, H, 0, 128, CHANNELS, KEYS_FIRST)
    q1 = load_heads(q, q_stride, heads, H, 128, 128, CHANNELS, KEYS_FIRST)
    q2 = load_heads(q, q_stride, heads, H, 256, 128, CHANNELS, KEYS_FIRST)
    q3 = load_heads(q, q_stride, heads, H, 384, W3, CHANNELS, KEYS_FIRST)
    q4 = load_heads(q, q_stride, heads, H, T3, W4, CHANNELS, KEYS_FIRST)
    factor = tl.full([BH], 1.0, tl.float32) * (scale * LOG2E)
    if MODE == 0:
        # A power of two brings each head's largest magnitude into [1, 2).
        largest = tl.maximum(largest_of(q0, KEYS_FIRST), largest_of(q1, KEYS_FIRST))
        largest = tl.maximum(largest, largest_of(q2, KEYS_FIRST))
        largest = tl.maximum(largest, largest_of(q3, KEYS_FIRST))
        largest = tl.maximum(largest, largest_of(q4, KEYS_FIRST))
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.minimum(tl.maximum(exponent, -126), 126)
        shrink = across(exp2_int(-exponent), KEYS_FIRST)
        q0, q1, q2, q3, q4 = q0 * shrink, q1 * shrink, q2 * shrink, q3 * shrink, q4 * shrink
        factor = factor * exp2_int(exponent) * (1.0 / LIFT)
        if KEY:
            q4 = q4 * LIFT
    q0, q1, q2 = narrow(q0, MODE), narrow(q1, MODE), narrow(q2, MODE)
    q3, q4 = narrow(q3, MODE), narrow(q4, MODE)
    factor = across(factor, KEYS_FIRST)

    shift = _SHIFT if MODE == 0 else 0.0
    highest = tl.full([BH], _NO_MAXIMUM, tl.float32)
    total = zeros(BH, BN, KEYS_FIRST)
    a0 = zeros(BH, 128, KEYS_FIRST)
    a1 = zeros(BH, 128, KEYS_FIRST)
    a2 = zeros(BH, 128, KEYS_FIRST)
    a3 = zeros(BH, W3, KEYS_FIRST)
    a4 = zeros(BH, W4, KEYS_FIRST)
    upcoming = _next_slots(first, blocks0, n0, n1, list0, list1, limit0, limit1, BN, TWO)
    for block in range(first, last):
        slots = upcoming
        upcoming = _next_slots(block + 1, blocks0, n0, n1, list0, list1, limit0, limit1, BN, TWO)
        ok = slots >= 0
        slots = tl.maximum(slots, 0)
        if TWO:
            here = block < blocks0
            kv = tl.where(here, kv0, kv1)
            entries = tl.where(here, entries0, entries1)
            page_stride = tl.where(here, page0, page1)
        else:
            kv = kv0
            entries = entries0
            page_stride = page0
        page = slots // entries
        offset = slots - page * entries
        pages = kv + page.to(tl.int64) * page_stride
        if FP8 == 2:
            data = pages + offset.to(tl.int64) * DATA
            marks = (data + (CHANNELS - W4)).to(tl.pointer_type(tl.float32))
            tail = (data + (CHANNELS - W4 + SCALES)).to(tl.pointer_type(tl.bfloat16))
            k0 = inline_tile(data, marks, ok, 0, BLOCK, MODE, NATIVE, ONCE)
            k1 = inline_tile(data, marks, ok, 1, BLOCK, MODE, NATIVE, ONCE)
            k2 = inline_tile(data, marks, ok, 2, BLOCK, MODE, NATIVE, ONCE)
            k3 = inline_tile(data, marks, ok, 3, BLOCK, MODE, NATIVE, ONCE)
            k4 = tail_tile(tail, ok, W4, MODE, KEY)
        elif FP8 == 1:
            data = pages + offset.to(tl.int64) * DATA
            marks = pages + entries.to(tl.int64) * DATA + offset.to(tl.int64) * SCALES
            tail = (data + (CHANNELS - W4)).to(tl.pointer_type(tl.bfloat16))
            k0 = coded_tile(data, marks, ok, 0, 2, BLOCK, MODE, NATIVE, ONCE)
            k1 = coded_tile(data, marks, ok, 2, 2, BLOCK, MODE, NATIVE, ONCE)
            k2 = coded_tile(data, marks, ok, 4, 2, BLOCK, MODE, NATIVE, ONCE)
            k3 = coded_tile(data, marks, ok, 6, 1, BLOCK, MODE, NATIVE, ONCE)
            k4 = tail_tile(tail, ok, W4, MODE, KEY)
        else:
            rows = pages + offset.to(tl.int64) * row_stride
            k0 = plain_tile(rows, ok, 0, 128, CHANNELS, MODE)
            k1 = plain_tile(rows, ok, 128, 128, CHANNELS, MODE)
            k2 = plain_tile(rows, ok, 256, 128, CHANNELS, MODE)
            k3 = plain_tile(rows, ok, 384, W3, CHANNELS, MODE)
            k4 = plain_tile(rows, ok, T3, W4, CHANNELS, MODE)
        s = zeros(BH, BN, KEYS_FIRST)
        s = score(q0, k0, s, KEYS_FIRST)
        s = score(q1, k1, s, KEYS_FIRST)
        s = score(q2, k2, s, KEYS_FIRST)
        s = score(q3, k3, s, KEYS_FIRST)
        s = score(q4, k4, s, KEYS_FIRST)
        s = tl.where(across(ok, not KEYS_FIRST), s * factor, float("-inf"))
        peak = tl.maximum(highest, tl.max(s, 0 if KEYS_FIRST else 1))
        decay = across(tl.exp2(highest - peak), KEYS_FIRST)
        highest = peak
        p = tl.exp2(s - across(peak - shift, KEYS_FIRST))
        total = total * decay + p
        p = narrow(p, MODE)
        a0 = weigh(p, k0, a0, decay, KEYS_FIRST)
        a1 = weigh(p, k1, a1, decay, KEYS_FIRST)
        a2 = weigh(p, k2, a2, decay, KEYS_FIRST)
        a3 = weigh(p, k3, a3, decay, KEYS_FIRST)
        if not KEY:
            a4 = weigh(p, k4, a4, decay, KEYS_FIRST)
    sums = tl.sum(total, 0 if KEYS_FIRST else 1)
    if MODE == 0:
        small = 1.0 / LIFT
        a0, a1, a2, a3, a4 = a0 * small, a1 * small, a2 * small, a3 * small, a4 * small
    return highest, highest - shift, sums, a0, a1, a2, a3, a4
