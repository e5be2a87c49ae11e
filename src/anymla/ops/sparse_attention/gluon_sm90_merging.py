"""Launch what merges the pieces of Hopper's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._build import Build
from anymla.ops._epilogue import QuantizedOut, epilogue_constants, epilogue_pointers
from anymla.ops.device import Target
from anymla.ops.sparse_attention.gluon_sm90_merge import merge_kernel, merge_stream_kernel
from anymla.ops.sparse_attention.schedule import Schedule

_STREAM_AT_ONCE, _STREAM_GROUP = 8, 2
# Programs that are launched in the time that one takes; and what more heads are merged by, if they
# are of few pieces.
_PROGRAMS = 1056
_GROUP, _FEW_PIECES = 4, 4


@dataclasses.dataclass(frozen=True)
class MergeTile:
    """What a program of ``merge_kernel`` merges: heads, channels, pieces at a time; its warps."""

    group: int
    width: int
    at_once: int
    warps: int


def merge_tile(heads: int, channels: int, most: int) -> MergeTile:
    """The tile for so many heads of all tasks, of at most ``most`` pieces, a power of two."""
    if most <= _FEW_PIECES and heads > _PROGRAMS:
        return MergeTile(_GROUP, channels, most, 4)
    if heads * 2 > _PROGRAMS:
        return MergeTile(1, channels, min(most, 8), 1)
    return MergeTile(1, channels // 2, min(most, 16), 1)


def merge(
    schedule: Schedule,
    part: Tensor,
    sums: Tensor,
    spans: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    empty: float,
    to: QuantizedOut | None,
    *,
    lifted: int,
    early: bool = True,
) -> None:
    """Launch; the kernels say what the arguments are.

    Args:
        schedule: of the attention kernel.
        part: see ``merge_kernel``, like what is not mentioned here.
        sums: likewise.
        spans: of a stream, see ``merge_stream_kernel``; the order of tokens if there is one.
        sink: likewise.
        out: heads [T, H, CHANNELS], unless ``to`` is given.
        lse: likewise.
        empty: likewise.
        to: where heads go that are rotated back and quantised.
        lifted: likewise.
        early: while the attention kernel still runs.
    """
    tokens, heads, channels = out.shape
    tasks, rows = tokens * schedule.tiles, schedule.heads
    result = out if to is None else to.codes
    sinks = lse if sink is None else sink
    end = (result.stride(0), result.stride(1), empty, *epilogue_pointers(to, lse))
    common = {
        "ROWS": rows, "CHANNELS": channels, "SINK": sink is not None, "LIFTED": lifted,
        "PDL": early, **epilogue_constants(to),
    }  # fmt: skip
    if early:
        common["launch_pdl"] = True
    if schedule.ranged:
        merge_stream_kernel[(schedule.programs * (rows // _STREAM_GROUP),)](
            part, sums, spans, sinks, result, lse, heads, tasks, schedule.programs, *end,
            GROUP=_STREAM_GROUP, MOST=triton.next_power_of_2(schedule.programs),
            AT_ONCE=_STREAM_AT_ONCE, num_warps=1, **common,
        )  # fmt: skip
        return
    most = triton.next_power_of_2(schedule.splits)
    whole, some = schedule.first_cut(tokens), min(heads, rows)
    # What is added up in which order depends on the tile.
    tile = merge_tile(some if schedule.invariant else (tasks - whole) * some, channels, most)
    groups = -(-some // tile.group)
    merge_kernel[((tasks - whole) * groups * (channels // tile.width),)](
        part, sums, sinks, result, lse, spans, heads, schedule.splits, whole, some, *end,
        WIDTH=tile.width, GROUP=tile.group, MOST=most, AT_ONCE=tile.at_once,
        ORDERED=schedule.ordered, num_warps=tile.warps, **common,
    )  # fmt: skip


def builds(target: Target) -> Iterator[Build]:
    """Some numbers of pieces, and the stream; as they are, and quantised."""
    if target.name != "sm_90":
        return
    for quantised in (False, True):
        yield from _builds(quantised)


def _builds(quantised: bool) -> Iterator[Build]:
    floats = ("sums_ptr", "sink_ptr", "lse_ptr", "scales_ptr", "table_ptr")
    types = {**dict.fromkeys(floats, "*fp32"), "positions_ptr": "*i64", "angles": "i32"}
    types |= {
        "part_ptr": "*fp16",
        "out_ptr": "*u8" if quantised else "*bf16",
        "spans_ptr": "*i32",
        "order_ptr": "*i32",
        "empty": "fp32",
    }
    end = {"ROPE_DIM": 64 if quantised else 0, "TYPE": tl.bfloat16, "NATIVE": True}
    note = ", quantised" if quantised else ""
    counts = ("H", "splits", "first_task", "rows", "tasks", "programs", "out_token", "out_head")
    types |= dict.fromkeys(counts, "i32")
    channels, lifted = get_layout(MAIN_FP8).channels, get_layout(MAIN_FP8).nope
    for rows, most, heads in (
        (64, 2, 64),
        (64, 4, 4096),
        (16, 16, 64),
        (64, 16, 1024),
        (64, 32, 64),
    ):
        tile = merge_tile(heads, channels, most)
        yield Build(
            f"{heads} heads of {rows}, {most} pieces{note}",
            merge_kernel,
            types,
            {"ROWS": rows, "CHANNELS": channels, "WIDTH": tile.width, "GROUP": tile.group,
             "MOST": most, "AT_ONCE": tile.at_once, "SINK": True, "PDL": True, "LIFTED": lifted,
             "ORDERED": most == 2, **end},
            num_warps=tile.warps,
            divisible=("out_token", "out_head"),
        )  # fmt: skip
    for rows in (16, 64):
        yield Build(
            f"{rows} rows{note}",
            merge_stream_kernel,
            types,
            {"ROWS": rows, "CHANNELS": channels, "GROUP": _STREAM_GROUP, "MOST": 256,
             "AT_ONCE": _STREAM_AT_ONCE, "SINK": True, "PDL": True, "LIFTED": lifted, **end},
            num_warps=1,
            divisible=("out_token", "out_head"),
        )  # fmt: skip
