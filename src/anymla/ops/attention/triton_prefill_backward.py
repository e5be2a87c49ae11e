"""Gradients of prefill attention: of queries, and what each query adds to the rows.

Query by query, a CTA takes one token and a block of heads, which name the same rows. What it adds
to a row is one product of doubled depth, [scale dS; P]^T [q; dout], since rows are keys and values.
Tile by tile of rows, a CTA goes through the tokens whose windows reach its tile: scores are made
again, and nothing is added by two.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# A query's addends to rows are left out, summed by atomics, or written to a row for each column.
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
    WINDOW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Compute dq of a token's block of heads, and its addends to rows.

    ``ROWS`` says what ``drows_ptr`` is: [N, CHANNELS] sums for ATOMICS; for COLUMNS a row for each
    token, block of heads and column of the second range, of which those that name no row are left
    as they are. Without ``WINDOW`` nothing is added to the rows of the first range.
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
        if ROWS != NOTHING and (WINDOW or k >= split):
            if ROWS == ATOMICS:
                first = slot * CHANNELS
            else:
                first = ((token * tl.num_programs(1) + block) * width + column) * CHANNELS
            # The interpreter does not broadcast the mask of an atomic.
            if TRANSPOSED:
                each = tl.dot(tl.trans(dout), p)
                each = tl.dot(tl.trans(q), ds, each)
                target = drows_ptr + first[None, :] + channel[:, None]
                used = named[None, :] & inside[:, None]
            else:
                each = tl.dot(tl.trans(p), dout, input_precision="ieee")
                each = tl.dot(tl.trans(ds), q, each, input_precision="ieee")
                target = drows_ptr + first[:, None] + channel[None, :]
                used = kept
            if ROWS == ATOMICS:
                tl.atomic_add(target, each, mask=used, sem="relaxed")
            else:
                tl.store(target, each, mask=used)
    if QUERIES:
        at = dq_ptr + (token * heads + wide_head) * CHANNELS + channel[None, :]
        tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["tokens", "window"])
def window_users_kernel(users_ptr, ranges_ptr, tokens, window, BN: tl.constexpr, BT: tl.constexpr):
    """Find the first token whose window reaches a tile of BN rows, and the end of the last one."""
    tile = tl.program_id(0)
    low = tile.to(tl.int64) * BN
    first = tokens
    last = 0
    for t in range(0, tokens, BT):
        token = t + tl.arange(0, BT)
        at = ranges_ptr + token.to(tl.int64) * 4
        start = tl.load(at, token < tokens, other=0).to(tl.int64)
        count = tl.minimum(tl.load(at + 1, token < tokens, other=0), window)
        sees = (count > 0) & (start < low + BN) & (start + count > low)
        first = tl.minimum(first, tl.min(tl.where(sees, token, tokens), 0))
        last = tl.maximum(last, tl.max(tl.where(sees, token + 1, 0), 0))
    tl.store(users_ptr + tile * 2, first)
    tl.store(users_ptr + tile * 2 + 1, last)


@triton.jit(do_not_specialize=["size", "window", "heads"])
def window_rows_kernel(
    drows_ptr,
    users_ptr,
    dout_ptr,
    q_ptr,
    rows_ptr,
    ranges_ptr,
    total_ptr,
    delta_ptr,
    lse_ptr,
    dlse_ptr,
    size,
    window,
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
    TRANSPOSED: tl.constexpr,
):
    """Add to a tile of rows what the windows add that reach it, in ascending order of tokens.

    A row that a token does not see gets zeros from it, so its sum does not depend on its tile.
    """
    tile = tl.program_id(0)
    row = tile.to(tl.int64) * BN + tl.arange(0, BN)
    channel = tl.arange(0, BC)
    there, inside = row < size, channel < CHANNELS
    kept = there[:, None] & inside[None, :]
    rows = tl.load(rows_ptr + row[:, None] * row_stride + channel[None, :], kept, other=0)
    if TRANSPOSED:
        place = drows_ptr + row[None, :] * CHANNELS + channel[:, None]
        kept = there[None, :] & inside[:, None]
    else:
        place = drows_ptr + row[:, None] * CHANNELS + channel[None, :]
    sums = tl.load(place, kept, other=0)
    first, last = tl.load(users_ptr + tile * 2), tl.load(users_ptr + tile * 2 + 1)
    blocks = (heads + BH - 1) // BH
    for step in range(first * blocks, last * blocks):
        token = (step // blocks).to(tl.int64)
        head = step % blocks * BH + tl.arange(0, BH)
        mask = (head < heads)[:, None] & inside[None, :]
        wide_head = head[:, None].to(tl.int64)
        at = q_ptr + token * q_token + wide_head * q_head + channel[None, :]
        q = tl.load(at, mask, other=0)
        at = dout_ptr + token * dout_token + wide_head * dout_head + channel[None, :]
        dout = tl.load(at, mask, other=0)
        at = token * heads + head
        total = tl.load(total_ptr + at, head < heads, other=float("inf"))[:, None]
        delta = tl.load(delta_ptr + at, head < heads, other=0)[:, None]
        start = tl.load(ranges_ptr + token * 4).to(tl.int64)
        count = tl.minimum(tl.load(ranges_ptr + token * 4 + 1), window)
        named = there & (row >= start) & (row < start + count)
        scores = tl.dot(q, tl.trans(rows), input_precision="ieee") * (scale * LOG2E)
        p = tl.where(named[None, :], tl.exp2(scores - total), 0.0)
        ds = p * (tl.dot(dout, tl.trans(rows), input_precision="ieee") - delta)
        if dlse_ptr is not None:
            lse = tl.load(lse_ptr + at, head < heads, other=float("inf"))[:, None] * LOG2E
            lse = tl.where(lse > float("-inf"), lse, float("inf"))
            dlse = tl.load(dlse_ptr + at, head < heads, other=0)[:, None]
            ds += dlse * tl.where(named[None, :], tl.exp2(scores - lse), 0.0)
        ds = (ds * scale).to(rows.dtype)
        p = p.to(rows.dtype)
        if TRANSPOSED:
            sums = tl.dot(tl.trans(dout), p, sums)
            sums = tl.dot(tl.trans(q), ds, sums)
        else:
            sums = tl.dot(tl.trans(p), dout, sums, input_precision="ieee")
            sums = tl.dot(tl.trans(ds), q, sums, input_precision="ieee")
    tl.store(place, sums, kept)


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
