"""Kernels that peers of the experts need around their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops.moe.triton_swiglu import clamped_swiglu

_ROWS, _CHANNELS = 64, 1024


# Its name becomes a part of the name of the kernel that calls it.
@triton.jit(repr=lambda _: "clamped_swiglu")
def interleaved_swiglu(rows, limit):
    """Compute the clamped SwiGLU [M, N] of rows [M, 2N] in which gate and up alternate."""
    gate, up = tl.split(tl.reshape(rows, (rows.shape[0], rows.shape[1] // 2, 2)))
    return clamped_swiglu(gate.to(tl.float32), up.to(tl.float32), limit)


@triton.jit
def _chosen_bits_kernel(
    ids, weights, out_bits, out_ids, out_weights, tokens, K: tl.constexpr, COLUMNS: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    is_row = row < tokens
    is_pair = is_row[:, None] & (column < K)[None, :]
    at = row[:, None] * K + column[None, :]
    expert = tl.load(ids + at, is_pair, other=-1)
    bit = tl.where((expert >> 5) == word, 1 << (expert & 31), 0)
    tl.store(out_bits + row * WORDS + word, tl.sum(bit, 1), is_row)
    if word == 0:
        to = row[:, None] * COLUMNS + column[None, :]
        tl.store(out_ids + to, expert.to(tl.int16), is_row[:, None])
        tl.store(out_weights + to, tl.load(weights + at, is_pair, other=-1.0), is_row[:, None])


def chosen_bits(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a bit mask of chosen experts, and ids and weights padded to 2^n columns with -1."""
    tokens, k = ids.shape
    columns, words = triton.next_power_of_2(k), triton.cdiv(experts, 32)
    bits = torch.empty(tokens, words, dtype=torch.int32, device=ids.device)
    wide_ids = torch.empty(tokens, columns, dtype=torch.int16, device=ids.device)
    wide_weights = torch.empty(tokens, columns, dtype=torch.float32, device=ids.device)
    _chosen_bits_kernel[(triton.cdiv(tokens, _ROWS), words)](
        ids, weights, bits, wide_ids, wide_weights, tokens, k, columns, words, _ROWS
    )
    return bits, wide_ids, wide_weights


@triton.jit
def _weighted_sum_kernel(rows, weights, out, d, K: tl.constexpr, CHANNELS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = at < d
    total = tl.zeros((CHANNELS,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(rows + (token * K + j) * d + at, mask, other=0.0).to(tl.float32)
        total += row * tl.load(weights + token * K + j)
    tl.store(out + token * d + at, total.to(out.dtype.element_ty), mask)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Sums [T, D] of rows [T * K, D] by weights [T, K], in float32, rounded once."""
    (tokens, k), d = weights.shape, rows.shape[1]
    out = torch.empty(tokens, d, dtype=rows.dtype, device=rows.device)
    grid = (tokens, triton.cdiv(d, _CHANNELS))
    _weighted_sum_kernel[grid](rows, weights, out, d, k, _CHANNELS)
    return out
