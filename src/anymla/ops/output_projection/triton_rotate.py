"""Rotate heads back: rounded for a 16-bit product here, or quantised by ``_triton_epilogue``.

A head of D channels is ceil(D/128) runs. Grid: blocks of runs.

    RUNS x 128 of o [T, H, D] -> R^-1 -> the same place
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._build import Build
from anymla.ops._epilogue import AMAX_FLOOR
from anymla.ops._triton_epilogue import (
    FEW_ROWS,
    ROWS,
    inverse_rope_quantize_kernel,
)
from anymla.ops.device import Target
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch

# Quant blocks of a program: 16 values a thread, or 4 for latency.
RUNS = 16
FEW_RUNS = 4
# Up to here there are too few heads for more than that to be worth it.
_FEW_HEADS = 1024


@triton.jit(do_not_specialize=["runs", "angles"])
def rotate_kernel(
    o,
    positions,
    table,
    out,
    runs,
    angles,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """RUNS runs of WIDTH channels."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PER_HEAD: tl.constexpr = (D + WIDTH - 1) // WIDTH
    PAIRS: tl.constexpr = WIDTH // 2
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    inside = run < runs
    head = run // PER_HEAD
    first = ((run - head * PER_HEAD) * WIDTH).to(tl.int32)
    channel = first[:, None] + tl.arange(0, WIDTH)[None, :]
    at = (head * D)[:, None] + channel
    mask = inside[:, None] & (channel < D)
    value = tl.load(o + at, mask, other=0.0).to(tl.float32)

    position = tl.load(positions + head // HEADS, inside, other=0)
    position = tl.minimum(tl.maximum(position, 0), angles - 1)
    pair = (first[:, None] - (D - ROPE_DIM)) // 2 + tl.arange(0, PAIRS)[None, :]
    turns = inside[:, None] & (pair >= 0) & (pair < ROPE_DIM // 2)
    angle = (position * ROPE_DIM)[:, None] + pair
    cos = tl.load(table + angle, turns, other=1.0)
    sin = tl.load(table + ROPE_DIM // 2 + angle, turns, other=0.0)
    even, odd = tl.split(tl.reshape(value, (RUNS, PAIRS, 2)))
    rotated = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    value = tl.reshape(rotated, (RUNS, WIDTH))
    tl.store(out + at, value.to(out.dtype.element_ty), mask)


def _rotate(o: Tensor, positions: Tensor, cos_sin_cache: Tensor, out: Tensor) -> None:
    tokens, heads, d = o.shape
    runs = tokens * heads * triton.cdiv(d, FP8_BLOCK)
    if not runs:
        return
    block = RUNS if tokens * heads > _FEW_HEADS else FEW_RUNS
    rotate_kernel[(triton.cdiv(runs, block),)](
        o.contiguous(),
        positions.contiguous(),
        cos_sin_cache.contiguous(),
        out,
        runs,
        len(cos_sin_cache),
        HEADS=heads,
        D=d,
        ROPE_DIM=cos_sin_cache.shape[1],
        WIDTH=FP8_BLOCK,
        RUNS=block,
        **pdl_launch(o.device),
    )


def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """See ``interface.grouped_output_projection``.

    The product is the vendor's batched one, written to its place without a copy.
    """
    tokens, (groups, rank, width) = o.shape[0], wo_a.shape
    rotated = scratch(tuple(o.shape), o.dtype, o.device)
    _rotate(o, positions, cos_sin_cache, rotated)
    out = torch.empty((tokens, groups, rank), dtype=o.dtype, device=o.device)
    by_group = rotated.view(tokens, groups, width).transpose(0, 1)
    torch.bmm(by_group, wo_a.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(tokens, groups * rank)


def builds(target: Target) -> Iterator[Build]:
    """Heads of Flash, quantised by both conversions, and rounded."""
    for dtype in ("bf16", "fp16", "fp32"):
        for rows, runs in ((FEW_ROWS, FEW_RUNS), (ROWS, RUNS)):
            inputs = {"o": f"*{dtype}", "positions": "*i64", "table": "*fp32", "angles": "i32"}
            sizes = {"HEADS": 64, "D": 512, "ROPE_DIM": 64, "WIDTH": FP8_BLOCK}
            sizes["PDL"] = target_has_pdl(target)
            for native in {False, target.native_e4m3}:
                yield Build(
                    f"{dtype}, {rows} heads, {'native' if native else 'bits'}",
                    inverse_rope_quantize_kernel,
                    {**inputs, "codes": "*u8", "scales": "*fp32", "count": "i32"},
                    {**sizes, "FLOOR": AMAX_FLOOR, "ROWS": rows, "NATIVE": native},
                )
            yield Build(
                f"{dtype}, {runs} runs",
                rotate_kernel,
                {**inputs, "out": f"*{dtype}", "runs": "i32"},
                {**sizes, "RUNS": runs},
            )
