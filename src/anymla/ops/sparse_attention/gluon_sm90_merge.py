"""Merge the pieces of every task that was cut: one softmax over the pieces and the sink.

    merge_kernel         tasks that are all cut into the same number of pieces. Grid: tasks x heads
                         of a tile x slices of the channels; a program reads one row of each piece.
    merge_stream_kernel  a stream. Grid: programs of the attention kernel x groups of heads; where a
                         program's range begins in a task, the first such program of the task
                         merges it, row by row of the group, piece by piece.

They are launched while the attention kernel still runs, and wait for its end. Results leave as they
are, or rotated back and quantised for the output projection (TURNED).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._triton import Build, Target
from anymla.ops.output_projection.triton_turned import store_turned

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NO_PIECE = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["H", "splits", "first_task", "rows", "angles"])
def merge_kernel(
    part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, order_ptr, H, splits, first_task, rows,
    out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
    AT_ONCE: tl.constexpr, SINK: tl.constexpr, EARLY: tl.constexpr, ORDERED: tl.constexpr,
    TURNED: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """See the file.

    Args:
        part_ptr: float32 [slots, ROWS, CHANNELS].
        sums_ptr: float32 [slots, ROWS, 2]: reference exponent and sum.
        sink_ptr: float32 [H].
        out_ptr: [T, H, CHANNELS]; codes if TURNED is not 0.
        lse_ptr: float32 [T, H].
        order_ptr: int32 [T], tokens; see ORDERED.
        H: heads.
        splits: pieces of a task.
        first_task: tasks before it were not cut.
        rows: heads of a tile that there are, at most ROWS.
        out_token: stride of out.
        out_head: stride of out.
        empty: lse of a token without rows.
        scales_ptr: as in ``store_turned``, like the next three and the last three.
        positions_ptr: likewise.
        table_ptr: likewise.
        angles: likewise.
        ROWS: heads of a tile.
        CHANNELS: of a row.
        WIDTH: channels of a program.
        MOST: a power of two, at least the number of pieces of any task.
        AT_ONCE: pieces that are read at a time, a power of two.
        SINK: there is one.
        EARLY: launched before the attention kernel ended.
        ORDERED: tasks are of the tokens in this order.
        TURNED: see above, or 0.
        TYPE: see above.
        NATIVE: see above.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slices: tl.constexpr = CHANNELS // WIDTH
    program = tl.program_id(0).to(tl.int64)
    part = program % slices
    row = program // slices % rows
    number = program // slices // rows
    task = first_task + number
    tiles = tl.cdiv(H, ROWS)
    token = task // tiles
    if ORDERED:
        token = tl.load(order_ptr + token).to(tl.int64)
    head = task % tiles * ROWS + row
    if head >= H:
        return
    first = number * splits
    channel = part * WIDTH + tl.arange(0, WIDTH)
    pieces = tl.arange(0, MOST)
    there = pieces < splits
    slots = (first + pieces) * ROWS + row
    top = tl.load(sums_ptr + slots * 2, mask=there, other=_NO_PIECE)
    sums = tl.load(sums_ptr + slots * 2 + 1, mask=there, other=0.0)
    if MOST == AT_ONCE:
        # Asked for at once, before anything is computed.
        values = tl.load(
            part_ptr + slots[:, None] * CHANNELS + channel[None, :], mask=there[:, None], other=0.0
        )
    highest = tl.max(top, 0)
    total = tl.sum(sums * tl.exp2(top - highest), 0)
    bottom = total
    if SINK:
        bottom += tl.exp2(tl.load(sink_ptr + head) * _LOG2E - highest)
    if MOST == AT_ONCE:
        value = tl.sum(values * tl.exp2(top - highest)[:, None], 0)
    else:
        value = tl.zeros([WIDTH], tl.float32)
        for start in range(0, splits, AT_ONCE):
            some = start + tl.arange(0, AT_ONCE)
            at = (first + some) * ROWS + row
            listed = some < splits
            weight = tl.exp2(tl.load(sums_ptr + at * 2, mask=listed, other=_NO_PIECE) - highest)
            rows_of = part_ptr + at[:, None] * CHANNELS + channel[None, :]
            values = tl.load(rows_of, mask=listed[:, None], other=0.0)
            value += tl.sum(values * weight[:, None], 0)
    value = value * tl.where(total == 0, 0.0, 1.0 / bottom)
    if TURNED > 0:
        store_turned(
            value[None, :], (part * WIDTH).to(tl.int32), token, head.to(tl.int32), H, out_ptr,
            scales_ptr, positions_ptr, table_ptr, angles, 1, WIDTH, CHANNELS, TURNED, TYPE, NATIVE,
        )  # fmt: skip
    else:
        to = out_ptr + token * out_token + head * out_head + channel
        tl.store(to, value.to(out_ptr.dtype.element_ty))
    if part == 0:
        lse = tl.where(total == 0, empty, (highest + tl.log2(total)) * _LN2)
        tl.store(lse_ptr + token * H + head, lse)


