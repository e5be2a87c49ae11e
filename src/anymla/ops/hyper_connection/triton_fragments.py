"""Streams as operands of a matrix product, in the registers that they were loaded to.

A warp loads rows of 32 channels of bfloat16, eight to a thread, and four threads a row; eight rows
at a time, and then eight more. The matrix instruction wants the same thread to have the same rows,
but pairs of channels, of which the eight that a thread has are four. So channels are given other
numbers, and tokens other places, until both are the same; the weights of a channel follow it, and
results are where their tokens are. Nothing is moved: no shared memory, and no barrier.

    loaded      row  p * 8 W + w * 8 + g      channel  8 t + 4 s + 2 f + e
    multiplied  row  16 w + 8 p + g           channel  16 s + 8 f + 2 t + e

with W warps w, p and f of 2, lanes g of 8 and t of 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Channels that four threads load together, and rows of a warp.
CHANNELS = 32
WARP_ROWS = 16


@triton.jit
def fragments(a, b, c, d, WARPS: tl.constexpr):
    """Channels [16 WARPS, 32] of four streams side by side, [16 WARPS, 128]."""
    x = tl.join(tl.join(a, b), tl.join(c, d))
    x = tl.reshape(x, (2, WARPS, 8, 4, 2, 2, 2, 2, 2))  # p, w, g, t, s, f, e, and two of streams
    x = tl.permute(x, (1, 0, 2, 8, 7, 4, 5, 3, 6))
    return tl.reshape(x, (16 * WARPS, 128))


@triton.jit
def in_order(weights):
    """Weights [P, 128] of 32 channels of four streams, in the order of ``fragments``."""
    P: tl.constexpr = weights.shape[0]
    x = tl.reshape(weights, (P, 4, 4, 2, 2, 2))  # stream, t, s, f, e
    return tl.reshape(tl.permute(x, (0, 1, 3, 4, 2, 5)), (P, 128))


@triton.jit
def loaded_rows(WARPS: tl.constexpr):
    """Which of the rows loaded are the rows of a product of ``fragments``, [16 WARPS]."""
    row = tl.arange(0, 16 * WARPS)
    return row // 16 * 8 + row % 16 // 8 * (8 * WARPS) + row % 8
