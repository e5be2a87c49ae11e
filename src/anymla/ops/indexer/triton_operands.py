"""Operands of index scores inside Triton kernels: queries and keys in what the product multiplies.

Kinds of values are "e4m3" and "e2m1" (codes), "fp16", "bf16" and "fp32". The product is taken in
the narrowest arithmetic that holds both operands' values exactly; sums are always float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.triton_cast import e2m1_to_fp32, e4m3_to_fp16, e4m3_to_fp32, ue8m0_to_fp32
from anymla.ops.device import Target

_BLOCK = tl.constexpr(MXFP4_BLOCK)

KIND_OF_DTYPE = {
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "e2m1",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
KIND_OF_CODEC = {"row_fp8": "e4m3", "row_mxfp4": "e2m1", "bf16": "bf16", "fp32": "fp32"}


def math_of(q_kind: str, k_kind: str, target: Target) -> str:
    """Arithmetic of the product: "e4m3", "fp16", "bf16" or "fp32"."""
    kinds = {q_kind, k_kind}
    if kinds == {"e4m3"}:
        return "e4m3" if target.dot_e4m3 else "fp16"
    if kinds <= {"e4m3", "fp16"}:
        return "fp16"
    # An e2m1 value with its scale has bfloat16's range.
    return "bf16" if kinds <= {"e4m3", "e2m1", "bf16"} else "fp32"


@triton.jit
def as_operand(x, KIND: tl.constexpr, MATH: tl.constexpr, NATIVE: tl.constexpr):
    """Values, or e4m3 codes, of any shape in the type that the product takes."""
    if KIND == "e4m3" and MATH == "e4m3":
        y = x.to(tl.float8e4nv, bitcast=True)
    elif KIND == "e4m3" and MATH == "fp16":
        y = e4m3_to_fp16(x, NATIVE)
    else:
        wide = e4m3_to_fp32(x, NATIVE) if KIND == "e4m3" else x
        if MATH == "fp16":
            y = wide.to(tl.float16)
        elif MATH == "bf16":
            y = wide.to(tl.bfloat16)
        else:
            y = wide.to(tl.float32)
    return y


@triton.jit
def load_operand(
    rows,
    there,
    first,
    KIND: tl.constexpr,
    MATH: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Channels [first, first + PART) of rows of WIDTH, padded to PADDED, as [N, PART].

    ``rows`` [N] are pointers to values, or e4m3 codes; zeros where not ``there`` [N].
    """
    channel = first + tl.arange(0, PART)
    mask = there[:, None]
    if PADDED != WIDTH:
        mask = mask & (channel < WIDTH)[None, :]
    if KIND == "e4m3" and MATH == "e4m3":
        # As FP8 from the start, so that loads and products overlap: codes that are converted
        # first go through registers.
        rows = rows.to(tl.pointer_type(tl.float8e4nv))
        return tl.load(rows[:, None] + channel[None, :], mask=mask, other=0.0)
    else:
        x = tl.load(rows[:, None] + channel[None, :], mask=mask, other=0)
        return as_operand(x, KIND, MATH, NATIVE)


@triton.jit
def load_packed(
    rows,
    scales,
    there,
    first,
    MATH: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
):
    """As ``load_operand`` of packed e2m1 codes with their scale bytes; ``first`` starts a block."""
    ROWS: tl.constexpr = rows.shape[0]
    BLOCKS: tl.constexpr = PART // _BLOCK
    byte = first // 2 + tl.arange(0, PART // 2)
    block = first // _BLOCK + tl.arange(0, BLOCKS)
    mask, scale_mask = there[:, None], there[:, None]
    if PADDED != WIDTH:
        mask = mask & (byte < WIDTH // 2)[None, :]
        scale_mask = scale_mask & (block < WIDTH // _BLOCK)[None, :]
    packed = tl.load(rows[:, None] + byte[None, :], mask=mask, other=0)
    scale = tl.load(scales[:, None] + block[None, :], mask=scale_mask, other=0)
    x = tl.join(e2m1_to_fp32(packed & 15), e2m1_to_fp32(packed >> 4))
    x = tl.reshape(x, (ROWS, BLOCKS, _BLOCK)) * ue8m0_to_fp32(scale)[:, :, None]
    return as_operand(tl.reshape(x, (ROWS, PART)), "fp32", MATH, False)


@triton.jit
def query_lines(
    row, live, weights, weights_stride, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr
):
    """Lines of q [.., HEADS, D] of rows ``row`` [ROWS] int64, their weights and their existence.

    Each is [ROWS * PADDED_HEADS], a row's heads side by side.
    """
    LINES: tl.constexpr = row.shape[0] * PADDED_HEADS
    head = tl.arange(0, PADDED_HEADS)
    exists = tl.reshape(live[:, None] & (head < HEADS)[None, :], (LINES,))
    line = tl.reshape(row[:, None] * HEADS + head[None, :], (LINES,))
    place = tl.reshape(row[:, None] * weights_stride + head[None, :], (LINES,))
    return line, tl.load(weights + place, mask=exists, other=0.0), exists


@triton.jit
def load_queries(
    q,
    q_scales,
    line,
    exists,
    first,
    KIND: tl.constexpr,
    MATH: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Channels [first, first + PART) of the ``line``-s that ``query_lines`` gives."""
    if KIND == "e2m1":
        scales = q_scales + line * (WIDTH // _BLOCK)
        return load_packed(
            q + line * (WIDTH // 2), scales, exists, first, MATH, WIDTH, PADDED, PART
        )
    else:
        return load_operand(
            q + line * WIDTH, exists, first, KIND, MATH, WIDTH, PADDED, PART, NATIVE
        )


@triton.jit
def head_sums(
    dots,
    weights,
    exists,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_EXIST: tl.constexpr,
):
    """``sum_h weights[row, h] * relu(dots[key, row, h])``, float32 [KEYS, ROWS].

    Args:
        dots: [KEYS, ROWS * HEADS] float32.
        weights: [ROWS * HEADS] float32.
        exists: [ROWS * HEADS], whether there is such a head.
        ROWS: rows of queries.
        HEADS: heads of a row.
        ALL_EXIST: ``exists`` is known to be true for every row that counts.
    """
    KEYS: tl.constexpr = dots.shape[0]
    # A NaN must stay one: no candidate is dropped silently.
    terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    if not ALL_EXIST:
        # An infinite key times the zeros of a head that does not exist would be NaN.
        terms = tl.where(exists[None, :], terms, 0.0)
    return tl.sum(tl.reshape(terms, (KEYS, ROWS, HEADS)), 2)
