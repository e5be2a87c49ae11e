"""MXFP4 weights times FP8 activations by instructions that take blocks of scales (sm_100).

Grid: (blocks of weight rows, blocks of tokens).

    w [ROWS, K] e2m1, a scale for 32 channels  .  x [COLUMNS, K]^T e4m3, the same scale for four
    such blocks  ->  y [tokens, N]

Nothing is decoded: the tensor cores read packed e2m1 and e4m3, and multiply the scales in. It has
been compiled and interpreted, never run on such a device, and runs only where it is named.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops._triton_quantize import quantize_rows
from anymla.ops.device import Target
from anymla.ops.linear.support import SCALED_TARGET

_ROWS, _CHANNELS = 128, 128
_MOST_COLUMNS = 128


@triton.jit(do_not_specialize=["tokens"])
def scaled_linear_kernel(
    x,
    x_scales,
    w,
    scales,
    out,
    tokens,
    n,
    width,
    per_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of results."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    exists = (row < n)[:, None]
    inside = (token < tokens)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width, BLOCK_K):
        pair = first // 2 + tl.arange(0, BLOCK_K // 2)
        block = first // 32 + tl.arange(0, BLOCK_K // 32)
        channel = first + tl.arange(0, BLOCK_K)
        known = (block < width // 32)[None, :]
        weight = tl.load(
            w + row[:, None] * (width // 2) + pair[None, :],
            exists & (pair < width // 2)[None, :],
            other=0,
        )
        factor = tl.load(
            scales + row[:, None] * (width // 32) + block[None, :], exists & known, other=0
        )
        codes = tl.load(
            x + token[:, None] * width + channel[None, :],
            inside & (channel < width)[None, :],
            other=0,
        )
        power = tl.load(
            x_scales + token[:, None] * per_row + (block // 4)[None, :], inside & known, other=0.0
        )
        total = tl.dot_scaled(
            weight,
            factor,
            "e2m1",
            codes.to(tl.float8e4nv, bitcast=True).trans(),
            (power.to(tl.int32, bitcast=True) >> 23).to(tl.uint8),
            "e4m3",
            total,
        )
    at = out + token[None, :] * n + row[:, None]
    tl.store(at, total.to(out.dtype.element_ty), exists & inside.trans())


def mxfp4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
) -> Tensor:
    """See ``interface.mxfp4_linear``."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    (tokens, width), n = rows.shape, len(weight)
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    if out.numel():
        codes, x_scales = quantize_rows(rows)
        columns = min(_MOST_COLUMNS, max(16, triton.next_power_of_2(tokens)))
        scaled_linear_kernel[(triton.cdiv(n, _ROWS), triton.cdiv(tokens, columns))](
            codes,
            x_scales,
            weight.contiguous(),
            scale.contiguous(),
            out,
            tokens,
            n,
            width,
            x_scales.shape[1],
            ROWS=_ROWS,
            COLUMNS=columns,
            BLOCK_K=_CHANNELS,
        )
    return out.view(*x.shape[:-1], n)


def builds(target: Target) -> Iterator[Build]:
    """Every number of columns."""
    if target.name != SCALED_TARGET:
        return
    pointers = {"x": "*u8", "x_scales": "*fp32", "w": "*u8", "scales": "*u8", "out": "*bf16"}
    types = pointers | dict.fromkeys(("tokens", "n", "width", "per_row"), "i32")
    for columns in (16, 32, 64, _MOST_COLUMNS):
        yield Build(
            f"{columns} columns",
            scaled_linear_kernel,
            types,
            {"ROWS": _ROWS, "COLUMNS": columns, "BLOCK_K": _CHANNELS},
            divisible=("n", "width"),
            matrix="e4m3",
        )
