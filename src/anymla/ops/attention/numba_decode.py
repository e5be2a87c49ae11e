"""Sparse attention of few tokens and heads on a CPU: rows are decoded once, and attended at once.

Tiles of rows stay in a core's own cache; the softmax is kept up with the largest score so far.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from anymla.formats.page_layout import get_layout
from anymla.formats.pages import pages_of
from anymla.ops._numba_rows import (
    CACHE,
    KERNEL,
    SUMS,
    f32_at,
    from_bf16,
    i32_at,
    narrow,
    u8_at,
    u16_at,
    widen,
    widen_fp8_block,
)

# Rows of a tile: 64 KiB of float32 with 512 channels.
_TILE = 32
_NOTHING = (0, 0, 1, 0), (0, 1, 0, 0), (0, 0, 0)


def sparse_attention(
    q, rows, *, sink=None, scale=None, value_dim=None, empty_lse=None,
    batch_invariant=False, plan=None, epilogue=None, out=None,
):  # fmt: skip
    """See ``interface.sparse_attention``; ``numba_attention_support`` refuses an epilogue."""
    tokens, heads, dim = q.shape
    values = dim if value_dim is None else value_dim
    given = out
    if out is None or not out.is_contiguous():
        out = torch.empty((tokens, heads, values), dtype=q.dtype)
    lse = torch.empty((tokens, heads), dtype=torch.float32)
    # Whatever is made contiguous lives until the kernel has run.
    lists = [_listed(*each) for each in rows]
    first, second = lists[0][0], lists[1][0] if len(lists) > 1 else _NOTHING
    q = q.contiguous()
    if sink is not None:
        sink = sink.contiguous()
    _attend(
        (q.data_ptr(), 0 if sink is None else sink.data_ptr(), out.data_ptr(), lse.data_ptr()),
        (tokens, heads, dim, values), dim**-0.5 if scale is None else float(scale),
        -math.inf if empty_lse is None else float(empty_lse), first, second,
    )  # fmt: skip
    del lists
    return out if given is None or given is out else given.copy_(out), lse


def _listed(cache, layout, indices, lengths):
    """Return addresses and sizes of one cache's rows, and the tensors that they point into."""
    pages, rows = pages_of(cache), get_layout(layout)
    slots = indices.contiguous()
    counts = None if lengths is None else lengths.contiguous()
    return (
        (pages.data_ptr(), pages.shape[0], pages.shape[1], pages.stride(0)),
        (rows.nope, rows.block, rows.data_bytes, rows.scale_bytes),
        (slots.data_ptr(), indices.shape[-1], 0 if counts is None else counts.data_ptr()),
    ), (slots, counts)


@njit(**KERNEL)
def _attend(places, sizes, scale, empty_lse, first, second):
    q, sink, out, lse = places
    tokens, heads, dim, values = sizes
    even = heads + heads % 2  # heads go in pairs, the last one maybe with one of zeros
    queries, total = np.zeros((even, dim), np.float32), np.empty((even, values), np.float32)
    tile, slots = np.empty((_TILE, dim), np.float32), np.empty(_TILE, np.int64)
    largest, sums = np.empty(even, np.float32), np.empty(even, np.float32)
    weights = np.empty((2, _TILE), np.float32)
    for token in range(tokens):
        widen(u16_at(q + 2 * token * heads * dim, heads * dim), queries[:heads].reshape(-1))
        total[:] = 0
        largest[:] = -np.inf
        sums[:] = 0
        count = 0
        for cache, layout, listed in (first, second):
            indices = i32_at(listed[0] + 4 * token * listed[1], listed[1])
            width = listed[1]
            if listed[2] != 0:
                width = min(width, i32_at(listed[2], tokens)[token])
            column = 0
            while column < width:
                rows = 0
                while column < width and rows < _TILE:
                    slot = indices[column]
                    if 0 <= slot < cache[1] * cache[2]:
                        slots[rows] = slot
                        rows += 1
                    column += 1
                for row in range(rows):
                    _read_row(cache, layout, slots[row], tile[row])
                count += rows
                for head in range(0, heads if rows else 0, 2):
                    w0, w1 = weights[0], weights[1]
                    t0, t1 = total[head], total[head + 1]
                    _scores(queries[head], queries[head + 1], tile, rows, w0, w1)
                    _to_weights(scale, rows, w0, largest, sums, head, t0)
                    _to_weights(scale, rows, w1, largest, sums, head + 1, t1)
                    _add_rows(tile, rows, w0, w1, t0, t1)
        to_lse = f32_at(lse + 4 * token * heads, heads)
        for head in range(heads):
            to = u16_at(out + 2 * (token * heads + head) * values, values)
            factor = np.float32(0)
            if count:
                to_lse[head] = largest[head] + np.float32(math.log(sums[head]))
                factor = np.float32(1) / sums[head]
                if sink != 0:
                    logit = np.float64(f32_at(sink, heads)[head])
                    factor *= np.float32(1.0 / (1.0 + math.exp(logit - to_lse[head])))
            else:
                to_lse[head] = empty_lse
            for i in range(values):
                total[head, i] *= factor
            narrow(total[head], to)


