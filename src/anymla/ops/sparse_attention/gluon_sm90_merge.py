"""Merge the pieces of every task that was cut: one softmax over the pieces and the sink.

Grid: tasks x heads of a tile x slices of the channels. A program reads one row of each piece's
sums. It is launched while the attention kernel still runs, and waits for its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._triton import Build, Target

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NO_PIECE = tl.constexpr(-1e30)


@triton.jit
def _slot(number, first, programs, STREAM: tl.constexpr):
    """Where a piece's sums are; see ``gluon_sm90_lists.piece``."""
    if STREAM:
        return tl.where(number == 0, first, programs + first + number)
    else:
        return first + number


@triton.jit(do_not_specialize=["H", "splits", "programs", "first_task", "rows"])
def merge_kernel(
    part_ptr, sums_ptr, spans_ptr, sink_ptr, out_ptr, lse_ptr, H, splits, programs, first_task,
    rows, out_token, out_head, empty,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
    AT_ONCE: tl.constexpr, STREAM: tl.constexpr, SINK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See the file.

    Args:
        part_ptr: float32 [slots, ROWS, CHANNELS].
        sums_ptr: float32 [slots, ROWS, 2]: reference exponent and sum.
        spans_ptr: int32 [tasks, 2], first and last program of each task (stream).
        sink_ptr: float32 [H].
        out_ptr: [T, H, CHANNELS].
        lse_ptr: float32 [T, H].
        H: heads.
        splits: pieces of a task (otherwise).
        programs: of the attention kernel (stream).
        first_task: tasks before it were not cut.
        rows: heads of a tile that there are, at most ROWS.
        out_token: stride of out.
        out_head: stride of out.
        empty: lse of a token without rows.
        ROWS: heads of a tile.
        CHANNELS: of a row.
        WIDTH: channels of a program.
        MOST: a power of two, at least the number of pieces of any task.
        AT_ONCE: pieces that are read at a time, a power of two.
        STREAM: how pieces were handed out.
        SINK: there is one.
        EARLY: launched before the attention kernel ended.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    slices: tl.constexpr = CHANNELS // WIDTH
    program = tl.program_id(0).to(tl.int64)
    part = program % slices
    row = program // slices % rows
    number = program // slices // rows
    task = first_task + number
    tiles = tl.cdiv(H, ROWS)
    token = task // tiles
    head = task % tiles * ROWS + row
    if head >= H:
        return
    if STREAM:
        first = tl.load(spans_ptr + task * 2).to(tl.int64)
        count = tl.load(spans_ptr + task * 2 + 1).to(tl.int64) - first + 1
        if count == 1:
            return
    else:
        first = number * splits
        count = splits.to(tl.int64)
    channel = part * WIDTH + tl.arange(0, WIDTH)
    pieces = tl.arange(0, MOST)
    there = pieces < count
    slots = _slot(pieces, first, programs, STREAM) * ROWS + row
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
        for start in range(0, count, AT_ONCE):
            some = start + tl.arange(0, AT_ONCE)
            at = _slot(some, first, programs, STREAM) * ROWS + row
            listed = some < count
            weight = tl.exp2(tl.load(sums_ptr + at * 2, mask=listed, other=_NO_PIECE) - highest)
            rows_of = part_ptr + at[:, None] * CHANNELS + channel[None, :]
            values = tl.load(rows_of, mask=listed[:, None], other=0.0)
            value += tl.sum(values * weight[:, None], 0)
    value = value * tl.where(total == 0, 0.0, 1.0 / bottom)
    to = out_ptr + token * out_token + head * out_head + channel
    tl.store(to, value.to(out_ptr.dtype.element_ty))
    if part == 0:
        lse = tl.where(total == 0, empty, (highest + tl.log2(total)) * _LN2)
        tl.store(lse_ptr + token * H + head, lse)


@dataclasses.dataclass(frozen=True)
class MergeTile:
    """How a program merges: pieces at a time, channels, warps."""

    at_once: int
    width: int
    warps: int


def merge_tile(most: int, stream: bool) -> MergeTile:
    """The tile for tasks of at most ``most`` pieces (a power of two), of which streams have few."""
    at_once = 2 if stream else min(most, 16)
    if at_once <= 2:
        return MergeTile(at_once, 512, 2)
    return MergeTile(at_once, 256, 4 if at_once > 4 else 2)


def builds(target: Target) -> Iterator[Build]:
    """Both ways of handing out pieces."""
    if target.name != "sm_90":
        return
    types = dict.fromkeys(("part_ptr", "sums_ptr", "sink_ptr", "lse_ptr"), "*fp32")
    counts = ("H", "splits", "programs", "first_task", "rows", "out_token", "out_head")
    types |= dict.fromkeys(counts, "i32")
    types |= {"out_ptr": "*bf16", "spans_ptr": "*i32", "empty": "fp32"}
    for stream, rows, most in ((False, 64, 2), (False, 16, 16), (False, 64, 128), (True, 64, 256)):
        tile = merge_tile(most, stream)
        yield Build(
            f"{rows} rows, {most} pieces{', stream' if stream else ''}",
            merge_kernel,
            types,
            {"ROWS": rows, "CHANNELS": get_layout(MAIN_FP8).channels, "WIDTH": tile.width,
             "MOST": most, "AT_ONCE": tile.at_once, "STREAM": stream, "SINK": True,
             "EARLY": True},
            num_warps=tile.warps,
            divisible=("out_token", "out_head"),
        )  # fmt: skip
