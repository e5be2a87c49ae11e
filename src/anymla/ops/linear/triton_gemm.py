"""GEMM with a weight as stored, decoded inside the kernel (``_triton_gemm``), and split-K.

gemm_kernel              x [tokens, K]  .  w [group][N, K]^T  ->  y [tokens, group, N]
                         grid: (blocks of weight rows, blocks of tokens, groups x splits of K)
split_k_reduce_kernel    partials [splits, results] float32 -> results, added in the order of
                         the splits; grid: blocks of results
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from anymla.ops._build import Build
from anymla.ops._triton_gemm import TL_DTYPES, ActivationRows, WeightRows, gemm_tile
from anymla.ops.device import Target
from anymla.ops.linear.config import GemmShape, TritonConfig, choose_triton_config
from anymla.ops.pdl import target_has_pdl

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
    PDL: tl.constexpr,
):
    """A tile of results, or of one split's sums."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(2) % groups
    split = tl.program_id(2) // groups
    inside = token < tokens
    exists = column < n
    rows = token.to(tl.int64)
    if CODED:
        x_scales += group.to(tl.int64) * tl.cdiv(width, 128)
    given = ActivationRows(
        x + group.to(tl.int64) * width, x_scales, rows, inside, x_stride, x_scale_stride
    )
    w += group.to(tl.int64) * w_group
    if FORMAT != "plain":
        scales += group.to(tl.int64) * s_group
    weight = WeightRows(w, scales, column.to(tl.int64), exists)
    total = gemm_tile(
        given,
        weight,
        split * split_k,
        tl.minimum(width, (split + 1) * split_k),
        width,
        FORMAT,
        CODED,
        OPERAND,
        BLOCK_K,
        NATIVE,
    )
    if factor is not None:
        total *= tl.load(factor)
    if SPLITS:
        rows += split.to(tl.int64) * tokens
    at = (rows * groups + group)[:, None] * n + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), inside[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["count", "splits"])
def split_k_reduce_kernel(partials, out, count, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK results: the splits' sums added in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    here = partials + at
    for _ in range(splits):
        total += tl.load(here, mask, other=0.0)
        here += count
    tl.store(out + at, total.to(out.dtype.element_ty), mask)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ACTIVATIONS = (("bf16", True), ("bf16", False), ("fp16", False), ("fp32", False))


def builds(target: Target) -> Iterator[Build]:
    """Every format, dtype and tile, whole and split, both conversions; sums of every dtype."""
    for weight_format in ("plain", "fp8", "mxfp4", "nvfp4"):
        for dtype, coded in _ACTIVATIONS:
            if coded and weight_format in ("plain", "nvfp4"):
                continue
            stored = _DTYPES[dtype] if weight_format == "plain" else torch.uint8
            seen = set()
            for tokens in (1, 64, 4096):
                config = choose_triton_config(
                    GemmShape(tokens, 4096, 4096), weight_format, target,
                    x_dtype=_DTYPES[dtype], weight_dtype=stored, quantized=coded, aligned=False,
                )  # fmt: skip
                if config.tile not in seen:
                    seen.add(config.tile)
                    yield _build(target, config, weight_format, dtype, coded, tokens)
    for dtype in _DTYPES:
        yield Build(
            f"to {dtype}",
            split_k_reduce_kernel,
            {"partials": "*fp32", "out": f"*{dtype}", "count": "i32", "splits": "i32"},
            {"BLOCK": REDUCE_BLOCK, "PDL": target_has_pdl(target)},
        )


def _build(
    target: Target, config: TritonConfig, weight_format: str, dtype: str, coded: bool, tokens: int
) -> Build:
    tile, split = config.tile, tokens == 1
    integers = ["tokens", "n", "width", "groups", "split_k", "x_stride", "x_scale_stride"]
    integers += ["w_group", "s_group"]
    types = {
        "x": "*u8" if coded else f"*{dtype}",
        "w": f"*{dtype}" if weight_format == "plain" else "*u8",
        "out": "*fp32" if split else f"*{dtype}",
        **dict.fromkeys(integers, "i32"),
    }
    if coded:
        types["x_scales"] = "*fp32"
    if weight_format == "nvfp4":
        types["factor"] = "*fp32"
    if weight_format != "plain":
        types["scales"] = "*fp32" if weight_format == "fp8" and tokens == 64 else "*u8"
    absent = dict.fromkeys({"x_scales", "factor", "scales"} - set(types))
    return Build(
        f"{weight_format}, {'e4m3' if coded else dtype} activations, {tile.block_m} tokens",
        gemm_kernel,
        types,
        {
            **absent,
            "FORMAT": weight_format,
            "CODED": coded,
            "OPERAND": TL_DTYPES[config.operand],
            "SPLITS": split,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "NATIVE": target.native_e4m3,
            "PDL": target_has_pdl(target),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible=("n", "width", "split_k", "x_stride", "x_scale_stride", "w_group"),
        matrix=config.operand != torch.float32,
        # Wide operands that are computed rather than loaded: some registers short of the tile.
        spills=64 if target.name == "sm_80" and tile.block_m == 128 else 32 * target.narrow,
    )
