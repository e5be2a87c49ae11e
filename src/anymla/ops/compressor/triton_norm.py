"""Pooling and norm of closed windows in Triton, without rotating or storing: one row a token.

window -> pooled -> normed -> its token's row; zeros where no window closes       grid (tokens,)
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops import device as device_facts
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops._triton_norm_rope import inverse_rms
from anymla.ops.compressor.config import Window, choose_norm_config
from anymla.ops.compressor.triton_pool import closing_tokens, pool_window
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit(
    do_not_specialize=["tokens", "pages", "columns", "requests", "capacity", "table_stride"]
)
def norm_kernel(
    state,
    tables,
    state_slots,
    token_to_req,
    positions,
    norm_weight,
    out,
    tokens,
    pages,
    columns,
    requests,
    capacity,
    state_page_stride,
    table_stride,
    eps,
    WINDOW: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a token's row of ``out`` [T, D]; ``capacity`` is in slots of states."""
    WIDTH: tl.constexpr = getattr(WINDOW, "channels")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    # Entries are not stored and have no slots; the slots of their states stand for them.
    closes = closing_tokens(
        state_slots,
        token_to_req,
        positions,
        state_slots,
        tokens,
        pages,
        requests,
        capacity,
        WINDOW,
        1,
    )
    channel = tl.arange(0, WIDTH)
    row = tl.zeros((WIDTH,), tl.float32)
    if tl.sum(closes.to(tl.int32), 0) > 0:
        table = tables + tl.load(token_to_req + token).to(tl.int64) * table_stride
        entry, found = pool_window(
            state,
            table,
            tl.load(positions + token),
            columns,
            pages,
            state_page_stride,
            channel,
            WINDOW,
            BLOCK_STATES,
        )
        entry = entry[None, :]
        weight = tl.load(norm_weight + channel).to(tl.float32)
        normed = entry * inverse_rms(entry, eps, WIDTH) * weight[None, :]
        row = tl.where(found > 0, tl.sum(normed, 0), 0.0)
    tl.store(out + token * WIDTH + channel, row)


def compress_norm(
    state_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    compress_ratio: int,
    overlap: bool,
) -> Tensor:
    """Backend of ``interface.compress_norm`` in Triton; see its contract."""
    count, (requests, columns) = positions.shape[0], state_block_table.shape
    pages, page_size = state_cache.shape[:2]
    if not (count and requests and columns and pages):
        return state_cache.new_zeros((count, len(norm_weight)))
    tables = state_block_table
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    window = Window(compress_ratio, overlap, len(norm_weight), page_size)
    numbers = count, pages, columns, requests, pages * page_size, state_cache.stride(0)
    out = state_cache.new_empty((count, len(norm_weight)))
    _norm((*numbers, tables.stride(0)), window, eps, positions.device)(
        state_cache, tables, state_slot_mapping.contiguous(), token_to_req.contiguous(),
        positions.contiguous(), norm_weight.contiguous(), out,
    )  # fmt: skip
    return out


@functools.lru_cache(LAUNCHES)
def _norm(
    numbers: tuple[int, ...], window: Window, eps: float, device: torch.device
) -> PreparedLaunch:
    config = choose_norm_config(window, device_facts.target_of(device))
    return PreparedLaunch(
        norm_kernel,
        (numbers[0],),
        *numbers,
        eps,
        WINDOW=window,
        BLOCK_STATES=config.block_states,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(device),
    )
