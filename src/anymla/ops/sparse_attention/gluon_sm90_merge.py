"""Merge the pieces of every task that was cut: one softmax over the pieces and the sink.

Grid: tokens x heads x halves of the channels. A program reads one row of each piece's sums. It is
launched while the attention kernel still runs, and waits for its end.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._triton import Build, Target

MERGE_CHANNELS = 256
_AT_ONCE = 8
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _slot(number, first, programs, STREAM: tl.constexpr):
    """Where a piece's sums are; see ``gluon_sm90_lists.piece``."""
    if STREAM:
        return tl.where(number == 0, first, programs + first + number)
    else:
        return first + number


@triton.jit(do_not_specialize=["H", "splits", "programs"])
def merge_kernel(
    part_ptr, sums_ptr, spans_ptr, sink_ptr, out_ptr, lse_ptr, H, splits, programs,
    out_token, out_head, empty,
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
        splits: pieces of a task (aligned).
        programs: of the attention kernel (stream).
        out_token: stride of out.
        out_head: stride of out.
        empty: lse of a token without rows.
        ROWS: heads of a tile.
        CHANNELS: of a row.
        WIDTH: channels of a program.
        MOST: a power of two, at least the number of pieces of any task.
        AT_ONCE: pieces that are read at a time.
        STREAM: how pieces were handed out.
        SINK: there is one.
        EARLY: launched before the attention kernel ended.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    slices: tl.constexpr = CHANNELS // WIDTH
    program = tl.program_id(0).to(tl.int64)
    slice_ = program % slices
    head = program // slices % H
    token = program // slices // H
    task = token * tl.cdiv(H, ROWS) + head // ROWS
    row = head % ROWS
    if STREAM:
        first = tl.load(spans_ptr + task * 2).to(tl.int64)
        count = tl.load(spans_ptr + task * 2 + 1).to(tl.int64) - first + 1
        if count == 1:
            return
    else:
        first = task * splits
        count = splits.to(tl.int64)
    number = tl.arange(0, MOST)
    at = sums_ptr + (_slot(number, first, programs, STREAM) * ROWS + row) * 2
    top = tl.load(at, mask=number < count, other=-1e30)
    sums = tl.load(at + 1, mask=number < count, other=0.0)
    highest = tl.max(top, 0)
    total = tl.sum(sums * tl.exp2(top - highest), 0)
    bottom = total
    if SINK:
        bottom += tl.exp2(tl.load(sink_ptr + head) * _LOG2E - highest)

    channel = slice_ * WIDTH + tl.arange(0, WIDTH)
    value = tl.zeros([WIDTH], tl.float32)
    for start in range(0, count, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        there = some < count
        from_ = _slot(some, first, programs, STREAM) * ROWS + row
        weight = tl.exp2(tl.load(sums_ptr + from_ * 2, mask=there, other=-1e30) - highest)
        piece = tl.load(
            part_ptr + from_[:, None] * CHANNELS + channel[None, :], mask=there[:, None], other=0.0
        )
        value += tl.sum(piece * weight[:, None], 0)
    value = value * tl.where(total == 0, 0.0, 1.0 / bottom)
    to = out_ptr + token * out_token + head * out_head + channel
    tl.store(to, value.to(out_ptr.dtype.element_ty))
    if slice_ == 0:
        lse = tl.where(total == 0, empty, (highest + tl.log2(total)) * _LN2)
        tl.store(lse_ptr + token * H + head, lse)


def pieces_at_once(most: int) -> int:
    """How many pieces a program reads at a time."""
    return min(most, _AT_ONCE)


def builds(target: Target) -> Iterator[Build]:
    """Both ways of handing out pieces."""
    if target.name != "sm_90":
        return
    types = dict.fromkeys(("part_ptr", "sums_ptr", "sink_ptr", "lse_ptr"), "*fp32")
    types |= dict.fromkeys(("H", "splits", "programs", "out_token", "out_head"), "i32")
    types |= {"out_ptr": "*bf16", "spans_ptr": "*i32", "empty": "fp32"}
    for stream, rows, most in ((False, 64, 2), (False, 16, 16), (True, 64, 256)):
        yield Build(
            f"{rows} rows, {most} pieces{', stream' if stream else ''}",
            merge_kernel,
            types,
            {"ROWS": rows, "CHANNELS": get_layout(MAIN_FP8).channels, "WIDTH": MERGE_CHANNELS,
             "MOST": most, "AT_ONCE": pieces_at_once(most), "STREAM": stream, "SINK": True,
             "EARLY": True},
            divisible=("out_token", "out_head"),
        )  # fmt: skip
