"""Inverse RoPE of heads for a 16-bit GEMM; ``_triton_epilogue`` holds the one that quantises.

A head of D channels has ceil(D/128) blocks. The grid is groups of BLOCKS blocks.

    BLOCKS x 128 of o [T, H, D] -> R^-1 -> the same place of the result
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

# Blocks per CTA: 16 values per thread, or 4 for low latency.
_BLOCKS, _FEW_BLOCKS = 16, 4
# Number of heads up to which a CTA has _FEW_BLOCKS of them.
_FEW_HEADS = 1024


@triton.jit(do_not_specialize=["blocks", "angles"])
def inverse_rope_kernel(
    o,
    positions,
    table,
    out,
    blocks,
    angles,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate BLOCKS blocks of WIDTH channels back."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    PER_HEAD: tl.constexpr = (D + WIDTH - 1) // WIDTH
    PAIRS: tl.constexpr = WIDTH // 2
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    head = block // PER_HEAD
    first = ((block - head * PER_HEAD) * WIDTH).to(tl.int32)
    channel = first[:, None] + tl.arange(0, WIDTH)[None, :]
    at = (head * D)[:, None] + channel
    mask = inside[:, None] & (channel < D)
    value = tl.load(o + at, mask, other=0.0).to(tl.float32)

    position = tl.load(positions + head // HEADS, inside, other=0)
    position = tl.minimum(tl.maximum(position, 0), angles - 1)
    pair = (first[:, None] - (D - ROPE_DIM)) // 2 + tl.arange(0, PAIRS)[None, :]
    rotates = inside[:, None] & (pair >= 0) & (pair < ROPE_DIM // 2)
    angle = (position * ROPE_DIM)[:, None] + pair
    cos = tl.load(table + angle, rotates, other=1.0)
    sin = tl.load(table + ROPE_DIM // 2 + angle, rotates, other=0.0)
    even, odd = tl.split(tl.reshape(value, (BLOCKS, PAIRS, 2)))
    rotated = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    value = tl.reshape(rotated, (BLOCKS, WIDTH))
    tl.store(out + at, value.to(out.dtype.element_ty), mask)


def inverse_rope(o: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return heads [T, H, D] rotated back by their tokens' positions, in scratch memory."""
    tokens, heads, d = o.shape
    out = scratch(tuple(o.shape), o.dtype, o.device)
    blocks = tokens * heads * triton.cdiv(d, FP8_BLOCK)
    if not blocks:
        return out
    of_cta = _BLOCKS if tokens * heads > _FEW_HEADS else _FEW_BLOCKS
    inverse_rope_kernel[(triton.cdiv(blocks, of_cta),)](
        o.contiguous(),
        positions.contiguous(),
        cos_sin_cache.contiguous(),
        out,
        blocks,
        len(cos_sin_cache),
        HEADS=heads,
        D=d,
        ROPE_DIM=cos_sin_cache.shape[1],
        WIDTH=FP8_BLOCK,
        BLOCKS=of_cta,
        **pdl_launch(o.device),
    )
    return out
