"""Compression of closed windows in Triton: pool, norm, RoPE, Hadamard transform and store.

Grid: blocks of tokens, of which a CTA processes those that close a window; most leave at once.

    window -> pooled, here or by ``pool_kernel`` -> one row -> one entry, in any layout
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_hadamard import hadamard as hadamard_rows
from anymla.formats.triton_rows import cache_bytes, entry_offsets, row_codec, store_rows
from anymla.ops import device as device_facts
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_norm_rope import inverse_rms, load_cos_sin, rotate
from anymla.ops.compressor.config import Window, choose_compress_config
from anymla.ops.compressor.triton_pool import (
    closing_tokens,
    count_states,
    next_token,
    pool_window,
    prepare_pool,
)
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch


@triton.jit(
    do_not_specialize=[
        "tokens",
        "pages",
        "columns",
        "requests",
        "capacity",
        "length",
        "table_stride",
    ]
)
def compress_kernel(
    state,
    pooled,
    tables,
    state_slots,
    token_to_req,
    positions,
    norm_weight,
    cos_sin,
    cache,
    slots,
    tokens,
    pages,
    columns,
    requests,
    capacity,
    length,
    state_page_stride,
    table_stride,
    page_stride,
    cos_sin_row_stride,
    cos_sin_column_stride,
    eps,
    WINDOW: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    ROPE: tl.constexpr,
    HADAMARD_LOG: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute and store the entries of the CTA's tokens.

    The state's page stride is in elements, the cache's in bytes, and ``capacity`` in slots. Windows
    are pooled here if there is no ``pooled``. HADAMARD_LOG is the transform's log2, or 0 for none.
    """
    WIDTH: tl.constexpr = getattr(CODEC, "channels")
    RATIO: tl.constexpr = getattr(WINDOW, "ratio")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    channel = tl.arange(0, WIDTH)
    one = tl.full((1,), True, tl.int1)
    closes = closing_tokens(
        state_slots,
        token_to_req,
        positions,
        slots,
        tokens,
        pages,
        requests,
        capacity,
        WINDOW,
        BLOCK_T,
    )
    last = -1
    for _ in range(tl.sum(closes.to(tl.int32), 0)):
        last = next_token(closes, last, BLOCK_T)
        token = tl.program_id(0).to(tl.int64) * BLOCK_T + last
        position = tl.load(positions + token)
        table = tables + tl.load(token_to_req + token).to(tl.int64) * table_stride
        if pooled is None:
            entry, found = pool_window(
                state,
                table,
                position,
                columns,
                pages,
                state_page_stride,
                channel,
                WINDOW,
                BLOCK_STATES,
            )
        else:
            entry = tl.load(pooled + token * WIDTH + channel)
            found = count_states(table, position, columns, pages, WINDOW, BLOCK_STATES)
        row = entry[None, :]
        weight = tl.load(norm_weight + channel).to(tl.float32)
        row = row * inverse_rms(row, eps, WIDTH) * weight[None, :]
        first = tl.zeros((1,), tl.int64) + (position + 1 - RATIO)
        cos, sin = load_cos_sin(
            cos_sin,
            cos_sin_row_stride,
            cos_sin_column_stride,
            length,
            first,
            one,
            WIDTH,
            ROPE,
            WIDTH,
        )
        row = rotate(row, cos, sin, WIDTH, ROPE)
        if HADAMARD_LOG > 0:
            row = hadamard_rows(row, HADAMARD_LOG)
        valid = one & (found > 0)
        slot = tl.zeros((1,), tl.int64) + tl.load(slots + token)
        values, scales = entry_offsets(slot, valid, page_stride, PAGE_SIZE, CODEC)
        store_rows(cache, values, scales, valid, row, CODEC, NATIVE)


def compress_norm_rope_insert(
    state_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    k_slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    layout: str,
    hadamard: bool = False,
) -> None:
    """Backend of ``interface.compress_norm_rope_insert`` in Triton; see its contract."""
    count, (requests, columns) = positions.shape[0], state_block_table.shape
    cache, page_stride, pages, page_size = cache_bytes(k_cache)
    state_pages = state_cache.shape[0]
    if not (count and requests and columns and pages and state_pages):
        return
    sizes = count, state_pages, columns, requests, pages, page_size
    window = compress_ratio, overlap, state_cache.shape[1]
    strides = state_cache.stride(0), page_stride, *cos_sin_cache.stride()
    rest = cos_sin_cache.shape, eps, layout, hadamard
    tables = state_block_table
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    found = _compression(sizes, window, strides, tables.stride(0), rest, positions.device)
    state_slots, token_to_req = state_slot_mapping.contiguous(), token_to_req.contiguous()
    positions, slots = positions.contiguous(), k_slot_mapping.contiguous()
    pooled = None
    if found.pool is not None:
        pooled = scratch((count, found.channels), torch.float32, positions.device)
        found.pool(state_cache, tables, state_slots, token_to_req, positions, slots, pooled)
    found.compress(
        state_cache, pooled, tables, state_slots, token_to_req, positions,
        norm_weight.contiguous(), cos_sin_cache, cache, slots,
    )  # fmt: skip


class _Launches(NamedTuple):
    """Launches of one call: pooling, if separate, then the rest; and an entry's channels."""

    pool: PreparedLaunch | None
    compress: PreparedLaunch
    channels: int


@functools.lru_cache(LAUNCHES)
def _compression(
    sizes: tuple[int, ...],
    pooled: tuple[int, bool, int],
    strides: tuple[int, ...],
    table_stride: int,
    rest: tuple[Any, ...],
    device: torch.device,
) -> _Launches:
    """Prepare the launches for a call's sizes, strides and windows."""
    count, state_pages, columns, requests, pages, page_size = sizes
    ratio, overlap, states_of_page = pooled
    state_page_stride, page_stride, *table_strides = strides
    (length, rope), eps, layout, hadamard = rest
    codec, target = row_codec(layout), device_facts.target_of(device)
    window = Window(ratio, overlap, codec.channels, states_of_page)
    config = choose_compress_config(count, window, target)
    capacity, pool = pages * page_size, None
    if config.pool_channels:
        numbers = count, state_pages, columns, requests, capacity, state_page_stride, table_stride
        pool = prepare_pool(numbers, window, config, device)
    compress = PreparedLaunch(
        compress_kernel,
        (cdiv(count, config.block_t),),
        count,
        state_pages,
        columns,
        requests,
        capacity,
        length,
        state_page_stride,
        table_stride,
        page_stride,
        *table_strides,
        eps,
        WINDOW=window,
        BLOCK_STATES=config.block_states,
        BLOCK_T=config.block_t,
        PAGE_SIZE=page_size,
        CODEC=codec,
        NATIVE=target.native_e4m3,
        ROPE=rope,
        HADAMARD_LOG=codec.channels.bit_length() - 1 if hadamard else 0,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **(pdl_launch(device) if config.pdl else {"PDL": False}),
    )
    return _Launches(pool, compress, codec.channels)
