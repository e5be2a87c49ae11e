"""GEMM in Triton with a stored weight that is decoded in the kernel, and split-K's reduction.

gemm_kernel              x [tokens, K]  .  w [group][N, K]^T  ->  y [tokens, group, N]
                         grid: (blocks of weight rows, blocks of tokens, groups x splits of K)
split_k_reduce_kernel    partials [splits, results] float32 -> results, added in the order of
                         the splits; grid: blocks of results
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops._triton_gemm import ActivationRows, WeightRows, gemm_tile
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait

REDUCE_BLOCK = 1024


@triton.jit(do_not_specialize=["tokens"])
def gemm_kernel(
    x,
    x_scales,
    w,
    scales,
    factor,
    out,
    tokens,
    n,
    width,
    groups,
    split_k,
    x_stride,
    x_scale_stride,
    w_group,
    s_group,
    FORMAT: tl.constexpr,
    CODED: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    QUANT: tl.constexpr,
    BY_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of results, or of one split's sums."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(2) % groups
    split = tl.program_id(2) // groups
    inside = token < tokens
    exists = column < n
    rows = token.to(tl.int64)
    given_rows, given_inside, columns, known = rows, inside, column, exists
    block, channels = rows, group.to(tl.int64) * width
    FRAGMENTS: tl.constexpr = BY_WORDS and x.dtype.element_ty == tl.float16
    if FRAGMENTS:
        # Past the end, the last row is read again: loads without a mask take fewer instructions.
        channels *= 16
        block = tl.program_id(1) * (BLOCK_M // 16) + tl.arange(0, BLOCK_M // 16)
        block = tl.minimum(block, (tokens - 1) // 16).to(tl.int64)
        given_rows, columns = tl.minimum(rows, tokens - 1), tl.minimum(column, n - 1)
        given_inside, known = tl.full((BLOCK_M,), 1, tl.int1), tl.full((BLOCK_N,), 1, tl.int1)
    if CODED:
        x_scales += group.to(tl.int64) * tl.cdiv(width, QUANT)
    x += channels
    w += group.to(tl.int64) * w_group
    if FORMAT != "plain":
        scales += group.to(tl.int64) * s_group
    first = split * split_k
    last = tl.minimum(width, (split + 1) * split_k)
    if (SPLITS and FORMAT == "plain") and BLOCK_M >= 128:
        # No split is empty. With a branch around the loop that zeroes the sums of two warpgroups,
        # ptxas would serialise their products (C7515).
        tl.assume(first < last)
    total = gemm_tile(
        ActivationRows(x, x_scales, given_rows, given_inside, x_stride, x_scale_stride, block),
        WeightRows(w, scales, columns.to(tl.int64), known),
        first,
        last,
        width,
        FORMAT,
        CODED,
        OPERAND,
        BLOCK_K,
        NATIVE,
        QUANT,
        BY_WORDS,
        STAGES,
        FRAGMENTS,
    )
    if factor is not None:
        total *= tl.load(factor)
    if SPLITS:
        rows += split.to(tl.int64) * tokens
    at = (rows * groups + group)[:, None] * n + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), inside[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["count", "splits"])
def split_k_reduce_kernel(partials, out, count, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute BLOCK results by adding the splits' sums in order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    here = partials + at
    for _ in range(splits):
        total += tl.load(here, mask, other=0.0)
        here += count
    tl.store(out + at, total.to(out.dtype.element_ty), mask)
