"""Products of plain weights with few tokens on a CPU, one token at a time."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from anymla.ops._numba_rows import (
    KERNEL,
    f32_at,
    from_bf16,
    gemv_bf16,
    gemv_f32,
    i64_at,
    narrow,
    rope_row,
    table_row,
    to_bf16,
    u16_at,
    widen,
)


def linear(x, weight):
    """Backend of ``interface.linear`` in numba; see its contract."""
    rows, width = weight.shape
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    x, weight = x.contiguous(), weight.contiguous()
    _linear(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, rows, width)
    return out


@njit(**KERNEL)
def _linear(x, weight, out, tokens, rows, width):
    wide, total = np.empty(width, np.float32), np.empty(rows, np.float32)
    for token in range(tokens):
        widen(u16_at(x + 2 * token * width, width), wide)
        gemv_bf16(weight, rows, wide, total)
        narrow(total, u16_at(out + 2 * token * rows, rows))


def linear_float32(x, weight):
    """Backend of ``interface.linear_float32`` in numba; see its contract."""
    rows, width = weight.shape
    out = torch.empty((*x.shape[:-1], rows), dtype=torch.float32)
    x, weight = x.contiguous(), weight.contiguous()
    _linear_float32(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, rows, width,
        weight.dtype == torch.bfloat16,
    )  # fmt: skip
    return out


@njit(**KERNEL)
def _linear_float32(x, weight, out, tokens, rows, width, is_bf16):
    wide = np.empty(width, np.float32)
    for token in range(tokens):
        widen(u16_at(x + 2 * token * width, width), wide)
        total = f32_at(out + 4 * token * rows, rows)
        if is_bf16:
            gemv_bf16(weight, rows, wide, total)
        else:
            gemv_f32(weight, rows, wide, total)


def grouped_output_projection(o, positions, cos_sin_cache, wo_a):
    """Backend of ``interface.grouped_output_projection`` in numba; see its contract."""
    (tokens, heads, dim), (groups, rank, _) = o.shape, wo_a.shape
    out = torch.empty((tokens, groups * rank), dtype=o.dtype)
    o, positions, wo_a = o.contiguous(), positions.contiguous(), wo_a.contiguous()
    table = cos_sin_cache.contiguous()
    _grouped(
        o.data_ptr(), positions.data_ptr(), table.data_ptr(), *table.shape,
        wo_a.data_ptr(), out.data_ptr(), tokens, heads, dim, groups, rank,
    )  # fmt: skip
    return out


@njit(**KERNEL)
def _grouped(
    o, positions, table, table_rows, rope, wo_a, out, tokens, heads, dim, groups, rank
):  # fmt: skip
    width = heads * dim // groups
    wide, total = np.empty(heads * dim, np.float32), np.empty(rank, np.float32)
    at = i64_at(positions, tokens)
    for token in range(tokens):
        widen(u16_at(o + 2 * token * heads * dim, heads * dim), wide)
        row = table_row(table, table_rows, rope, at[token])
        for head in range(heads):
            each = wide[head * dim : (head + 1) * dim]
            rope_row(each, row, rope // 2, -1)
            for i in range(dim - rope, dim):
                each[i] = from_bf16(to_bf16(each[i]))
        for group in range(groups):
            part = wide[group * width : (group + 1) * width]
            gemv_bf16(wo_a + 2 * group * rank * width, rank, part, total)
            narrow(total, u16_at(out + 2 * (token * groups + group) * rank, rank))
