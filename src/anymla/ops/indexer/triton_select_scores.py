"""Scores that a selection reads: rows of tokens against their own entries in a paged cache.

Grid: (groups of ROWS neighbouring tokens, parts of the context). A program keeps its tokens'
queries and passes over the entries that they see, once for each request among them; tokens that
list all of their entries are passed over. Nothing is written but scores of visible entries, and,
for the selector by groups, the largest of each 16 of them as an ordered integer:

    request's pages | 16 | 16 | 16 | ..  x  [rows x heads]  ->  scores [rows, entries]
                                                                maxima [rows, entries / 16]
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, ROWS_BF16_128
from anymla.formats.triton_rows import cache_bytes, row_codec
from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.config import GROUP, choose_score_config, score_registers, split_size
from anymla.ops.indexer.inputs import ScoreInputs
from anymla.ops.indexer.triton_operands import (
    KIND_OF_CODEC,
    KIND_OF_DTYPE,
    load_queries,
    math_of,
    query_lines,
)
from anymla.ops.indexer.triton_pages import tile_scores
from anymla.ops.indexer.triton_scores import POINTER_OF_KIND, codes_of
from anymla.ops.indexer.triton_topk import NOTHING, ordered_result
from anymla.ops.pdl import pdl_launch, target_has_pdl

_GROUP = tl.constexpr(GROUP)


@triton.jit
def row_ranges(
    lengths, starts, owners, row, live, first_row, per_request, requests, covered
):  # fmt: skip
    """Request and entries [start, end) of rows; (0, 0) where there is nothing to see."""
    if owners is None:
        request = ((first_row + row) // per_request).to(tl.int32)
    else:
        request = tl.load(owners + row, mask=live, other=-1)
    end = tl.minimum(tl.load(lengths + row, mask=live, other=0), covered)
    if starts is None:
        start = tl.zeros_like(end)
    else:
        start = tl.maximum(tl.load(starts + row, mask=live, other=0), 0)
    sees = (request >= 0) & (request < requests) & (start < end)
    return request, tl.where(sees, start, 0), tl.where(sees, end, 0)


@triton.jit(
    do_not_specialize=[
        "first_row", "rows", "per_request", "requests", "pages", "covered", "k", "span"
    ]
)  # fmt: skip
def select_scores_kernel(
    q,
    q_scales,
    weights,
    weights_stride,
    cache,
    page_stride,
    table,
    table_row_stride,
    table_column_stride,
    lengths,
    starts,
    owners,
    scores,
    scores_stride,
    maxima,
    maxima_stride,
    first_row,
    rows,
    per_request,
    requests,
    pages,
    covered,
    k,
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
    CANONICAL_NAN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS tokens and ``span`` entries; rows are numbered from ``first_row``.

    PDL: see ``pdl_launch``.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    member = tl.arange(0, ROWS)
    row = tl.program_id(0).to(tl.int64) * ROWS + member
    live = row < rows
    request, start, end = row_ranges(
        lengths, starts, owners, row, live, first_row, per_request, requests, covered
    )
    scored = live & (end - start > k)
    end = tl.where(scored, end, 0)
    first = tl.program_id(1) * span
    reach = tl.minimum(tl.max(end, 0), first + span)
    if first < reach:
        line, weight, exists = query_lines(row, live, weights, weights_stride, HEADS, PADDED_HEADS)
        queries = weight
        if PART == PADDED:
            queries = load_queries(
                q, q_scales, line, exists, 0, Q_KIND, MATH, CODEC.channels, PADDED, PART, NATIVE
            )
        for turn in range(ROWS):
            mine = tl.sum(tl.where(member == turn, request, 0), 0)
            same = scored & (request == mine)
            done = tl.sum((same & (member < turn)).to(tl.int32), 0)
            lowest = tl.min(tl.where(same, start, covered), 0)
            lowest = tl.maximum(lowest, first) // KEYS * KEYS
            stop = tl.minimum(tl.max(tl.where(same, end, 0), 0), first + span)
            stop = tl.where(done > 0, 0, stop)
            pages_of_request = table + mine.to(tl.int64) * table_row_stride
            for at in tl.range(lowest, stop, KEYS, num_stages=STAGES):
                sums = tile_scores(
                    cache, pages_of_request, table_column_stride, at, stop, pages, page_stride,
                    queries, q, q_scales, line, weight, exists, HEADS, PADDED_HEADS, PADDED, PART,
                    ROWS, KEYS, ENTRIES, CODEC, Q_KIND, MATH, NATIVE,
                )  # fmt: skip
                key = at + tl.arange(0, KEYS)
                seen = same[None, :] & (key[:, None] >= start[None, :])
                seen = seen & (key[:, None] < end[None, :])
                tl.store(scores + row[None, :] * scores_stride + key[:, None], sums, mask=seen)
                if maxima is not None:
                    PARTS: tl.constexpr = KEYS // _GROUP
                    rank = tl.where(seen, ordered_result(sums, CANONICAL_NAN), NOTHING)
                    best = tl.max(tl.reshape(rank, (PARTS, _GROUP, ROWS)), 1)
                    group = at // _GROUP + tl.arange(0, PARTS)
                    tl.store(
                        maxima + row[None, :] * maxima_stride + group[:, None],
                        best,
                        mask=same[None, :] & (best != NOTHING),
                    )


def write_scores(
    inputs: ScoreInputs, scores: Tensor, maxima: Tensor | None, target: Target
) -> None:
    """Write the scores of a chunk of tokens, and the maximum of every 16.

    Args:
        inputs: of the chunk.
        scores: [>= rows, >= covered] float32, written where an entry is visible to a scored row.
        maxima: [>= rows, >= covered / 16] int32, written likewise; or None.
        target: of the device.
    """
    rows, heads = inputs.q.shape[:2]
    codec = row_codec(inputs.layout)
    q_kind = KIND_OF_DTYPE[inputs.q.dtype]
    math = math_of(q_kind, KIND_OF_CODEC[codec.kind], target)
    together = 2 if inputs.neighbours_share_keys else 1
    tile = choose_score_config(
        together, heads, codec.channels, math, target, paged_keys=rows * inputs.covered
    )
    groups = triton.cdiv(rows, tile.rows)
    span = split_size(groups, inputs.covered, tile)
    cache, page_stride, pages, entries = cache_bytes(inputs.keys)
    select_scores_kernel[(groups, triton.cdiv(inputs.covered, span))](
        codes_of(inputs.q), inputs.q_scales, inputs.weights, inputs.weights.stride(0), cache,
        page_stride, inputs.block_table, *inputs.block_table.stride(), inputs.lengths,
        inputs.starts, inputs.requests, scores, scores.stride(0), maxima,
        0 if maxima is None else maxima.stride(0), inputs.first_row, rows,
        max(inputs.rows_per_request, 1), inputs.num_requests, pages, inputs.covered, inputs.k, span,
        HEADS=heads, PADDED_HEADS=tile.heads, PADDED=tile.width, PART=tile.block_k, ROWS=tile.rows,
        KEYS=tile.keys, ENTRIES=entries, CODEC=codec, Q_KIND=q_kind, MATH=math,
        NATIVE=target.native_e4m3, CANONICAL_NAN=target.backend == "cuda", STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages, **score_registers(tile, math, target),
        **pdl_launch(inputs.q.device),
    )  # fmt: skip


def builds(target: Target) -> Iterator[Build]:
    """64 heads of 128 channels, pages of 64: a token alone and two, with maxima and without."""
    heads, entries = 64, 64
    numbers = (
        "weights_stride", "page_stride", "table_row_stride", "table_column_stride",
        "scores_stride", "maxima_stride", "first_row", "rows", "per_request", "requests", "pages",
        "covered", "k", "span",
    )  # fmt: skip
    choices = (
        ("e4m3", INDEX_FP8, True, True),
        ("e4m3", INDEX_FP8, False, True),
        ("e4m3", INDEX_FP8, True, False),
        ("bf16", INDEX_FP8, True, True),
        ("e2m1", INDEX_MXFP4, True, True),
        ("bf16", ROWS_BF16_128, True, True),
    )
    for q_kind, layout, with_maxima, with_owners in choices:
        codec = row_codec(layout)
        math = math_of(q_kind, KIND_OF_CODEC[codec.kind], target)
        for rows in (1, 2):
            tile = choose_score_config(rows, heads, codec.channels, math, target, paged_keys=0)
            types = {
                "q": POINTER_OF_KIND[q_kind],
                "weights": "*fp32",
                "cache": "*u8",
                "table": "*i32",
                "lengths": "*i32",
                "scores": "*fp32",
                **dict.fromkeys(numbers, "i32"),
            }
            constants = {
                "starts": None,
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
                "CANONICAL_NAN": target.backend == "cuda",
                "STAGES": tile.stages,
                "PDL": target_has_pdl(target),
            }
            optional = (
                ("q_scales", "*u8", q_kind == "e2m1"),
                ("maxima", "*i32", with_maxima),
                ("owners", "*i32", with_owners),
            )
            for name, kind, given in optional:
                if given:
                    types[name] = kind
                else:
                    constants[name] = None
            label = f"{q_kind} x {layout} in {math}, {tile.rows} rows"
            label += " with maxima" * with_maxima + " ragged" * with_owners
            yield Build(
                label,
                select_scores_kernel,
                types,
                constants,
                num_warps=tile.warps,
                num_stages=tile.stages,
                divisible=("weights_stride", "page_stride"),
                matrix=True,
                # Packed queries are decoded once, before the loop.
                spills=48 if q_kind == "e2m1" else 16,
            )
