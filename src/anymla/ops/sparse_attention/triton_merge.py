"""Merge what the programs of a token left: one softmax over the splits and the sink.

Each split left a row of ``SUMS`` numbers a head: reference exponent, sum of probabilities and
highest score (written only if it is asked for).

Grid: tokens x heads x slices of ``BV`` values; a program reads [splits, BV] partial sums. The
result leaves as it is, or rotated back and quantised for the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._build import Build
from anymla.ops._triton_epilogue import store_quantized
from anymla.ops.device import Target

MERGE_VALUES = 256
SUMS = 3

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["H", "splits", "has_sink", "angles"])
def merge_kernel(
    part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, peak_ptr, H, splits, out_token, out_head,
    has_sink, empty, scales_ptr, positions_ptr, table_ptr, angles,
    S: tl.constexpr, VALUES: tl.constexpr, BV: tl.constexpr,
    PEAK: tl.constexpr, SUMS: tl.constexpr,
    ROPE_DIM: tl.constexpr = 0, TYPE: tl.constexpr = None, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """See the file; S is a power of two of at least ``splits``.

    If ROPE_DIM is not 0, ``out_ptr`` takes codes, and what ``store_quantized`` needs is given.
    """
    slices: tl.constexpr = (VALUES + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    piece = program % slices
    head = program // slices % H
    token = program // slices // H
    split = tl.arange(0, S)
    row = (token * splits + split) * H + head
    there = split < splits
    top = tl.load(sums_ptr + row * SUMS, mask=there, other=-1e30)
    sums = tl.load(sums_ptr + row * SUMS + 1, mask=there, other=0.0)
    channel = piece * BV + tl.arange(0, BV)
    inside = there[:, None] & (channel < VALUES)[None, :]
    part = tl.load(part_ptr + row[:, None] * VALUES + channel[None, :], mask=inside, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - highest)
    total = tl.sum(sums * weight, 0)
    sink = tl.where(tl.zeros([], tl.int32) < has_sink, tl.load(sink_ptr + head), float("-inf"))
    bottom = total + tl.exp2(sink * _LOG2E - highest)
    value = tl.sum(part * weight[:, None], 0) * tl.where(total == 0, 0.0, 1.0 / bottom)
    if ROPE_DIM > 0:
        store_quantized(
            value[None, :], (piece * BV).to(tl.int32), token, head.to(tl.int32), H, out_ptr,
            scales_ptr, positions_ptr, table_ptr, angles, 1, BV, VALUES, ROPE_DIM, TYPE, NATIVE,
        )  # fmt: skip
    else:
        to = out_ptr + token * out_token + head * out_head + channel
        tl.store(to, value.to(out_ptr.dtype.element_ty), mask=channel < VALUES)
    if piece == 0:
        lse = tl.where(total == 0, empty, (highest + tl.log2(total)) * _LN2)
        tl.store(lse_ptr + token * H + head, lse)
        if PEAK:
            peak = tl.max(tl.load(sums_ptr + row * SUMS + 2, mask=there, other=-1e30), 0)
            peak = tl.where(total == 0, float("-inf"), peak * _LN2)
            tl.store(peak_ptr + token * H + head, peak)


def merge_warps(splits: int) -> int:
    """Warps of a program."""
    return 4 if splits > 8 else 2


def builds(target: Target) -> Iterator[Build]:
    """Some numbers of splits, for both types of output, and quantised."""
    floats = ("part_ptr", "sums_ptr", "sink_ptr", "lse_ptr", "peak_ptr", "scales_ptr", "table_ptr")
    types = {**dict.fromkeys(floats, "*fp32"), "positions_ptr": "*i64"}
    types |= dict.fromkeys(("H", "splits", "has_sink", "out_token", "out_head", "angles"), "i32")
    for out in ("*bf16", "*fp32"):
        for count in (2, 16, 32):
            yield Build(
                f"{count} splits {out}",
                merge_kernel,
                types | {"out_ptr": out, "empty": "fp32"},
                {"S": count, "VALUES": get_layout(MAIN_FP8).channels, "BV": MERGE_VALUES,
                 "PEAK": out == "*fp32", "SUMS": SUMS, "ROPE_DIM": 0, "TYPE": tl.float32,
                 "NATIVE": False},
                num_warps=merge_warps(count),
                divisible=("out_token", "out_head"),
            )  # fmt: skip
    for native in sorted({False, target.native_e4m3}):
        yield Build(
            f"16 splits, quantised, {'native' if native else 'bits'}",
            merge_kernel,
            types | {"out_ptr": "*u8", "empty": "fp32"},
            {"S": 16, "VALUES": get_layout(MAIN_FP8).channels, "BV": MERGE_VALUES,
             "PEAK": False, "SUMS": SUMS, "ROPE_DIM": 64, "TYPE": tl.bfloat16, "NATIVE": native},
            num_warps=merge_warps(16),
            divisible=("out_token", "out_head"),
        )  # fmt: skip