@njit(cache=CACHE)
def _read_row(cache, layout, slot, row):
    """Decode the row at a slot to float32."""
    start, _, entries, stride = cache
    nope, block, data_bytes, scale_bytes = layout
    page, entry = start + slot // entries * stride, slot % entries
    data = page + entry * data_bytes
    exponents = u8_at(page + entries * data_bytes + entry * scale_bytes, scale_bytes)
    for number in range(nope // block):
        codes = u8_at(data + number * block, block)
        widen_fp8_block(codes, exponents[number], row[number * block : (number + 1) * block])
    rest = u16_at(data + nope, len(row) - nope)
    for i in range(len(row) - nope):
        row[nope + i] = from_bf16(rest[i])


@njit(cache=CACHE, fastmath=SUMS)
def _scores(q0, q1, tile, rows, w0, w1):
    """Products of two queries with rows, four of them at a time."""
    for row in range(0, rows, 4):
        # Rows behind the last one hold anything; their products are not used.
        r0, r1, r2, r3 = tile[row], tile[row + 1], tile[row + 2], tile[row + 3]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for i in range(len(q0)):
            a0 += q0[i] * r0[i]
            a1 += q0[i] * r1[i]
            a2 += q0[i] * r2[i]
            a3 += q0[i] * r3[i]
            b0 += q1[i] * r0[i]
            b1 += q1[i] * r1[i]
            b2 += q1[i] * r2[i]
            b3 += q1[i] * r3[i]
        w0[row], w0[row + 1], w0[row + 2], w0[row + 3] = a0, a1, a2, a3
        w1[row], w1[row + 1], w1[row + 2], w1[row + 3] = b0, b1, b2, b3


@njit(cache=CACHE, error_model="numpy")
def _to_weights(scale, rows, weights, largest, sums, head, total):
    """Scores to weights, and what has been summed to the largest score so far."""
    before = top = largest[head]
    for row in range(rows):
        weights[row] *= np.float32(scale)
        if weights[row] > top:
            top = weights[row]
    fade = np.float32(1) if before == top else np.float32(math.exp(before - top))
    sums[head] *= fade
    # Scores that overflow weigh nothing, also while there is no other: not exp(-inf + inf).
    origin = top if top > -np.inf else np.float32(0)
    for row in range(rows):
        weights[row] = np.float32(math.exp(weights[row] - origin))
        sums[head] += weights[row]
    largest[head] = top
    if fade != 1:
        for i in range(len(total)):
            total[i] *= fade


@njit(cache=CACHE)
def _add_rows(tile, rows, w0, w1, t0, t1):
    """Add weighted rows to the sums of two heads."""
    whole = rows // 4 * 4
    for row in range(0, whole, 4):
        _add_four(tile, row, w0, w1, t0, t1)
    for row in range(whole, rows):
        a, b, each = w0[row], w1[row], tile[row]
        for i in range(len(t0)):
            t0[i] += a * each[i]
            t1[i] += b * each[i]


@njit(cache=CACHE, fastmath=SUMS)
def _add_four(tile, row, w0, w1, t0, t1):
    r0, r1, r2, r3 = tile[row], tile[row + 1], tile[row + 2], tile[row + 3]
    a0, a1, a2, a3 = w0[row], w0[row + 1], w0[row + 2], w0[row + 3]
    b0, b1, b2, b3 = w1[row], w1[row + 1], w1[row + 2], w1[row + 3]
    for i in range(len(t0)):
        t0[i] += a0 * r0[i] + a1 * r1[i] + a2 * r2[i] + a3 * r3[i]
        t1[i] += b0 * r0[i] + b1 * r1[i] + b2 * r2[i] + b3 * r3[i]
