"""Matrix products inside kernels whose operands lose no bits."""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.formats.triton_cast import widen


@triton.jit
def _upper_bits(x):
    """A float32 without the 16 bits that a bfloat16 has not; what it leaves has 16 bits at most."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _as_bf16(x):
    """A float32 that is a bfloat16, by moving its bits: conversions are slow on NVIDIA."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def split_in_three(x):
    """Three bfloat16, the largest first, whose sum is a float32 x: 8 of its 24 bits each."""
    high = _upper_bits(x)
    rest = x - high
    middle = _upper_bits(rest)
    return _as_bf16(high), _as_bf16(middle), _as_bf16(rest - middle)


@triton.jit
def _bf16_parts(x):
    """bfloat16, the least first, whose sum is x."""
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
    """Add a @ w^T to ``total``, the operands unrounded and the sums in float32.

    Tensor cores cut off what they add to a sum: up to a unit of its last place each time, always
    towards zero. So a call's products are summed by themselves, the least of them first while the
    sum is small, and that sum is added to ``total`` with rounding.

    Args:
        a: [M, K] bfloat16, float16 or float32.
        w: [N, K] likewise.
        total: [M, N] float32.
        WIDE: multiply in float32, where the target has no products of bfloat16.
    """
    ALIKE: tl.constexpr = a.dtype == w.dtype
    if WIDE:
        total = tl.dot(widen(a), tl.trans(widen(w)), total, input_precision="ieee")
    elif ALIKE and a.dtype != tl.float32:
        total = tl.dot(a, tl.trans(w), total)
    elif ALIKE:
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    else:
        # The products of bfloat16 are tensor-core ones.
        left, right = _bf16_parts(a), _bf16_parts(w)
        part = tl.zeros_like(total)
        for i in tl.static_range(len(left)):
            for j in tl.static_range(len(right)):
                part = tl.dot(left[i], tl.trans(right[j]), part)
        total += part
    return total
