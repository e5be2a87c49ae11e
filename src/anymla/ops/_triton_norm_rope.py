"""Triton device functions for RMS norms and RoPE of rows.

Channels (2i, 2i + 1) of a row form pair i; RoPE rotates a row's last pairs. A tile has PADDED
channels, a power of two; its first WIDTH channels are the row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_rms(x, eps, WIDTH: tl.constexpr):
    """Compute ``1 / sqrt(mean(x^2) + eps)`` [N, 1] of float32 rows [N, PADDED], zero past WIDTH."""
    return tl.rsqrt(tl.sum(x * x, 1) * (1.0 / WIDTH) + eps)[:, None]


@triton.jit
def load_cos_sin(
    table,
    row_stride,
    column_stride,
    length,
    positions,
    valid,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Load cosines and sines, float32 [N, PADDED / 2], of the pairs of rows at ``positions`` [N].

    Args:
        table: [length, ROPE], cosines in the first half of the columns, sines in the second.
        row_stride: elements between rows of the table.
        column_stride: elements between columns of the table.
        length: number of rows in the table, to which positions are clamped.
        positions: positions of the rows, integer [N].
        valid: bool [N]; nothing is read where it is False.
        WIDTH: channels per row.
        ROPE: number of channels that rotate, the last of the row.
        PADDED: channels per tile.

    Pairs that do not rotate have cosine 1 and sine 0.
    """
    known = tl.minimum(tl.maximum(positions.to(tl.int64), 0), length - 1)
    column = tl.arange(0, PADDED // 2) - (WIDTH - ROPE) // 2
    rotates = valid[:, None] & ((column >= 0) & (column < ROPE // 2))[None, :]
    at = table + known[:, None] * row_stride + (column * column_stride)[None, :]
    cos = tl.load(at, mask=rotates, other=1.0)
    sin = tl.load(at + (ROPE // 2) * column_stride, mask=rotates, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(x, cos, sin, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Rotate the last ROPE of the WIDTH channels of float32 rows x [N, PADDED].

    ``cos`` and ``sin`` [N or 1, PADDED / 2] are those of ``load_cos_sin``. The bits of the other
    channels do not change.
    """
    ROWS: tl.constexpr = x.shape[0]
    PADDED: tl.constexpr = x.shape[1]
    column = tl.arange(0, PADDED // 2) - (WIDTH - ROPE) // 2
    rotates = ((column >= 0) & (column < ROPE // 2))[None, :]
    even, odd = tl.split(tl.reshape(x, (ROWS, PADDED // 2, 2)))
    new_even = tl.where(rotates, even * cos - odd * sin, even)
    new_odd = tl.where(rotates, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(new_even, new_odd), (ROWS, PADDED))
