"""Gradients of prefill attention: of queries, and what each query adds to the rows.

Query by query, a CTA takes one token and a block of heads, which name the same rows. Since rows are
keys and values, q and dout are one operand: [q; dout] rows^T holds scores and the gradient of
probabilities, and what is added to a row is [scale dS; P]^T [q; dout].
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
        # Triton takes a constant below 2^-126 for a double.
        sums = tl.exp2((lse - top) * LOG2E) + tl.exp2((sink - top) * LOG2E)
        total = tl.where(top == float("inf"), top, top + tl.log2(tl.maximum(sums, 1e-37)) / LOG2E)
        finite = tl.abs(sink) < float("inf")
        share = tl.where(finite, tl.exp2((sink - tl.where(finite, total, 0)) * LOG2E), 0)
        # A token without rows has no output, whatever its gradient holds.
        some = finite & (lse > float("-inf"))
        tl.store(dsink_ptr + place, tl.where(some, -share * delta, 0), there)
    tl.store(total_ptr + place, total * LOG2E, there)


@triton.jit
def _channels(i: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr, TAIL: tl.constexpr):
    """Number the channels of a tile: BC / PARTS of the first BC, or the TAIL behind them."""
    if i < PARTS:
        return i * (BC // PARTS) + tl.arange(0, BC // PARTS)
    else:
        return BC + tl.arange(0, TAIL)


@triton.jit
def _load_parts(
    base, mask, CHANNELS: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """Load rows of channels from pointers [r, 1], as PARTS tiles [r, BC / PARTS] and a tail."""
    parts = ()
    for i in tl.static_range(PARTS + (TAIL > 0)):
        channel = _channels(i, BC, PARTS, TAIL)
        kept = mask & (channel < CHANNELS)[None, :]
        parts += (tl.load(base + channel[None, :], kept, other=0),)
    return parts


@triton.jit
def _load_pairs(
    q_ptr, dout_ptr, token, block, heads, q_token, q_head, dout_token, dout_head,
    CHANNELS: tl.constexpr, VALUES: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
    TAIL: tl.constexpr, BH: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Load q and dout of a block of heads below each other, in tiles of all 2 BH.

    Where only VALUES channels of a row are its value, dout is 0 in the others.

    Triton spreads warps over the rows alone of a product that another one depends on; those beyond
    its rows would compute it again. Both products at once have twice as many rows. Eight heads of q
    are followed by the same heads of dout: a thread of a matrix instruction holds rows r and r + 8,
    which are the score and <dout, row> of one head.
    """
    line = tl.arange(0, 2 * BH)
    head = block * BH + line // 16 * 8 + line % 8
    wide = head[:, None].to(tl.int64)
    there = (head < heads)[:, None]
    first = (line // 8 % 2 == 0)[:, None]
    of_q = q_ptr + token * q_token + wide * q_head
    of_dout = dout_ptr + token * dout_token + wide * dout_head
    if TRANSPOSED:
        # A choice of addresses leaves one copy in shared memory for both of its directions.
        both = tl.where(first, of_q, of_dout)
        if VALUES == CHANNELS:
            return _load_parts(both, there, CHANNELS, BC, PARTS, TAIL)
        else:
            limit = tl.where(first, CHANNELS, VALUES)
            pairs = ()
            for i in tl.static_range(PARTS + (TAIL > 0)):
                channel = _channels(i, BC, PARTS, TAIL)[None, :]
                pairs += (tl.load(both + channel, there & (channel < limit), other=0),)
            return pairs
    else:
        # AMD's compiler takes no choice of addresses.
        q = _load_parts(of_q, there & first, CHANNELS, BC, PARTS, TAIL)
        dout = _load_parts(of_dout, there & (first == 0), VALUES, BC, PARTS, TAIL)
        pairs = ()
        for i in tl.static_range(PARTS + (TAIL > 0)):
            pairs += (tl.where(first, q[i], dout[i]),)
        return pairs


@triton.jit
def _products(pairs, rows, BH: tl.constexpr, BN: tl.constexpr):
    """Multiply pairs with rows: <q, row> and <dout, row>, each [BH, BN]."""
    both = tl.dot(pairs[0], tl.trans(rows[0]), input_precision="ieee")
    for i in tl.static_range(1, len(rows)):
        both = tl.dot(pairs[i], tl.trans(rows[i]), both, input_precision="ieee")
    both = tl.permute(tl.reshape(both, (BH // 8, 2, 8, BN)), (0, 2, 3, 1))
    scores, dp = tl.split(both)
    return tl.reshape(scores, (BH, BN)), tl.reshape(dp, (BH, BN))


@triton.jit
def _weights(ds, p, BH: tl.constexpr, BN: tl.constexpr):
    """Arrange weights of q and of dout [BH, BN] as pairs are, [2 BH, BN]."""
    both = tl.reshape(tl.join(ds, p), (BH // 8, 8, BN, 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (2 * BH, BN))


@triton.jit
def _probabilities(scores, dp, total, delta, lse, dlse, scale):
    """Compute p and the gradient of scaled scores in float32, [BH, BN].

    Columns that name no row have scores of 0, which may be far above the denominator. What they
    give is multiplied with zeros or left out, so it only must be finite, also in float16. Of those
    that name one no probability is above 1.
    """
    scores *= scale * LOG2E
    p = tl.exp2(tl.minimum(scores - total, 8.0))
    ds = p * (dp - delta)
    if dlse is not None:
        ds += dlse * tl.exp2(tl.minimum(scores - lse, 8.0))
    return p, ds


@triton.jit
def _differentiate(
    dq, drows_ptr, mass_ptr, pairs, rows_ptr, total, delta, lse, dlse, slot, named, column, line,
    scale, row_stride, width, CHANNELS: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
    TAIL: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Add to dq what BN rows add, and to rows what the heads add; return dq.

    ``line`` is the token and block of heads as a row number of ``mass_ptr``, [lines, width].
    """
    rows = _load_parts(
        rows_ptr + slot[:, None] * row_stride, named[:, None], CHANNELS, BC, PARTS, TAIL
    )
    scores, dp = _products(pairs, rows, BH, BN)
    p, ds = _probabilities(scores, dp, total, delta, lse, dlse, scale)
    if mass_ptr is not None:
        sums = tl.where(named, tl.sum(p, 0), 0.0)
        tl.store(mass_ptr + line * width + column, sums, column < width)
    ds = (ds * scale).to(rows[0].dtype)
    if QUERIES:
        sums = ()
        for i in tl.static_range(len(rows)):
            sums += (tl.dot(ds, rows[i], dq[i], input_precision="ieee"),)
        dq = sums
    if ROWS != NOTHING:
        weights = _weights(ds, p.to(ds.dtype), BH, BN)
        first = (slot if ROWS == ATOMICS else line * width + column) * CHANNELS
        for i in tl.static_range(len(rows)):
            channel = _channels(i, BC, PARTS, TAIL)
            inside = channel < CHANNELS
            # The interpreter does not broadcast the mask of an atomic.
            if TRANSPOSED:
                each = tl.dot(tl.trans(pairs[i]), weights)
                target = drows_ptr + first[None, :] + channel[:, None]
                used = named[None, :] & inside[:, None]
            else:
                each = tl.dot(tl.trans(weights), pairs[i], input_precision="ieee")
                target = drows_ptr + first[:, None] + channel[None, :]
                used = named[:, None] & inside[None, :]
            if ROWS == ATOMICS:
                tl.atomic_add(target, each, mask=used, sem="relaxed")
            else:
                tl.store(target, each, mask=used)
    return dq


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
    VALUES: tl.constexpr,
    BC: tl.constexpr,
    TAIL: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Compute dq of a token's block of heads, and its addends to rows.

    ``ROWS`` says what ``drows_ptr`` is: [N, CHANNELS] sums for ATOMICS; for COLUMNS a row for each
    token, block of heads and column of the second range, of which those that name no row are left
    as they are, and nothing for the first range.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    line = token * tl.num_programs(1) + block
    # First what addresses depend on.
    start = tl.load(ranges_ptr + token * 4).to(tl.int64)
    near = tl.minimum(tl.load(ranges_ptr + token * 4 + 1), window)
    base = tl.load(ranges_ptr + token * 4 + 2).to(tl.int64)
    more = tl.minimum(tl.load(ranges_ptr + token * 4 + 3), width)
    head = block * BH + tl.arange(0, BH)
    there = head < heads
    pairs = _load_pairs(
        q_ptr, dout_ptr, token, block, heads, q_token, q_head, dout_token, dout_head,
        CHANNELS, VALUES, BC, PARTS, TAIL, BH, TRANSPOSED,
    )  # fmt: skip
    place = token * heads + head
    # Heads that are not there weigh nothing.
    total = tl.load(total_ptr + place, there, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + place, there, other=0)[:, None]
    lse = None
    dlse = None
    if dlse_ptr is not None:
        lse = tl.load(lse_ptr + place, there, other=float("inf"))[:, None] * LOG2E
        dlse = tl.load(dlse_ptr + place, there, other=0)[:, None]
        lse = tl.where(lse > float("-inf"), lse, float("inf"))
    dq = ()
    for i in tl.static_range(PARTS + (TAIL > 0)):
        dq += (tl.zeros([BH, BC // PARTS if i < PARTS else TAIL], tl.float32),)

    columns = tl.arange(0, BN)
    for k in tl.range(0, near, BN, num_stages=STAGES):
        column = k + columns
        slot = start + column
        named = (column < near) & (slot >= 0) & (slot < size)
        dq = _differentiate(
            dq, drows_ptr, None, pairs, rows_ptr, total, delta, lse, dlse, slot, named, column,
            line, scale, row_stride, width, CHANNELS, BC, PARTS, TAIL, BH, BN, QUERIES,
            ROWS if ROWS == ATOMICS else NOTHING, TRANSPOSED,
        )  # fmt: skip
    listed = columns
    if lists_ptr is not None:
        lists_ptr += token * width
        if STAGES > 1:
            listed = tl.load(lists_ptr + columns, columns < more, other=-1)
    for k in tl.range(0, more, BN, num_stages=STAGES):
        column = k + columns
        if lists_ptr is None:
            listed = column
        elif STAGES == 1:
            listed = tl.load(lists_ptr + column, column < more, other=-1)
        slot = base + listed
        named = (column < more) & (listed >= 0) & (slot >= 0) & (slot < size)
        if lists_ptr is not None and STAGES > 1:
            # Early, so that the addresses of the next rows are there when they are to be loaded.
            listed = tl.load(lists_ptr + BN + column, column + BN < more, other=-1)
        dq = _differentiate(
            dq, drows_ptr, mass_ptr, pairs, rows_ptr, total, delta, lse, dlse, slot, named, column,
            line, scale, row_stride, width, CHANNELS, BC, PARTS, TAIL, BH, BN, QUERIES, ROWS,
            TRANSPOSED,
        )  # fmt: skip
    if QUERIES:
        for i in tl.static_range(PARTS + (TAIL > 0)):
            channel = _channels(i, BC, PARTS, TAIL)
            at = dq_ptr + (place * CHANNELS)[:, None] + channel[None, :]
            kept = there[:, None] & (channel < CHANNELS)[None, :]
            tl.store(at, dq[i].to(dq_ptr.dtype.element_ty), kept)


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
    VALUES: tl.constexpr,
    BC: tl.constexpr,
    TAIL: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Add to a tile of rows what the windows add that reach it, in ascending order of tokens.

    A row that a token does not see gets zeros from it, so its sum does not depend on its tile.
    """
    tile = tl.program_id(0)
    row = tile.to(tl.int64) * BN + tl.arange(0, BN)
    there = row < size
    rows = _load_parts(rows_ptr + row[:, None] * row_stride, there[:, None], CHANNELS, BC, 1, TAIL)
    places = ()
    masks = ()
    sums = ()
    for i in tl.static_range(len(rows)):
        channel = _channels(i, BC, 1, TAIL)
        inside = channel < CHANNELS
        if TRANSPOSED:
            places += (drows_ptr + row[None, :] * CHANNELS + channel[:, None],)
            masks += (there[None, :] & inside[:, None],)
        else:
            places += (drows_ptr + row[:, None] * CHANNELS + channel[None, :],)
            masks += (there[:, None] & inside[None, :],)
        sums += (tl.load(places[i], masks[i], other=0),)
    first, last = tl.load(users_ptr + tile * 2), tl.load(users_ptr + tile * 2 + 1)
    blocks = (heads + BH - 1) // BH
    for step in range(first * blocks, last * blocks):
        token = (step // blocks).to(tl.int64)
        block = step % blocks
        head = block * BH + tl.arange(0, BH)
        pairs = _load_pairs(
            q_ptr, dout_ptr, token, block, heads, q_token, q_head, dout_token, dout_head,
            CHANNELS, VALUES, BC, 1, TAIL, BH, TRANSPOSED,
        )  # fmt: skip
        at = token * heads + head
        total = tl.load(total_ptr + at, head < heads, other=float("inf"))[:, None]
        delta = tl.load(delta_ptr + at, head < heads, other=0)[:, None]
        lse = None
        dlse = None
        if dlse_ptr is not None:
            lse = tl.load(lse_ptr + at, head < heads, other=float("inf"))[:, None] * LOG2E
            lse = tl.where(lse > float("-inf"), lse, float("inf"))
            dlse = tl.load(dlse_ptr + at, head < heads, other=0)[:, None]
        start = tl.load(ranges_ptr + token * 4).to(tl.int64)
        count = tl.minimum(tl.load(ranges_ptr + token * 4 + 1), window)
        named = (there & (row >= start) & (row < start + count))[None, :]
        scores, dp = _products(pairs, rows, BH, BN)
        p, ds = _probabilities(scores, dp, total, delta, lse, dlse, scale)
        ds = tl.where(named, ds * scale, 0.0).to(rows[0].dtype)
        weights = _weights(ds, tl.where(named, p, 0.0).to(ds.dtype), BH, BN)
        added = ()
        for i in tl.static_range(len(rows)):
            if TRANSPOSED:
                added += (tl.dot(tl.trans(pairs[i]), weights, sums[i]),)
            else:
                added += (tl.dot(tl.trans(weights), pairs[i], sums[i], input_precision="ieee"),)
        sums = added
    for i in tl.static_range(len(rows)):
        tl.store(places[i], sums[i], masks[i])


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


@triton.jit(do_not_specialize=["count", "size"])
def sum_parts_kernel(
    drows_ptr, parts_ptr, users_ptr, count, size,
    CHANNELS: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Add to the rows of tiles that have users the ``count`` parts of their sums, in order.

    Args:
        drows_ptr: gradient of the rows, which is added to, float32 [size, CHANNELS].
        parts_ptr: parts of each row's gradient, float32 [count, size, CHANNELS].
        users_ptr: first user and end of the last one of each tile of BN rows, int32 [tiles, 2].
        count: number of parts.
        size: number of rows.
        CHANNELS: channels of a row, a power of two.
        BN: rows of a tile.
        BR: rows that a program takes.
    """
    first_row = tl.program_id(0) * BR
    tile = first_row // BN
    if tl.load(users_ptr + tile * 2) < tl.load(users_ptr + tile * 2 + 1):
        row = first_row.to(tl.int64) + tl.arange(0, BR)
        at = row[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        kept = (row < size)[:, None] & (tl.arange(0, CHANNELS) >= 0)[None, :]
        sums = tl.load(drows_ptr + at, kept, other=0)
        part = parts_ptr + at
        for _ in range(count):
            sums += tl.load(part, kept, other=0)
            part += size.to(tl.int64) * CHANNELS
        tl.store(drows_ptr + at, sums, kept)
