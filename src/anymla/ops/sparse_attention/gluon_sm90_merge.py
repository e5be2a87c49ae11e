"""Merge the pieces of every task that was cut: one softmax over the pieces and the sink.

    merge_kernel         tasks that are all cut into the same number of pieces. Grid: tasks x heads
                         of a tile x slices of the channels; a program reads one row of each piece.
    merge_stream_kernel  a stream. Grid: programs of the attention kernel x groups of heads; where a
                         program's range begins in a task, the first such program of the task
                         merges it, row by row of the group, piece by piece.

A piece's result is float16: less its first channels' ``LIFT`` and a power of two for each head,
which is not 1 where float16 would not hold it.

They are launched while the attention kernel still runs, and wait for its end. Results leave as they
are, or rotated back and quantised for the output projection (ROPE_DIM).
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops._triton_epilogue import store_quantized
from anymla.ops.sparse_attention.float16_range import LIFT

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NO_PIECE = tl.constexpr(-1e30)
_UNLIFT = tl.constexpr(2.0**-LIFT)


@triton.jit
def _weight(sums_ptr, at, there):
    """Reference exponents of pieces, and with them the sums and what to multiply parts by."""
    top = tl.load(sums_ptr + at * 4, mask=there, other=_NO_PIECE)
    sums = tl.load(sums_ptr + at * 4 + 1, mask=there, other=0.0)
    return top, sums, sums * tl.load(sums_ptr + at * 4 + 2, mask=there, other=0.0)


@triton.jit
def _merge_head(
    part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, slot, others, count, row, token, head, part, H,
    out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
    AT_ONCE: tl.constexpr, SINK: tl.constexpr, LIFTED: tl.constexpr, ROPE_DIM: tl.constexpr,
    TYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """WIDTH channels of a head from its pieces: ``slot``, ``others`` + 1, ``others`` + 2 ..

    One warp, and nothing goes through shared memory.
    """
    channel = part * WIDTH + tl.arange(0, WIDTH)
    pieces = tl.arange(0, MOST)
    there = pieces < count
    at = tl.where(pieces == 0, slot, others + pieces).to(tl.int64) * ROWS + row
    if MOST == AT_ONCE:
        # Asked for at once, before anything is computed.
        values = tl.load(
            part_ptr + at[:, None] * CHANNELS + channel[None, :], mask=there[:, None], other=0.0,
            volatile=True,
        )  # fmt: skip
    top, sums, factor = _weight(sums_ptr, at, there)
    highest = tl.max(top, 0)
    total = tl.sum(sums * tl.exp2(top - highest), 0)
    bottom = total
    if SINK:
        bottom += tl.exp2(tl.load(sink_ptr + head) * _LOG2E - highest)
    if MOST == AT_ONCE:
        value = tl.sum(values.to(tl.float32) * (factor * tl.exp2(top - highest))[:, None], 0)
    else:
        value = tl.zeros([WIDTH], tl.float32)
        for start in range(0, count, AT_ONCE):
            some = start + tl.arange(0, AT_ONCE)
            here = tl.where(some == 0, slot, others + some).to(tl.int64) * ROWS + row
            listed = some < count
            tops, _, factors = _weight(sums_ptr, here, listed)
            weight = factors * tl.exp2(tops - highest)
            rows_of = part_ptr + here[:, None] * CHANNELS + channel[None, :]
            values = tl.load(rows_of, mask=listed[:, None], other=0.0)
            value += tl.sum(values.to(tl.float32) * weight[:, None], 0)
    value = value * tl.where(channel < LIFTED, _UNLIFT, 1.0)
    value = value * tl.where(total == 0, 0.0, 1.0 / bottom)
    if ROPE_DIM > 0:
        store_quantized(
            value[None, :], (part * WIDTH).to(tl.int32), token, head.to(tl.int32), H, out_ptr,
            scales_ptr, positions_ptr, table_ptr, angles, 1, WIDTH, CHANNELS, ROPE_DIM, TYPE,
            NATIVE,
        )  # fmt: skip
    else:
        to = out_ptr + token * out_token + head * out_head + channel
        tl.store(to, value.to(out_ptr.dtype.element_ty))
    if part == 0:
        lse = tl.where(total == 0, empty, (highest + tl.log2(total)) * _LN2)
        tl.store(lse_ptr + token * H + head, lse)


@triton.jit
def _merge_group(
    part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, first, splits, row, token, head, H,
    out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr,
    SINK: tl.constexpr, LIFTED: tl.constexpr, ROPE_DIM: tl.constexpr, TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """GROUP heads from few pieces, piece by piece."""
    heads = tl.arange(0, GROUP)
    there = head + heads < H
    channel = tl.arange(0, CHANNELS)
    highest = tl.full([GROUP], _NO_PIECE, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    value = tl.zeros([GROUP, CHANNELS], tl.float32)
    for piece in tl.static_range(MOST):
        listed = there & (heads * 0 + piece < splits)
        at = (first + piece) * ROWS + row + heads
        values = tl.load(
            part_ptr + at[:, None] * CHANNELS + channel[None, :], mask=listed[:, None], other=0.0
        )
        top, sums, factor = _weight(sums_ptr, at, listed)
        peak = tl.maximum(highest, top)
        decay, weight = tl.exp2(highest - peak), tl.exp2(top - peak)
        total = total * decay + sums * weight
        value = value * decay[:, None] + values.to(tl.float32) * (factor * weight)[:, None]
        highest = peak
    bottom = total
    if SINK:
        sink = tl.load(sink_ptr + head + heads, mask=there, other=0.0)
        bottom += tl.exp2(sink * _LOG2E - highest)
    value = value * tl.where(total == 0, 0.0, 1.0 / bottom)[:, None]
    value = value * tl.where(channel < LIFTED, _UNLIFT, 1.0)[None, :]
    if ROPE_DIM > 0:
        store_quantized(
            value, 0, token, head.to(tl.int32), H, out_ptr, scales_ptr, positions_ptr, table_ptr,
            angles, GROUP, CHANNELS, CHANNELS, ROPE_DIM, TYPE, NATIVE,
        )  # fmt: skip
    else:
        to = out_ptr + token * out_token + (head + heads)[:, None] * out_head + channel[None, :]
        tl.store(to, value.to(out_ptr.dtype.element_ty), mask=there[:, None])
    lse = tl.where(total == 0, empty, (highest + tl.log2(total)) * _LN2)
    tl.store(lse_ptr + token * H + head + heads, lse, mask=there)


@triton.jit(do_not_specialize=["H", "splits", "first_task", "rows", "angles"])
def merge_kernel(
    part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, order_ptr, H, splits, first_task, rows,
    out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    MOST: tl.constexpr, AT_ONCE: tl.constexpr, SINK: tl.constexpr, PDL: tl.constexpr,
    ORDERED: tl.constexpr, LIFTED: tl.constexpr, ROPE_DIM: tl.constexpr, TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """See the file.

    Args:
        part_ptr: float16 [slots, ROWS, CHANNELS].
        sums_ptr: float32 [slots, ROWS, 4]: reference exponent, sum, factor of the piece, and room.
        sink_ptr: float32 [H].
        out_ptr: [T, H, CHANNELS]; codes if ROPE_DIM is not 0.
        lse_ptr: float32 [T, H].
        order_ptr: int32 [T], tokens; see ORDERED.
        H: heads.
        splits: pieces of a task.
        first_task: tasks before it were not cut.
        rows: heads of a tile that there are, at most ROWS.
        out_token: stride of out.
        out_head: stride of out.
        empty: lse of a token without rows.
        scales_ptr: as in ``store_quantized``, like the next three and the last three.
        positions_ptr: likewise.
        table_ptr: likewise.
        angles: likewise.
        ROWS: heads of a tile.
        CHANNELS: of a row.
        WIDTH: channels of a program.
        GROUP: heads of a program, whose channels are all, if it is not 1.
        MOST: a power of two, at least the number of pieces of any task.
        AT_ONCE: pieces that are read at a time, a power of two.
        SINK: there is one.
        PDL: launched before the attention kernel ended.
        ORDERED: tasks are of the tokens in this order.
        LIFTED: channels before this one are stored times 2^``LIFT``.
        ROPE_DIM: see above, or 0.
        TYPE: see above.
        NATIVE: see above.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slices: tl.constexpr = CHANNELS // WIDTH
    program = tl.program_id(0).to(tl.int64)
    part = program % slices
    groups = tl.cdiv(rows, GROUP)
    row = program // slices % groups * GROUP
    number = program // slices // groups
    task = first_task + number
    tiles = tl.cdiv(H, ROWS)
    token = task // tiles
    if ORDERED:
        tasks = first_task + tl.num_programs(0) // (slices * groups)
        if tl.load(order_ptr + tasks // tiles) != 0:
            return
        token = tl.load(order_ptr + token).to(tl.int64)
    head = task % tiles * ROWS + row
    if head >= H:
        return
    first = number * splits
    if GROUP > 1:
        _merge_group(
            part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, first, splits, row, token, head, H,
            out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
            ROWS, CHANNELS, GROUP, MOST, SINK, LIFTED, ROPE_DIM, TYPE, NATIVE,
        )  # fmt: skip
    else:
        _merge_head(
            part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, first, first, splits, row, token, head,
            part, H, out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
            ROWS, CHANNELS, WIDTH, MOST, AT_ONCE, SINK, LIFTED, ROPE_DIM, TYPE, NATIVE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H", "tasks", "programs", "angles"])
def merge_stream_kernel(
    part_ptr, sums_ptr, spans_ptr, sink_ptr, out_ptr, lse_ptr, H, tasks, programs,
    out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr,
    AT_ONCE: tl.constexpr, SINK: tl.constexpr, PDL: tl.constexpr, LIFTED: tl.constexpr,
    ROPE_DIM: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """See the file. Arguments that ``merge_kernel`` does not have are these.

    spans_ptr: int32 [tasks + programs, 2]: first and last program of each task, then for each
    program the task that its range begins in the middle of, or -1. tasks, programs: of the
    attention kernel. GROUP: heads of a program.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    groups: tl.constexpr = ROWS // GROUP
    program = tl.program_id(0) // groups
    task = tl.load(spans_ptr + (tasks + program) * 2).to(tl.int64)
    if task < 0:
        return
    first = tl.load(spans_ptr + task * 2)
    last = tl.load(spans_ptr + task * 2 + 1)
    if first != program - 1:
        return
    tiles = tl.cdiv(H, ROWS)
    token = task // tiles
    for number in tl.static_range(GROUP):
        row = (tl.program_id(0) % groups) * GROUP + number
        head = task % tiles * ROWS + row
        if head < H:
            _merge_head(
                part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, first, programs + first,
                last + 1 - first, row, token, head, program * 0, H, out_token, out_head, empty,
                scales_ptr, positions_ptr, table_ptr, angles, ROWS, CHANNELS, CHANNELS, MOST,
                AT_ONCE, SINK, LIFTED, ROPE_DIM, TYPE, NATIVE,
            )  # fmt: skip
