"""Storing of each token's compressor state in Triton.

Grid: a CTA for BLOCK_T consecutive tokens; the tile is BLOCK_T rows of BLOCK_W >= WIDTH channels.

    token  | kv | score + ape[position mod ratio] |  -> state of slot_mapping[token], or nothing
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.compressor.config import choose_save_config
from anymla.ops.device import target_of
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit(do_not_specialize=["count", "capacity"])
def save_partial_states_kernel(
    kv,
    score,
    ape,
    positions,
    state,
    slots,
    count,
    kv_row_stride,
    kv_column_stride,
    score_row_stride,
    score_column_stride,
    ape_row_stride,
    ape_column_stride,
    page_stride,
    capacity,
    RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store ``count`` rows; strides are in elements, and capacity is in slots."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_W)
    inside = row < count
    mask = inside[:, None] & (channel < WIDTH)[None, :]
    slot = tl.load(slots + row, mask=inside, other=-1)
    position = tl.load(positions + row, mask=inside, other=0)
    at = kv + row[:, None] * kv_row_stride + (channel * kv_column_stride)[None, :]
    value = tl.load(at, mask=mask, other=0.0)
    at = score + row[:, None] * score_row_stride + (channel * score_column_stride)[None, :]
    logit = tl.load(at, mask=mask, other=0.0)
    # Make the modulus of a negative position positive too.
    within = (position % RATIO + RATIO) % RATIO
    at = ape + within[:, None] * ape_row_stride + (channel * ape_column_stride)[None, :]
    logit += tl.load(at, mask=mask, other=0.0)
    valid = (slot >= 0) & (slot < capacity)
    known = tl.where(valid, slot, 0)
    at = state + (known // PAGE_SIZE) * page_stride + (known % PAGE_SIZE) * (2 * WIDTH)
    mask = mask & valid[:, None]
    tl.store(at[:, None] + channel[None, :], value, mask=mask)
    tl.store(at[:, None] + WIDTH + channel[None, :], logit, mask=mask)


def save_partial_states(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
) -> None:
    """Backend of ``interface.save_partial_states`` in Triton; see its contract."""
    count, (pages, page_size, _) = slot_mapping.shape[0], state_cache.shape
    if not count or not pages:
        return
    strides = *kv.stride(), *score.stride(), *ape.stride(), state_cache.stride(0)
    sizes = count, pages, page_size, kv.shape[1], compress_ratio
    launch = _saving(sizes, strides, kv.device)
    launch(kv, score, ape, positions.contiguous(), state_cache, slot_mapping.contiguous())


@functools.lru_cache(LAUNCHES)
def _saving(
    sizes: tuple[int, int, int, int, int], strides: tuple[int, ...], device: torch.device
) -> PreparedLaunch:
    """Prepare a launch for numbers of tokens, pages, page size, channels and ratio."""
    count, pages, page_size, width, ratio = sizes
    config = choose_save_config(width, target_of(device))
    return PreparedLaunch(
        save_partial_states_kernel,
        (cdiv(count, config.block_t),),
        count,
        *strides,
        pages * page_size,
        RATIO=ratio,
        PAGE_SIZE=page_size,
        WIDTH=width,
        BLOCK_W=config.block_w,
        BLOCK_T=config.block_t,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(device),
    )
