"""Gradients of prefill attention, query by query: dq, and what each query adds to the rows.

A CTA takes one token and a block of heads, which name the same rows. What it adds to a row is one
product of doubled depth, [scale dS; P]^T [q; dout], since rows are keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# What becomes of a query's addends to rows: nothing, atomic sums, or a row for each column.
NOTHING = tl.constexpr(0)
ATOMICS = tl.constexpr(1)
COLUMNS = tl.constexpr(2)
# Exponents of scores that are not there must not overflow before they are masked.
LEAST = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["heads"])
def delta_kernel(
    delta_ptr,
    total_ptr,
    dsink_ptr,
    dout_ptr,
    out_ptr,
    given_ptr,
    lse_ptr,
    sink_ptr,
    heads,
    dout_token,
    dout_head,
    out_token,
    out_head,
    CHANNELS: tl.constexpr,
    BC: tl.constexpr,
    BH: tl.constexpr,
):
    """Compute <dout, out>, the whole denominator in log2, and a token's share of dsink."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    there = head < heads
    place = token * heads + head
    if given_ptr is None:
        channel = tl.arange(0, BC)
        mask = there[:, None] & (channel < CHANNELS)[None, :]
        at = token * dout_token + head[:, None].to(tl.int64) * dout_head + channel[None, :]
        dout = tl.load(dout_ptr + at, mask, other=0).to(tl.float32)
        at = token * out_token + head[:, None].to(tl.int64) * out_head + channel[None, :]
        delta = tl.sum(dout * tl.load(out_ptr + at, mask, other=0).to(tl.float32), 1)
        tl.store(delta_ptr + place, delta, there)
    else:
        delta = tl.load(given_ptr + place, there, other=0)
    lse = tl.load(lse_ptr + place, there, other=0)
    if sink_ptr is None:
        total = tl.maximum(lse, LEAST)
    else:
        # Differences are formed before they are scaled: a sink times log2(e) may overflow.
        sink = tl.load(sink_ptr + head, there, other=0).to(tl.float32)
        top = tl.maximum(tl.maximum(lse, sink), LEAST)
        sums = tl.exp2((lse - top) * LOG2E) + tl.exp2((sink - top) * LOG2E)
        total = tl.where(top == float("inf"), top, top + tl.log2(tl.maximum(sums, 1e-38)) / LOG2E)
        finite = tl.abs(sink) < float("inf")
        share = tl.where(finite, tl.exp2((sink - tl.where(finite, total, 0)) * LOG2E), 0)
        # A token without rows has no output, whatever its gradient holds.
        some = finite & (lse > float("-inf"))
        tl.store(dsink_ptr + place, tl.where(some, -share * delta, 0), there)
    tl.store(total_ptr + place, total * LOG2E, there)


