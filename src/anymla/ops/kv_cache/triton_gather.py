"""Gathering and decoding of cache rows in Triton.

Grid: one CTA for ROWS consecutive rows of the result (of one request); a tile is ROWS whole rows
from anywhere in the cache.

    out row | decode(entry)      |
    out row | zeros: no such slot|
    out row | not written        |  past the request's last row
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.formats.triton_rows import cache_bytes, entry_offsets, load_rows, row_codec
from anymla.ops import device as device_facts
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.kv_cache.config import choose_config
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit(do_not_specialize=["count", "capacity"])
def gather_slots_kernel(
    out,
    cache,
    slots,
    count,
    row_stride,
    column_stride,
    page_stride,
    capacity,
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decode ``count`` slots.

    The page stride is in bytes, capacity in slots, and the other strides in elements.
    """
    CHANNELS: tl.constexpr = getattr(CODEC, "channels")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < count
    slot = tl.load(slots + row, mask=mask, other=-1)
    valid = (slot >= 0) & (slot < capacity)
    values, scales = entry_offsets(slot, valid, page_stride, ENTRIES, CODEC)
    x = load_rows(cache, values, scales, valid, CODEC, NATIVE)
    channel = tl.arange(0, CHANNELS)
    at = out + row[:, None] * row_stride + (channel * column_stride)[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=mask[:, None])


# A step's requests begin anywhere in the lists that all steps share.
@triton.jit(
    do_not_specialize=["first", "limit", "columns", "pages", "tiles", "table_stride"],
    do_not_specialize_on_alignment=["stops", "lengths", "tables"],
)
def gather_sequences_kernel(
    out,
    cache,
    stops,
    lengths,
    tables,
    first,
    limit,
    columns,
    pages,
    tiles,
    request_stride,
    row_stride,
    column_stride,
    table_stride,
    page_stride,
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decode the last ``lengths[r]`` rows before ``stops[r]`` to out[r, first:first + limit].

    ``tables`` is [R, columns] with contiguous columns; a request has ``tiles`` CTAs.
    """
    CHANNELS: tl.constexpr = getattr(CODEC, "channels")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64) // tiles
    start = (tl.program_id(0) % tiles) * ROWS
    row = start + tl.arange(0, ROWS)
    length = tl.load(lengths + request)
    if start < length:
        mask = (row < length) & (row < limit)
        position = tl.load(stops + request).to(tl.int64) - length + row
        column = position // ENTRIES
        known = mask & (position >= 0) & (column < columns)
        page = tl.load(tables + request * table_stride + column, mask=known, other=-1)
        valid = known & (page >= 0) & (page < pages)
        slot = page.to(tl.int64) * ENTRIES + position % ENTRIES
        values, scales = entry_offsets(slot, valid, page_stride, ENTRIES, CODEC)
        x = load_rows(cache, values, scales, valid, CODEC, NATIVE)
        channel = tl.arange(0, CHANNELS)
        at = out + request * request_stride + (first + row).to(tl.int64)[:, None] * row_stride
        at += (channel * column_stride)[None, :]
        tl.store(at, x.to(out.dtype.element_ty), mask=mask[:, None])


def dequant_gather_slots(
    out: Tensor, k_cache: Tensor, indices: Tensor, *, layout: str = MAIN_FP8
) -> None:
    """Backend of ``interface.dequant_gather_slots`` in Triton; see its contract."""
    cache, page_stride, pages, entries = cache_bytes(k_cache)
    count, codec = indices.shape[0], row_codec(layout)
    if not count:
        return
    target = device_facts.target_of(out.device)
    config = choose_config(codec.channels, target)
    gather_slots_kernel[(triton.cdiv(count, config.rows),)](
        out,
        cache,
        indices.contiguous(),
        count,
        out.stride(0),
        out.stride(1),
        page_stride,
        pages * entries,
        entries,
        codec,
        target.native_e4m3,
        config.rows,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(out.device),
    )


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    offset: int = 0,
    layout: str = MAIN_FP8,
) -> None:
    """Backend of ``interface.dequantize_and_gather_k_cache`` in Triton; see its contract."""
    cache, page_stride, pages, entries = cache_bytes(k_cache)
    requests, limit = out.shape[0], out.shape[1] - offset
    if not requests or limit <= 0:
        return
    tables = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    sizes = requests, limit, offset, tables.shape[1], tables.stride(0)
    paged = page_stride, pages, entries, layout
    launch = _gathering(sizes, out.stride(), paged, out.device)
    last = seq_lens if gather_lens is None else gather_lens
    launch(out, cache, seq_lens.contiguous(), last.contiguous(), tables)


@functools.lru_cache(LAUNCHES)
def _gathering(
    sizes: tuple[int, int, int, int, int],
    strides: tuple[int, ...],
    paged: tuple[int, int, int, str],
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch for requests, rows of each, skipped rows, and a table's width and stride."""
    requests, limit, offset, columns, table_stride = sizes
    page_stride, pages, entries, layout = paged
    codec, target = row_codec(layout), device_facts.target_of(device)
    config = choose_config(codec.channels, target)
    tiles = cdiv(limit, config.rows)
    return PreparedLaunch(
        gather_sequences_kernel,
        (requests * tiles,),
        offset,
        limit,
        columns,
        pages,
        tiles,
        *strides,
        table_stride,
        page_stride,
        ENTRIES=entries,
        CODEC=codec,
        NATIVE=target.native_e4m3,
        ROWS=config.rows,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(device),
    )
