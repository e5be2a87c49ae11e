"""Rotate heads back: rounded for a 16-bit product, or quantised to FP8, in one pass.

Grid: blocks of runs; a head of D channels is ceil(D/128) runs.

    RUNS x 128 of o [T, H, D] -> R^-1 -> the same place, or 128 codes and one scale a run
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._triton import Build, Target, target_of
from anymla.ops.linear.triton_quantize import FEW_RUNS, RUNS, quantize_runs, runs_of_program
from anymla.ops.output_projection.reference import AMAX_FLOOR


@triton.jit(do_not_specialize=["runs", "angles"])
def rotate_kernel(
    o,
    positions,
    table,
    out,
    scales,
    runs,
    angles,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    FLOOR: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """RUNS runs of WIDTH channels; quantised if there are ``scales``."""
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
    pair = (first[:, None] - (D - TURNED)) // 2 + tl.arange(0, PAIRS)[None, :]
    turns = inside[:, None] & (pair >= 0) & (pair < TURNED // 2)
    angle = (position * TURNED)[:, None] + pair
    cos = tl.load(table + angle, turns, other=1.0)
    sin = tl.load(table + TURNED // 2 + angle, turns, other=0.0)
    even, odd = tl.split(tl.reshape(value, (RUNS, PAIRS, 2)))
    turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    value = tl.reshape(turned, (RUNS, WIDTH))

    if scales is not None:
        codes, scale = quantize_runs(value, FLOOR, NATIVE)
        tl.store(out + at, codes, mask)
        tl.store(scales + run, scale, inside)
    else:
        tl.store(out + at, value.to(out.dtype.element_ty), mask)


def _rotate(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, out: Tensor, scales: Tensor | None
) -> None:
    tokens, heads, d = o.shape
    runs = tokens * heads * triton.cdiv(d, FP8_BLOCK)
    if not runs:
        return
    block = runs_of_program(runs)
    rotate_kernel[(triton.cdiv(runs, block),)](
        o.contiguous(),
        positions.contiguous(),
        cos_sin_cache.contiguous(),
        out,
        scales,
        runs,
        len(cos_sin_cache),
        HEADS=heads,
        D=d,
        TURNED=cos_sin_cache.shape[1],
        FLOOR=AMAX_FLOOR,
        WIDTH=FP8_BLOCK,
        RUNS=block,
        NATIVE=target_of(o.device).native_e4m3,
    )


def inverse_rope_fp8_quant(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, n_groups: int
) -> tuple[Tensor, Tensor]:
    """See ``interface.inverse_rope_fp8_quant``."""
    tokens, heads, d = o.shape
    width = heads // n_groups * d
    codes = torch.empty((tokens, n_groups, width), dtype=torch.uint8, device=o.device)
    scales = torch.empty(
        (tokens, n_groups, width // FP8_BLOCK), dtype=torch.float32, device=o.device
    )
    _rotate(o, positions, cos_sin_cache, codes, scales)
    return codes.view(torch.float8_e4m3fn), scales


def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """See ``interface.grouped_output_projection``.

    The product is the vendor's batched one, written to its place without a copy.
    """
    tokens, (groups, rank, width) = o.shape[0], wo_a.shape
    turned = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    _rotate(o, positions, cos_sin_cache, turned, None)
    out = torch.empty((tokens, groups, rank), dtype=o.dtype, device=o.device)
    by_group = turned.view(tokens, groups, width).transpose(0, 1)
    torch.bmm(by_group, wo_a.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(tokens, groups * rank)


def builds(target: Target) -> Iterator[Build]:
    """Heads of Flash, quantised by both conversions, and rounded."""
    for dtype in ("bf16", "fp16", "fp32"):
        for runs in (FEW_RUNS, RUNS):
            for native in {False, target.native_e4m3}:
                yield _build(dtype, runs, native, True)
            yield _build(dtype, runs, False, False)


def _build(dtype: str, runs: int, native: bool, quantizes: bool) -> Build:
    types = {
        "o": f"*{dtype}",
        "positions": "*i64",
        "table": "*fp32",
        "out": "*u8" if quantizes else f"*{dtype}",
        "runs": "i32",
        "angles": "i32",
    }
    absent = {} if quantizes else {"scales": None}
    if quantizes:
        types["scales"] = "*fp32"
    how = ("native" if native else "bits") if quantizes else "rounded"
    return Build(
        f"{dtype}, {runs} runs, {how}",
        rotate_kernel,
        types,
        {
            **absent,
            "HEADS": 64,
            "D": 512,
            "TURNED": 64,
            "FLOOR": AMAX_FLOOR,
            "WIDTH": FP8_BLOCK,
            "RUNS": runs,
            "NATIVE": native,
        },
    )
