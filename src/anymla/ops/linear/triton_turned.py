"""Products for few tokens: the weight's rows come first, and are decoded as they lie.

    for each run of 128 channels:   decode(w [n, 128])  .  x [m, 128]^T  is added to [n, m]

Matrix instructions have many rows and few columns, so rows are the weight's, of which there are
many, and columns the tokens. A weight of packed e2m1 is read by the word and goes from registers
into the instruction (``formats.triton_words``); for that its activations come in the order of the
decoded values. Products are exact and add up in float32, except that Hopper's e4m3 instructions
keep 13 bits below the largest of 32 products; scales are factors in float32:

    weight   operands            scale of the weight      scale of the activations
    mxfp4    e4m3 or float16     rows, every 32 channels  tokens, every 128 channels
    mxfp4    bfloat16            in the operand           in the operand
    fp8      float16             128 x 128 blocks         tokens, every 128 channels
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.formats.triton_cast import e4m3_to_fp16, ue8m0_to_fp32
from anymla.formats.triton_words import (
    BFLOAT16_UNIT,
    E4M3_UNIT,
    FLOAT16_UNIT,
    words_to_bf16,
    words_to_e4m3,
    words_to_fp16,
)
from anymla.ops.device import Target


def waits_together(target: Target) -> bool:
    """Whether products are instructions that a group of warps issues and waits for."""
    return target.name == "sm_90"


@triton.jit
def _decoded(words, OPERAND: tl.constexpr):
    return words_to_e4m3(words) if OPERAND == tl.float8e4nv else words_to_fp16(words)


@triton.jit
def _factor(scale, BYTE: tl.constexpr):
    """Byte BYTE of each scale as float32; NaN (255) is looked for by ``_has_nan``."""
    SHIFT: tl.constexpr = 23 - 8 * BYTE
    bits = scale << SHIFT if SHIFT >= 0 else scale >> -SHIFT
    # Byte 0 stands for 2^-127, which is subnormal.
    return tl.maximum(bits & 0x7F800000, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _has_nan(scale):
    """Whether one of four bytes is 255, which adding one makes overflow into bit 7."""
    return (((scale & 0x7F7F7F7F) + 0x01010101) & scale & -0x7F7F7F80) != 0


@triton.jit
def _nibbles_apart(words, scale, x, inside, OPERAND: tl.constexpr):
    """128 channels as four products, a scale of the weight each; x: pointers [32, m]."""
    ROWS: tl.constexpr = words.shape[0]
    even, odd = tl.split(tl.permute(tl.reshape(words, (ROWS, 2, 2, 4)), (0, 3, 1, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    a, b = _decoded(first, OPERAND), tl.load(x, inside, other=0.0)
    factor = tl.where(_has_nan(scale), float("nan"), _factor(scale, 0))
    part = tl.dot(a, b) * factor[:, None]
    a, b = _decoded(second, OPERAND), tl.load(x + 32, inside, other=0.0)
    part += tl.dot(a, b) * _factor(scale, 1)[:, None]
    a, b = _decoded(third, OPERAND), tl.load(x + 64, inside, other=0.0)
    part += tl.dot(a, b) * _factor(scale, 2)[:, None]
    a, b = _decoded(fourth, OPERAND), tl.load(x + 96, inside, other=0.0)
    return part + tl.dot(a, b) * _factor(scale, 3)[:, None]


@triton.jit
def _nibbles_together(words, scale, x, inside, OPERAND: tl.constexpr):
    """128 channels as one product; x: pointers [128, 4 m], a column zero but in its 32 channels."""
    ROWS: tl.constexpr = words.shape[0]
    product = tl.dot(_decoded(words, OPERAND), tl.load(x, inside, other=0.0))
    bits = (scale[:, None] >> (tl.arange(0, 4) * 8)[None, :]) << 23
    factor = tl.maximum(bits & 0x7F800000, 0x00400000).to(tl.float32, bitcast=True)
    # One of the four is enough.
    spoiled = _has_nan(scale)[:, None] & (tl.arange(0, 4) == 0)[None, :]
    factor = tl.where(spoiled, float("nan"), factor)
    part = tl.reshape(product, (ROWS, 4, x.shape[1] // 4))
    return tl.sum(part * factor[:, :, None], 1)


@triton.jit
def _columns(x, x_inside, TOGETHER: tl.constexpr):
    """Pointers and mask of the activations' operand, from those of its rows [m]."""
    COLUMNS: tl.constexpr = x.shape[0]
    if TOGETHER:
        # Instructions that a group of warps waits for are then waited for once in 128 channels.
        channel = tl.arange(0, 128)
        mine = (channel // 32)[:, None] == (tl.arange(0, 4 * COLUMNS) // COLUMNS)[None, :]
        x = tl.reshape(tl.broadcast_to(x[None, :], (4, COLUMNS)), (4 * COLUMNS,))
        inside = tl.reshape(tl.broadcast_to(x_inside[None, :], (4, COLUMNS)), (4 * COLUMNS,))
        mask = mine & inside[None, :]
    else:
        channel = tl.arange(0, 32)
        mask = x_inside[None, :]
    # Rows begin at multiples of 128 elements, which the compiler does not see through reshape.
    return tl.multiple_of(x[None, :] + channel[:, None], (16, 1)), mask


@triton.jit
def _part(tile, PART: tl.constexpr, PARTS: tl.constexpr):
    """Columns PART of PARTS (1, 2 or 4) equal ones of a tile [n, c]."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1] // PARTS
    if PARTS == 1:
        part = tile
    elif PARTS == 2:
        lower, upper = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS)), (0, 2, 1)))
        part = upper if PART else lower
    else:
        halves = tl.permute(tl.reshape(tile, (ROWS, 2, 2, COLUMNS)), (0, 3, 2, 1))
        lower, upper = tl.split(halves)
        even, odd = tl.split(upper if PART >= 2 else lower)
        part = odd if PART % 2 else even
    return part


@triton.jit
def _nibbles(
    w,
    scales,
    x,
    x_scales,
    x_inside,
    runs,
    OPERAND: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDE: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    UNIT: tl.constexpr = E4M3_UNIT if OPERAND == tl.float8e4nv else FLOAT16_UNIT
    total = tl.zeros((w.shape[0], x_inside.shape[0]), tl.float32)
    if WIDE:
        # A row's bytes of all runs of a step at once: longer accesses, and fewer.
        w = w[:, None] + tl.arange(0, 16 * UNROLL)[None, :]
        scales = scales[:, None] + tl.arange(0, UNROLL)[None, :]
    else:
        w = w[:, None] + tl.arange(0, 16)[None, :]
    x, inside = _columns(x, x_inside, TOGETHER)
    for _ in tl.range(0, runs, UNROLL, num_stages=STAGES):
        if WIDE:
            step_words, step_scale = tl.load(w), tl.load(scales)
        for run in tl.static_range(UNROLL):
            if WIDE:
                words = _part(step_words, run, UNROLL)
                scale = tl.reshape(_part(step_scale, run, UNROLL), (w.shape[0],))
            else:
                words, scale = tl.load(w + 16 * run), tl.load(scales + run)
            if TOGETHER:
                part = _nibbles_together(words, scale, x + 128 * run, inside, OPERAND)
            else:
                part = _nibbles_apart(words, scale, x + 128 * run, inside, OPERAND)
            factor = tl.load(x_scales + run, x_inside, other=0.0) * UNIT
            total += part * factor[None, :]
        w += 16 * UNROLL
        scales += UNROLL
        x += 128 * UNROLL
        x_scales += UNROLL
    return total


@triton.jit
def _values(w, scales, x, x_inside, runs, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    """Scales multiplied into the operand: for many tokens, or tokens that have none."""
    ROWS: tl.constexpr = w.shape[0]
    SCALES: tl.constexpr = BLOCK_K // 32
    total = tl.zeros((ROWS, x_inside.shape[0]), tl.float32)
    w = w[:, None] + tl.arange(0, BLOCK_K // 8)[None, :]
    scales = scales[:, None] + tl.arange(0, SCALES)[None, :]
    x = x[None, :] + tl.arange(0, BLOCK_K)[:, None]
    for _ in tl.range(0, runs * 128, BLOCK_K, num_stages=STAGES):
        factor = ue8m0_to_fp32(tl.load(scales)).to(tl.bfloat16)
        # Two products, because their factors' product may be no number.
        value = words_to_bf16(tl.load(w)) * tl.full((), BFLOAT16_UNIT, tl.bfloat16)
        value = tl.reshape(value, (ROWS, SCALES, 32)) * factor[:, :, None]
        b = tl.load(x, x_inside[None, :], other=0.0)
        total = tl.dot(tl.reshape(value, (ROWS, BLOCK_K)), b, total)
        w += BLOCK_K // 8
        scales += SCALES
        x += BLOCK_K
    return total


@triton.jit
def _codes(w, scales, x, x_scales, x_inside, runs, NATIVE: tl.constexpr, STAGES: tl.constexpr):
    total = tl.zeros((w.shape[0], x_inside.shape[0]), tl.float32)
    w = w[:, None] + tl.arange(0, 128)[None, :]
    x = x[None, :] + tl.arange(0, 128)[:, None]
    for _ in tl.range(0, runs, num_stages=STAGES):
        factor = tl.load(scales)
        if factor.dtype == tl.uint8:
            factor = ue8m0_to_fp32(factor)
        a = e4m3_to_fp16(tl.load(w), NATIVE)
        b = tl.load(x, x_inside[None, :], other=0.0)
        if b.dtype == tl.uint8:
            b = e4m3_to_fp16(b, NATIVE)
        part = tl.dot(a, b) * factor[:, None]
        total += part * tl.load(x_scales, x_inside, other=0.0)[None, :]
        w += 128
        scales += 1
        x += 128
        x_scales += 1
    return total


@triton.jit
def turned_product(
    w,
    scales,
    x,
    x_scales,
    x_inside,
    runs,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows of w times rows of x.

    Args:
        w: uint8 pointers [n] to the first of a row's channels, at multiples of 16 bytes.
        scales: pointers [n] to the row's first scale, at multiples of 4 bytes for "mxfp4".
        x: pointers [m] to the rows of activations, as ``triton_operands`` makes them; for "fp8"
            also their e4m3 codes.
        x_scales: pointers [m] to the scales of their runs of 128, or None.
        x_inside: bool [m], rows of x to read.
        runs: runs of 128 channels.
        FORMAT: "mxfp4" or "fp8".
        OPERAND: float16 or for "mxfp4" float8e4nv with x_scales, else bfloat16.
        NATIVE: convert e4m3 by instructions.
        BLOCK_K: channels of a step, a multiple of 128 with x_scales.
        STAGES: of the loop's pipeline.
        TOGETHER: how mxfp4 is scaled, see ``_columns``; takes four times as many columns.
        WIDE: read all of a step's weights at once; a step is 1, 2 or 4 runs.

    Returns:
        float32 [n, m].
    """
    if OPERAND == tl.float8e4nv:
        x = x.to(tl.pointer_type(tl.float8e4nv))
    if FORMAT == "mxfp4":
        w = w.to(tl.pointer_type(tl.int32))
        if x_scales is not None:
            scales = scales.to(tl.pointer_type(tl.int32))
    if x_scales is None:
        total = _values(w, scales, x, x_inside, runs, BLOCK_K, STAGES)
    elif FORMAT == "mxfp4":
        total = _nibbles(
            w,
            scales,
            x,
            x_scales,
            x_inside,
            runs,
            OPERAND,
            TOGETHER,
            WIDE,
            BLOCK_K // 128,
            STAGES,
        )
    else:
        total = _codes(w, scales, x, x_scales, x_inside, runs, NATIVE, STAGES)
    return total
