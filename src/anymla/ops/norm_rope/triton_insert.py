"""Norm and rotate the query heads, rotate the key-value rows and store them, in one launch.

Grid, two kinds of programs; those with the longer way come first:

    program | 0 .. kv_programs - 1: ROWS tokens' kv rows -> cache entries |
            | the others: HEADS heads of one token -> out                 |

Both tiles are whole rows, which the rotation sees as pairs of channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, MAIN_LAYOUTS
from anymla.formats.triton_rows import cache_bytes, row_codec
from anymla.ops import device as device_facts
from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.norm_rope.triton_programs import insert_rows, turn_heads
from anymla.ops.pdl import pdl_launch, target_has_pdl

_Q_TILE = 4096
_KV_TILE = 2048


@dataclasses.dataclass(frozen=True)
class Config:
    """Heads of a query program, tokens of a key-value program, and the warps of either."""

    heads: int
    rows: int
    num_warps: int


def config(heads: int, channels: int, target: Target) -> Config:
    """Thirty-two elements of query, sixteen of key-value rows a thread."""
    together = max(1, min(_Q_TILE // channels, triton.next_power_of_2(heads)))
    return Config(together, max(1, _KV_TILE // channels), _Q_TILE // (32 * target.warp_size))


@triton.jit(do_not_specialize=["inserted", "kv_programs", "capacity", "length"])
def qnorm_rope_kv_insert_kernel(
    q,
    kv,
    out,
    cache,
    slots,
    positions,
    table,
    inserted,
    kv_programs,
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
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Query heads to ``out``, ``inserted`` key-value rows to the cache."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program < kv_programs:
        insert_rows(
            kv,
            cache,
            slots,
            positions,
            table,
            program.to(tl.int64) * ROWS,
            inserted,
            kv_row_stride,
            kv_column_stride,
            page_stride,
            capacity,
            table_row_stride,
            table_column_stride,
            length,
            ENTRIES,
            CODEC,
            NATIVE,
            ROPE,
            ROWS,
        )
    else:
        groups = tl.cdiv(heads, HEADS)
        group = program - kv_programs
        turn_heads(
            q,
            out,
            positions,
            table,
            (group // groups).to(tl.int64),
            group % groups * HEADS,
            heads,
            q_token_stride,
            q_head_stride,
            q_column_stride,
            out_token_stride,
            out_head_stride,
            out_column_stride,
            table_row_stride,
            table_column_stride,
            length,
            eps,
            CODEC.channels,
            ROPE,
            HEADS,
        )


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
    """See ``interface.qnorm_rope_kv_insert``."""
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    cache, page_stride, pages, entries = cache_bytes(k_cache)
    tokens, heads, _ = q.shape
    codec, target = row_codec(layout), device_facts.target_of(q.device)
    chosen = config(heads, codec.channels, target)
    inserted = slot_mapping.shape[0] if pages else 0
    kv_programs = triton.cdiv(inserted, chosen.rows)
    programs = kv_programs + tokens * triton.cdiv(heads, chosen.heads)
    if not programs:
        return result
    qnorm_rope_kv_insert_kernel[(programs,)](
        q,
        kv,
        result,
        cache,
        slot_mapping.contiguous(),
        positions.contiguous(),
        cos_sin_cache,
        inserted,
        kv_programs,
        heads,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        kv.stride(0),
        kv.stride(1),
        result.stride(0),
        result.stride(1),
        result.stride(2),
        page_stride,
        pages * entries,
        cos_sin_cache.stride(0),
        cos_sin_cache.stride(1),
        cos_sin_cache.shape[0],
        eps,
        entries,
        codec,
        target.native_e4m3,
        cos_sin_cache.shape[1],
        chosen.heads,
        chosen.rows,
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(q.device),
    )
    return result


def builds(target: Target) -> Iterator[Build]:
    """Every layout of the main cache, heads from one to many."""
    numbers = (
        "inserted",
        "kv_programs",
        "heads",
        "q_token_stride",
        "q_head_stride",
        "kv_row_stride",
        "out_token_stride",
        "out_head_stride",
        "page_stride",
        "capacity",
        "table_row_stride",
        "length",
    )
    for layout in MAIN_LAYOUTS:
        codec = row_codec(layout)
        # Rows without codes take less of everything.
        coded = layout == MAIN_LAYOUTS[0]
        for dtype in ("bf16", "fp32") if coded else ("bf16",):
            for heads in (1, 2, 4, 8) if coded else (8,):
                chosen = config(heads, codec.channels, target)
                yield Build(
                    label=f"{layout}, {dtype}, {chosen.heads} heads a program",
                    kernel=qnorm_rope_kv_insert_kernel,
                    types={
                        **dict.fromkeys(("q", "kv", "out"), f"*{dtype}"),
                        "cache": "*u8",
                        **dict.fromkeys(("slots", "positions"), "*i64"),
                        "table": "*fp32",
                        **dict.fromkeys(numbers, "i32"),
                        "eps": "fp32",
                    },
                    constants={
                        "q_column_stride": 1,
                        "kv_column_stride": 1,
                        "out_column_stride": 1,
                        "table_column_stride": 1,
                        "ENTRIES": 64,
                        "CODEC": codec,
                        "NATIVE": target.native_e4m3,
                        "ROPE": 64,
                        "HEADS": chosen.heads,
                        "ROWS": chosen.rows,
                        "PDL": target_has_pdl(target),
                    },
                    num_warps=chosen.num_warps,
                    fp_fusion=False,
                    divisible=tuple(name for name in numbers if name.endswith("stride")),
                )
