"""Rotate heads back: rounded for a 16-bit product, or quantised to FP8, in one pass.

A head of D channels is ceil(D/128) runs. Grid when rounding: blocks of runs; when quantising:
(blocks of heads, runs of a head), so that only the programs of rotated runs know of angles.

    RUNS x 128 of o [T, H, D] -> R^-1 -> the same place, or 128 codes and one scale a run
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.triton_cast import exp2_int, fp32_to_e4m3, scale_exponent
from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.output_projection.reference import AMAX_FLOOR
from anymla.ops.output_projection.turned import Turned
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch

# Runs of a program that rounds, heads of one that quantises: 16 values a thread, or 4 for latency.
RUNS = 16
FEW_RUNS = 4
# Up to here there are too few heads for more than that to be worth it.
_FEW_HEADS = 1024


@triton.jit
def _angles(positions, table, heads, inside, first, angles, HEADS, D, TURNED, PAIRS: tl.constexpr):
    """Cosines and sines [n, PAIRS] of the pairs from channel ``first`` on; 1 and 0 outside."""
    position = tl.load(positions + heads // HEADS, inside, other=0)
    position = tl.minimum(tl.maximum(position, 0), angles - 1)
    pair = (first - (D - TURNED)) // 2 + tl.arange(0, PAIRS)
    turns = inside[:, None] & ((pair >= 0) & (pair < TURNED // 2))[None, :]
    at = table + (position * TURNED)[:, None] + pair[None, :]
    cos = tl.load(at, turns, other=1.0)
    sin = tl.load(at + TURNED // 2, turns, other=0.0)
    return cos, sin


@triton.jit
def _load_pairs(o, at, mask):
    """Even and odd channels, float32, of the pairs at ``at``; 16-bit pairs are loaded as one."""
    if o.dtype.element_ty == tl.float32:
        even = tl.load(o + 2 * at, mask, other=0.0)
        odd = tl.load(o + 2 * at + 1, mask, other=0.0)
    else:
        both = tl.load(o.to(tl.pointer_type(tl.uint32)) + at, mask, other=0)
        if o.dtype.element_ty == tl.bfloat16:
            even = (both << 16).to(tl.float32, bitcast=True)
            odd = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            even = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit(do_not_specialize=["count", "angles"])
def rotate_quantise_kernel(
    o,
    positions,
    table,
    codes,
    scales,
    count,
    angles,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    FLOOR: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One run of WIDTH channels of ROWS of the ``count`` heads."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PER_HEAD: tl.constexpr = (D + WIDTH - 1) // WIDTH
    PAIRS: tl.constexpr = WIDTH // 2
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    run = tl.program_id(1)
    inside = head < count
    first = run * WIDTH
    pair = tl.arange(0, PAIRS)
    mask = inside[:, None]
    if D % WIDTH > 0:
        mask = mask & (pair < D // 2 - run * PAIRS)[None, :]
    at = (head.to(tl.int64) * (D // 2) + run * PAIRS)[:, None] + pair[None, :]
    even, odd = _load_pairs(o, at, mask)
    if first + WIDTH > D - TURNED:
        cos, sin = _angles(positions, table, head, inside, first, angles, HEADS, D, TURNED, PAIRS)
        turned = even * cos + odd * sin
        odd = odd * cos - even * sin
        even = turned
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    exponent = scale_exponent(largest, 448.0, FLOOR)
    # An infinite value has exponent 128, whose inverse is no normal number.
    inverse = exp2_int(tl.maximum(-exponent, -126))[:, None]
    # Neighbours are converted together and stored as bytes: put together as 16-bit numbers by
    # shifts, the ptxas of Triton 3.6 loses every second even channel.
    value = tl.reshape(tl.join(even * inverse, odd * inverse), (ROWS, WIDTH))
    channel = first + tl.arange(0, WIDTH)
    mask = inside[:, None]
    if D % WIDTH > 0:
        mask = mask & (channel < D)[None, :]
    at = (head.to(tl.int64) * D)[:, None] + channel[None, :]
    tl.store(codes + at, fp32_to_e4m3(value, NATIVE), mask)
    tl.store(scales + head.to(tl.int64) * PER_HEAD + run, exp2_int(exponent), inside)


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
    TURNED: tl.constexpr,
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
    pair = (first[:, None] - (D - TURNED)) // 2 + tl.arange(0, PAIRS)[None, :]
    turns = inside[:, None] & (pair >= 0) & (pair < TURNED // 2)
    angle = (position * TURNED)[:, None] + pair
    cos = tl.load(table + angle, turns, other=1.0)
    sin = tl.load(table + TURNED // 2 + angle, turns, other=0.0)
    even, odd = tl.split(tl.reshape(value, (RUNS, PAIRS, 2)))
    turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    value = tl.reshape(turned, (RUNS, WIDTH))
    tl.store(out + at, value.to(out.dtype.element_ty), mask)


def inverse_rope_fp8_quant(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, n_groups: int
) -> tuple[Tensor, Tensor]:
    """See ``interface.inverse_rope_fp8_quant``."""
    turned = Turned.allocate(o, positions, cos_sin_cache, target_of(o.device).native_e4m3)
    rotate_quantise(o, turned)
    return turned.results(n_groups)


def rotate_quantise(o: Tensor, to: Turned) -> None:
    """Rotate the heads o [T, H, D] back and quantise them."""
    tokens, heads, d = o.shape
    if not o.numel():
        return
    rows = RUNS if tokens * heads > _FEW_HEADS else FEW_RUNS
    rotate_quantise_kernel[(triton.cdiv(tokens * heads, rows), triton.cdiv(d, FP8_BLOCK))](
        _aligned(o),
        to.positions,
        to.table,
        to.codes,
        to.scales,
        tokens * heads,
        len(to.table),
        HEADS=heads,
        D=d,
        TURNED=to.table.shape[1],
        FLOOR=AMAX_FLOOR,
        WIDTH=FP8_BLOCK,
        ROWS=rows,
        NATIVE=to.native,
        **pdl_launch(o.device),
    )


def _aligned(o: Tensor) -> Tensor:
    """Contiguous, and pairs of channels where they can be loaded as one."""
    o = o.contiguous()
    return o if o.storage_offset() % 2 == 0 else o.clone()


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
        TURNED=cos_sin_cache.shape[1],
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
    turned = scratch(tuple(o.shape), o.dtype, o.device)
    _rotate(o, positions, cos_sin_cache, turned)
    out = torch.empty((tokens, groups, rank), dtype=o.dtype, device=o.device)
    by_group = turned.view(tokens, groups, width).transpose(0, 1)
    torch.bmm(by_group, wo_a.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(tokens, groups * rank)


def builds(target: Target) -> Iterator[Build]:
    """Heads of Flash, quantised by both conversions, and rounded."""
    for dtype in ("bf16", "fp16", "fp32"):
        for rows in (FEW_RUNS, RUNS):
            inputs = {"o": f"*{dtype}", "positions": "*i64", "table": "*fp32", "angles": "i32"}
            sizes = {"HEADS": 64, "D": 512, "TURNED": 64, "WIDTH": FP8_BLOCK}
            sizes["PDL"] = target_has_pdl(target)
            for native in {False, target.native_e4m3}:
                yield Build(
                    f"{dtype}, {rows} heads, {'native' if native else 'bits'}",
                    rotate_quantise_kernel,
                    {**inputs, "codes": "*u8", "scales": "*fp32", "count": "i32"},
                    {**sizes, "FLOOR": AMAX_FLOOR, "ROWS": rows, "NATIVE": native},
                )
            yield Build(
                f"{dtype}, {rows} runs",
                rotate_kernel,
                {**inputs, "out": f"*{dtype}", "runs": "i32"},
                {**sizes, "RUNS": rows},
            )
