"""Packed linear layers for few tokens, whose activations are quantised.

Grid: (blocks of weight rows, blocks of tokens, groups x splits of K); see ``triton_turned``.

    w [group][N, K]  .  x [tokens, K]^T  ->  y [tokens, group, N], or float32 sums of one split
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops._gemm_config import uses_wgmma
from anymla.ops._triton_gemm import TL_DTYPES, gemm_tile_swap_ab
from anymla.ops.device import Target, target_of
from anymla.ops.linear.triton_splits import sum_splits
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch

# Programs that keep enough loads under way, and the fewest runs that are worth a program.
_PROGRAMS = 396
_FEWEST_RUNS = 4
# Below, FP8 codes are decoded sooner as columns (H200, 4096 x 4096: 12.6 us for one token, here
# 14.8); with 32 tokens that takes up to 14.2 us where this takes 10.8. Above, rows are read twice.
_FEWEST_TOKENS = {"fp8": 17, "mxfp4": 1}
MOST_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class FewTile:
    """Rows of the weight, tokens, channels of a step; operands; warps and stages."""

    rows: int
    columns: int
    channels: int
    operand: torch.dtype
    num_warps: int
    stages: int
    together: bool


def few_tile(tokens: int, weight_format: str, target: Target) -> FewTile:
    """The tile for so many tokens. Operands are float16, whose products are exact everywhere."""
    together = uses_wgmma(target) and weight_format == "mxfp4"
    # Registers for more sums of decoded rows are not everywhere.
    wide = tokens > 16 and (weight_format == "fp8" or together)
    return FewTile(64, 32 if wide else 16, 128, torch.float16, 4, 4, together and not wide)


def runs_of_split(tokens: int, groups: int, n: int, runs: int, chosen: FewTile) -> int:
    """Runs of 128 channels of one split of K."""
    blocks = groups * triton.cdiv(n, chosen.rows) * triton.cdiv(tokens, chosen.columns)
    splits = max(1, min(triton.cdiv(_PROGRAMS, max(1, blocks)), runs // _FEWEST_RUNS))
    return int(triton.cdiv(runs, splits))


@triton.jit(do_not_specialize=["tokens"])
def few_linear_kernel(
    x,
    x_scales,
    w,
    scales,
    out,
    tokens,
    n,
    width,
    groups,
    split,
    w_row,
    s_row,
    w_group,
    s_group,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of results, or of one split's sums."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    group = (tl.program_id(2) % groups).to(tl.int64)
    part = tl.program_id(2) // groups
    token = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = token < tokens
    runs = width // 128
    first = part * split
    at = token * groups + group
    block = row // 128 if FORMAT == "fp8" else row
    # Bytes of a run of packed codes, and its scales.
    WEIGHT: tl.constexpr = 128 if FORMAT == "fp8" else 64
    SCALES: tl.constexpr = 1 if FORMAT == "fp8" else 4
    total = gemm_tile_swap_ab(
        w + group * w_group + row * w_row + first * WEIGHT,
        scales + group * s_group + block * s_row + first * SCALES,
        x + at * width + first * 128,
        x_scales + at * runs + first,
        inside,
        tl.minimum(split, runs - first),
        FORMAT,
        OPERAND,
        NATIVE,
        BLOCK_K,
        STAGES,
        TOGETHER,
        False,
    )
    if SPLITS:
        at += part.to(tl.int64) * tokens * groups
    place = (at * n)[None, :] + row[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), inside[None, :])


def few_support(
    tokens: int, w: Tensor, scales: Tensor, weight_format: str, width: int, target: Target
) -> bool:
    """Whether this kernel takes the product, and is the one for it.

    Args:
        tokens: rows of activations.
        w: contiguous [G, N, bytes of a row].
        scales: contiguous [G, ...].
        weight_format: "fp8", "mxfp4" or "nvfp4".
        width: channels.
        target: what it runs on.
    """
    fewest = _FEWEST_TOKENS.get(weight_format, MOST_TOKENS + 1)
    if not fewest <= tokens <= MOST_TOKENS or target.narrow:
        return False
    whole = width % 128 == 0 and w.shape[1] % few_tile(tokens, weight_format, target).rows == 0
    placed = w.data_ptr() % 16 == 0 and scales.data_ptr() % 4 == 0
    # An int32 of four scales lies at a multiple of four in every group and row.
    return whole and placed


def launch_few(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    scales: Tensor,
    chosen: FewTile,
    *,
    weight_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply every group's activations by its weight.

    Args:
        x: contiguous [T, G, K]: e4m3 codes ("fp8") or operands of ``triton_operands``.
        x_scales: float32 [T, G, K / 128].
        w: contiguous [G, N, bytes of a row].
        scales: contiguous [G, ...].
        chosen: the tile.
        weight_format: "fp8" or "mxfp4".
        out_dtype: of the result.

    Returns:
        [T, G, N].
    """
    tokens, groups, width = x.shape
    n, runs = w.shape[1], width // 128
    out = torch.empty((tokens, groups, n), dtype=out_dtype, device=x.device)
    split = runs_of_split(tokens, groups, n, runs, chosen)
    splits = triton.cdiv(runs, split)
    result = out if splits == 1 else scratch((splits, *out.shape), torch.float32, x.device)
    grid = (triton.cdiv(n, chosen.rows), triton.cdiv(tokens, chosen.columns), groups * splits)
    few_linear_kernel[grid](
        x,
        x_scales,
        w,
        scales,
        result,
        tokens,
        n,
        width,
        groups,
        split,
        w.shape[2],
        scales.shape[2],
        w[0].numel(),
        scales[0].numel(),
        FORMAT=weight_format,
        OPERAND=TL_DTYPES[chosen.operand],
        SPLITS=splits > 1,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        BLOCK_K=chosen.channels,
        NATIVE=target_of(x.device).native_e4m3,
        STAGES=chosen.stages,
        TOGETHER=chosen.together,
        num_warps=chosen.num_warps,
        **pdl_launch(x.device),
    )
    if splits > 1:
        sum_splits(result, out)
    return out


