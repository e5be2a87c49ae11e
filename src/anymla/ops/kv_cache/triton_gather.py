"""Gather cache rows and decode them.

Grid: one program for ROWS consecutive rows of the result (of one request); the tile is ROWS whole
rows, wherever in the cache they lie.

    out row | decode(entry)      |
    out row | zeros: no such slot|
    out row | not written        |  past the request's last row
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.formats.triton_rows import cache_bytes, entry_offsets, load_rows, row_codec
from anymla.ops import device as device_facts
from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.kv_cache.triton_builds import KINDS
from anymla.ops.pdl import pdl_launch, target_has_pdl

_TILE = 2048


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a program, and its warps."""

    rows: int
    num_warps: int


def config(channels: int, target: Target) -> Config:
    """Sixteen codes a thread: one load of 16 bytes, and two stores of bfloat16."""
    return Config(max(1, _TILE // channels), _TILE // (16 * target.warp_size))


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
    """Decode ``count`` slots; page stride in bytes, capacity in slots, the others in elements."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wanted = row < count
    slot = tl.load(slots + row, mask=wanted, other=-1)
    valid = (slot >= 0) & (slot < capacity)
    values, scales = entry_offsets(slot, valid, page_stride, ENTRIES, CODEC)
    x = load_rows(cache, values, scales, valid, CODEC, NATIVE)
    channel = tl.arange(0, CODEC.channels)
    at = out + row[:, None] * row_stride + (channel * column_stride)[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=wanted[:, None])


@triton.jit(do_not_specialize=["first", "room", "columns", "pages", "tiles"])
def gather_sequences_kernel(
    out,
    cache,
    stops,
    lengths,
    tables,
    first,
    room,
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
    """Decode the last ``lengths[r]`` rows before ``stops[r]`` to out[r, first:first + room].

    ``tables`` is [R, columns] with contiguous columns; a request has ``tiles`` programs.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64) // tiles
    start = (tl.program_id(0) % tiles) * ROWS
    row = start + tl.arange(0, ROWS)
    length = tl.load(lengths + request)
    if start < length:
        wanted = (row < length) & (row < room)
        position = tl.load(stops + request).to(tl.int64) - length + row
        column = position // ENTRIES
        known = wanted & (position >= 0) & (column < columns)
        page = tl.load(tables + request * table_stride + column, mask=known, other=-1)
        valid = known & (page >= 0) & (page < pages)
        slot = page.to(tl.int64) * ENTRIES + position % ENTRIES
        values, scales = entry_offsets(slot, valid, page_stride, ENTRIES, CODEC)
        x = load_rows(cache, values, scales, valid, CODEC, NATIVE)
        channel = tl.arange(0, CODEC.channels)
        at = out + request * request_stride + (first + row).to(tl.int64)[:, None] * row_stride
        at += (channel * column_stride)[None, :]
        tl.store(at, x.to(out.dtype.element_ty), mask=wanted[:, None])


def dequant_gather_slots(
    out: Tensor, k_cache: Tensor, indices: Tensor, *, layout: str = MAIN_FP8
) -> None:
    """See ``interface.dequant_gather_slots``."""
    cache, page_stride, pages, entries = cache_bytes(k_cache)
    count, codec = indices.shape[0], row_codec(layout)
    if not count:
        return
    target = device_facts.target_of(out.device)
    chosen = config(codec.channels, target)
    gather_slots_kernel[(triton.cdiv(count, chosen.rows),)](
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
        chosen.rows,
        num_warps=chosen.num_warps,
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
    """See ``interface.dequantize_and_gather_k_cache``."""
    cache, page_stride, pages, entries = cache_bytes(k_cache)
    requests, room, codec = out.shape[0], out.shape[1] - offset, row_codec(layout)
    if not requests or room <= 0:
        return
    target = device_facts.target_of(out.device)
    chosen = config(codec.channels, target)
    tiles = triton.cdiv(room, chosen.rows)
    tables = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    gather_sequences_kernel[(requests * tiles,)](
        out,
        cache,
        seq_lens.contiguous(),
        (seq_lens if gather_lens is None else gather_lens).contiguous(),
        tables,
        offset,
        room,
        tables.shape[1],
        pages,
        tiles,
        out.stride(0),
        out.stride(1),
        out.stride(2),
        tables.stride(0),
        page_stride,
        entries,
        codec,
        target.native_e4m3,
        chosen.rows,
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(out.device),
    )


def builds(target: Target) -> Iterator[Build]:
    """Both kernels, every layout; and what must not be tried."""
    for layout, dtype, entries in KINDS:
        yield _slots_build(layout, dtype, entries, target)
        yield _sequences_build(layout, dtype, entries, target)
    if target.backend == "cuda" and not target.native_e4m3:
        # Why codes are converted by bits there: the compiler refuses the type.
        native = dataclasses.replace(target, native_e4m3=True)
        build = _slots_build(*KINDS[0], native)
        yield dataclasses.replace(build, label=f"{build.label}, native", fails="fp8e4nv")


def _common(layout: str, entries: int, target: Target) -> dict[str, Any]:
    codec = row_codec(layout)
    chosen = config(codec.channels, target)
    constants = {
        "column_stride": 1,
        "ENTRIES": entries,
        "CODEC": codec,
        "NATIVE": target.native_e4m3,
        "ROWS": chosen.rows,
        "PDL": target_has_pdl(target),
    }
    return {"constants": constants, "num_warps": chosen.num_warps, "fp_fusion": False}


def _slots_build(layout: str, dtype: str, entries: int, target: Target) -> Build:
    return Build(
        label=f"slots, {layout} to {dtype}, page {entries}",
        kernel=gather_slots_kernel,
        types={
            "out": f"*{dtype}",
            "cache": "*u8",
            "slots": "*i32",
            **dict.fromkeys(("count", "row_stride", "page_stride", "capacity"), "i32"),
        },
        divisible=("row_stride", "page_stride"),
        **_common(layout, entries, target),
    )


def _sequences_build(layout: str, dtype: str, entries: int, target: Target) -> Build:
    strides = ("request_stride", "row_stride", "page_stride")
    counts = ("first", "room", "columns", "pages", "tiles", "table_stride")
    return Build(
        label=f"sequences, {layout} to {dtype}, page {entries}",
        kernel=gather_sequences_kernel,
        types={
            "out": f"*{dtype}",
            "cache": "*u8",
            **dict.fromkeys(("stops", "lengths", "tables"), "*i32"),
            **dict.fromkeys((*counts, *strides), "i32"),
        },
        divisible=strides,
        **_common(layout, entries, target),
    )
