"""Index scores in Triton: rows of queries against keys in pages, or in one list.

    score[row, key] = sum_h weight[row, h] * relu(q[row, h] . key)

The grid is (groups of neighbouring rows, splits of the context). A CTA keeps its rows' queries, all
heads side by side, and passes over the keys that they see, once for each request among them. A tile
of keys [KEYS, D] is multiplied with the heads, [rows x heads, D], and the products of a row's heads
are summed:

    keys of a request | tile | tile | ..  x  [rows x heads]  ->  scores [rows, keys]
                                                                 maxima [rows, keys / 16]

One kernel serves four options. Keys lie in pages that a block table lists, or in a list without a
block table. The table may list blocks, which are parts of pages, for each row; columns are then the
entries of these blocks side by side. With a ``context``, entries that a row does not see become
-inf up to there; otherwise they are not written. With ``maxima``, the maximum of each 16 scores is
written as an ordered integer, for the top-k by groups.

Kinds of values are "e4m3" and "e2m1" (codes), "fp16", "bf16" and "fp32". The product uses the
narrowest arithmetic that holds both operands' values exactly; sums are always float32. Codes of
"e4m3_words" are read and decoded four at a time, from addresses that are multiples of 4.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.triton_cast import e2m1_to_fp32, e4m3_to_fp16, e4m3_to_fp32, ue8m0_to_fp32
from anymla.formats.triton_rows import cache_bytes, row_codec
from anymla.formats.triton_words import E4M3_WORD_UNIT, e4m3_words_to_fp16
from anymla.ops.device import Target
from anymla.ops.indexer.config import (
    GROUP,
    choose_score_config,
    decodes_words,
    score_registers,
    split_size,
)
from anymla.ops.indexer.inputs import ScoreInputs, dense_logits, paged_logits
from anymla.ops.indexer.triton_topk import NOTHING, ordered_result
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch

_BLOCK = tl.constexpr(MXFP4_BLOCK)
_GROUP = tl.constexpr(GROUP)
# Columns of a row that are filled with -inf at once.
_FILL = tl.constexpr(512)

_KIND_OF_DTYPE = {
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "e2m1",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
_KIND_OF_CODEC = {"row_fp8": "e4m3", "row_mxfp4": "e2m1", "bf16": "bf16", "fp32": "fp32"}


@dataclasses.dataclass(frozen=True)
class ListFormat:
    """Format of keys in a list, in place of the codec of pages; a constexpr.

    Attributes:
        values: kind of the keys' values (a constexpr already has a ``value``).
        channels: number of channels of a key.
        kind: constant that distinguishes this format from a codec of pages.
    """

    values: str
    channels: int
    kind: str = "list"


def math_of(q_kind: str, k_kind: str, target: Target) -> str:
    """Return the arithmetic of the product: "e4m3", "fp16", "bf16" or "fp32"."""
    kinds = {q_kind, k_kind}
    if kinds == {"e4m3"}:
        return "e4m3" if target.dot_e4m3 else "fp16"
    if kinds <= {"e4m3", "fp16"}:
        return "fp16"
    # A scaled e2m1 value needs bfloat16's range.
    return "bf16" if kinds <= {"e4m3", "e2m1", "bf16"} and not target.arc_a else "fp32"


@triton.jit
def _as_operand(x, KIND: tl.constexpr, MATH: tl.constexpr, NATIVE: tl.constexpr):
    """Convert values or e4m3 codes of any shape to the operand type of the product."""
    if KIND == "e4m3" and MATH == "e4m3":
        y = x.to(tl.float8e4nv, bitcast=True)
    elif KIND == "e4m3" and MATH == "fp16":
        y = e4m3_to_fp16(x, NATIVE)
    else:
        wide = e4m3_to_fp32(x, NATIVE) if KIND == "e4m3" else x
        if MATH == "fp16":
            y = wide.to(tl.float16)
        elif MATH == "bf16":
            y = wide.to(tl.bfloat16)
        else:
            y = wide.to(tl.float32)
    return y


@triton.jit
def _load_operand(
    rows,
    there,
    first,
    KIND: tl.constexpr,
    MATH: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load channels [first, first + BLOCK_K) of rows of WIDTH, padded to PADDED, as [N, BLOCK_K].

    ``rows`` [N] are pointers to values or e4m3 codes; the result is zero where not ``there`` [N].
    Codes read as words give their value over E4M3_WORD_UNIT.
    """
    channel = first + tl.arange(0, BLOCK_K)
    mask = there[:, None]
    if PADDED != WIDTH:
        mask = mask & (channel < WIDTH)[None, :]
    if KIND == "e4m3_words":
        word = first // 4 + tl.arange(0, BLOCK_K // 4)
        mask = there[:, None]
        if PADDED != WIDTH:
            mask = mask & (word < WIDTH // 4)[None, :]
        at = rows.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
        c0, c1, c2, c3 = e4m3_words_to_fp16(tl.load(at, mask=mask, other=0))
        x = tl.join(tl.join(c0, c2), tl.join(c1, c3))
        return _as_operand(tl.reshape(x, (rows.shape[0], BLOCK_K)), "fp16", MATH, NATIVE)
    elif KIND == "e4m3" and MATH == "e4m3":
        # Load as FP8, so that loads and products overlap: codes that are converted first go through
        # registers.
        rows = rows.to(tl.pointer_type(tl.float8e4nv))
        return tl.load(rows[:, None] + channel[None, :], mask=mask, other=0.0)
    else:
        x = tl.load(rows[:, None] + channel[None, :], mask=mask, other=0)
        return _as_operand(x, KIND, MATH, NATIVE)


@triton.jit
def _load_packed(
    rows,
    scales,
    there,
    first,
    MATH: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load like ``_load_operand`` from packed e2m1 with scale bytes; ``first`` starts a block."""
    ROWS: tl.constexpr = rows.shape[0]
    BLOCKS: tl.constexpr = BLOCK_K // _BLOCK
    byte = first // 2 + tl.arange(0, BLOCK_K // 2)
    block = first // _BLOCK + tl.arange(0, BLOCKS)
    mask, scale_mask = there[:, None], there[:, None]
    if PADDED != WIDTH:
        mask = mask & (byte < WIDTH // 2)[None, :]
        scale_mask = scale_mask & (block < WIDTH // _BLOCK)[None, :]
    packed = tl.load(rows[:, None] + byte[None, :], mask=mask, other=0)
    scale = tl.load(scales[:, None] + block[None, :], mask=scale_mask, other=0)
    x = tl.join(e2m1_to_fp32(packed & 15), e2m1_to_fp32(packed >> 4))
    x = tl.reshape(x, (ROWS, BLOCKS, _BLOCK)) * ue8m0_to_fp32(scale)[:, :, None]
    return _as_operand(tl.reshape(x, (ROWS, BLOCK_K)), "fp32", MATH, False)


@triton.jit
def _query_lines(
    row, live, weights, weights_stride, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr
):
    """Return lines of q [.., HEADS, D] of rows ``row`` [ROWS] int64, their weights and a mask.

    Each is [ROWS * PADDED_HEADS], a row's heads side by side; the mask is True for heads that
    exist.
    """
    LINES: tl.constexpr = row.shape[0] * PADDED_HEADS
    head = tl.arange(0, PADDED_HEADS)
    exists = tl.reshape(live[:, None] & (head < HEADS)[None, :], (LINES,))
    line = tl.reshape(row[:, None] * HEADS + head[None, :], (LINES,))
    place = tl.reshape(row[:, None] * weights_stride + head[None, :], (LINES,))
    return line, tl.load(weights + place, mask=exists, other=0.0), exists


@triton.jit
def _load_queries(
    q,
    q_scales,
    line,
    exists,
    first,
    KIND: tl.constexpr,
    MATH: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load channels [first, first + BLOCK_K) of the lines of q that ``_query_lines`` returns."""
    if KIND == "e2m1":
        scales = q_scales + line * (WIDTH // _BLOCK)
        return _load_packed(
            q + line * (WIDTH // 2), scales, exists, first, MATH, WIDTH, PADDED, BLOCK_K
        )
    else:
        return _load_operand(
            q + line * WIDTH, exists, first, KIND, MATH, WIDTH, PADDED, BLOCK_K, NATIVE
        )


@triton.jit
def _sum_heads(
    dots,
    weights,
    exists,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_EXIST: tl.constexpr,
):
    """Compute ``sum_h weights[row, h] * relu(dots[key, row, h])``, float32 [KEYS, ROWS].

    Args:
        dots: products of queries and keys, [KEYS, ROWS * HEADS] float32.
        weights: weights of the heads, [ROWS * HEADS] float32.
        exists: bool [ROWS * HEADS], True for heads that exist.
        ROWS: rows of queries.
        HEADS: heads per row.
        ALL_EXIST: True if ``exists`` is known to be True for every row that counts.
    """
    KEYS: tl.constexpr = dots.shape[0]
    # A NaN must stay one: no candidate is dropped silently.
    terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    if not ALL_EXIST:
        # An infinite key times the zeros of a padding head would be NaN.
        terms = tl.where(exists[None, :], terms, 0.0)
    return tl.sum(tl.reshape(terms, (KEYS, ROWS, HEADS)), 2)


@triton.jit
def row_ranges(
    lengths, starts, requests, row, live, first_row, per_request, num_requests, covered
):  # fmt: skip
    """Return request and entries [start, end) of rows; (0, 0) where there is nothing to see."""
    if requests is None:
        request = ((first_row + row) // per_request).to(tl.int32)
    else:
        request = tl.load(requests + row, mask=live, other=-1)
    end = tl.minimum(tl.load(lengths + row, mask=live, other=0), covered)
    if starts is None:
        start = tl.zeros_like(end)
    else:
        start = tl.maximum(tl.load(starts + row, mask=live, other=0), 0)
    sees = (request >= 0) & (request < num_requests) & (start < end)
    return request, tl.where(sees, start, 0), tl.where(sees, end, 0)


@triton.jit
def _load_keys(
    keys,
    at,
    scales_at,
    there,
    first,
    FORMAT: tl.constexpr,
    MATH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load channels [first, first + BLOCK_K) of keys at offsets [KEYS], without FP8's scales.

    Offsets are bytes in pages, and elements in a list. Words are as in ``_load_operand``.
    """
    KIND: tl.constexpr = getattr(FORMAT, "kind")
    WIDTH: tl.constexpr = getattr(FORMAT, "channels")
    if KIND == "row_mxfp4":
        return _load_packed(keys + at, keys + scales_at, there, first, MATH, WIDTH, PADDED, BLOCK_K)
    elif KIND == "row_fp8":
        return _load_operand(keys + at, there, first, "e4m3", MATH, WIDTH, PADDED, BLOCK_K, NATIVE)
    elif KIND == "row_fp8_words":
        return _load_operand(
            keys + at, there, first, "e4m3_words", MATH, WIDTH, PADDED, BLOCK_K, NATIVE
        )
    elif KIND == "bf16":
        rows = (keys + at).to(tl.pointer_type(tl.bfloat16))
        return _load_operand(rows, there, first, "bf16", MATH, WIDTH, PADDED, BLOCK_K, NATIVE)
    elif KIND == "fp32":
        rows = (keys + at).to(tl.pointer_type(tl.float32))
        return _load_operand(rows, there, first, "fp32", MATH, WIDTH, PADDED, BLOCK_K, NATIVE)
    else:
        tl.static_assert(KIND == "list")
        VALUES: tl.constexpr = getattr(FORMAT, "values")
        return _load_operand(keys + at, there, first, VALUES, MATH, WIDTH, PADDED, BLOCK_K, NATIVE)


@triton.jit
def _locate(
    table,
    table_stride,
    at,
    stop,
    pages,
    page_stride,
    KEYS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Locate keys [at, at + KEYS); ``at`` is a multiple of KEYS, below ``stop``.

    Returns byte offsets of the keys' pages [KEYS] int64, their indices there, and True where they
    exist; keys that do not exist are given a page that does. Whole pages cost the fewest
    instructions.
    """
    number = tl.arange(0, KEYS)
    wide = tl.full((), 1, tl.int64)
    if BLOCK_SIZE > 0:
        SHARE: tl.constexpr = ENTRIES // BLOCK_SIZE
        key = at + number
        block = tl.load(
            table + (key // BLOCK_SIZE).to(tl.int64) * table_stride, mask=key < stop, other=-1
        )
        there = (block >= 0) & (block < pages * SHARE)
        block = tl.where(there, block, 0)
        place = block % SHARE * BLOCK_SIZE + key % BLOCK_SIZE
        return (block // SHARE).to(tl.int64) * page_stride, place, there
    elif ENTRIES % KEYS == 0:
        page = tl.load(table + wide * (at // ENTRIES) * table_stride)
        known = (page >= 0) & (page < pages)
        page_at = tl.where(known, page, 0).to(tl.int64) * page_stride
        place = at % ENTRIES + number
        there = tl.full((KEYS,), 1, tl.int1) & known
        return page_at + tl.zeros((KEYS,), tl.int64), place, there
    elif KEYS == 2 * ENTRIES:
        cell = table + wide * (at // ENTRIES) * table_stride
        first = tl.load(cell)
        second = tl.load(cell + table_stride, mask=at + ENTRIES < stop, other=-1)
        first_known = (first >= 0) & (first < pages)
        second_known = (second >= 0) & (second < pages)
        first_at = tl.where(first_known, first, 0).to(tl.int64) * page_stride
        second_at = tl.where(second_known, second, 0).to(tl.int64) * page_stride
        front = number < ENTRIES
        there = (front & first_known) | ((number >= ENTRIES) & second_known)
        return tl.where(front, first_at, second_at), number % ENTRIES, there
    else:
        key = at + number
        page = tl.load(
            table + (key // ENTRIES).to(tl.int64) * table_stride, mask=key < stop, other=-1
        )
        there = (page >= 0) & (page < pages)
        return tl.where(there, page, 0).to(tl.int64) * page_stride, key % ENTRIES, there


@triton.jit
def _fill(out, first, last):
    """Write -inf to columns [first, last) of a row."""
    nothing = tl.full((_FILL,), float("-inf"), tl.float32)
    for at in range(first, last, _FILL):
        column = at + tl.arange(0, _FILL)
        tl.store(out + column, nothing, mask=column < last)


@triton.jit(
    do_not_specialize=[
        "first_row", "rows", "per_request", "num_requests", "pages", "covered", "k", "split",
        "context", "table_row_stride",
    ]
)  # fmt: skip
def scores_kernel(
    q,
    q_scales,
    weights,
    weights_stride,
    keys,
    keys_stride,
    key_scale,
    table,
    table_row_stride,
    table_column_stride,
    lengths,
    starts,
    requests,
    scores,
    scores_stride,
    maxima,
    maxima_stride,
    first_row,
    rows,
    per_request,
    num_requests,
    pages,
    covered,
    k,
    split,
    context,
    HEADS: tl.constexpr,
    CONFIG: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    Q_KIND: tl.constexpr,
    UNIT: tl.constexpr,
    MATH: tl.constexpr,
    NATIVE: tl.constexpr,
    CANONICAL_NAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute scores of CONFIG.rows rows against ``split`` keys; rows count from ``first_row``.

    Queries are in the form that ``_load_queries`` reads, their kind is Q_KIND. ``keys`` are bytes
    of pages of ENTRIES entries, ``keys_stride`` apart, with a codec FORMAT; or values of a list,
    with a ``ListFormat``. If BLOCK_SIZE is not 0, the table lists places of blocks of as many
    entries instead of pages. ``split``, the number of keys of a CTA, is a multiple of CONFIG.keys.
    In the first ``context`` columns, entries that a row does not see become -inf. MATH is the
    arithmetic of the product, which lacks a factor UNIT. All other arguments are those of
    ``ScoreInputs`` and ``write_scores``, or strides of their rows.
    """
    ROWS: tl.constexpr = getattr(CONFIG, "rows")
    PADDED_HEADS: tl.constexpr = getattr(CONFIG, "heads")
    PADDED: tl.constexpr = getattr(CONFIG, "width")
    BLOCK_K: tl.constexpr = getattr(CONFIG, "block_k")
    KEYS: tl.constexpr = getattr(CONFIG, "keys")
    STAGES: tl.constexpr = getattr(CONFIG, "stages")
    KIND: tl.constexpr = getattr(FORMAT, "kind")
    WIDTH: tl.constexpr = getattr(FORMAT, "channels")
    if table is not None:
        DATA: tl.constexpr = getattr(FORMAT, "data_bytes")
        SCALES: tl.constexpr = getattr(FORMAT, "scale_bytes")
    # Largest number of requests in a group of rows.
    REQUESTS: tl.constexpr = 1 if KIND == "list" else ROWS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    member = tl.arange(0, ROWS)
    row = tl.program_id(0).to(tl.int64) * ROWS + member
    live = row < rows
    request, start, end = row_ranges(
        lengths, starts, requests, row, live, first_row, per_request, num_requests, covered
    )
    scored = live & (end - start > k)
    end = tl.where(scored, end, 0)
    first = tl.program_id(1) * split
    reach = tl.minimum(tl.max(end, 0), first + split)
    if first < reach:
        line, weight, exists = _query_lines(row, live, weights, weights_stride, HEADS, PADDED_HEADS)
        queries = weight
        if BLOCK_K == PADDED:
            queries = _load_queries(
                q, q_scales, line, exists, 0, Q_KIND, MATH, WIDTH, PADDED, BLOCK_K, NATIVE
            )
        for index in range(REQUESTS):
            mine = tl.sum(tl.where(member == index, request, 0), 0)
            same = scored & (request == mine)
            done = tl.sum((same & (member < index)).to(tl.int32), 0)
            lowest = tl.min(tl.where(same, start, covered), 0)
            lowest = tl.maximum(lowest, first) // KEYS * KEYS
            stop = tl.minimum(tl.max(tl.where(same, end, 0), 0), first + split)
            stop = tl.where(done > 0, 0, stop)
            if table is not None:
                pages_of_request = table + mine.to(tl.int64) * table_row_stride
            for at in tl.range(lowest, stop, KEYS, num_stages=STAGES):
                if table is None:
                    place = at + tl.arange(0, KEYS)
                    there = place < stop
                    values_at = place.to(tl.int64) * keys_stride
                    scales_at = place
                    # A list may end where no row sees any further.
                    readable = there
                else:
                    page_at, place, there = _locate(
                        pages_of_request, table_column_stride, at, stop, pages, keys_stride, KEYS,
                        ENTRIES, BLOCK_SIZE,
                    )  # fmt: skip
                    scales_at = page_at + ENTRIES * DATA + place * SCALES
                    values_at = page_at + place * DATA
                    # Read any entry of the cache and drop unwanted results, which costs less than a
                    # mask on every load.
                    readable = tl.full((KEYS,), 1, tl.int1)
                if BLOCK_K == PADDED:
                    tile = _load_keys(
                        keys,
                        values_at,
                        scales_at,
                        readable,
                        0,
                        FORMAT,
                        MATH,
                        PADDED,
                        BLOCK_K,
                        NATIVE,
                    )
                    dots = tl.dot(tile, tl.trans(queries))
                else:
                    dots = tl.zeros((KEYS, ROWS * PADDED_HEADS), tl.float32)
                    for channel_at in range(0, PADDED, BLOCK_K):
                        some = _load_queries(
                            q, q_scales, line, exists, channel_at, Q_KIND, MATH,
                            WIDTH, PADDED, BLOCK_K, NATIVE,
                        )  # fmt: skip
                        tile = _load_keys(
                            keys, values_at, scales_at, readable, channel_at, FORMAT, MATH,
                            PADDED, BLOCK_K, NATIVE,
                        )  # fmt: skip
                        dots = tl.dot(tile, tl.trans(some), dots, input_precision="ieee")
                sums = _sum_heads(dots, weight, exists, ROWS, PADDED_HEADS, HEADS == PADDED_HEADS)
                if UNIT != 1.0:
                    sums = sums * UNIT
                if KIND == "row_fp8" or KIND == "row_fp8_words":
                    pointers = (keys + scales_at).to(tl.pointer_type(tl.float32))
                    sums = sums * tl.load(pointers)[:, None]
                elif key_scale is not None:
                    sums = sums * tl.load(key_scale + place, mask=there, other=0.0)[:, None]
                if table is not None:
                    sums = tl.where(there[:, None], sums, float("-inf"))
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
    if context is not None:
        last = tl.minimum(first + split, context)
        for index in range(ROWS):
            number = tl.program_id(0).to(tl.int64) * ROWS + index
            if number < rows:
                mine = member == index
                out = scores + number * scores_stride
                _fill(out, first, tl.minimum(tl.sum(tl.where(mine, start, 0), 0), last))
                _fill(out, tl.maximum(tl.sum(tl.where(mine, end, 0), 0), first), last)


def write_scores(
    inputs: ScoreInputs,
    scores: Tensor,
    maxima: Tensor | None,
    target: Target,
    *,
    context: int = 0,
) -> None:
    """Write the scores of some rows, and the maximum of every 16 scores.

    Args:
        inputs: queries and keys of the rows.
        scores: scores to write, float32 [>= rows, >= covered], where a scored row sees an entry.
        maxima: maxima to write, int32 [>= rows, >= covered / 16], for the same entries; or None.
        target: architecture of the device.
        context: number of columns in which entries that a row does not see become -inf; 0 for none.
    """
    rows, heads = inputs.q.shape[:2]
    table = inputs.block_table
    keys, keys_stride, pages, entries = _codes(inputs.keys), inputs.keys.stride(0), 0, 0
    if inputs.layout is None:
        k_kind = _KIND_OF_DTYPE[inputs.keys.dtype]
        key_format: Any = ListFormat(k_kind, inputs.keys.shape[1])
    else:
        key_format = row_codec(inputs.layout)
        k_kind = _KIND_OF_CODEC[key_format.kind]
        keys, keys_stride, pages, entries = cache_bytes(inputs.keys)
    q_kind = _KIND_OF_DTYPE[inputs.q.dtype]
    math = math_of(q_kind, k_kind, target)
    unit = 1.0
    if decodes_words(target, math):
        q_kind, key_format, unit = _in_words(inputs, q_kind, key_format, keys_stride)
    config = choose_score_config(
        2 if inputs.neighbours_share_keys else 1,
        heads,
        key_format.channels,
        math,
        target,
        paged_keys=None if table is None else rows * inputs.covered,
        listed=inputs.block_size > 0,
    )
    groups, columns = triton.cdiv(rows, config.rows), max(inputs.covered, context)
    split = split_size(groups, columns, config)
    scores_kernel[(groups, triton.cdiv(columns, split))](
        _codes(inputs.q), inputs.q_scales, inputs.weights, inputs.weights.stride(0),
        keys, keys_stride, inputs.key_scale, table, *((0, 0) if table is None else table.stride()),
        inputs.lengths, inputs.starts, inputs.requests, scores, scores.stride(0), maxima,
        0 if maxima is None else maxima.stride(0), inputs.first_row, rows,
        max(inputs.rows_per_request, 1), inputs.num_requests, pages, inputs.covered, inputs.k,
        split, context or None,
        HEADS=heads, CONFIG=config, ENTRIES=entries, BLOCK_SIZE=inputs.block_size,
        FORMAT=key_format, Q_KIND=q_kind, UNIT=unit, MATH=math, NATIVE=target.native_e4m3,
        CANONICAL_NAN=target.backend == "cuda", num_warps=config.warps, num_stages=config.stages,
        **score_registers(config, math, context > 0, target), **pdl_launch(inputs.q.device),
    )  # fmt: skip


mqa_logits = functools.partial(dense_logits, write_scores)
paged_mqa_logits = functools.partial(paged_logits, write_scores)


def _in_words(
    inputs: ScoreInputs, q_kind: str, key_format: Any, keys_stride: int
) -> tuple[str, Any, float]:
    """Choose kinds of queries and keys, reading e4m3 codes four at a time where possible.

    Returns:
        Both kinds, and the factor that their products lack.
    """
    unit = 1.0
    if key_format.channels % 4 == 0:
        if q_kind == "e4m3" and inputs.q.data_ptr() % 4 == 0:
            q_kind, unit = "e4m3_words", E4M3_WORD_UNIT.value
        if (keys_stride | inputs.keys.data_ptr()) % 4 == 0:
            words = key_format
            if key_format.kind == "row_fp8":
                words = dataclasses.replace(key_format, kind="row_fp8_words")
            elif key_format.kind == "list" and key_format.values == "e4m3":
                words = dataclasses.replace(key_format, values="e4m3_words")
            if words is not key_format:
                key_format, unit = words, unit * E4M3_WORD_UNIT.value
    return q_kind, key_format, unit


def _codes(x: Tensor) -> Tensor:
    """View FP8 values as bytes, since kernels take no pointers to FP8."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
