"""The product of activations and a stored weight, decoded tile by tile inside a kernel.

    for each block of K:   x [m, BLOCK_K]  .  decode(w [n, BLOCK_K])^T  is added to [m, n]

Nothing is rounded on the way: operands are of a dtype that holds every decoded value, products add
up in float32, and what the operands do not hold is a factor in float32: the scale of a 128 x 128
block, of a quantised run of activations, or of a whole NVFP4 tensor.

    weight   operand with bfloat16 / float16 / float32 / e4m3 activations   factor
    plain    theirs if the weight has it too, else float32                  -
    fp8      bfloat16 / float16 / float32 / e4m3 or float16                 each 128 x 128 block
    mxfp4    bfloat16 (float16 as two of them) / float32 / bfloat16         -
    nvfp4    bfloat16 / float16 / float32                                   the tensor's
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from anymla.formats.triton_cast import (
    e2m1_to_fp32,
    e4m3_to_fp16,
    e4m3_to_fp32,
    ue8m0_to_fp32,
)
from anymla.ops.device import Target

TL_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def operand(
    x: torch.dtype, weight_format: str, weight: torch.dtype, coded: bool, target: Target
) -> tl.dtype:
    """Dtype of the matrix product's operands.

    Args:
        x: dtype of the activations before they were quantised.
        weight_format: "plain", "fp8", "mxfp4" or "nvfp4".
        weight: dtype of the stored weight, which matters for "plain".
        coded: the activations are e4m3 codes.
        target: what the product runs on.
    """
    if coded:
        if weight_format != "fp8":
            return tl.bfloat16
        return tl.float8e4nv if target.dot_e4m3 else tl.float16
    if x == torch.float32 or (weight_format == "plain" and weight != x):
        return tl.float32
    return tl.bfloat16 if weight_format == "mxfp4" else TL_DTYPES[x]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows of activations, rows of the weight and channels of a step; warps and stages."""

    rows: int
    columns: int
    channels: int
    num_warps: int
    num_stages: int


def tile(rows: int, kind: tl.dtype, target: Target) -> Tile:
    """The tile for so many rows of activations and an operand dtype."""
    if target.backend == "cpu":
        # The interpreter pays for steps, not for their size.
        return Tile(16 if rows <= 16 else 64, 64, 128, 4, 1)
    if kind == tl.float32:
        return Tile(16, 32, 32, 4, 2)
    if rows <= 16:
        return Tile(16, 32, 128, 4, 3 if target.shared_bytes > 96 * 1024 else 2)
    if rows <= 512 or target.shared_bytes < 160 * 1024 or target.backend != "cuda":
        return Tile(64, 64, 64, 4, 2)
    return Tile(128, 128, 64, 8, 3)


@triton.jit
def _decode_codes(codes, OPERAND: tl.constexpr, NATIVE: tl.constexpr):
    if OPERAND == tl.float8e4nv:
        value = codes.to(tl.float8e4nv, bitcast=True)
    elif OPERAND == tl.float16:
        value = e4m3_to_fp16(codes, NATIVE)
    else:
        value = e4m3_to_fp32(codes, NATIVE).to(OPERAND)
    return value


