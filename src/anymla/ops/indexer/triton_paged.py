"""Index scores against keys in a paged cache, on the device.

Grid: (requests x groups of rows, parts of the context). As in ``triton_scores``, with keys found
through the block table (``triton_pages``); entries that are absent are -inf.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import (
    INDEX_FP8,
    INDEX_MXFP4,
    ROWS_BF16_128,
    ROWS_FP32_128,
)
from anymla.formats.triton_rows import cache_bytes, row_codec
from anymla.ops import device as device_facts
from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.config import choose_score_config, split_size
from anymla.ops.indexer.triton_operands import (
    KIND_OF_CODEC,
    KIND_OF_DTYPE,
    load_queries,
    math_of,
    query_lines,
)
from anymla.ops.indexer.triton_pages import tile_scores
from anymla.ops.indexer.triton_scores import (
    FILL,
    POINTER_OF_KIND,
    codes_of,
    fill_hidden,
)


@triton.jit(do_not_specialize=["rows", "groups", "pages", "context", "covered", "span"])
def paged_scores_kernel(
    q,
    q_scales,
    weights,
    weights_stride,
    cache,
    page_stride,
    table,
    table_row_stride,
    table_column_stride,
    lens,
    lens_row_stride,
    lens_column_stride,
    out,
    out_stride,
    rows,
    groups,
    pages,
    context,
    covered,
    span,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ENTRIES: tl.constexpr,
    CODEC: tl.constexpr,
    Q_KIND: tl.constexpr,
    MATH: tl.constexpr,
    NATIVE: tl.constexpr,
    FILL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS rows of a request and ``span`` entries; ``covered`` entries are in the block table."""
    request = (tl.program_id(0) // groups).to(tl.int64)
    token = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    live = token < rows
    row = request * rows + token
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, context)
    end = tl.load(lens + request * lens_row_stride + token * lens_column_stride, mask=live, other=0)
    end = tl.minimum(end, covered)
    stop = tl.minimum(tl.max(end, 0), last)
    if first < stop:
        line, weight, exists = query_lines(row, live, weights, weights_stride, HEADS, PADDED_HEADS)
        queries = weight
        if PART == PADDED:
            queries = load_queries(
                q, q_scales, line, exists, 0, Q_KIND, MATH, CODEC.channels, PADDED, PART, NATIVE
            )
        pages_of_request = table + request * table_row_stride
        for at in tl.range(first, stop, KEYS, num_stages=STAGES):
            scores = tile_scores(
                cache, pages_of_request, table_column_stride, at, stop, pages, page_stride,
                queries, q, q_scales, line, weight, exists, HEADS, PADDED_HEADS, PADDED, PART, ROWS,
                KEYS, ENTRIES, CODEC, Q_KIND, MATH, NATIVE,
            )  # fmt: skip
            key = at + tl.arange(0, KEYS)
            tl.store(
                out + row[None, :] * out_stride + key[:, None],
                tl.where(key[:, None] < end[None, :], scores, float("-inf")),
                mask=live[None, :] & (key < last)[:, None],
            )
    filled = tl.cdiv(tl.maximum(stop - first, 0), KEYS) * KEYS
    fill_hidden(out, out_stride, row, live, first + filled, last, FILL)


def paged_mqa_logits(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    max_context: int,
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``interface.paged_mqa_logits``."""
    requests, rows, heads = q.shape[:3]
    logits = out
    if logits is None or logits.stride(1) != 1:
        logits = torch.empty(requests * rows, max_context, dtype=torch.float32, device=q.device)
    cache, page_stride, pages, entries = cache_bytes(index_cache)
    if not pages:
        logits.fill_(-torch.inf)
    elif logits.numel():
        target = device_facts.target_of(q.device)
        codec = row_codec(layout)
        q_kind = KIND_OF_DTYPE[q.dtype]
        math = math_of(q_kind, KIND_OF_CODEC[codec.kind], target)
        keys = requests * max_context
        tile = choose_score_config(rows, heads, codec.channels, math, target, paged_keys=keys)
        groups = triton.cdiv(rows, tile.rows)
        span = split_size(requests * groups, max_context, tile)
        each = context_lens.ndim == 2
        weights = weights if weights.stride(1) == 1 else weights.contiguous()
        paged_scores_kernel[(requests * groups, triton.cdiv(max_context, span))](
            codes_of(q.contiguous()),
            None if q_scales is None else q_scales.contiguous(),
            weights,
            weights.stride(0),
            cache,
            page_stride,
            block_table,
            *block_table.stride(),
            context_lens,
            context_lens.stride(0),
            context_lens.stride(1) if each else 0,
            logits,
            logits.stride(0),
            rows,
            groups,
            pages,
            max_context,
            min(max_context, block_table.shape[1] * entries),
            span,
            HEADS=heads,
            PADDED_HEADS=tile.heads,
            PADDED=tile.width,
            PART=tile.block_k,
            ROWS=tile.rows,
            KEYS=tile.keys,
            ENTRIES=entries,
            CODEC=codec,
            Q_KIND=q_kind,
            MATH=math,
            NATIVE=target.native_e4m3,
            FILL=FILL,
            STAGES=tile.stages,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return logits if out is None or out is logits else out.copy_(logits)


def builds(target: Target) -> Iterator[Build]:
    """64 heads of 128 channels, pages of 64: decoding and several rows, every layout."""
    heads, entries = 64, 64
    pairs = (
        ("e4m3", INDEX_FP8),
        ("bf16", INDEX_FP8),
        ("e2m1", INDEX_MXFP4),
        ("bf16", INDEX_MXFP4),
        ("bf16", ROWS_BF16_128),
        ("fp32", ROWS_FP32_128),
    )
    numbers = (
        "weights_stride", "page_stride", "table_row_stride", "table_column_stride",
        "lens_row_stride", "lens_column_stride", "out_stride", "rows", "groups", "pages",
        "context", "covered", "span",
    )  # fmt: skip
    for q_kind, layout in pairs:
        codec = row_codec(layout)
        math = math_of(q_kind, KIND_OF_CODEC[codec.kind], target)
        for rows in (1, 2):
            tile = choose_score_config(rows, heads, codec.channels, math, target, paged_keys=0)
            types = {
                "q": POINTER_OF_KIND[q_kind],
                "weights": "*fp32",
                "cache": "*u8",
                "table": "*i32",
                "lens": "*i32",
                "out": "*fp32",
                **dict.fromkeys(numbers, "i32"),
            }
            constants = {
                "HEADS": heads,
                "PADDED_HEADS": tile.heads,
                "PADDED": tile.width,
                "PART": tile.block_k,
                "ROWS": tile.rows,
                "KEYS": tile.keys,
                "ENTRIES": entries,
                "CODEC": codec,
                "Q_KIND": q_kind,
                "MATH": math,
                "NATIVE": target.native_e4m3,
                "FILL": FILL,
                "STAGES": tile.stages,
            }
            if q_kind == "e2m1":
                types["q_scales"] = "*u8"
            else:
                constants["q_scales"] = None
            yield Build(
                f"{q_kind} x {layout} in {math}, {tile.rows} rows",
                paged_scores_kernel,
                types,
                constants,
                num_warps=tile.warps,
                num_stages=tile.stages,
                divisible=("weights_stride", "page_stride"),
                matrix=math != "fp32",
                # Packed queries are decoded once, before the loop; float32 is for verification.
                spills=32 if q_kind == "e2m1" or math == "fp32" else 4,
            )
