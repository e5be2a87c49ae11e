"""Quantisation and storing of cache rows in Triton.

Grid: one CTA for ROWS consecutive tokens; a tile is ROWS whole rows.

              channels
    token  | codes of 7 quant blocks | bf16 |  -> entry of slot_mapping[token], or nothing
    token  |        ...        | ...  |
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.formats.triton_rows import (
    cache_bytes,
    entry_offsets,
    row_codec,
    store_rows,
    store_tail,
)
from anymla.ops import device as device_facts
from anymla.ops.kv_cache.config import choose_config
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit(do_not_specialize=["count", "capacity"])
def insert_kernel(
    k,
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
    """Store ``count`` rows of k; the page stride is in bytes, and capacity in slots."""
    KIND: tl.constexpr = getattr(CODEC, "kind")
    CHANNELS: tl.constexpr = getattr(CODEC, "channels")
    NOPE: tl.constexpr = getattr(CODEC, "nope")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    mask = row < count
    slot = tl.load(slots + row, mask=mask, other=-1)
    # Do not mask by the slot, so that both loads are in flight at the same time.
    at = k + row[:, None] * row_stride + (channel * column_stride)[None, :]
    x = tl.load(at, mask=mask[:, None], other=0.0).to(tl.float32)
    valid = (slot >= 0) & (slot < capacity)
    values, scales = entry_offsets(slot, valid, page_stride, ENTRIES, CODEC)
    TAIL: tl.constexpr = KIND == "split_fp8" and NOPE < CHANNELS
    if TAIL:
        last = NOPE + tl.arange(0, CHANNELS - NOPE)
        tail = k + row[:, None] * row_stride + (last * column_stride)[None, :]
        tail = tl.load(tail, mask=mask[:, None], other=0.0).to(tl.float32)
        store_tail(cache, values, valid, tail, CODEC)
    store_rows(cache, values, scales, valid, x, CODEC, NATIVE, not TAIL)


def quantize_and_insert_k_cache(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, layout: str = MAIN_FP8
) -> None:
    """Backend of ``interface.quantize_and_insert_k_cache`` in Triton; see its contract."""
    cache, page_stride, pages, entries = cache_bytes(k_cache)
    count, codec = slot_mapping.shape[0], row_codec(layout)
    if not count or not pages:
        return
    target = device_facts.target_of(k.device)
    config = choose_config(codec.channels, target)
    insert_kernel[(triton.cdiv(count, config.rows),)](
        k,
        cache,
        slot_mapping.contiguous(),
        count,
        k.stride(0),
        k.stride(1),
        page_stride,
        pages * entries,
        entries,
        codec,
        target.native_e4m3,
        config.rows,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(k.device),
    )
