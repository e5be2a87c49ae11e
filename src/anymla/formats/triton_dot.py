"""Matrix products inside kernels that lose nothing of their operands."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exact_dot(a, w, total):
    """Add a @ w^T to ``total``, the operands unrounded and the sums in float32.

    Args:
        a: [M, K] bfloat16, float16 or float32.
        w: [N, K] likewise.
        total: [M, N] float32.
    """
    if a.dtype == w.dtype and a.dtype != tl.float32:
        total = tl.dot(a, tl.trans(w), total)
    elif a.dtype == tl.float16 and w.dtype == tl.float32:
        upper = a.to(tl.float32).to(tl.bfloat16)
        lower = (a.to(tl.float32) - upper.to(tl.float32)).to(tl.bfloat16)
        total = exact_dot(lower, w, total)
        total = exact_dot(upper, w, total)
    elif a.dtype == tl.bfloat16 and w.dtype == tl.float32:
        # Three bfloat16 hold the 24 bits of a float32, and their products are tensor-core ones.
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(a, tl.trans(low), total)
        total = tl.dot(a, tl.trans(middle), total)
        total = tl.dot(a, tl.trans(high), total)
    else:
        wide = tl.trans(w.to(tl.float32))
        total = tl.dot(a.to(tl.float32), wide, total, input_precision="ieee")
    return total
