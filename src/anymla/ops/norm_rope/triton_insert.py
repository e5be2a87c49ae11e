"""Norm and RoPE of query heads, RoPE and insertion of key-value rows, in one Triton launch.

The grid has two kinds of CTAs, of which those that take longer come first:

    program id | 0 .. kv_ctas - 1: ROWS tokens' kv rows -> cache entries |
               | from kv_ctas on: HEADS heads of one token -> out        |

Both tiles are whole rows, which the rotation splits into pairs of channels.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.formats.triton_rows import cache_bytes, entry_offsets, row_codec, store_rows
from anymla.ops import device as device_facts
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_norm_rope import inverse_rms, load_cos_sin, rotate
from anymla.ops.norm_rope.config import choose_insert_config
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit
def insert_kv_rows(
    kv, kv_strides, first, inserted, slots, positions, rope_table, cache, page_stride, capacity,
    ENTRIES: tl.constexpr, CODEC: tl.constexpr, NATIVE: tl.constexpr, ROPE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate and store key-value rows from ``first`` on of ``inserted``.

    ``kv_strides`` are (row, channel), ``rope_table`` is (table, row stride, column stride, rows).
    """
    WIDTH: tl.constexpr = getattr(CODEC, "channels")
    table, table_row_stride, table_column_stride, length = rope_table
    channel = tl.arange(0, WIDTH)
    row = first + tl.arange(0, ROWS)
    mask = row < inserted
    slot = tl.load(slots + row, mask=mask, other=-1)
    position = tl.load(positions + row, mask=mask, other=0)
    at = kv + row[:, None] * kv_strides[0] + (channel * kv_strides[1])[None, :]
    x = tl.load(at, mask=mask[:, None], other=0.0).to(tl.float32)
    cos, sin = load_cos_sin(
        table, table_row_stride, table_column_stride, length, position, mask, WIDTH, ROPE, WIDTH
    )
    valid = (slot >= 0) & (slot < capacity)
    values, scales = entry_offsets(slot, valid, page_stride, ENTRIES, CODEC)
    store_rows(cache, values, scales, valid, rotate(x, cos, sin, WIDTH, ROPE), CODEC, NATIVE)


@triton.jit
def norm_rotate_heads(
    q, q_strides, out, out_strides, token, first, heads, positions, rope_table, eps,
    WIDTH: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads from ``first`` on of one token.

    Strides are (token, head, channel), ``rope_table`` is (table, row stride, column stride, rows).
    """
    table, table_row_stride, table_column_stride, length = rope_table
    channel = tl.arange(0, WIDTH)
    head = first + tl.arange(0, HEADS)
    mask = (head < heads)[:, None]
    at = q + token * q_strides[0] + head[:, None].to(tl.int64) * q_strides[1]
    at += (channel * q_strides[2])[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    # Load a row of cosines for every head: a single row would have another layout than the heads,
    # and the compiler would move the heads, not the row.
    position = tl.load(positions + token + tl.zeros((HEADS,), tl.int64))
    cos, sin = load_cos_sin(
        table, table_row_stride, table_column_stride, length, position, head < heads,
        WIDTH, ROPE, WIDTH,
    )  # fmt: skip
    x = rotate(x * inverse_rms(x, eps, WIDTH), cos, sin, WIDTH, ROPE)
    at = out + token * out_strides[0] + head[:, None].to(tl.int64) * out_strides[1]
    at += (channel * out_strides[2])[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inserted", "kv_ctas", "capacity", "length"])
def qnorm_rope_kv_insert_kernel(
    q,
    kv,
    out,
    cache,
    slots,
    positions,
    table,
    inserted,
    kv_ctas,
    heads,
    q_token_stride,
    q_head_stride,
    q_column_stride,
    kv_row_stride,
    kv_column_stride,
    out_token_stride,
    out_head_stride,
    out_column_stride,
    page_stride,
    capacity,
    table_row_stride,
    table_column_stride,
    length,
    eps,
    CONFIG: tl.constexpr,
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write query heads to ``out``, and ``inserted`` key-value rows to the cache."""
    ROWS: tl.constexpr = getattr(CONFIG, "rows")
    HEADS: tl.constexpr = getattr(CONFIG, "heads")
    WIDTH: tl.constexpr = getattr(CODEC, "channels")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    cta = tl.program_id(0)
    rope_table = (table, table_row_stride, table_column_stride, length)
    if cta < kv_ctas:
        first = cta.to(tl.int64) * ROWS
        insert_kv_rows(
            kv, (kv_row_stride, kv_column_stride), first, inserted, slots, positions, rope_table,
            cache, page_stride, capacity, ENTRIES, CODEC, NATIVE, ROPE, ROWS,
        )  # fmt: skip
    else:
        groups = tl.cdiv(heads, HEADS)
        group = cta - kv_ctas
        norm_rotate_heads(
            q, (q_token_stride, q_head_stride, q_column_stride),
            out, (out_token_stride, out_head_stride, out_column_stride),
            (group // groups).to(tl.int64), group % groups * HEADS, heads,
            positions, rope_table, eps, WIDTH, ROPE, HEADS,
        )  # fmt: skip


def qnorm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    *,
    layout: str = MAIN_FP8,
    out: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.qnorm_rope_kv_insert`` in Triton; see its contract."""
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    cache, page_stride, pages, entries = cache_bytes(k_cache)
    inserted = slot_mapping.shape[0] if pages else 0
    sizes = q.shape[0], q.shape[1], inserted, cos_sin_cache.shape
    strides = *q.stride(), *kv.stride(), *result.stride()
    paged = page_stride, pages * entries, entries, layout
    launch = _insertion(sizes, strides, paged, cos_sin_cache.stride(), eps, q.device)
    if launch is not None:
        slots, positions = slot_mapping.contiguous(), positions.contiguous()
        launch(q, kv, result, cache, slots, positions, cos_sin_cache)
    return result


@functools.lru_cache(LAUNCHES)
def _insertion(
    sizes: tuple[int, int, int, tuple[int, int]],
    strides: tuple[int, ...],
    paged: tuple[int, int, int, str],
    table_strides: tuple[int, int],
    eps: float,
    device: torch.device,
) -> PreparedLaunch | None:
    """Prepare a launch for (tokens, heads, inserted rows, table shape); None without work."""
    tokens, heads, inserted, (length, channels) = sizes
    page_stride, capacity, entries, layout = paged
    codec, target = row_codec(layout), device_facts.target_of(device)
    config = choose_insert_config(heads, codec.channels, target)
    kv_ctas = cdiv(inserted, config.rows)
    ctas = kv_ctas + tokens * cdiv(heads, config.heads)
    if not ctas:
        return None
    return PreparedLaunch(
        qnorm_rope_kv_insert_kernel,
        (ctas,),
        inserted,
        kv_ctas,
        heads,
        *strides,
        page_stride,
        capacity,
        *table_strides,
        length,
        eps,
        CONFIG=config,
        ENTRIES=entries,
        CODEC=codec,
        NATIVE=target.native_e4m3,
        ROPE=channels,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(device),
    )
