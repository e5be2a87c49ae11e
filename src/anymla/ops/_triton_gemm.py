"""Triton device functions for tiles of a GEMM whose stored weight is decoded in the kernel.

gemm_tile           activations [m, K] . decode(w [n, K])^T -> [m, n]
gemm_tile_swap_ab   decode(w [n, K]) . x [m, K]^T -> [n, m], for few tokens
operand_rows_kernel activations in memory -> operands of ``gemm_tile_swap_ab``; the grid is blocks
                    of quant blocks of QUANT channels, K / QUANT for a row of K channels
fragments_kernel    activations or their codes -> fragments for ``gemm_tile`` by words; the grid is
                    (blocks of 16 rows, blocks of 128 channels)

QUANT rows and columns of an FP8 weight share a scale, and so do QUANT channels of activations: 128
in DeepSeek-V4, 32 in V4.1.

Decoding loses nothing: operands have a dtype that holds every decoded value, and products
accumulate in float32. Scales that the operands cannot hold become float32 factors, of a weight's
block, of a quant block of activations, or of a whole NVFP4 tensor. ``gemm_tile`` takes

    weight   operand with bfloat16 / float16 / float32 / e4m3 activations   factor
    plain    theirs if the weight has it too, else float32                  -
    fp8      bfloat16 / float16 / float32 / e4m3 or float16                 each QUANT x QUANT block
    mxfp4    bfloat16 (float16 as two of them) / float32 / bfloat16         -
    nvfp4    bfloat16 / float16 / float32                                   the tensor's

(On Arc A, every operand is float32.)

With swapped operands, the weight's rows are the rows of the matrix instruction, which has many, and
tokens are its columns, which may be as few as 8. Packed e2m1 is read as int32 and goes from
registers into the instruction (``formats.triton_words``), so the activations are stored in the
order of the decoded values. Products are exact and accumulate in float32, except that Hopper's e4m3
instructions keep 13 bits below the largest of 32 products:

    weight   operands            scale of the weight      scale of the activations
    mxfp4    e4m3 or float16     rows, every 32 channels  tokens, every QUANT channels
    mxfp4    bfloat16            in the operand           in the operand
    fp8      float16             QUANT x QUANT blocks     tokens, every QUANT channels
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.formats.triton_cast import (
    e2m1_to_fp32,
    e4m3_to_fp16,
    e4m3_to_fp32,
    ue8m0_to_fp32,
    widen,
)
from anymla.formats.triton_words import (
    BFLOAT16_UNIT,
    E4M3_UNIT,
    E4M3_WORD_UNIT,
    FLOAT16_UNIT,
    channel_at,
    e4m3_words_to_fp16,
    words_to_bf16,
    words_to_e4m3,
    words_to_fp16,
)
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_quantize import blocks_of_cta, quantize_blocks
from anymla.ops.device import target_of
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

# Triton's types by the operands' dtypes.
TL_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
}


class ActivationRows(NamedTuple):
    """Rows of activations to multiply in a tile.

    Attributes:
        x: pointer to the activations, or to their e4m3 codes.
        scales: pointer to float32 scales of the codes' quant blocks, or None.
        row: numbers of the rows to read, int64 [m].
        inside: mask of the rows that exist, bool [m].
        stride: elements between two rows of x.
        scale_stride: elements between two rows of scales.
        block: numbers of the rows' blocks of 16, int64 [m / 16], if x points to ``fragments``;
            unused otherwise (no default: Intel's Triton takes no None).
    """

    x: Any
    scales: Any
    row: Any
    inside: Any
    stride: Any
    scale_stride: Any
    block: Any


class WeightRows(NamedTuple):
    """Rows of a stored weight to multiply in a tile.

    Attributes:
        w: pointer to the stored weight.
        scales: pointer to the weight's scales, or None.
        row: numbers of the rows to read, int64 [n].
        inside: mask of the rows that exist, bool [n].
    """

    w: Any
    scales: Any
    row: Any
    inside: Any


@triton.jit
def _decode_e4m3(codes, OPERAND: tl.constexpr, NATIVE: tl.constexpr):
    if OPERAND == tl.float8e4nv:
        value = codes.to(tl.float8e4nv, bitcast=True)
    elif OPERAND == tl.float16:
        value = e4m3_to_fp16(codes, NATIVE)
    else:
        value = e4m3_to_fp32(codes, NATIVE).to(OPERAND)
    return value


@triton.jit
def _load_e2m1(
    weight, k, width,
    BLOCK: tl.constexpr, OPERAND: tl.constexpr, BLOCK_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Load and decode packed e2m1 with a scale byte per 32 (ue8m0) or 16 (e4m3) channels."""
    rows = weight.row
    inside = weight.inside
    pair = k // 2 + tl.arange(0, BLOCK_K // 2)
    packed_at = (rows * (width // 2))[:, None] + pair[None, :]
    packed = tl.load(weight.w + packed_at, inside[:, None] & (pair < width // 2)[None, :], other=0)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), (rows.shape[0], BLOCK_K // BLOCK, BLOCK))
    block = k // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
    scale_at = (rows * (width // BLOCK))[:, None] + block[None, :]
    known = inside[:, None] & (block < width // BLOCK)[None, :]
    scale = tl.load(weight.scales + scale_at, known, other=0)
    factor = ue8m0_to_fp32(scale) if BLOCK == 32 else e4m3_to_fp32(scale, NATIVE)
    value = e2m1_to_fp32(codes) * factor[:, :, None]
    return tl.reshape(value, (rows.shape[0], BLOCK_K)).to(OPERAND)


@triton.jit
def _load_weight(
    weight, k, width,
    FORMAT: tl.constexpr, OPERAND: tl.constexpr, BLOCK_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Load channels k .. k + BLOCK_K of the weight's rows [n] as OPERAND, 0 where outside."""
    if FORMAT == "mxfp4":
        value = _load_e2m1(weight, k, width, 32, OPERAND, BLOCK_K, NATIVE)
    elif FORMAT == "nvfp4":
        value = _load_e2m1(weight, k, width, 16, OPERAND, BLOCK_K, NATIVE)
    else:
        channel = k + tl.arange(0, BLOCK_K)
        mask = weight.inside[:, None] & (channel < width)[None, :]
        at = weight.w + (weight.row * width)[:, None] + channel[None, :]
        stored = tl.load(at, mask, other=0)
        value = _decode_e4m3(stored, OPERAND, NATIVE) if FORMAT == "fp8" else stored.to(OPERAND)
    return value


@triton.jit
def _four_values(words):
    """Decode int32 words of e4m3 [...] to float16 [..., 2, 2]: bytes 0, 2, 1 and 3 of each."""
    first, second, third, fourth = e4m3_words_to_fp16(words)
    return tl.join(tl.join(first, second), tl.join(third, fourth))


@triton.jit
def _load_four_codes(at, row, stride, inside, k, width, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """Load codes k .. k + BLOCK_K of rows [n] as float16, in the order of ``_four_values``."""
    word = k // 4 + tl.arange(0, BLOCK_K // 4)
    mask = inside[:, None] if WHOLE else inside[:, None] & (word < width // 4)[None, :]
    at = at.to(tl.pointer_type(tl.int32)) + (row * (stride // 4))[:, None] + word[None, :]
    return tl.reshape(_four_values(tl.load(at, mask, other=0)), (row.shape[0], BLOCK_K))


@triton.jit
def _load_fragments(given, k, BLOCK_K: tl.constexpr):
    """Load channels k .. k + BLOCK_K of ``fragments`` as [m, BLOCK_K], as ``_load_four_codes``."""
    BLOCKS: tl.constexpr = given.block.shape[0]
    at = (given.block * given.stride * 16)[:, None] + (k * 16 + tl.arange(0, 16 * BLOCK_K))[None, :]
    values = tl.reshape(tl.load(given.x + at), (BLOCKS, BLOCK_K // 32, 2, 8, 4, 2, 2, 2))
    # The dimensions of 16 x 32 values are half of four channels, row of eight, four channels, half
    # of the channels, half of the rows, and channel of two.
    values = tl.permute(values, (0, 6, 3, 1, 5, 4, 2, 7))
    return tl.reshape(values, (16 * BLOCKS, BLOCK_K))


@triton.jit
def _dot(a, w, total, OPERAND: tl.constexpr):
    """Return total + a @ w^T; float16 with a bfloat16 operand goes in as two exact parts."""
    b = tl.trans(w)
    if OPERAND == tl.bfloat16 and a.dtype == tl.float16:
        wide = a.to(tl.float32)
        upper = wide.to(tl.bfloat16)
        lower = (wide - widen(upper)).to(tl.bfloat16)
        total = tl.dot(lower, b, total)
        total = tl.dot(upper, b, total)
    else:
        total = tl.dot(a.to(OPERAND), b, total, input_precision="ieee")
    return total


@triton.jit
def gemm_tile(
    given, weight, first, last, width,
    FORMAT: tl.constexpr, CODED: tl.constexpr, OPERAND: tl.constexpr, BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr, QUANT: tl.constexpr, BY_WORDS: tl.constexpr = False,
    STAGES: tl.constexpr = None, FRAGMENTS: tl.constexpr = False,
):  # fmt: skip
    """Multiply rows of activations by rows of a weight over channels first .. last.

    Args:
        given: rows of activations, an ``ActivationRows``.
        weight: rows of the weight, a ``WeightRows``.
        first: first channel, a multiple of 128.
        last: end of the channels, which may exceed ``width``.
        width: number of channels in a row.
        FORMAT: format of the weight, "plain", "fp8", "mxfp4" or "nvfp4".
        CODED: True if activations are e4m3 codes.
        OPERAND: operand type of the products, from ``operand_dtype``.
        BLOCK_K: channels per step, at most QUANT if either operand has scales per quant block.
        NATIVE: True to convert e4m3 by instructions.
        QUANT: channels that share a scale.
        BY_WORDS: True to decode four e4m3 codes at a time, of the weight and, unless they are
            ``fragments``, of the activations. Rows must begin at multiples of 16 bytes.
        STAGES: number of stages of a pipeline that loads scales ahead, too; None for the launch's
            pipeline, which does not.
        FRAGMENTS: True if activations are ``fragments``.

    Returns:
        float32 [m, n], the sums of all products.
    """
    total = tl.zeros((given.row.shape[0], weight.row.shape[0]), tl.float32)
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if FRAGMENTS:
            a = _load_fragments(given, k, BLOCK_K)
        elif BY_WORDS:
            a = _load_four_codes(
                given.x, given.row, given.stride, given.inside, k, width, BLOCK_K, False
            )
        else:
            channel = k + tl.arange(0, BLOCK_K)
            mask = given.inside[:, None] & (channel < width)[None, :]
            at = given.x + (given.row * given.stride)[:, None] + channel[None, :]
            a = tl.load(at, mask, other=0)
        if BY_WORDS:
            b = _load_four_codes(
                weight.w, weight.row, width, weight.inside, k, width, BLOCK_K, FRAGMENTS
            )
        else:
            b = _load_weight(weight, k, width, FORMAT, OPERAND, BLOCK_K, NATIVE)
            if CODED:
                a = _decode_e4m3(a, OPERAND, NATIVE)
        if CODED or FORMAT == "fp8":
            part = tl.zeros((given.row.shape[0], weight.row.shape[0]), tl.float32)
            part = _dot(a, b, part, OPERAND)
            if FORMAT == "fp8":
                block = (weight.row // QUANT) * tl.cdiv(width, QUANT) + k // QUANT
                factor = tl.load(weight.scales + block, weight.inside, other=0)
                if weight.scales.dtype.element_ty == tl.uint8:
                    factor = ue8m0_to_fp32(factor)
                part *= factor[None, :]
            if CODED:
                at = given.scales + given.row * given.scale_stride + k // QUANT
                part *= tl.load(at, given.inside, other=0.0)[:, None]
            total += part
        else:
            total = _dot(a, b, total, OPERAND)
    if BY_WORDS:
        total *= E4M3_WORD_UNIT if FRAGMENTS else E4M3_WORD_UNIT * E4M3_WORD_UNIT
    return total


@triton.jit
def _decode_e2m1(packed, OPERAND: tl.constexpr):
    return words_to_e4m3(packed) if OPERAND == tl.float8e4nv else words_to_fp16(packed)


@triton.jit
def _decode_scale_byte(scale, BYTE: tl.constexpr):
    """Return byte BYTE of each scale as float32, ignoring NaN (255), which ``_has_nan`` finds."""
    SHIFT: tl.constexpr = 23 - 8 * BYTE
    bits = scale << SHIFT if SHIFT >= 0 else scale >> -SHIFT
    # Byte 0 stands for 2^-127, which is subnormal.
    return tl.maximum(bits & 0x7F800000, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _has_nan(scale):
    """True where one of four bytes is 255, because adding one to it overflows into bit 7."""
    return (((scale & 0x7F7F7F7F) + 0x01010101) & scale & -0x7F7F7F80) != 0


@triton.jit
def _scaled(part, x_scales, x_inside, NUMBER: tl.constexpr, QUANT: tl.constexpr):
    """Multiply a product of 32 channels by the activations' scales of that block, if any."""
    if QUANT == 32:
        part *= tl.load(x_scales + NUMBER, x_inside, other=0.0)[None, :]
    return part


@triton.jit
def _four_dots(
    packed, scale, x, inside, x_scales, x_inside, OPERAND: tl.constexpr, QUANT: tl.constexpr
):
    """Multiply 128 channels as four products, one per scale of the weight; x is pointers [32, m].

    If QUANT is 32 the activations' scales, at ``x_scales`` [m], are multiplied in as well.
    """
    BLOCK_N: tl.constexpr = packed.shape[0]
    even, odd = tl.split(tl.permute(tl.reshape(packed, (BLOCK_N, 2, 2, 4)), (0, 3, 1, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    a, b = _decode_e2m1(first, OPERAND), tl.load(x, inside, other=0.0)
    factor = tl.where(_has_nan(scale), float("nan"), _decode_scale_byte(scale, 0))
    part = _scaled(tl.dot(a, b) * factor[:, None], x_scales, x_inside, 0, QUANT)
    a, b = _decode_e2m1(second, OPERAND), tl.load(x + 32, inside, other=0.0)
    scaled = tl.dot(a, b) * _decode_scale_byte(scale, 1)[:, None]
    part += _scaled(scaled, x_scales, x_inside, 1, QUANT)
    a, b = _decode_e2m1(third, OPERAND), tl.load(x + 64, inside, other=0.0)
    scaled = tl.dot(a, b) * _decode_scale_byte(scale, 2)[:, None]
    part += _scaled(scaled, x_scales, x_inside, 2, QUANT)
    a, b = _decode_e2m1(fourth, OPERAND), tl.load(x + 96, inside, other=0.0)
    scaled = tl.dot(a, b) * _decode_scale_byte(scale, 3)[:, None]
    return part + _scaled(scaled, x_scales, x_inside, 3, QUANT)


@triton.jit
def _block_diagonal_dot(
    packed, scale, x, inside, x_scales, x_inside, OPERAND: tl.constexpr, QUANT: tl.constexpr
):
    """Multiply 128 channels as one product with a block-diagonal operand.

    ``x`` is pointers [128, 4 m]; a column of the operand is zero outside of its 32 channels.
    """
    BLOCK_N: tl.constexpr = packed.shape[0]
    product = tl.dot(_decode_e2m1(packed, OPERAND), tl.load(x, inside, other=0.0))
    bits = (scale[:, None] >> (tl.arange(0, 4) * 8)[None, :]) << 23
    factor = tl.maximum(bits & 0x7F800000, 0x00400000).to(tl.float32, bitcast=True)
    # A NaN in one of the four factors is enough.
    spoiled = _has_nan(scale)[:, None] & (tl.arange(0, 4) == 0)[None, :]
    factor = tl.where(spoiled, float("nan"), factor)
    part = tl.reshape(product, (BLOCK_N, 4, x.shape[1] // 4)) * factor[:, :, None]
    if QUANT == 32:
        at = x_scales[None, :] + tl.arange(0, 4)[:, None]
        part *= tl.load(at, x_inside[None, :], other=0.0)[None, :, :]
    return tl.sum(part, 1)


@triton.jit
def _activation_pointers(x, x_inside, BLOCK_DIAGONAL: tl.constexpr):
    """Return pointers and mask of the activations' operand from those of its rows [m]."""
    BLOCK_M: tl.constexpr = x.shape[0]
    if BLOCK_DIAGONAL:
        # With this operand a warpgroup waits for matrix instructions only once per 128 channels.
        channel = tl.arange(0, 128)
        mine = (channel // 32)[:, None] == (tl.arange(0, 4 * BLOCK_M) // BLOCK_M)[None, :]
        x = tl.reshape(tl.broadcast_to(x[None, :], (4, BLOCK_M)), (4 * BLOCK_M,))
        inside = tl.reshape(tl.broadcast_to(x_inside[None, :], (4, BLOCK_M)), (4 * BLOCK_M,))
        mask = mine & inside[None, :]
    else:
        channel = tl.arange(0, 32)
        mask = x_inside[None, :]
    # Rows begin at multiples of 128 elements, but the compiler does not see that through reshape.
    return tl.multiple_of(x[None, :] + channel[:, None], (16, 1)), mask


@triton.jit
def _column_slice(tile, NUMBER: tl.constexpr, SLICES: tl.constexpr):
    """Return slice NUMBER of SLICES (1, 2 or 4) equal slices of the columns of a tile [n, c]."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1] // SLICES
    if SLICES == 1:
        part = tile
    elif SLICES == 2:
        lower, upper = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS)), (0, 2, 1)))
        part = upper if NUMBER else lower
    else:
        halves = tl.permute(tl.reshape(tile, (ROWS, 2, 2, COLUMNS)), (0, 3, 2, 1))
        lower, upper = tl.split(halves)
        even, odd = tl.split(upper if NUMBER >= 2 else lower)
        part = odd if NUMBER % 2 else even
    return part


@triton.jit
def _mxfp4_tile(
    w, scales, x, x_scales, x_inside, k_blocks,
    OPERAND: tl.constexpr, BLOCK_DIAGONAL: tl.constexpr, WIDE_LOADS: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Multiply packed e2m1 by quantised activations, UNROLL K blocks of 128 channels per step."""
    UNIT: tl.constexpr = E4M3_UNIT if OPERAND == tl.float8e4nv else FLOAT16_UNIT
    SCALES: tl.constexpr = 128 // QUANT
    total = tl.zeros((w.shape[0], x_inside.shape[0]), tl.float32)
    if WIDE_LOADS:
        # Load a row's bytes of all K blocks of a step at once: accesses are longer and fewer.
        w = w[:, None] + tl.arange(0, 16 * UNROLL)[None, :]
        scales = scales[:, None] + tl.arange(0, UNROLL)[None, :]
    else:
        w = w[:, None] + tl.arange(0, 16)[None, :]
    x, inside = _activation_pointers(x, x_inside, BLOCK_DIAGONAL)
    for _ in tl.range(0, k_blocks, UNROLL, num_stages=STAGES):
        if WIDE_LOADS:
            step_packed, step_scale = tl.load(w), tl.load(scales)
        for i in tl.static_range(UNROLL):
            if WIDE_LOADS:
                packed = _column_slice(step_packed, i, UNROLL)
                scale = tl.reshape(_column_slice(step_scale, i, UNROLL), (w.shape[0],))
            else:
                packed, scale = tl.load(w + 16 * i), tl.load(scales + i)
            at, x_scale = x + 128 * i, x_scales
            if QUANT == 32:
                x_scale += i * SCALES
            if BLOCK_DIAGONAL:
                part = _block_diagonal_dot(
                    packed, scale, at, inside, x_scale, x_inside, OPERAND, QUANT
                )
            else:
                part = _four_dots(packed, scale, at, inside, x_scale, x_inside, OPERAND, QUANT)
            if QUANT == 32:
                total += part * UNIT
            else:
                factor = tl.load(x_scales + i, x_inside, other=0.0) * UNIT
                total += part * factor[None, :]
        w += 16 * UNROLL
        scales += UNROLL
        x += 128 * UNROLL
        x_scales += UNROLL * SCALES
    return total


@triton.jit
def _warp_operand(words):
    """Decode int32 words [g, n, 4] to the float16 operand [g, n, 32] of g warps' products."""
    WARPS: tl.constexpr = words.shape[0]
    BLOCK_N: tl.constexpr = words.shape[1]
    return tl.reshape(
        words_to_fp16(tl.reshape(words, (WARPS * BLOCK_N, 4)), 2), (WARPS, BLOCK_N, 32)
    )


@triton.jit
def _warp_scaled(part, scale, x_scales, inside, NUMBER: tl.constexpr, QUANT: tl.constexpr):
    """Multiply products [g, n, m] of 32 channels by their factors; see ``_mxfp4_warps_tile``."""
    part *= _decode_scale_byte(scale, NUMBER)[:, :, None]
    if QUANT == 32:
        part *= tl.load(x_scales + NUMBER, inside, other=0.0)[:, None, :]
    return part


@triton.jit
def _mxfp4_warps_tile(
    w, scales, x, x_scales, x_inside, k_blocks,
    K_WARPS: tl.constexpr, STAGES: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Multiply packed e2m1 by quantised activations, each of K_WARPS warps its own K blocks.

    Products are batches of K_WARPS, which Triton gives to warps. So every warp multiplies all rows,
    loads activations once for all of them, and decodes what ``ldmatrix`` has put where the
    instruction needs it. Sums of warps meet once, after the last step.
    """
    BLOCK_N: tl.constexpr = w.shape[0]
    BLOCK_M: tl.constexpr = x_inside.shape[0]
    X_SCALES: tl.constexpr = 128 // QUANT
    warp = tl.arange(0, K_WARPS)
    w = w[:, None] + tl.arange(0, 16 * K_WARPS)[None, :]
    scales = scales[:, None] + warp[None, :]
    channel = 128 * warp[:, None] + tl.arange(0, 32)[None, :]
    # Rows begin at multiples of 128 elements, which the compiler does not see.
    x = tl.multiple_of(x[None, None, :] + channel[:, :, None], (1, 16, 1))
    inside = x_inside[None, None, :]
    x_scales = x_scales[None, :] + X_SCALES * warp[:, None]
    total = tl.zeros((K_WARPS, BLOCK_N, BLOCK_M), tl.float32)
    spoiled = tl.zeros((K_WARPS, BLOCK_N), tl.int32)
    for _ in tl.range(0, k_blocks, K_WARPS, num_stages=STAGES):
        packed = tl.reshape(tl.load(w), (BLOCK_N, K_WARPS, 2, 2, 4))
        even, odd = tl.split(tl.permute(packed, (1, 0, 4, 2, 3)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        scale = tl.permute(tl.load(scales), (1, 0))
        # Adding one to a byte that stands for NaN, 255, overflows into its bit 7.
        spoiled |= ((scale & 0x7F7F7F7F) + 0x01010101) & scale
        part = tl.dot(_warp_operand(first), tl.load(x, inside, other=0.0))
        part = _warp_scaled(part, scale, x_scales, x_inside[None, :], 0, QUANT)
        more = tl.dot(_warp_operand(second), tl.load(x + 32, inside, other=0.0))
        part += _warp_scaled(more, scale, x_scales, x_inside[None, :], 1, QUANT)
        more = tl.dot(_warp_operand(third), tl.load(x + 64, inside, other=0.0))
        part += _warp_scaled(more, scale, x_scales, x_inside[None, :], 2, QUANT)
        more = tl.dot(_warp_operand(fourth), tl.load(x + 96, inside, other=0.0))
        part += _warp_scaled(more, scale, x_scales, x_inside[None, :], 3, QUANT)
        if QUANT == 32:
            total += part
        else:
            total += part * tl.load(x_scales, x_inside[None, :], other=0.0)[:, None, :]
        w += 16 * K_WARPS
        scales += K_WARPS
        x += 128 * K_WARPS
        x_scales += X_SCALES * K_WARPS
    total = tl.where(((spoiled & -0x7F7F7F80) != 0)[:, :, None], float("nan"), total)
    return tl.sum(total, 0) * FLOAT16_UNIT


@triton.jit
def _mxfp4_bf16_tile(w, scales, x, x_inside, k_blocks, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    """Multiply packed e2m1, scaled in the operand, for many tokens or tokens without scales."""
    BLOCK_N: tl.constexpr = w.shape[0]
    SCALES: tl.constexpr = BLOCK_K // 32
    total = tl.zeros((BLOCK_N, x_inside.shape[0]), tl.float32)
    w = w[:, None] + tl.arange(0, BLOCK_K // 8)[None, :]
    scales = scales[:, None] + tl.arange(0, SCALES)[None, :]
    x = x[None, :] + tl.arange(0, BLOCK_K)[:, None]
    for _ in tl.range(0, k_blocks * 128, BLOCK_K, num_stages=STAGES):
        factor = ue8m0_to_fp32(tl.load(scales)).to(tl.bfloat16)
        # Apply unit and scale one at a time: their product can overflow bfloat16.
        value = words_to_bf16(tl.load(w)) * tl.full((), BFLOAT16_UNIT, tl.float32).to(tl.bfloat16)
        value = tl.reshape(value, (BLOCK_N, SCALES, 32)) * factor[:, :, None]
        b = tl.load(x, x_inside[None, :], other=0.0)
        total = tl.dot(tl.reshape(value, (BLOCK_N, BLOCK_K)), b, total)
        w += BLOCK_K // 8
        scales += SCALES
        x += BLOCK_K
    return total


@triton.jit
def _fp8_tile(
    w, scales, x, x_scales, x_inside, k_blocks,
    NATIVE: tl.constexpr, STAGES: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Multiply e4m3 codes by e4m3 codes or float16, both as float16, whose products are exact."""
    total = tl.zeros((w.shape[0], x_inside.shape[0]), tl.float32)
    w = w[:, None] + tl.arange(0, QUANT)[None, :]
    x = x[None, :] + tl.arange(0, QUANT)[:, None]
    for _ in tl.range(0, k_blocks * (128 // QUANT), num_stages=STAGES):
        factor = tl.load(scales)
        if factor.dtype == tl.uint8:
            factor = ue8m0_to_fp32(factor)
        a = e4m3_to_fp16(tl.load(w), NATIVE)
        b = tl.load(x, x_inside[None, :], other=0.0)
        if b.dtype == tl.uint8:
            b = e4m3_to_fp16(b, NATIVE)
        part = tl.dot(a, b) * factor[:, None]
        total += part * tl.load(x_scales, x_inside, other=0.0)[None, :]
        w += QUANT
        scales += 1
        x += QUANT
        x_scales += 1
    return total


@triton.jit
def _fp8_warps_tile(
    w, scales, x, x_scales, x_inside, blocks,
    K_WARPS: tl.constexpr, STAGES: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Multiply e4m3 codes by e4m3 codes, each of K_WARPS warps its own quant blocks.

    Both are decoded by int32 words, so the order of channels is the same; see
    ``_mxfp4_warps_tile``.
    """
    BLOCK_N: tl.constexpr = w.shape[0]
    BLOCK_M: tl.constexpr = x_inside.shape[0]
    WORDS: tl.constexpr = QUANT // 4
    # Only loads of four bytes are in flight during a step.
    SCALE_WORDS: tl.constexpr = K_WARPS // 4 if scales.dtype.element_ty == tl.uint8 else 0
    warp = tl.arange(0, K_WARPS)
    w = w[:, None] + tl.arange(0, WORDS * K_WARPS)[None, :]
    if SCALE_WORDS:
        scales = scales.to(tl.pointer_type(tl.int32))[None, :]
        scales += tl.arange(0, SCALE_WORDS)[:, None]
    else:
        scales = scales[None, :] + warp[:, None]
    word = WORDS * warp[:, None] + tl.arange(0, WORDS)[None, :]
    # Rows begin at multiples of 128 codes, which the compiler does not see.
    x = tl.multiple_of(x[None, None, :] + word[:, :, None], (1, 16, 1))
    inside = x_inside[None, None, :]
    x_scales = x_scales[None, :] + warp[:, None]
    total = tl.zeros((K_WARPS, BLOCK_N, BLOCK_M), tl.float32)
    for _ in tl.range(0, blocks, K_WARPS, num_stages=STAGES):
        packed = tl.permute(tl.reshape(tl.load(w), (BLOCK_N, K_WARPS, WORDS)), (1, 0, 2))
        a = tl.reshape(_four_values(packed), (K_WARPS, BLOCK_N, QUANT))
        b = tl.permute(_four_values(tl.load(x, inside, other=0)), (0, 1, 3, 4, 2))
        part = tl.dot(a, tl.reshape(b, (K_WARPS, QUANT, BLOCK_M)))
        factor = tl.load(scales)
        if SCALE_WORDS:
            factor = (factor[:, None, :] >> (8 * tl.arange(0, 4))[None, :, None]) & 255
            factor = tl.reshape(factor, (K_WARPS, BLOCK_N))
        if factor.dtype != tl.float32:
            factor = ue8m0_to_fp32(factor)
        part *= factor[:, :, None]
        total += part * tl.load(x_scales, x_inside[None, :], other=0.0)[:, None, :]
        w += WORDS * K_WARPS
        scales += SCALE_WORDS if SCALE_WORDS else K_WARPS
        x += WORDS * K_WARPS
        x_scales += K_WARPS
    return tl.sum(total, 0) * (E4M3_WORD_UNIT * E4M3_WORD_UNIT)


@triton.jit
def gemm_tile_swap_ab(
    w, scales, x, x_scales, x_inside, k_blocks,
    FORMAT: tl.constexpr, OPERAND: tl.constexpr, NATIVE: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_DIAGONAL: tl.constexpr, WIDE_LOADS: tl.constexpr,
    QUANT: tl.constexpr, K_WARPS: tl.constexpr = 0,
):  # fmt: skip
    """Multiply rows of a weight by rows of activations.

    Args:
        w: uint8 pointers [n] to the first of a row's channels, at multiples of 16 bytes.
        scales: pointers [n] to the row's first scale, at multiples of 4 bytes for "mxfp4".
        x: pointers [m] to the rows of activations, as ``operand_rows`` makes them; for "fp8" also
            their e4m3 codes.
        x_scales: pointers [m] to the scales of their quant blocks, or None.
        x_inside: bool [m], True for rows of x to read.
        k_blocks: number of K blocks of 128 channels.
        FORMAT: format of the weight, "mxfp4" or "fp8".
        OPERAND: operand type, float16 or (for "mxfp4") float8e4nv with x_scales, else bfloat16.
        NATIVE: True to convert e4m3 by instructions.
        BLOCK_K: channels per step, a multiple of 128 with x_scales.
        STAGES: number of stages in the loop's pipeline.
        BLOCK_DIAGONAL: True to scale mxfp4 by ``_block_diagonal_dot``, which takes four times as
            many columns of the instruction.
        WIDE_LOADS: True to read all of a step's weights at once; a step is 1, 2 or 4 K blocks.
        QUANT: channels that share a scale, 128 or 32.
        K_WARPS: number of warps that share the channels of a step, of as many K blocks ("fp8":
            quant blocks), which divide those of a row; 0 if all warps multiply the same channels.
            Takes mxfp4 with float16 operands in runs of two pairs, or fp8 with codes.

    Returns:
        float32 [n, m], the sums of all products.
    """
    if OPERAND == tl.float8e4nv:
        x = x.to(tl.pointer_type(tl.float8e4nv))
    if FORMAT == "mxfp4" or K_WARPS:
        w = w.to(tl.pointer_type(tl.int32))
    if FORMAT == "mxfp4" and x_scales is not None:
        scales = scales.to(tl.pointer_type(tl.int32))
    if x_scales is None:
        total = _mxfp4_bf16_tile(w, scales, x, x_inside, k_blocks, BLOCK_K, STAGES)
    elif K_WARPS and FORMAT == "mxfp4":
        total = _mxfp4_warps_tile(
            w, scales, x, x_scales, x_inside, k_blocks, K_WARPS, STAGES, QUANT
        )
    elif K_WARPS:
        total = _fp8_warps_tile(
            w, scales, x.to(tl.pointer_type(tl.int32)), x_scales, x_inside,
            k_blocks * (128 // QUANT), K_WARPS, STAGES, QUANT,
        )  # fmt: skip
    elif FORMAT == "mxfp4":
        total = _mxfp4_tile(
            w, scales, x, x_scales, x_inside, k_blocks,
            OPERAND, BLOCK_DIAGONAL, WIDE_LOADS, BLOCK_K // 128, STAGES, QUANT,
        )  # fmt: skip
    else:
        total = _fp8_tile(w, scales, x, x_scales, x_inside, k_blocks, NATIVE, STAGES, QUANT)
    return total


@triton.jit(do_not_specialize=["rows"])
def operand_rows_kernel(
    x,
    operands,
    scales,
    rows,
    width,
    row_blocks,
    FLOOR: tl.constexpr,
    BLOCKS: tl.constexpr,
    BYTES: tl.constexpr,
    PAIRS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NATIVE: tl.constexpr,
    QUANT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convert BLOCKS quant blocks of activations to operands of a product.

    The order is that of decoded values of BYTES bytes in runs of PAIRS pairs, or if BYTES is 0 that
    of the channels.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // row_blocks
    place = tl.arange(0, QUANT)
    channel = channel_at(place, BYTES, PAIRS) if BYTES else place
    first = (row * width + (block - row * row_blocks) * QUANT)[:, None]
    inside = (row < rows)[:, None]
    value = tl.load(x + first + channel[None, :], inside, other=0.0)
    if QUANTIZE:
        codes, scale = quantize_blocks(value.to(tl.float32), FLOOR, NATIVE)
        if scales is not None:
            tl.store(scales + block, scale, row < rows)
        if operands.dtype.element_ty == tl.uint8:
            tl.store(operands + first + place[None, :], codes, inside)
        else:
            number = e4m3_to_fp16(codes, NATIVE)
            if scales is None:
                number = number.to(tl.float32) * scale[:, None]
            tl.store(
                operands + first + place[None, :], number.to(operands.dtype.element_ty), inside
            )
    else:
        tl.store(operands + first + place[None, :], value.to(operands.dtype.element_ty), inside)


def operand_rows(
    x: Tensor,
    operand: torch.dtype,
    *,
    weight_format: str,
    quantize: bool,
    block: int = FP8_BLOCK,
    pairs: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Convert contiguous x [T, K], K a multiple of 128, to operands in scratch memory.

    Quantised values become e4m3 or, where there is no matrix instruction for e4m3, the same numbers
    in float16. bfloat16 operands have no scales: they are the decoded values, or x itself.

    Args:
        x: activations [T, K], bfloat16, or any 16-bit or 32-bit float if quantised.
        operand: dtype of the operands, float8_e4m3fn, float16 or bfloat16.
        weight_format: format of the weight that the operands multiply, "mxfp4" or "fp8".
        quantize: True to quantise to e4m3 first; must be True for float8_e4m3fn and float16.
        block: number of channels of a quant block, 128 or 32.
        pairs: number of pairs of operands in a run, 1 or 2; see ``formats.triton_words``.

    Returns:
        Operands [T, K] (e4m3 as uint8) and float32 scales [T, K / block], None for bfloat16.
    """
    rows, width = x.shape
    row_blocks = width // block
    stored = torch.uint8 if operand == torch.float8_e4m3fn else operand
    operands = scratch((rows, width), stored, x.device)
    scales = None
    if operand != torch.bfloat16:
        scales = scratch((rows, row_blocks), torch.float32, x.device)
    size = stored.itemsize if weight_format == "mxfp4" else 0
    _decoding(rows, width, (size, pairs), quantize, block, x.device)(x, operands, scales)
    return operands, scales


@functools.lru_cache(LAUNCHES)
def _decoding(
    rows: int,
    width: int,
    order: tuple[int, int],
    quantize: bool,
    block: int,
    device: torch.device,
) -> PreparedLaunch:
    row_blocks = width // block
    blocks = blocks_of_cta(rows * row_blocks, block)
    return PreparedLaunch(
        operand_rows_kernel,
        (cdiv(rows * row_blocks, blocks),),
        rows,
        width,
        row_blocks,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        BLOCKS=blocks,
        BYTES=order[0],
        PAIRS=order[1],
        QUANTIZE=quantize,
        NATIVE=target_of(device).native_e4m3,
        QUANT=block,
        **pdl_launch(device),
    )


@triton.jit(do_not_specialize=["rows"])
def fragments_kernel(
    x,
    given_scales,
    values,
    scales,
    rows,
    width,
    row_stride,
    block_stride,
    FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
    QUANT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convert 128 channels of 16 rows of activations, or of their codes, to fragments."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    SCALES: tl.constexpr = 128 // QUANT
    block = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * 128
    row = block * 16 + tl.arange(0, 16)
    known = (row < rows)[:, None]
    at = (row * width)[:, None] + (first + tl.arange(0, 128))[None, :]
    codes = tl.load(x + at, known, other=0)
    number = (first // QUANT + tl.arange(0, SCALES))[None, :]
    if given_scales is None:
        given = tl.reshape(codes.to(tl.float32), (16 * SCALES, QUANT))
        codes, scale = quantize_blocks(given, FLOOR, NATIVE)
        scale = tl.reshape(scale, (16, SCALES))
    else:
        place = (row * row_stride)[:, None] + number * block_stride
        scale = tl.load(given_scales + place, known, other=0.0)
    # 32 channels are two halves of four words, whose pairs ``_four_values`` exchanges.
    value = tl.reshape(e4m3_to_fp16(codes, NATIVE), (2, 8, 4, 2, 4, 2, 2))
    value = tl.reshape(tl.permute(value, (2, 6, 1, 4, 3, 0, 5)), (2048,))
    tl.store(values + (block * width + first) * 16 + tl.arange(0, 2048), value)
    tl.store(scales + (row * (width // QUANT))[:, None] + number, scale, known)


def fragments(
    x: Tensor, scales: Tensor | None = None, *, block: int = FP8_BLOCK
) -> tuple[Tensor, Tensor]:
    """Convert x [T, K] to float16 operands of ``mma.sync`` in the order of its threads' registers.

    16 rows of 32 channels, in the order that ``_four_values`` gives the weight's, lie next to each
    other; a thread of a warp reads its operand of an instruction as 16 bytes.

    Args:
        x: contiguous activations [T, K] to quantise, or with scales their e4m3 codes, uint8; K is a
            multiple of 128.
        scales: float32 scales of the codes [T, K / block] at any strides, or None.
        block: number of channels of a quant block, 128 or 32.

    Returns:
        float16 fragments, whose shape [T, K] is only that of x (memory goes on to a multiple of 16
        rows), and contiguous float32 scales [T, K / block]; both are scratch memory.
    """
    rows, width = x.shape
    values = scratch((16 * cdiv(rows, 16), width), torch.float16, x.device)
    found = scratch((rows, width // block), torch.float32, x.device)
    strides = (0, 0) if scales is None else (scales.stride(0), scales.stride(1))
    _fragments(rows, width, strides, block, x.device)(x, scales, values, found)
    return values[:rows], found


@functools.lru_cache(LAUNCHES)
def _fragments(
    rows: int, width: int, strides: tuple[int, int], block: int, device: torch.device
) -> PreparedLaunch:
    return PreparedLaunch(
        fragments_kernel,
        (cdiv(rows, 16), width // 128),
        rows,
        width,
        *strides,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        NATIVE=target_of(device).native_e4m3,
        QUANT=block,
        **pdl_launch(device),
    )
