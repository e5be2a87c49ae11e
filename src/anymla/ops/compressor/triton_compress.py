"""Turn closed windows into cache entries: pool, norm, rotate, transform and store.

Grid: one program a token; those that close no window leave at once. The tile is LOOKED states of
the window by all channels, passed over with a running softmax in every channel:

    position p - n + 1 .. | score | kv |   state[position], its part for this window
    ...                   |       |    |   LOOKED rows at a time
    position p            |       |    |   -> one row -> one entry, in any layout
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_hadamard import hadamard as hadamard_rows
from anymla.formats.triton_rows import cache_bytes, entry_offsets, row_codec, store_rows
from anymla.ops import _triton
from anymla.ops._triton import Build, Target
from anymla.ops.kv_cache.triton_builds import INDEX_LAYOUTS, MAIN_LAYOUTS
from anymla.ops.norm_rope.triton_norm import inverse_rms
from anymla.ops.norm_rope.triton_pairs import load_turns, turn_pairs

# Enough loads under way for one program a multiprocessor.
_MOST_LOOKED = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """States of a tile, and warps of a program."""

    looked: int
    num_warps: int


def config(states: int, channels: int, target: Target) -> Config:
    """Thirty-two scores and as many values a thread, if the window has so many."""
    looked = min(_MOST_LOOKED, triton.next_power_of_2(states))
    warps = looked * channels // (32 * target.warp_size)
    return Config(looked, min(8, max(1, warps)))


@triton.jit
def pool_window(
    state,
    table,
    position,
    columns,
    pages,
    page_stride,
    STATES: tl.constexpr,
    RATIO: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    LOOKED: tl.constexpr,
):
    """Pool the STATES positions up to ``position`` (int64) to float32 [WIDTH].

    ``table`` points at the request's ``columns`` page ids. Returns the row and how many of the
    states are there; without any the row is NaN. With STATES = 2 RATIO a state has two parts.
    """
    PARTS: tl.constexpr = STATES // RATIO
    channel = tl.arange(0, WIDTH)
    top = tl.full((WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    pooled = tl.zeros((WIDTH,), tl.float32)
    found = 0
    for start in range(0, STATES, LOOKED):
        term = start + tl.arange(0, LOOKED)
        before = position - (STATES - 1) + term
        column = before // ENTRIES
        there = (term < STATES) & (before >= 0) & (column < columns)
        page = tl.load(table + column, mask=there, other=-1)
        there = there & (page >= 0) & (page < pages)
        found += tl.sum(there.to(tl.int32), 0)
        at = state + page.to(tl.int64) * page_stride + before % ENTRIES * (2 * PARTS * WIDTH)
        # The older half of the terms gives its part for the next window.
        part = tl.where(term < STATES - RATIO, 0, (PARTS - 1) * WIDTH)
        at = (at + part)[:, None] + channel[None, :]
        score = tl.load(at + PARTS * WIDTH, mask=there[:, None], other=float("-inf"))
        value = tl.load(at, mask=there[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(score, 0))
        # Without a finite score yet every weight is 0, not exp(-inf + inf).
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(top - origin)
        weight = tl.exp(score - origin[None, :])
        total = total * kept + tl.sum(weight, 0)
        pooled = pooled * kept + tl.sum(weight * value, 0)
        top = higher
    return pooled / total, found


@triton.jit(do_not_specialize=["pages", "columns", "requests", "capacity", "length"])
def compress_kernel(
    state,
    tables,
    state_slots,
    requests_of,
    positions,
    norm_weight,
    cos_sin,
    cache,
    slots,
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
    RATIO: tl.constexpr,
    STATES: tl.constexpr,
    STATE_ENTRIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    ROPE: tl.constexpr,
    HADAMARD_LOG: tl.constexpr,
    LOOKED: tl.constexpr,
):
    """One token; the state's page stride in elements, the cache's in bytes, capacity in slots.

    HADAMARD_LOG is the transform's log2, or 0 for none.
    """
    WIDTH: tl.constexpr = CODEC.channels
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    state_slot = tl.load(state_slots + token)
    request = tl.load(requests_of + token)
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    wanted = (slot >= 0) & (slot < capacity) & (request >= 0) & (request < requests)
    stored = (state_slot >= 0) & (state_slot < pages.to(tl.int64) * STATE_ENTRIES)
    if closes & wanted & stored:
        entry, found = pool_window(
            state,
            tables + request.to(tl.int64) * table_stride,
            position,
            columns,
            pages,
            state_page_stride,
            STATES,
            RATIO,
            STATE_ENTRIES,
            WIDTH,
            LOOKED,
        )
        row = entry[None, :]
        weight = tl.load(norm_weight + tl.arange(0, WIDTH)).to(tl.float32)
        row = row * inverse_rms(row, eps, WIDTH) * weight[None, :]
        one = tl.full((1,), True, tl.int1)
        first = tl.zeros((1,), tl.int64) + (position + 1 - RATIO)
        cos, sin = load_turns(
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
        row = turn_pairs(row, cos, sin, WIDTH, ROPE)
        if HADAMARD_LOG > 0:
            row = hadamard_rows(row, HADAMARD_LOG)
        valid = one & (found > 0)
        where = tl.zeros((1,), tl.int64) + slot
        values, scales = entry_offsets(where, valid, page_stride, ENTRIES, CODEC)
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
    """See ``interface.compress_norm_rope_insert``."""
    tokens, (requests, columns) = positions.shape[0], state_block_table.shape
    cache, page_stride, pages, entries = cache_bytes(k_cache)
    state_pages = state_cache.shape[0]
    if not (tokens and requests and columns and pages and state_pages):
        return
    codec, target = row_codec(layout), _triton.target_of(positions.device)
    states = (2 if overlap else 1) * compress_ratio
    chosen = config(states, codec.channels, target)
    tables = state_block_table
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    compress_kernel[(tokens,)](
        state_cache,
        tables,
        state_slot_mapping.contiguous(),
        token_to_req.contiguous(),
        positions.contiguous(),
        norm_weight.contiguous(),
        cos_sin_cache,
        cache,
        k_slot_mapping.contiguous(),
        state_pages,
        columns,
        requests,
        pages * entries,
        cos_sin_cache.shape[0],
        state_cache.stride(0),
        tables.stride(0),
        page_stride,
        cos_sin_cache.stride(0),
        cos_sin_cache.stride(1),
        eps,
        compress_ratio,
        states,
        state_cache.shape[1],
        entries,
        codec,
        target.native_e4m3,
        cos_sin_cache.shape[1],
        codec.channels.bit_length() - 1 if hadamard else 0,
        chosen.looked,
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
    )


def builds(target: Target) -> Iterator[Build]:
    """The compressors of DeepSeek-V4 into every layout, the index also with the transform."""
    numbers = ("pages", "columns", "requests", "capacity", "length", "table_stride")
    strides = ("state_page_stride", "page_stride", "cos_sin_row_stride")
    main = [
        (ratio, overlap, state_entries, entries, layout, False)
        for ratio, overlap, state_entries, entries in ((4, True, 4, 64), (128, False, 8, 2))
        for layout in MAIN_LAYOUTS
    ]
    index = [
        (4, True, 4, 64, layout, transformed)
        for layout in INDEX_LAYOUTS
        for transformed in (False, True)
    ]
    for ratio, overlap, state_entries, entries, layout, transformed in main + index:
        codec = row_codec(layout)
        states = (2 if overlap else 1) * ratio
        chosen = config(states, codec.channels, target)
        for weight in ("bf16", "fp32"):
            yield Build(
                label=f"ratio {ratio}, {layout}, {weight}{', hadamard' if transformed else ''}",
                kernel=compress_kernel,
                types={
                    **dict.fromkeys(("state", "cos_sin"), "*fp32"),
                    **dict.fromkeys(("tables", "requests_of"), "*i32"),
                    **dict.fromkeys(("state_slots", "positions", "slots"), "*i64"),
                    "norm_weight": f"*{weight}",
                    "cache": "*u8",
                    **dict.fromkeys(numbers + strides, "i32"),
                    "eps": "fp32",
                },
                constants={
                    "cos_sin_column_stride": 1,
                    "RATIO": ratio,
                    "STATES": states,
                    "STATE_ENTRIES": state_entries,
                    "ENTRIES": entries,
                    "CODEC": codec,
                    "NATIVE": target.native_e4m3,
                    "ROPE": 64,
                    "HADAMARD_LOG": codec.channels.bit_length() - 1 if transformed else 0,
                    "LOOKED": chosen.looked,
                },
                num_warps=chosen.num_warps,
                fp_fusion=False,
                divisible=strides,
            )
