"""Index scores against one dense list of keys, on the device.

Grid: (groups of rows, parts of the keys). A program keeps its rows' queries, all heads side by
side, and passes over the keys that any of them sees; the rest of its part is -inf.

                rows x heads (queries)
          k  |                       |      relu, times weights, summed over a row's heads
          e  |  keys . queries       |  ->  [keys, rows]
          y  |                       |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops import device as device_facts
from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.config import choose_score_config, split_size
from anymla.ops.indexer.triton_operands import (
    KIND_OF_DTYPE,
    head_sums,
    load_operand,
    load_queries,
    math_of,
    query_lines,
)

# Columns of a row that are filled with -inf at a time.
FILL = 512


@triton.jit
def fill_hidden(out, out_stride, row, live, first, last, FILL: tl.constexpr):
    """Write -inf to columns [first, last) of rows ``row`` [ROWS] int64."""
    ROWS: tl.constexpr = row.shape[0]
    hidden = tl.full((ROWS, FILL), float("-inf"), tl.float32)
    for at in range(first, last, FILL):
        column = at + tl.arange(0, FILL)
        mask = live[:, None] & (column < last)[None, :]
        tl.store(out + row[:, None] * out_stride + column[None, :], hidden, mask=mask)


@triton.jit(do_not_specialize=["rows", "keys", "span"])
def dense_scores_kernel(
    q,
    q_scales,
    weights,
    weights_stride,
    k,
    k_stride,
    k_scale,
    starts,
    ends,
    out,
    out_stride,
    rows,
    keys,
    span,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    Q_KIND: tl.constexpr,
    K_KIND: tl.constexpr,
    MATH: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    FILL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS rows and ``span`` keys."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, keys)
    start = tl.maximum(tl.load(starts + row, mask=live, other=0), 0)
    end = tl.minimum(tl.load(ends + row, mask=live, other=0), keys)
    # Rows that see nothing must not widen what is read.
    start = tl.where(start < end, start, keys)
    end = tl.where(start < end, end, 0)
    lowest = tl.maximum(tl.min(start, 0), first)
    stop = tl.minimum(tl.max(end, 0), last)
    lowest = tl.where(lowest < stop, first + (lowest - first) // KEYS * KEYS, last)
    fill_hidden(out, out_stride, row, live, first, lowest, FILL)
    if lowest < stop:
        line, weight, exists = query_lines(row, live, weights, weights_stride, HEADS, PADDED_HEADS)
        if PART == PADDED:
            queries = load_queries(
                q, q_scales, line, exists, 0, Q_KIND, MATH, WIDTH, PADDED, PART, NATIVE
            )
        for at in tl.range(lowest, stop, KEYS, num_stages=STAGES):
            key = at + tl.arange(0, KEYS)
            wanted = key < stop
            lines = k + key.to(tl.int64) * k_stride
            if PART == PADDED:
                tile = load_operand(lines, wanted, 0, K_KIND, MATH, WIDTH, PADDED, PART, NATIVE)
                dots = tl.dot(tile, tl.trans(queries))
            else:
                dots = tl.zeros((KEYS, ROWS * PADDED_HEADS), tl.float32)
                for part in range(0, PADDED, PART):
                    queries = load_queries(
                        q, q_scales, line, exists, part, Q_KIND, MATH, WIDTH, PADDED, PART, NATIVE
                    )
                    tile = load_operand(
                        lines, wanted, part, K_KIND, MATH, WIDTH, PADDED, PART, NATIVE
                    )
                    dots = tl.dot(tile, tl.trans(queries), dots, input_precision="ieee")
            scores = head_sums(dots, weight, exists, ROWS, PADDED_HEADS, HEADS == PADDED_HEADS)
            if HAS_SCALE:
                scores = scores * tl.load(k_scale + key, mask=wanted, other=0.0)[:, None]
            seen = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
            tl.store(
                out + row[None, :] * out_stride + key[:, None],
                tl.where(seen, scores, float("-inf")),
                mask=live[None, :] & (key < last)[:, None],
            )
        fill_hidden(
            out, out_stride, row, live, lowest + tl.cdiv(stop - lowest, KEYS) * KEYS, last, FILL
        )


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``interface.mqa_logits``."""
    (rows, heads, _), (keys, width) = q.shape, k.shape
    logits = out
    if logits is None or logits.stride(1) != 1:
        logits = torch.empty(rows, keys, dtype=torch.float32, device=q.device)
    if rows and keys:
        target = device_facts.target_of(q.device)
        q_kind, k_kind = KIND_OF_DTYPE[q.dtype], KIND_OF_DTYPE[k.dtype]
        math = math_of(q_kind, k_kind, target)
        tile = choose_score_config(rows, heads, width, math, target)
        groups = triton.cdiv(rows, tile.rows)
        span = split_size(groups, keys, tile)
        k = k if k.stride(1) == 1 else k.contiguous()
        weights = weights if weights.stride(1) == 1 else weights.contiguous()
        dense_scores_kernel[(groups, triton.cdiv(keys, span))](
            codes_of(q.contiguous()),
            None if q_scales is None else q_scales.contiguous(),
            weights,
            weights.stride(0),
            codes_of(k),
            k.stride(0),
            None if k_scale is None else k_scale.contiguous(),
            starts.contiguous(),
            ends.contiguous(),
            logits,
            logits.stride(0),
            rows,
            keys,
            span,
            HEADS=heads,
            PADDED_HEADS=tile.heads,
            WIDTH=width,
            PADDED=tile.width,
            PART=tile.block_k,
            ROWS=tile.rows,
            KEYS=tile.keys,
            Q_KIND=q_kind,
            K_KIND=k_kind,
            MATH=math,
            NATIVE=target.native_e4m3,
            HAS_SCALE=k_scale is not None,
            FILL=FILL,
            STAGES=tile.stages,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return logits if out is None or out is logits else out.copy_(logits)


def codes_of(x: Tensor) -> Tensor:
    """FP8 values as bytes: kernels take no pointer to FP8."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


POINTER_OF_KIND = {"e4m3": "*u8", "e2m1": "*u8", "fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32"}


def builds(target: Target) -> Iterator[Build]:
    """64 heads of 128 channels: a row alone and several, in every arithmetic."""
    heads, width = 64, 128
    kinds = (("e4m3", "e4m3"), ("bf16", "e4m3"), ("e2m1", "bf16"), ("fp32", "fp32"))
    for q_kind, k_kind in kinds:
        math = math_of(q_kind, k_kind, target)
        for rows in (1, 2):
            tile = choose_score_config(rows, heads, width, math, target)
            coded = k_kind == "e4m3"
            types = {
                "q": POINTER_OF_KIND[q_kind],
                "weights": "*fp32",
                "weights_stride": "i32",
                "k": POINTER_OF_KIND[k_kind],
                "k_stride": "i32",
                "starts": "*i32",
                "ends": "*i32",
                "out": "*fp32",
                "out_stride": "i32",
                **dict.fromkeys(("rows", "keys", "span"), "i32"),
            }
            constants = {
                "HEADS": heads,
                "PADDED_HEADS": tile.heads,
                "WIDTH": width,
                "PADDED": tile.width,
                "PART": tile.block_k,
                "ROWS": tile.rows,
                "KEYS": tile.keys,
                "Q_KIND": q_kind,
                "K_KIND": k_kind,
                "MATH": math,
                "NATIVE": target.native_e4m3,
                "HAS_SCALE": coded,
                "FILL": FILL,
                "STAGES": tile.stages,
            }
            for name, given in (("q_scales", q_kind == "e2m1"), ("k_scale", coded)):
                if given:
                    types[name] = "*u8" if name == "q_scales" else "*fp32"
                else:
                    constants[name] = None
            yield Build(
                f"{q_kind} x {k_kind} in {math}, {tile.rows} rows",
                dense_scores_kernel,
                types,
                constants,
                num_warps=tile.warps,
                num_stages=tile.stages,
                divisible=("weights_stride", "k_stride", "out_stride"),
                matrix=math != "fp32",
                # Packed queries are decoded once, before the loop; float32 is for verification.
                spills=32 if q_kind == "e2m1" or math == "fp32" else 0,
            )
