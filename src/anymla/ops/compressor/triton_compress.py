"""Turn closed windows into cache entries: pool, norm, rotate, transform and store.

Grid: blocks of SPAN tokens, which look for those of theirs that close a window; most leave at once.

    window -> pooled, here or by a kernel before -> one row -> one entry, in any layout
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import INDEX_LAYOUTS, MAIN_LAYOUTS
from anymla.formats.triton_hadamard import hadamard as hadamard_rows
from anymla.formats.triton_rows import cache_bytes, entry_offsets, row_codec, store_rows
from anymla.ops import device as device_facts
from anymla.ops._build import Build
from anymla.ops._triton_norm_rope import inverse_rms, load_cos_sin, rotate
from anymla.ops.compressor.triton_pool import (
    FEW_TOKENS,
    GIVEN,
    MOST_EARLY,
    config,
    early,
    launch_pool,
)
from anymla.ops.compressor.triton_window import closing, count_states, next_of, pool_window
from anymla.ops.device import Target
from anymla.ops.pdl import pdl_launch, target_has_pdl


@triton.jit(do_not_specialize=["tokens", "pages", "columns", "requests", "capacity", "length"])
def compress_kernel(
    state,
    pooled,
    tables,
    state_slots,
    requests_of,
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
    RATIO: tl.constexpr,
    STATES: tl.constexpr,
    STATE_ENTRIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    ROPE: tl.constexpr,
    HADAMARD_LOG: tl.constexpr,
    LOOKED: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPAN tokens; the state's page stride in elements, the cache's in bytes, capacity in slots.

    The windows are pooled here if there is no ``pooled``. HADAMARD_LOG is the transform's log2, or
    0 for none.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = CODEC.channels
    channel = tl.arange(0, WIDTH)
    one = tl.full((1,), True, tl.int1)
    which = closing(
        state_slots,
        requests_of,
        positions,
        slots,
        tokens,
        pages,
        requests,
        capacity,
        RATIO,
        STATE_ENTRIES,
        SPAN,
    )
    last = -1
    for _ in range(tl.sum(which.to(tl.int32), 0)):
        last = next_of(which, last, SPAN)
        token = tl.program_id(0).to(tl.int64) * SPAN + last
        position = tl.load(positions + token)
        table = tables + tl.load(requests_of + token).to(tl.int64) * table_stride
        if pooled is None:
            entry, found = pool_window(
                state,
                table,
                position,
                columns,
                pages,
                state_page_stride,
                channel,
                STATES,
                RATIO,
                STATE_ENTRIES,
                WIDTH,
                LOOKED,
            )
        else:
            entry = tl.load(pooled + token * WIDTH + channel)
            found = count_states(table, position, columns, pages, STATES, STATE_ENTRIES, LOOKED)
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
        where = tl.zeros((1,), tl.int64) + tl.load(slots + token)
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
    codec, target = row_codec(layout), device_facts.target_of(positions.device)
    states = (2 if overlap else 1) * compress_ratio
    chosen = config(tokens, compress_ratio, states, codec.channels, target)
    tables = state_block_table
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    given = (
        state_slot_mapping.contiguous(),
        token_to_req.contiguous(),
        positions.contiguous(),
    )
    slots, pooled = k_slot_mapping.contiguous(), None
    if chosen.slice:
        pooled = launch_pool(
            state_cache,
            tables,
            *given,
            slots,
            pages * entries,
            codec.channels,
            compress_ratio,
            states,
            chosen,
        )
    compress_kernel[(triton.cdiv(tokens, chosen.span),)](
        state_cache,
        pooled,
        tables,
        *given,
        norm_weight.contiguous(),
        cos_sin_cache,
        cache,
        slots,
        tokens,
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
        chosen.span,
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
        **(pdl_launch(positions.device) if early(tokens, chosen) else {"PDL": False}),
    )


def builds(target: Target) -> Iterator[Build]:
    """The compressors of DeepSeek-V4 into every layout, the index also with the transform."""
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
        # The weight's type is of no consequence for the tile.
        for weight in ("bf16", "fp32") if layout == MAIN_LAYOUTS[0] else ("bf16",):
            seen = set()
            for tokens in (1, 1 + FEW_TOKENS, 1 + MOST_EARLY):
                given = (ratio, overlap, state_entries, entries, layout, transformed, weight)
                made = _build(tokens, *given, target)
                if made.label not in seen:
                    seen.add(made.label)
                    yield made


def _build(
    tokens: int,
    ratio: int,
    overlap: bool,
    state_entries: int,
    entries: int,
    layout: str,
    transformed: bool,
    weight: str,
    target: Target,
) -> Build:
    codec, states = row_codec(layout), (2 if overlap else 1) * ratio
    chosen = config(tokens, ratio, states, codec.channels, target)
    strides = ("state_page_stride", "page_stride", "cos_sin_row_stride")
    pooled = {"pooled": "*fp32"} if chosen.slice else {}
    launched = target_has_pdl(target) and early(tokens, chosen)
    marks = ", hadamard" * transformed + ", plainly" * (launched != target_has_pdl(target))
    how = f"{chosen.span} tokens, {layout}, {weight}{marks}"
    return Build(
        label=f"ratio {ratio}, {how}",
        kernel=compress_kernel,
        types={
            **GIVEN,
            **pooled,
            "cos_sin": "*fp32",
            "norm_weight": f"*{weight}",
            "cache": "*u8",
            **dict.fromkeys(("length", *strides), "i32"),
            "eps": "fp32",
        },
        constants={
            **({} if pooled else {"pooled": None}),
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
            "SPAN": chosen.span,
            "PDL": launched,
        },
        num_warps=chosen.num_warps,
        fp_fusion=False,
        divisible=strides,
    )
