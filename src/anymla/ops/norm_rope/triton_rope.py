"""Rotate the last channels of every head.

Grid: one program for ROWS consecutive (token, head) rows; the tile is ROWS whole rows of PADDED >=
WIDTH channels, which the rotation sees as pairs.

    token, head | pass | pass | ... | turn, by the token's position |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops._triton_norm_rope import load_cos_sin, rotate
from anymla.ops.device import Target, target_of
from anymla.ops.pdl import pdl_launch, target_has_pdl

_TILE = 2048
_MOST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a program, channels of its tile, and its warps."""

    rows: int
    padded: int
    num_warps: int


def config(width: int, target: Target) -> Config:
    """Sixteen elements a thread; a wider row gets more threads."""
    padded = triton.next_power_of_2(width)
    warps = max(_TILE, padded) // (16 * target.warp_size)
    return Config(min(_MOST_ROWS, max(1, _TILE // padded)), padded, min(16, warps))


@triton.jit(do_not_specialize=["rows", "length"])
def rope_kernel(
    x,
    positions,
    table,
    out,
    rows,
    heads,
    token_stride,
    head_stride,
    column_stride,
    table_row_stride,
    table_column_stride,
    length,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    INVERSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate the rows of x [T, heads, WIDTH] into contiguous ``out``; rows = T * heads."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    given = row < rows
    there = given[:, None] & (channel < WIDTH)[None, :]
    token, head = row // heads, row % heads
    at = x + (token * token_stride + head * head_stride)[:, None]
    value = tl.load(at + (channel * column_stride)[None, :], mask=there, other=0.0)
    position = tl.load(positions + token, mask=given, other=0)
    cos, sin = load_cos_sin(
        table,
        table_row_stride,
        table_column_stride,
        length,
        position,
        given,
        WIDTH,
        ROPE,
        PADDED,
    )
    if INVERSE:
        sin = -sin
    rotated = rotate(value.to(tl.float32), cos, sin, WIDTH, ROPE)
    at = out + row[:, None] * WIDTH + channel[None, :]
    tl.store(at, rotated.to(out.dtype.element_ty), mask=there)


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """See ``interface.rope``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, width = x.shape
    rows = tokens * heads
    if not rows:
        return out
    chosen = config(width, target_of(x.device))
    rope_kernel[(triton.cdiv(rows, chosen.rows),)](
        x,
        positions.contiguous(),
        cos_sin_cache,
        out,
        rows,
        heads,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        cos_sin_cache.stride(0),
        cos_sin_cache.stride(1),
        cos_sin_cache.shape[0],
        width,
        cos_sin_cache.shape[1],
        chosen.padded,
        chosen.rows,
        inverse,
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(x.device),
    )
    return out


def builds(target: Target) -> Iterator[Build]:
    """Main and index heads, both ways."""
    for dtype in ("bf16", "fp32"):
        for width in (128, 512):
            for inverse in (False, True):
                chosen = config(width, target)
                yield Build(
                    label=f"{width} {dtype}{' inverse' if inverse else ''}",
                    kernel=rope_kernel,
                    types={
                        "x": f"*{dtype}",
                        "positions": "*i64",
                        "table": "*fp32",
                        "out": f"*{dtype}",
                        "rows": "i32",
                        "heads": "i32",
                        "token_stride": "i32",
                        "head_stride": "i32",
                        "table_row_stride": "i32",
                        "length": "i32",
                    },
                    constants={
                        "column_stride": 1,
                        "table_column_stride": 1,
                        "WIDTH": width,
                        "ROPE": 64,
                        "PADDED": chosen.padded,
                        "ROWS": chosen.rows,
                        "INVERSE": inverse,
                        "PDL": target_has_pdl(target),
                    },
                    num_warps=chosen.num_warps,
                    fp_fusion=False,
                    divisible=("heads", "token_stride", "head_stride", "table_row_stride"),
                )
