"""RoPE of heads in Triton.

Grid: one CTA for the rows (token, head) of a tile; a tile is whole rows of PADDED >= WIDTH
channels, which the rotation splits into pairs.

    token, head | pass | pass | ... | rotated by the token's position |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton_norm_rope import load_cos_sin, rotate
from anymla.ops.device import target_of
from anymla.ops.norm_rope.config import choose_rope_config
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


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
    CONFIG: tl.constexpr,
    ROPE: tl.constexpr,
    INVERSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate the rows of x [T, heads, WIDTH] into contiguous ``out``; rows = T * heads."""
    WIDTH: tl.constexpr = getattr(CONFIG, "width")
    PADDED: tl.constexpr = getattr(CONFIG, "padded")
    ROWS: tl.constexpr = getattr(CONFIG, "rows")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    valid = row < rows
    mask = valid[:, None] & (channel < WIDTH)[None, :]
    token, head = row // heads, row % heads
    at = x + (token * token_stride + head * head_stride)[:, None]
    value = tl.load(at + (channel * column_stride)[None, :], mask=mask, other=0.0)
    position = tl.load(positions + token, mask=valid, other=0)
    cos, sin = load_cos_sin(
        table, table_row_stride, table_column_stride, length, position, valid, WIDTH, ROPE, PADDED
    )
    if INVERSE:
        sin = -sin
    rotated = rotate(value.to(tl.float32), cos, sin, WIDTH, ROPE)
    at = out + row[:, None] * WIDTH + channel[None, :]
    tl.store(at, rotated.to(out.dtype.element_ty), mask=mask)


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """Backend of ``interface.rope`` in Triton; see its contract."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, width = x.shape
    rows = tokens * heads
    if not rows:
        return out
    config = choose_rope_config(width, target_of(x.device))
    rope_kernel[(triton.cdiv(rows, config.rows),)](
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
        config,
        cos_sin_cache.shape[1],
        inverse,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(x.device),
    )
    return out