@triton.jit(do_not_specialize=["H", "tasks", "programs", "angles"])
def merge_stream_kernel(
    part_ptr, sums_ptr, spans_ptr, sink_ptr, out_ptr, lse_ptr, H, tasks, programs,
    out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, SINK: tl.constexpr,
    EARLY: tl.constexpr, TURNED: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """See the file. Arguments that ``merge_kernel`` does not have are these.

    spans_ptr: int32 [tasks + programs, 2]: first and last program of each task, then for each
    program the task that its range begins in the middle of, or -1. tasks, programs: of the
    attention kernel. GROUP: heads of a program.
    """
    if EARLY:
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
    row = (tl.program_id(0) % groups) * GROUP + tl.arange(0, GROUP)
    tiles = tl.cdiv(H, ROWS)
    token = task // tiles
    head = task % tiles * ROWS + row
    there = head < H
    channel = tl.arange(0, CHANNELS)
    highest = tl.full([GROUP], _NO_PIECE, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    value = tl.zeros([GROUP, CHANNELS], tl.float32)
    for piece in range(first, last + 1):
        slot = tl.where(piece == first, first, programs + piece).to(tl.int64)
        at = slot * ROWS + row
        values = tl.load(
            part_ptr + at[:, None] * CHANNELS + channel[None, :], mask=there[:, None], other=0.0
        )
        top = tl.load(sums_ptr + at * 2, mask=there, other=_NO_PIECE)
        sums = tl.load(sums_ptr + at * 2 + 1, mask=there, other=0.0)
        peak = tl.maximum(highest, top)
        decay, weight = tl.exp2(highest - peak), tl.exp2(top - peak)
        total = total * decay + sums * weight
        value = value * decay[:, None] + values * weight[:, None]
        highest = peak
    bottom = total
    if SINK:
        sink = tl.load(sink_ptr + head, mask=there, other=0.0)
        bottom += tl.exp2(sink * _LOG2E - highest)
    value = value * tl.where(total == 0, 0.0, 1.0 / bottom)[:, None]
    if TURNED > 0:
        store_turned(
            value, 0, token, task % tiles * ROWS + (tl.program_id(0) % groups) * GROUP, H, out_ptr,
            scales_ptr, positions_ptr, table_ptr, angles, GROUP, CHANNELS, CHANNELS, TURNED, TYPE,
            NATIVE,
        )  # fmt: skip
    else:
        to = out_ptr + token * out_token + head[:, None] * out_head + channel[None, :]
        tl.store(to, value.to(out_ptr.dtype.element_ty), mask=there[:, None])
    lse = tl.where(total == 0, empty, (highest + tl.log2(total)) * _LN2)
    tl.store(lse_ptr + token * H + head, lse, mask=there)


STREAM_GROUP = 8


@dataclasses.dataclass(frozen=True)
class MergeTile:
    """How a program merges: pieces at a time, channels, warps."""

    at_once: int
    width: int
    warps: int


def merge_tile(most: int) -> MergeTile:
    """The tile for tasks of at most ``most`` pieces, a power of two."""
    at_once = min(most, 32)
    if at_once <= 2:
        return MergeTile(at_once, 512, 2)
    return MergeTile(at_once, 256, 4 if at_once > 4 else 2)


def builds(target: Target) -> Iterator[Build]:
    """Some numbers of pieces, and the stream; as they are, and quantised."""
    if target.name != "sm_90":
        return
    for turned in (False, True):
        yield from _builds(turned)


def _builds(turned: bool) -> Iterator[Build]:
    floats = ("part_ptr", "sums_ptr", "sink_ptr", "lse_ptr", "scales_ptr", "table_ptr")
    types = {**dict.fromkeys(floats, "*fp32"), "positions_ptr": "*i64", "angles": "i32"}
    types |= {
        "out_ptr": "*u8" if turned else "*bf16",
        "spans_ptr": "*i32",
        "order_ptr": "*i32",
        "empty": "fp32",
    }
    end = {"TURNED": 64 if turned else 0, "TYPE": tl.bfloat16, "NATIVE": True}
    note = ", quantised" if turned else ""
    counts = ("H", "splits", "first_task", "rows", "tasks", "programs", "out_token", "out_head")
    types |= dict.fromkeys(counts, "i32")
    channels = get_layout(MAIN_FP8).channels
    for rows, most in ((64, 2), (16, 16), (64, 32), (64, 128)):
        tile = merge_tile(most)
        yield Build(
            f"{rows} rows, {most} pieces{note}",
            merge_kernel,
            types,
            {"ROWS": rows, "CHANNELS": channels, "WIDTH": tile.width, "MOST": most,
             "AT_ONCE": tile.at_once, "SINK": True, "EARLY": True, "ORDERED": most == 2, **end},
            num_warps=tile.warps,
            divisible=("out_token", "out_head"),
        )  # fmt: skip
    for rows in (16, 64):
        yield Build(
            f"{rows} rows{note}",
            merge_stream_kernel,
            types,
            {"ROWS": rows, "CHANNELS": channels, "GROUP": STREAM_GROUP, "SINK": True,
             "EARLY": True, **end},
            divisible=("out_token", "out_head"),
        )  # fmt: skip
