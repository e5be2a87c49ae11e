"""Products of packed weights.

Grid: (blocks of weight rows, blocks of tokens, groups x splits of K).

    x [tokens, K]  .  w [group][N, K]^T  ->  y [tokens, group, N]

With few tokens there are few blocks, so K is split too; every split leaves float32 sums, which a
second kernel adds in the order of the splits. Where the kernel of ``triton_few`` takes so few
tokens, it does.

The operations, which bring activations and weights into this order, are in ``triton_layers``; the
output projection, whose groups share a launch, is the other that calls this. float32 scales of
either operand are factors of sums, so that both products of codes stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops._gemm_config import TileConfig, choose_tile, operand_dtype
from anymla.ops._triton_gemm import TL_DTYPES, ActivationRows, WeightRows, gemm_tile
from anymla.ops.device import Target, target_of
from anymla.ops.linear.triton_few import few_support, few_tile, launch_few
from anymla.ops.linear.triton_splits import sum_splits
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch

# Programs that keep the largest GPUs busy, and the shortest split that is worth a program.
_PROGRAMS = 512
_SHORTEST = 512


def split_length(tokens: int, groups: int, n: int, k: int, chosen: TileConfig) -> int:
    """Channels of one split of K, a multiple of 128."""
    blocks = groups * triton.cdiv(n, chosen.block_n) * triton.cdiv(tokens, chosen.block_m)
    splits = max(1, min(_PROGRAMS // max(1, blocks), k // _SHORTEST))
    return triton.cdiv(triton.cdiv(max(1, k), splits), 128) * 128


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
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
    split,
    x_stride,
    x_scale_stride,
    w_bytes_group,
    scale_group,
    FORMAT: tl.constexpr,
    CODED: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of results, or of one split's sums."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(2) % groups
    part = tl.program_id(2) // groups
    inside = token < tokens
    exists = column < n
    rows = token.to(tl.int64)
    if CODED:
        x_scales += group.to(tl.int64) * tl.cdiv(width, 128)
    given = ActivationRows(
        x + group.to(tl.int64) * width, x_scales, rows, inside, x_stride, x_scale_stride
    )
    weight = WeightRows(
        w + group.to(tl.int64) * w_bytes_group,
        scales + group.to(tl.int64) * scale_group,
        column.to(tl.int64),
        exists,
    )
    total = gemm_tile(
        given,
        weight,
        part * split,
        tl.minimum(width, (part + 1) * split),
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
        rows += part.to(tl.int64) * tokens
    at = (rows * groups + group)[:, None] * n + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), inside[:, None] & exists[None, :])


def launch_linear(
    x: Tensor,
    x_scales: Tensor | None,
    w: Tensor,
    scales: Tensor,
    *,
    weight_format: str,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
) -> Tensor:
    """Multiply every group's activations by its weight.

    Args:
        x: contiguous [T, G, K], floating point or (with x_scales) e4m3 codes as uint8.
        x_scales: float32 [T, G, ceil(K/128)] or None.
        w: contiguous [G, N, bytes of a row].
        scales: contiguous [G, ...].
        weight_format: "fp8", "mxfp4" or "nvfp4".
        x_dtype: of the activations before they were quantised.
        out_dtype: of the result.
        factor: float32 [1] that every result is multiplied with, or None.

    Returns:
        [T, G, N].
    """
    tokens, groups, width = x.shape
    n = w.shape[1]
    out = torch.empty((tokens, groups, n), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    target = target_of(x.device)
    coded = x_scales is not None and weight_format == "fp8"
    if coded and few_support(tokens, w, scales, weight_format, width, target):
        few = few_tile(tokens, weight_format, target)
        return launch_few(
            x, x_scales, w, scales, few, weight_format=weight_format, out_dtype=out_dtype
        )
    kind = operand_dtype(x_dtype, weight_format, w.dtype, x_scales is not None, target)
    chosen = choose_tile(tokens, kind, target)
    split = split_length(tokens, groups, n, width, chosen)
    splits = max(1, triton.cdiv(width, split))
    result = out
    if splits > 1:
        result = scratch((splits, *out.shape), torch.float32, x.device)
    grid = (triton.cdiv(n, chosen.block_n), triton.cdiv(tokens, chosen.block_m), groups * splits)
    linear_kernel[grid](
        x,
        x_scales,
        w,
        scales,
        factor,
        result,
        tokens,
        n,
        width,
        groups,
        split,
        groups * width,
        groups * triton.cdiv(width, 128),
        w[0].numel(),
        scales[0].numel(),
        FORMAT=weight_format,
        CODED=x_scales is not None,
        OPERAND=TL_DTYPES[kind],
        SPLITS=splits > 1,
        ROWS=chosen.block_m,
        COLUMNS=chosen.block_n,
        BLOCK_K=chosen.block_k,
        NATIVE=target.native_e4m3,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **pdl_launch(x.device),
    )
    if splits > 1:
        sum_splits(result, out)
    return out


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CODED = (("bf16", True), ("bf16", False), ("fp16", False), ("fp32", False))


def builds(target: Target) -> Iterator[Build]:
    """Every format, dtype and tile, whole and split, both conversions."""
    for weight_format in ("fp8", "mxfp4", "nvfp4"):
        for dtype, coded in _CODED:
            if coded and weight_format == "nvfp4":
                continue
            seen = set()
            for tokens in (1, 64, 4096):
                kind = operand_dtype(_DTYPES[dtype], weight_format, torch.uint8, coded, target)
                chosen = choose_tile(tokens, kind, target)
                if chosen not in seen:
                    seen.add(chosen)
                    yield _build(target, weight_format, dtype, coded, tokens)


def _build(target: Target, weight_format: str, dtype: str, coded: bool, tokens: int) -> Build:
    kind = operand_dtype(_DTYPES[dtype], weight_format, torch.uint8, coded, target)
    chosen = choose_tile(tokens, kind, target)
    splits = tokens == 1
    integers = ["tokens", "n", "width", "groups", "split", "x_stride", "x_scale_stride"]
    integers += ["w_bytes_group", "scale_group"]
    types = {
        "x": "*u8" if coded else f"*{dtype}",
        "w": "*u8",
        "scales": "*fp32" if weight_format == "fp8" and tokens == 64 else "*u8",
        "out": "*fp32" if splits else f"*{dtype}",
        **dict.fromkeys(integers, "i32"),
    }
    absent = {}
    if coded:
        types["x_scales"] = "*fp32"
    else:
        absent["x_scales"] = None
    if weight_format == "nvfp4":
        types["factor"] = "*fp32"
    else:
        absent["factor"] = None
    native = target.native_e4m3
    label = f"{weight_format}, {'e4m3' if coded else dtype} activations, {chosen.block_m} rows"
    return Build(
        label,
        linear_kernel,
        types,
        {
            **absent,
            "FORMAT": weight_format,
            "CODED": coded,
            "OPERAND": TL_DTYPES[kind],
            "SPLITS": splits,
            "ROWS": chosen.block_m,
            "COLUMNS": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "NATIVE": native,
            "PDL": target_has_pdl(target),
        },
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        divisible=("n", "width", "split", "x_stride", "x_scale_stride", "w_bytes_group"),
        matrix=kind != torch.float32,
        # Wide operands that are computed rather than loaded: some registers short of the tile.
        spills=64
        if target.name == "sm_80" and chosen.block_m == 128
        else 32
        if target.narrow
        else 0,
    )
