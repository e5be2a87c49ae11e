"""Rotary positions inside Triton kernels: cosines and sines of a tile's pairs, and the turn.

Channels (2i, 2i + 1) of a row are pair i; the last pairs of a row turn. A tile holds PADDED
channels, a power of two, of which the first WIDTH are the row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_turns(
    table,
    row_stride,
    column_stride,
    length,
    positions,
    there,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Cosines and sines, float32 [N, PADDED / 2], of the pairs of rows at ``positions`` [N].

    Args:
        table: [length, ROPE], cosines in the first half of the columns, sines in the second.
        row_stride: of the table.
        column_stride: of the table.
        length: positions are read clamped to it.
        positions: integer [N].
        there: bool [N]; nothing is read for the others.
        WIDTH: channels of a row.
        ROPE: channels that turn, the last of the row.
        PADDED: channels of the tile.

    Pairs that do not turn have cosine 1 and sine 0.
    """
    known = tl.minimum(tl.maximum(positions.to(tl.int64), 0), length - 1)
    column = tl.arange(0, PADDED // 2) - (WIDTH - ROPE) // 2
    turning = there[:, None] & ((column >= 0) & (column < ROPE // 2))[None, :]
    at = table + known[:, None] * row_stride + (column * column_stride)[None, :]
    cos = tl.load(at, mask=turning, other=1.0)
    sin = tl.load(at + (ROPE // 2) * column_stride, mask=turning, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def turn_pairs(x, cos, sin, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Turn the last ROPE of the WIDTH channels of float32 rows x [N, PADDED].

    ``cos`` and ``sin`` [N or 1, PADDED / 2] are those of ``load_turns``. The other channels pass
    bit by bit.
    """
    ROWS: tl.constexpr = x.shape[0]
    PADDED: tl.constexpr = x.shape[1]
    column = tl.arange(0, PADDED // 2) - (WIDTH - ROPE) // 2
    turning = ((column >= 0) & (column < ROPE // 2))[None, :]
    even, odd = tl.split(tl.reshape(x, (ROWS, PADDED // 2, 2)))
    new_even = tl.where(turning, even * cos - odd * sin, even)
    new_odd = tl.where(turning, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(new_even, new_odd), (ROWS, PADDED))
