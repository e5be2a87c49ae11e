"""What the two kinds of programs do that turn query heads and insert key-value rows."""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.formats.triton_rows import entry_offsets, store_rows
from anymla.ops._triton_norm_rope import inverse_rms, load_cos_sin, rotate


@triton.jit
def insert_rows(
    kv,
    cache,
    slots,
    positions,
    table,
    first,
    inserted,
    row_stride,
    column_stride,
    page_stride,
    capacity,
    table_row_stride,
    table_column_stride,
    length,
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate and store key-value rows ``first`` .. of ``inserted``."""
    WIDTH: tl.constexpr = CODEC.channels
    channel = tl.arange(0, WIDTH)
    row = first + tl.arange(0, ROWS)
    given = row < inserted
    slot = tl.load(slots + row, mask=given, other=-1)
    position = tl.load(positions + row, mask=given, other=0)
    at = kv + row[:, None] * row_stride + (channel * column_stride)[None, :]
    x = tl.load(at, mask=given[:, None], other=0.0).to(tl.float32)
    cos, sin = load_cos_sin(
        table,
        table_row_stride,
        table_column_stride,
        length,
        position,
        given,
        WIDTH,
        ROPE,
        WIDTH,
    )
    valid = (slot >= 0) & (slot < capacity)
    values, scales = entry_offsets(slot, valid, page_stride, ENTRIES, CODEC)
    store_rows(cache, values, scales, valid, rotate(x, cos, sin, WIDTH, ROPE), CODEC, NATIVE)


@triton.jit
def turn_heads(
    q,
    out,
    positions,
    table,
    token,
    first,
    heads,
    q_token_stride,
    q_head_stride,
    q_column_stride,
    out_token_stride,
    out_head_stride,
    out_column_stride,
    table_row_stride,
    table_column_stride,
    length,
    eps,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Norm and rotate heads ``first`` .. of one token."""
    channel = tl.arange(0, WIDTH)
    head = first + tl.arange(0, HEADS)
    there = (head < heads)[:, None]
    at = q + token * q_token_stride + head[:, None].to(tl.int64) * q_head_stride
    at += (channel * q_column_stride)[None, :]
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)
    # A row of cosines for every head: as one row they would have another layout than the heads,
    # and the heads, not the row, would be moved.
    cos, sin = load_cos_sin(
        table,
        table_row_stride,
        table_column_stride,
        length,
        tl.load(positions + token + tl.zeros((HEADS,), tl.int64)),
        head < heads,
        WIDTH,
        ROPE,
        WIDTH,
    )
    x = rotate(x * inverse_rms(x, eps, WIDTH), cos, sin, WIDTH, ROPE)
    at = out + token * out_token_stride + head[:, None].to(tl.int64) * out_head_stride
    at += (channel * out_column_stride)[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=there)
