"""Gradients of prefill attention with the channels divided among the warps, for Intel's GPUs.

The kernels compute what ``backward_kernel`` and ``window_rows_kernel`` of
``triton_prefill_backward`` do. There each warp holds whole rows of an operand; a thread of Xe has
16 KiB of registers, which one block of rows would fill. Here a warp has its own channels of
everything: of q, dout, rows, dq and of what is added to rows. Scores and <dout, row> are sums over
the warps.

Intel's compiler divides a product among warps by rows alone if it sees another product that it
depends on in the same block of code, and fails at some that merely read the same rows. Therefore
each product stands in a block of its own, under a condition that always holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops.attention.triton_prefill_backward import (
    ATOMICS,
    COLUMNS,
    LOG2E,
    NOTHING,
    _probabilities,
)


@triton.jit
def _load_whole(base, there, FIRST: tl.constexpr, LIMIT: tl.constexpr, BC: tl.constexpr,
                WIDE: tl.constexpr):  # fmt: skip
    """Load channels FIRST to FIRST + BC of rows at pointers [r], zeros from LIMIT on."""
    channel = FIRST + tl.arange(0, BC)
    inside = there[:, None] & (channel < LIMIT)[None, :]
    x = tl.load(base[:, None] + channel[None, :], inside, other=0.0)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def _load_divided(base, there, LIMIT: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
                  WIDE: tl.constexpr):  # fmt: skip
    """Load the first BC channels of rows at pointers [r] as [PARTS, r, BC / PARTS]."""
    part = (tl.arange(0, PARTS) * (BC // PARTS))[:, None, None]
    channel = part + tl.arange(0, BC // PARTS)[None, None, :]
    inside = there[None, :, None] & (channel < LIMIT)
    x = tl.load(base[None, :, None] + channel, inside, other=0.0)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def _load_rest(base, there, CHANNELS: tl.constexpr, BC: tl.constexpr, TAIL: tl.constexpr,
               PARTS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Load the TAIL channels behind the first BC as [PARTS, r, n], zeros behind each part's own.

    A matrix instruction takes 16 channels.
    """
    EACH: tl.constexpr = TAIL // PARTS
    mine = tl.arange(0, 16 if EACH < 16 else EACH)[None, None, :]
    channel = BC + (tl.arange(0, PARTS) * EACH)[:, None, None] + mine
    inside = (mine < EACH) & (channel < CHANNELS)
    x = tl.load(base[None, :, None] + channel, there[None, :, None] & inside, other=0.0)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def _divided(rows, PARTS: tl.constexpr):
    """Return rows [r, BC] as keys [PARTS, BC / PARTS, r]."""
    parts = tl.reshape(rows, (rows.shape[0], PARTS, rows.shape[1] // PARTS))
    return tl.permute(parts, (1, 2, 0))


@triton.jit(do_not_specialize=["size", "window", "width", "heads"])
def divided_backward_kernel(
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
    WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute dq of a token's block of heads, and its addends to rows; see ``backward_kernel``.

    At most BC channels are the value. WIDE is True to multiply in float32.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    line = token * tl.num_programs(1) + block
    start = tl.load(ranges_ptr + token * 4).to(tl.int64)
    near = tl.maximum(tl.minimum(tl.load(ranges_ptr + token * 4 + 1), window), 0)
    base = tl.load(ranges_ptr + token * 4 + 2).to(tl.int64)
    more = tl.maximum(tl.minimum(tl.load(ranges_ptr + token * 4 + 3), width), 0)
    head = block * BH + tl.arange(0, BH)
    there = head < heads
    live = heads > 0
    filled = size > 0
    of_q = q_ptr + token * q_token + head.to(tl.int64) * q_head
    of_dout = dout_ptr + token * dout_token + head.to(tl.int64) * dout_head
    q_parts = _load_divided(of_q, there, CHANNELS, BC, PARTS, WIDE)
    dout_parts = _load_divided(of_dout, there, VALUES, BC, PARTS, WIDE)
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
    channel = tl.arange(0, BC)
    inside = channel < CHANNELS
    dq = tl.zeros([BH, BC], tl.float32)
    if TAIL > 0:
        q_rest = _load_rest(of_q, there, CHANNELS, BC, TAIL, PARTS, WIDE)
        behind = BC + tl.arange(0, TAIL)
        known = behind < CHANNELS
        dq_tail = tl.zeros([BH, TAIL], tl.float32)
    if lists_ptr is not None:
        lists_ptr += token * width
    blocks = tl.cdiv(near, BN)
    # One loop over both ranges: two would be twice the code.
    for step in range(blocks + tl.cdiv(more, BN)):
        second = step >= blocks
        column = tl.where(second, step - blocks, step) * BN + tl.arange(0, BN)
        used = column < tl.where(second, more, near)
        if lists_ptr is None:
            slot = tl.where(second, base, start) + column
            named = used & (slot >= 0) & (slot < size)
        else:
            listed = tl.load(lists_ptr + column, second & used, other=0)
            slot = tl.where(second, base + listed, start + column)
            named = used & (listed >= 0) & (slot >= 0) & (slot < size)
        at = rows_ptr + slot * row_stride
        rows = _load_whole(at, named, 0, CHANNELS, BC, WIDE)
        keys = _divided(rows, PARTS)
        scores = tl.zeros([PARTS, BH, BN], tl.float32)
        dp = tl.zeros([PARTS, BH, BN], tl.float32)
        if live:
            scores = tl.dot(q_parts, keys, scores, input_precision="ieee")
        if filled:
            dp = tl.dot(dout_parts, keys, dp, input_precision="ieee")
        if TAIL > 0:
            rest = tl.permute(_load_rest(at, named, CHANNELS, BC, TAIL, PARTS, WIDE), (0, 2, 1))
            if live:
                scores = tl.dot(q_rest, rest, scores, input_precision="ieee")
        p, ds = _probabilities(tl.sum(scores, 0), tl.sum(dp, 0), total, delta, lse, dlse, scale)
        if mass_ptr is not None:
            sums = tl.where(named, tl.sum(p, 0), 0.0)
            tl.store(mass_ptr + line * width + column, sums, second & (column < width))
        ds = (ds * scale).to(rows.dtype)
        p = p.to(rows.dtype)
        if QUERIES:
            if live:
                dq = tl.dot(ds, rows, dq, input_precision="ieee")
            if TAIL > 0:
                tail = _load_whole(at, named, BC, CHANNELS, TAIL, WIDE)
                if filled:
                    dq_tail = tl.dot(ds, tail, dq_tail, input_precision="ieee")
        if ROWS != NOTHING:
            # Windows' addends are made by tiles of rows where others are written to columns.
            adds = second if ROWS == COLUMNS else live
            each = tl.zeros([BN, BC], tl.float32)
            q = _load_whole(of_q, there, 0, CHANNELS, BC, WIDE)
            if adds:
                each = tl.dot(tl.trans(ds), q, each, input_precision="ieee")
            dout = _load_whole(of_dout, there, 0, VALUES, BC, WIDE)
            if adds:
                each = tl.dot(tl.trans(p), dout, each, input_precision="ieee")
            first = slot if ROWS == ATOMICS else line * width + column
            to = drows_ptr + (first * CHANNELS)[:, None]
            wanted = named if ROWS == ATOMICS else named & second
            if ROWS == ATOMICS:
                mask = wanted[:, None] & inside[None, :]
                tl.atomic_add(to + channel[None, :], each, mask, sem="relaxed")
            else:
                tl.store(to + channel[None, :], each, wanted[:, None] & inside[None, :])
            if TAIL > 0:
                each_tail = tl.zeros([BN, TAIL], tl.float32)
                q_tail = _load_whole(of_q, there, BC, CHANNELS, TAIL, WIDE)
                if adds:
                    each_tail = tl.dot(tl.trans(ds), q_tail, each_tail, input_precision="ieee")
                mask = wanted[:, None] & known[None, :]
                if ROWS == ATOMICS:
                    tl.atomic_add(to + behind[None, :], each_tail, mask, sem="relaxed")
                else:
                    tl.store(to + behind[None, :], each_tail, mask)
    if QUERIES:
        to = dq_ptr + (place * CHANNELS)[:, None]
        kept = there[:, None] & inside[None, :]
        tl.store(to + channel[None, :], dq.to(dq_ptr.dtype.element_ty), kept)
        if TAIL > 0:
            kept = there[:, None] & known[None, :]
            tl.store(to + behind[None, :], dq_tail.to(dq_ptr.dtype.element_ty), kept)


@triton.jit(do_not_specialize=["size", "window", "heads"])
def divided_window_kernel(
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
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add to a tile of rows what the windows add that reach it; see ``window_rows_kernel``."""
    tile = tl.program_id(0)
    row = tile.to(tl.int64) * BN + tl.arange(0, BN)
    there = row < size
    live = heads > 0
    filled = size > 0
    of_row = rows_ptr + row * row_stride
    keys = _divided(_load_whole(of_row, there, 0, CHANNELS, BC, WIDE), PARTS)
    channel = tl.arange(0, BC)
    place = drows_ptr + row[:, None] * CHANNELS + channel[None, :]
    kept = there[:, None] & (channel < CHANNELS)[None, :]
    sums = tl.load(place, kept, other=0)
    if TAIL > 0:
        rest = tl.permute(_load_rest(of_row, there, CHANNELS, BC, TAIL, PARTS, WIDE), (0, 2, 1))
        behind = BC + tl.arange(0, TAIL)
        place_tail = drows_ptr + row[:, None] * CHANNELS + behind[None, :]
        kept_tail = there[:, None] & (behind < CHANNELS)[None, :]
        sums_tail = tl.load(place_tail, kept_tail, other=0)
    first, last = tl.load(users_ptr + tile * 2), tl.load(users_ptr + tile * 2 + 1)
    blocks = (heads + BH - 1) // BH
    for step in range(first * blocks, last * blocks):
        token = (step // blocks).to(tl.int64)
        head = step % blocks * BH + tl.arange(0, BH)
        here = head < heads
        of_q = q_ptr + token * q_token + head.to(tl.int64) * q_head
        of_dout = dout_ptr + token * dout_token + head.to(tl.int64) * dout_head
        at = token * heads + head
        total = tl.load(total_ptr + at, here, other=float("inf"))[:, None]
        delta = tl.load(delta_ptr + at, here, other=0)[:, None]
        lse = None
        dlse = None
        if dlse_ptr is not None:
            lse = tl.load(lse_ptr + at, here, other=float("inf"))[:, None] * LOG2E
            lse = tl.where(lse > float("-inf"), lse, float("inf"))
            dlse = tl.load(dlse_ptr + at, here, other=0)[:, None]
        start = tl.load(ranges_ptr + token * 4).to(tl.int64)
        count = tl.minimum(tl.load(ranges_ptr + token * 4 + 1), window)
        named = (there & (row >= start) & (row < start + count))[None, :]
        scores = tl.zeros([PARTS, BH, BN], tl.float32)
        dp = tl.zeros([PARTS, BH, BN], tl.float32)
        q_parts = _load_divided(of_q, here, CHANNELS, BC, PARTS, WIDE)
        if live:
            scores = tl.dot(q_parts, keys, scores, input_precision="ieee")
        dout_parts = _load_divided(of_dout, here, VALUES, BC, PARTS, WIDE)
        if filled:
            dp = tl.dot(dout_parts, keys, dp, input_precision="ieee")
        if TAIL > 0:
            q_rest = _load_rest(of_q, here, CHANNELS, BC, TAIL, PARTS, WIDE)
            if live:
                scores = tl.dot(q_rest, rest, scores, input_precision="ieee")
        p, ds = _probabilities(tl.sum(scores, 0), tl.sum(dp, 0), total, delta, lse, dlse, scale)
        q = _load_whole(of_q, here, 0, CHANNELS, BC, WIDE)
        ds = tl.where(named, ds * scale, 0.0).to(q.dtype)
        p = tl.where(named, p, 0.0).to(q.dtype)
        if live:
            sums = tl.dot(tl.trans(ds), q, sums, input_precision="ieee")
        dout = _load_whole(of_dout, here, 0, VALUES, BC, WIDE)
        if live:
            sums = tl.dot(tl.trans(p), dout, sums, input_precision="ieee")
        if TAIL > 0:
            q_tail = _load_whole(of_q, here, BC, CHANNELS, TAIL, WIDE)
            if live:
                sums_tail = tl.dot(tl.trans(ds), q_tail, sums_tail, input_precision="ieee")
    tl.store(place, sums, kept)
    if TAIL > 0:
        tl.store(place_tail, sums_tail, kept_tail)
