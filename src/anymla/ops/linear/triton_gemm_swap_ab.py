"""GEMM with a packed weight for few tokens, swap-AB: the weight's rows are the instruction's.

Grid: (blocks of weight rows, blocks of tokens, groups x splits of K); see
``_triton_gemm.gemm_tile_swap_ab``.

    w [group][N, K]  .  x [tokens, K]^T  ->  y [tokens, group, N], or float32 sums of one split
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.ops._build import Build
from anymla.ops._triton_gemm import TL_DTYPES, gemm_tile_swap_ab
from anymla.ops.device import Target
from anymla.ops.linear.config import (
    MAX_SWAP_AB_TOKENS,
    GemmShape,
    TritonConfig,
    swap_ab_config,
)
from anymla.ops.pdl import target_has_pdl


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
    PDL: tl.constexpr,
):
    """A tile of results, or of one split's sums."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    group = (tl.program_id(2) % groups).to(tl.int64)
    split = tl.program_id(2) // groups
    token = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = token < tokens
    k_blocks = width // 128
    first = split * split_blocks
    at = token * groups + group
    scale_row = row // 128 if FORMAT == "fp8" else row
    # Bytes of a K block of packed codes, and its scales.
    WEIGHT: tl.constexpr = 128 if FORMAT == "fp8" else 64
    SCALES: tl.constexpr = 1 if FORMAT == "fp8" else 4
    total = gemm_tile_swap_ab(
        w + group * w_group + row * w_row + first * WEIGHT,
        scales + group * s_group + scale_row * s_row + first * SCALES,
        x + at * width + first * 128,
        x_scales + at * k_blocks + first,
        inside,
        tl.minimum(split_blocks, k_blocks - first),
        FORMAT,
        OPERAND,
        NATIVE,
        BLOCK_K,
        STAGES,
        BLOCK_DIAGONAL,
        False,
    )
    if SPLITS:
        at += split.to(tl.int64) * tokens * groups
    place = (at * n)[None, :] + row[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), inside[None, :])


def builds(target: Target) -> Iterator[Build]:
    """Both formats and heights, whole and split; RDNA has no registers for them."""
    if target.narrow:
        return
    for weight_format in ("fp8", "mxfp4"):
        for tokens in (1, MAX_SWAP_AB_TOKENS):
            config = swap_ab_config(GemmShape(tokens, 4096, 4096), weight_format, target)
            yield _build(target, weight_format, config, tokens == 1)


def _build(target: Target, weight_format: str, config: TritonConfig, split: bool) -> Build:
    tile = config.tile
    integers = ("tokens", "n", "width", "groups", "split_blocks", "w_row", "s_row")
    types = {
        "x": "*u8" if weight_format == "fp8" else "*fp16",
        "x_scales": "*fp32",
        "w": "*u8",
        "scales": "*fp32" if weight_format == "fp8" and split else "*u8",
        "out": "*fp32" if split else "*bf16",
        **dict.fromkeys((*integers, "w_group", "s_group"), "i32"),
    }
    return Build(
        f"{weight_format} as {TL_DTYPES[config.operand]}, {tile.block_m} tokens"
        + ", split" * split,
        gemm_swap_ab_kernel,
        types,
        {
            "FORMAT": weight_format,
            "OPERAND": TL_DTYPES[config.operand],
            "SPLITS": split,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "NATIVE": target.native_e4m3,
            "STAGES": tile.num_stages,
            "BLOCK_DIAGONAL": config.block_diagonal,
            "PDL": target_has_pdl(target),
        },
        num_warps=tile.num_warps,
        divisible=("n", "width", "w_row", "w_group"),
        matrix=True,
        # Operands that pass through registers: a few are short where a CTA has 99 KiB.
        spills=10 if target.shared_bytes < 100 << 10 else 0,
    )