@triton.jit
def _decode_nibbles(
    w,
    scales,
    rows,
    inside,
    k,
    width,
    RUN: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Packed e2m1 with a scale byte for RUN channels: ue8m0 for 32, e4m3 for 16."""
    pair = k // 2 + tl.arange(0, BLOCK_K // 2)
    packed_at = (rows * (width // 2))[:, None] + pair[None, :]
    packed = tl.load(w + packed_at, inside[:, None] & (pair < width // 2)[None, :], other=0)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), (rows.shape[0], BLOCK_K // RUN, RUN))
    run = k // RUN + tl.arange(0, BLOCK_K // RUN)
    scale_at = (rows * (width // RUN))[:, None] + run[None, :]
    known = inside[:, None] & (run < width // RUN)[None, :]
    scale = tl.load(scales + scale_at, known, other=0)
    factor = ue8m0_to_fp32(scale) if RUN == 32 else e4m3_to_fp32(scale, NATIVE)
    value = e2m1_to_fp32(codes) * factor[:, :, None]
    return tl.reshape(value, (rows.shape[0], BLOCK_K)).to(OPERAND)


@triton.jit
def weight_tile(
    w,
    scales,
    rows,
    inside,
    k,
    width,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Channels k..k + BLOCK_K of the weight's int64 ``rows`` [n] in OPERAND, 0 where outside."""
    if FORMAT == "mxfp4":
        value = _decode_nibbles(w, scales, rows, inside, k, width, 32, OPERAND, BLOCK_K, NATIVE)
    elif FORMAT == "nvfp4":
        value = _decode_nibbles(w, scales, rows, inside, k, width, 16, OPERAND, BLOCK_K, NATIVE)
    else:
        channel = k + tl.arange(0, BLOCK_K)
        mask = inside[:, None] & (channel < width)[None, :]
        stored = tl.load(w + (rows * width)[:, None] + channel[None, :], mask, other=0)
        value = _decode_codes(stored, OPERAND, NATIVE) if FORMAT == "fp8" else stored.to(OPERAND)
    return value


@triton.jit
def _multiply(a, w, total, OPERAND: tl.constexpr):
    """Total + a @ w^T; a float16 that meets bfloat16 goes in as two exact parts."""
    turned = tl.trans(w)
    if a.dtype == tl.float16 and OPERAND == tl.bfloat16:
        wide = a.to(tl.float32)
        upper = wide.to(tl.bfloat16)
        lower = (wide - upper.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(lower, turned, total)
        total = tl.dot(upper, turned, total)
    else:
        total = tl.dot(a.to(OPERAND), turned, total, input_precision="ieee")
    return total


@triton.jit
def product(
    x,
    x_scales,
    x_rows,
    x_inside,
    x_stride,
    x_scale_stride,
    w,
    scales,
    w_rows,
    w_inside,
    first,
    last,
    width,
    FORMAT: tl.constexpr,
    CODED: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rows of x times rows of w over channels first..last.

    Args:
        x: activations, or with CODED their e4m3 codes; a row every x_stride elements.
        x_scales: with CODED float32 scales of runs of 128; a row every x_scale_stride.
        x_rows: int64 [m] rows of x.
        x_inside: bool [m], those to read.
        x_stride: see x.
        x_scale_stride: see x_scales.
        w: the weight as stored.
        scales: its scales.
        w_rows: int64 [n] rows of w.
        w_inside: bool [n], those to read.
        first: first channel, a multiple of 128.
        last: end of the channels; beyond ``width`` there are none.
        width: channels of a row.
        FORMAT: "plain", "fp8", "mxfp4" or "nvfp4".
        CODED: see x.
        OPERAND: from ``operand``.
        BLOCK_K: channels of a step, at most 128.
        NATIVE: convert e4m3 by instructions.

    Returns:
        float32 [m, n].
    """
    total = tl.zeros((x_rows.shape[0], w_rows.shape[0]), tl.float32)
    for k in range(first, last, BLOCK_K):
        channel = k + tl.arange(0, BLOCK_K)
        mask = x_inside[:, None] & (channel < width)[None, :]
        a = tl.load(x + (x_rows * x_stride)[:, None] + channel[None, :], mask, other=0)
        b = weight_tile(w, scales, w_rows, w_inside, k, width, FORMAT, OPERAND, BLOCK_K, NATIVE)
        if CODED:
            a = _decode_codes(a, OPERAND, NATIVE)
        if CODED or FORMAT == "fp8":
            part = tl.zeros((x_rows.shape[0], w_rows.shape[0]), tl.float32)
            part = _multiply(a, b, part, OPERAND)
            if FORMAT == "fp8":
                block = (w_rows // 128) * tl.cdiv(width, 128) + k // 128
                factor = tl.load(scales + block, w_inside, other=0)
                if scales.dtype.element_ty == tl.uint8:
                    factor = ue8m0_to_fp32(factor)
                part *= factor[None, :]
            if CODED:
                run = x_scales + x_rows * x_scale_stride + k // 128
                part *= tl.load(run, x_inside, other=0.0)[:, None]
            total += part
        else:
            total = _multiply(a, b, total, OPERAND)
    return total