@triton.jit(do_not_specialize=["size", "window", "width", "heads"])
def backward_kernel(
    dq_ptr,
    drows_ptr,
    mass_ptr,
    dout_ptr,
    q_ptr,
    rows_ptr,
    ranges_ptr,
    lists_ptr,
    total_ptr,
    delta_ptr,
    lse_ptr,
    dlse_ptr,
    size,
    window,
    width,
    heads,
    scale,
    dout_token,
    dout_head,
    q_token,
    q_head,
    row_stride,
    CHANNELS: tl.constexpr,
    BC: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute dq of a token's block of heads, and its addends to rows.

    The columns are ``window`` for the first range and ``width`` for the second. ``ROWS`` says what
    ``drows_ptr`` is: [N, CHANNELS] sums for ATOMICS; for COLUMNS a row for each token, block of
    heads and column, of which those that name no row are left as they are.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head = block * BH + tl.arange(0, BH)
    channel = tl.arange(0, BC)
    there = head < heads
    inside = channel < CHANNELS
    mask = there[:, None] & inside[None, :]
    wide_head = head[:, None].to(tl.int64)
    q = tl.load(q_ptr + token * q_token + wide_head * q_head + channel[None, :], mask, other=0)
    dout = tl.load(
        dout_ptr + token * dout_token + wide_head * dout_head + channel[None, :], mask, other=0
    )
    if WIDE:
        q = q.to(tl.float32)
        dout = dout.to(tl.float32)
    place = token * heads + head
    # Heads that are not there weigh nothing.
    total = tl.load(total_ptr + place, there, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + place, there, other=0)[:, None]
    if dlse_ptr is not None:
        lse = tl.load(lse_ptr + place, there, other=float("inf"))[:, None] * LOG2E
        dlse = tl.load(dlse_ptr + place, there, other=0)[:, None]
        lse = tl.where(lse > float("-inf"), lse, float("inf"))
    dq = tl.zeros([BH, BC], tl.float32)

    start = tl.load(ranges_ptr + token * 4).to(tl.int64)
    near = tl.minimum(tl.load(ranges_ptr + token * 4 + 1), window)
    base = tl.load(ranges_ptr + token * 4 + 2).to(tl.int64)
    more = tl.minimum(tl.load(ranges_ptr + token * 4 + 3), width)
    split = tl.maximum((near + BN - 1) // BN, 0) * BN
    for k in range(0, split + tl.maximum(more, 0), BN):
        close = k < split
        column = k + tl.arange(0, BN) - tl.where(close, 0, split)
        slot = tl.where(close, start, base) + column
        named = column < tl.where(close, near, more)
        if lists_ptr is not None:
            at = lists_ptr + token * width + column
            listed = tl.load(at, named & (k >= split), other=0).to(tl.int64)
            slot = tl.where(close, slot, base + listed)
            named = named & (listed >= 0)
        named = named & (slot >= 0) & (slot < size)
        kept = named[:, None] & inside[None, :]
        rows = tl.load(rows_ptr + slot[:, None] * row_stride + channel[None, :], kept, other=0)
        if WIDE:
            rows = rows.to(tl.float32)
        scores = tl.dot(q, tl.trans(rows), input_precision="ieee") * (scale * LOG2E)
        p = tl.where(named[None, :], tl.exp2(scores - total), 0.0)
        ds = p * (tl.dot(dout, tl.trans(rows), input_precision="ieee") - delta)
        if dlse_ptr is not None:
            ds += dlse * tl.where(named[None, :], tl.exp2(scores - lse), 0.0)
        if mass_ptr is not None:
            at = (token * tl.num_programs(1) + block) * width + column
            tl.store(mass_ptr + at, tl.sum(p, 0), (k >= split) & (column < width))
        ds = (ds * scale).to(rows.dtype)
        p = p.to(rows.dtype)
        if QUERIES:
            dq = tl.dot(ds, rows, dq, input_precision="ieee")
        if ROWS != NOTHING:
            if ROWS == ATOMICS:
                target = slot * CHANNELS
            else:
                column += tl.where(close, 0, window)
                columns = window + width
                target = ((token * tl.num_programs(1) + block) * columns + column) * CHANNELS
            if TRANSPOSED:
                each = tl.dot(tl.trans(dout), p)
                each = tl.dot(tl.trans(q), ds, each)
                at = drows_ptr + target[None, :] + channel[:, None]
                # The interpreter does not broadcast the mask of an atomic.
                kept = named[None, :] & inside[:, None]
            else:
                each = tl.dot(tl.trans(p), dout, input_precision="ieee")
                each = tl.dot(tl.trans(ds), q, each, input_precision="ieee")
                at = drows_ptr + target[:, None] + channel[None, :]
            if ROWS == ATOMICS:
                tl.atomic_add(at, each, mask=kept, sem="relaxed")
            else:
                tl.store(at, each, mask=kept)
    if QUERIES:
        at = dq_ptr + (token * heads + wide_head) * CHANNELS + channel[None, :]
        tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["columns"])
def segmented_sum_kernel(
    drows_ptr,
    parts_ptr,
    order_ptr,
    first_ptr,
    columns,
    CHANNELS: tl.constexpr,
    BC: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Add to a row what each (token, column) that names it adds, in ascending order.

    One addend at a time: the sum does not depend on where a chunk of tokens ends.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < CHANNELS
    first, last = tl.load(first_ptr + row), tl.load(first_ptr + row + 1)
    if first < last:
        at = drows_ptr + row * CHANNELS + channel
        sums = tl.load(at, inside)
        for user in range(first, last):
            place = tl.load(order_ptr + user)
            token, column = place // columns, place % columns
            for block in tl.static_range(BLOCKS):
                part = (token * BLOCKS + block) * columns + column
                sums += tl.load(parts_ptr + part * CHANNELS + channel, inside, other=0)
        tl.store(at, sums, inside)