def builds(target: Target) -> Iterator[Build]:
    """Both formats and heights, whole and split; RDNA has no registers for them."""
    if target.narrow:
        return
    for weight_format in ("fp8", "mxfp4"):
        for tokens in (1, MOST_TOKENS):
            yield _build(
                target, weight_format, few_tile(tokens, weight_format, target), tokens == 1
            )


def _build(target: Target, weight_format: str, chosen: FewTile, splits: bool) -> Build:
    integers = ("tokens", "n", "width", "groups", "split", "w_row", "s_row", "w_group", "s_group")
    types = {
        "x": "*u8" if weight_format == "fp8" else "*fp16",
        "x_scales": "*fp32",
        "w": "*u8",
        "scales": "*fp32" if weight_format == "fp8" and splits else "*u8",
        "out": "*fp32" if splits else "*bf16",
        **dict.fromkeys(integers, "i32"),
    }
    return Build(
        f"{weight_format} as {TL_DTYPES[chosen.operand]}, {chosen.columns} columns"
        + ", split" * splits,
        few_linear_kernel,
        types,
        {
            "FORMAT": weight_format,
            "OPERAND": TL_DTYPES[chosen.operand],
            "SPLITS": splits,
            "ROWS": chosen.rows,
            "COLUMNS": chosen.columns,
            "BLOCK_K": chosen.channels,
            "NATIVE": target.native_e4m3,
            "STAGES": chosen.stages,
            "TOGETHER": chosen.together,
            "PDL": target_has_pdl(target),
        },
        num_warps=chosen.num_warps,
        divisible=("n", "width", "w_row", "w_group"),
        matrix=True,
        # Operands that pass through registers: a few are short where programs have 99 KiB.
        spills=10 if target.shared_bytes < 100 << 10 else 0,
    )
