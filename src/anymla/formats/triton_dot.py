"""Matrix products inside kernels that lose no bits of their operands."""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.formats.triton_cast import widen


@triton.jit
def _upper_bits(x):
    """Clear the 16 bits of a float32 that a bfloat16 lacks; the rest is at most 16 bits wide."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _as_bf16(x):
    """Convert a float32 that is a bfloat16 by moving its bits: conversions are slow on NVIDIA."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def split_in_three(x):
    """Split a float32 x into three bfloat16 of 8 bits each, the largest first, whose sum is x."""
    high = _upper_bits(x)
    rest = x - high
    middle = _upper_bits(rest)
    return _as_bf16(high), _as_bf16(middle), _as_bf16(rest - middle)


@triton.jit
def _bf16_parts(x):
    """Split x into bfloat16 whose sum is x, the least first."""
    if x.dtype == tl.float32:
        high, middle, low = split_in_three(x)
        return low, middle, high
    elif x.dtype == tl.float16:
        upper = x.to(tl.float32).to(tl.bfloat16)
        lower = x.to(tl.float32) - widen(upper)
        return lower.to(tl.bfloat16), upper
    else:
        return (x,)


@triton.jit
def exact_dot(a, w, total, WIDE: tl.constexpr = False):
    """Add a @ w^T to ``total``, with unrounded operands and sums in float32.

    Tensor cores truncate when they add to a sum: each time by up to a unit of its last place, and
    always towards zero. So the products of one call are summed on their own, the least of them
    first while the sum is small, and that sum is added to ``total`` with rounding.

    Args:
        a: left operand, [M, K] bfloat16, float16 or float32.
        w: right operand, [N, K] of the same dtypes.
        total: sums so far, [M, N] float32.
        WIDE: True to multiply in float32, for targets without products of bfloat16.
    """
    ALIKE: tl.constexpr = a.dtype == w.dtype
    if WIDE:
        total = tl.dot(widen(a), tl.trans(widen(w)), total, input_precision="ieee")
    elif ALIKE and a.dtype != tl.float32:
        total = tl.dot(a, tl.trans(w), total)
    elif ALIKE:
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    else:
        # Split into bfloat16, whose products run on tensor cores.
        left, right = _bf16_parts(a), _bf16_parts(w)
        part = tl.zeros_like(total)
        for i in tl.static_range(len(left)):
            for j in tl.static_range(len(right)):
                part = tl.dot(left[i], tl.trans(right[j]), part)
        total += part
    return total
