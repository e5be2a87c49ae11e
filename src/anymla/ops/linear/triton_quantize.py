"""Quantise activations to e4m3 in runs of 128 channels.

Grid: blocks of runs; a row of K channels is ceil(K/128) runs.

    RUNS x 128 values -> RUNS x 128 codes, RUNS power-of-two scales
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.formats.triton_cast import exp2_int, fp32_to_e4m3, scale_exponent
from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch

# Runs of a program: 16 to 32 values a thread.
RUNS = 16
FEW_RUNS = 4


def runs_of_program(runs: int) -> int:
    """How many runs a program takes of so many."""
    return RUNS if runs > 4096 else FEW_RUNS


@triton.jit
def quantize_runs(x, FLOOR: tl.constexpr, NATIVE: tl.constexpr):
    """Codes [n, w] and float32 scales [n] of float32 runs [n, w]."""
    exponent = scale_exponent(tl.max(tl.abs(x), 1), 448.0, FLOOR)
    # An infinite value has exponent 128, whose inverse is no normal number.
    inverse = exp2_int(tl.maximum(-exponent, -126))
    return fp32_to_e4m3(x * inverse[:, None], NATIVE), exp2_int(exponent)


@triton.jit
def store_codes(
    y, codes, code_scales, rows, inside, first, row_stride, run_stride, width,
    FLOOR: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store a tile y [n, c], zero past ``width``, of channels ``first`` .. of rows [n] as codes.

    ``first`` is a multiple of 128, or of c where it is less; strides are those of ``code_scales``.
    """
    COUNT: tl.constexpr = y.shape[0]
    CHANNELS: tl.constexpr = y.shape[1]
    RUN: tl.constexpr = min(CHANNELS, 128)
    RUNS: tl.constexpr = CHANNELS // RUN
    wide = tl.reshape(y.to(tl.float32), (COUNT * RUNS, RUN))
    encoded, scale = quantize_runs(wide, FLOOR, NATIVE)
    channel = first + tl.arange(0, CHANNELS)
    mask = inside[:, None] & (channel < width)[None, :]
    at = codes + (rows * width)[:, None] + channel[None, :]
    tl.store(at, tl.reshape(encoded, (COUNT, CHANNELS)), mask)
    run = first // RUN + tl.arange(0, RUNS)
    mask = inside[:, None] & (run * RUN < width)[None, :]
    at = code_scales + (rows * row_stride)[:, None] + (run * run_stride)[None, :]
    tl.store(at, tl.reshape(scale, (COUNT, RUNS)), mask)


@triton.jit
def store_row_codes(
    y, codes, code_scales, first, run_stride, width, FLOOR: tl.constexpr, NATIVE: tl.constexpr
):
    """As ``store_codes`` for channels y [c] of the one row at ``codes`` and ``code_scales``."""
    CHANNELS: tl.constexpr = y.shape[0]
    RUN: tl.constexpr = min(CHANNELS, 128)
    wide = tl.reshape(y.to(tl.float32), (CHANNELS // RUN, RUN))
    encoded, scale = quantize_runs(wide, FLOOR, NATIVE)
    channel = first + tl.arange(0, CHANNELS)
    tl.store(codes + channel, tl.reshape(encoded, (CHANNELS,)), channel < width)
    run = first // RUN + tl.arange(0, CHANNELS // RUN)
    tl.store(code_scales + run * run_stride, scale, run * RUN < width)


@triton.jit(do_not_specialize=["rows", "column"])
def quantize_rows_kernel(
    x,
    codes,
    scales,
    rows,
    width,
    per_row,
    column,
    FLOOR: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    NATIVE: tl.constexpr,
    SCALES_BY_RUN: tl.constexpr,
    PDL: tl.constexpr,
):
    """RUNS runs of WIDTH channels; scales a row after the other, or columns of ``column`` rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    row = run // per_row
    channel = (run - row * per_row)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = row[:, None] * width + channel
    mask = (row < rows)[:, None] & (channel < width)
    value = tl.load(x + at, mask, other=0.0).to(tl.float32)
    encoded, scale = quantize_runs(value, FLOOR, NATIVE)
    tl.store(codes + at, encoded, mask)
    place = (run - row * per_row) * column + row if SCALES_BY_RUN else run
    tl.store(scales + place, scale, row < rows)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``formats.fp8_block.quantize_fp8_rows`` of contiguous x [T, K], in scratch memory."""
    rows, width = x.shape
    codes = scratch((rows, width), torch.uint8, x.device)
    scales = scratch((rows, triton.cdiv(width, FP8_BLOCK)), torch.float32, x.device)
    _launch(x, codes, scales, 0)
    return codes, scales


def quantize_rows_by_run(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """As ``quantize_rows``, with the scales of a run next to each other.

    There are rows up to a multiple of ``step``; those beyond x are anything. The scales
    [rows, ceil(K/128)] have the rows last in memory.
    """
    rows, width = x.shape
    padded = triton.cdiv(rows, step) * step
    codes = scratch((padded, width), torch.uint8, x.device)
    scales = scratch((triton.cdiv(width, FP8_BLOCK), padded), torch.float32, x.device)
    _launch(x, codes, scales, padded)
    return codes, scales.t()


def _launch(x: Tensor, codes: Tensor, scales: Tensor, column: int) -> None:
    rows, width = x.shape
    if not x.numel():
        return
    per_row = triton.cdiv(width, FP8_BLOCK)
    runs = runs_of_program(rows * per_row)
    quantize_rows_kernel[(triton.cdiv(rows * per_row, runs),)](
        x,
        codes,
        scales,
        rows,
        width,
        per_row,
        column,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        WIDTH=FP8_BLOCK,
        RUNS=runs,
        NATIVE=target_of(x.device).native_e4m3,
        SCALES_BY_RUN=column > 0,
        **pdl_launch(x.device),
    )


def builds(target: Target) -> Iterator[Build]:
    """Every dtype, both conversions."""
    for dtype in ("bf16", "fp16", "fp32"):
        for runs in (FEW_RUNS, RUNS):
            for native in {False, target.native_e4m3}:
                yield _build(target, dtype, runs, native, False)
    yield _build(target, "bf16", RUNS, target.native_e4m3, True)


def _build(target: Target, dtype: str, runs: int, native: bool, scales_by_run: bool) -> Build:
    label = f"{dtype}, {runs} runs, {'native' if native else 'bits'}"
    return Build(
        label + ", scales by run" * scales_by_run,
        quantize_rows_kernel,
        {
            "x": f"*{dtype}",
            "codes": "*u8",
            "scales": "*fp32",
            "rows": "i32",
            "width": "i32",
            "per_row": "i32",
            "column": "i32",
        },
        {
            "FLOOR": ACTIVATION_AMAX_FLOOR,
            "WIDTH": FP8_BLOCK,
            "RUNS": runs,
            "NATIVE": native,
            "SCALES_BY_RUN": scales_by_run,
            "PDL": target_has_pdl(target),
        },
        divisible=("width",),
    )
