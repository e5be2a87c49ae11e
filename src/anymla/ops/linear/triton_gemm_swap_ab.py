"""GEMM in Triton with a packed weight for few tokens; swap-AB: weight rows are instruction rows.

Grid: (blocks of weight rows, blocks of tokens, groups x splits of K); see
``_triton_gemm.gemm_tile_swap_ab``.

    w [group][N, K]  .  x [tokens, K]^T  ->  y [tokens, group, N], or float32 sums of one split
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops._triton_gemm import gemm_tile_swap_ab
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tokens"])
def gemm_swap_ab_kernel(
    x,
    x_scales,
    w,
    scales,
    out,
    tokens,
    n,
    width,
    groups,
    split_blocks,
    w_row,
    s_row,
    w_group,
    s_group,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_DIAGONAL: tl.constexpr,
    QUANT: tl.constexpr,
    K_WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of results, or of one split's sums."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group = (tl.program_id(2) % groups).to(tl.int64)
    split = tl.program_id(2) // groups
    token = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = token < tokens
    k_blocks = width // 128
    first = split * split_blocks
    at = token * groups + group
    scale_row = row // QUANT if FORMAT == "fp8" else row
    # Bytes of a K block of codes, and the number of the activations' scales in it.
    WEIGHT: tl.constexpr = 128 if FORMAT == "fp8" else 64
    X_SCALES: tl.constexpr = 128 // QUANT
    SCALES: tl.constexpr = X_SCALES if FORMAT == "fp8" else 4
    total = gemm_tile_swap_ab(
        w + group * w_group + row * w_row + first * WEIGHT,
        scales + group * s_group + scale_row * s_row + first * SCALES,
        x + at * width + first * 128,
        x_scales + (at * k_blocks + first) * X_SCALES,
        inside,
        tl.minimum(split_blocks, k_blocks - first),
        FORMAT,
        OPERAND,
        NATIVE,
        BLOCK_K,
        STAGES,
        BLOCK_DIAGONAL,
        False,
        QUANT,
        K_WARPS,
    )
    if SPLITS:
        at += split.to(tl.int64) * tokens * groups
    place = (at * n)[None, :] + row[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), inside[None, :])
