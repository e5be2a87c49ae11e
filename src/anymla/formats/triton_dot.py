"""Matrix products inside kernels that lose nothing of their operands."""

from __future__ import annotations

import triton
import triton.language as tl


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
def _add_products(a, w, total):
    """Add a @ w^T of 16-bit a and float32 w, the least of its products first."""
    high, middle, low = split_in_three(w)
    total = tl.dot(a, tl.trans(low), total)
    total = tl.dot(a, tl.trans(middle), total)
    return tl.dot(a, tl.trans(high), total)


@triton.jit
def exact_dot(a, w, total):
    """Add a @ w^T to ``total``, the operands unrounded and the sums in float32.

    Tensor cores cut off what they add to a sum: up to a unit of its last place each time, always
    towards zero. So a call's products are summed by themselves, the least of them first while the
    sum is small, and that sum is added to ``total`` with rounding.

    Args:
        a: [M, K] bfloat16, float16 or float32.
        w: [N, K] likewise.
        total: [M, N] float32.
    """
    if a.dtype == w.dtype and a.dtype != tl.float32:
        total = tl.dot(a, tl.trans(w), total)
    elif a.dtype == tl.float16 and w.dtype == tl.float32:
        # The products of bfloat16 are tensor-core ones.
        upper = a.to(tl.float32).to(tl.bfloat16)
        lower = (a.to(tl.float32) - upper.to(tl.float32)).to(tl.bfloat16)
        part = _add_products(lower, w, tl.zeros_like(total))
        total += _add_products(upper, w, part)
    elif a.dtype == tl.bfloat16 and w.dtype == tl.float32:
        total += _add_products(a, w, tl.zeros_like(total))
    else:
        wide = tl.trans(w.to(tl.float32))
        total = tl.dot(a.to(tl.float32), wide, total, input_precision="ieee")
    return total
