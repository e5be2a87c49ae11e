"""The k best of rows that are known, ordered: best first, then -1.

sort   winners of a row, in a sorting network   ->  k columns   grid (rows,)
rank   each goes where as many are better       ->  k columns   grid (rows, blocks of winners)
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.triton_order import ordered

# More winners than this are ranked by counting, because a sorting network grows too large.
_MOST_SORTED = 2048
_RANKED, _COMPARED = 32, 256


@triton.jit
def columns_in_sight(starts, ends, row, columns):
    """First column in sight and number of columns in sight of a row."""
    first = tl.maximum(tl.load(starts + row), 0)
    length = tl.maximum(tl.minimum(tl.load(ends + row), columns).to(tl.int64) - first, 0)
    return first, length.to(tl.int32)


@triton.jit
def _composite(line, winners, place, kept):
    """int64 of (score, lower column first) of winners, the lowest number where there is none."""
    column = tl.load(winners + place, mask=place < kept, other=-1)
    key = ordered(tl.load(line + column, mask=column >= 0, other=0)).to(tl.int64)
    order = (key << 32) | (0x7FFFFFFF - column).to(tl.int64)
    return tl.where(column >= 0, order, -0x8000000000000000)


@triton.jit
def _column_of(order, start):
    """Inverse of ``_composite``, relative to ``start``; -1 where there is none."""
    column = 0x7FFFFFFF - (order & 0x7FFFFFFF)
    return tl.where(order == -0x8000000000000000, -1, column - start).to(tl.int32)


@triton.jit(do_not_specialize=["k", "kept"])
def sort_kernel(logits, row_stride, starts, winners, out, out_stride, k, kept, TILE: tl.constexpr):
    """A row's winners, best first, and -1 up to k."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    order = _composite(logits + row * row_stride, winners + row * kept, place, kept)
    order = tl.sort(order, descending=True)
    start = tl.load(starts + row).to(tl.int64)
    out += row * out_stride
    tl.store(out + place, _column_of(order, start), mask=place < k)
    for at in range(TILE, k, TILE):
        tl.store(out + at + place, tl.full((TILE,), -1, tl.int32), mask=at + place < k)


@triton.jit(do_not_specialize=["k", "kept", "columns"])
def rank_kernel(
    logits,
    row_stride,
    starts,
    ends,
    winners,
    out,
    out_stride,
    columns,
    k,
    kept,
    RANKED: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """RANKED of a row's winners: each goes where as many are better than it; -1 up to k."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    line = logits + row * row_stride
    winners += row * kept
    _, length = columns_in_sight(starts, ends, row, columns)
    mine = _composite(line, winners, place, kept)
    rank = tl.full((RANKED,), 0, tl.int32)
    for at in range(0, kept, COMPARED):
        others = _composite(line, winners, at + tl.arange(0, COMPARED), kept)
        rank += tl.sum((others[None, :] > mine[:, None]).to(tl.int32), 1)
    exists = mine != -0x8000000000000000
    start = tl.load(starts + row).to(tl.int64)
    out += row * out_stride
    tl.store(out + rank, _column_of(mine, start), mask=exists)
    beyond = (place >= tl.minimum(length, kept)) & (place < k)
    tl.store(out + place, tl.full((RANKED,), -1, tl.int32), mask=beyond)


def order_winners(
    bits: Tensor,
    starts: Tensor,
    ends: Tensor,
    winners: Tensor,
    out: Tensor,
) -> None:
    """Write each row's winners in order.

    Args:
        bits: [M, N] int32, the scores.
        starts: [M] int32.
        ends: [M] int32.
        winners: [M, min(k, N)] int32, columns in any order, then -1.
        out: [M, k] int32, written.
    """
    rows, columns = bits.shape
    kept, k = winners.shape[1], out.shape[1]
    if kept <= _MOST_SORTED:
        tile = max(triton.next_power_of_2(kept), 64)
        sort_kernel[(rows,)](
            bits, bits.stride(0), starts, winners, out, out.stride(0), k, kept,
            TILE=tile, num_warps=_sort_warps(tile),
        )  # fmt: skip
    else:
        rank_kernel[(rows, triton.cdiv(k, _RANKED))](
            bits, bits.stride(0), starts, ends, winners, out, out.stride(0), columns, k, kept,
            RANKED=_RANKED, COMPARED=_COMPARED,
        )  # fmt: skip


def _sort_warps(tile: int) -> int:
    return max(1, min(tile // 256, 8))


def builds(target: Target) -> Iterator[Build]:
    """Every size that is sorted, and ranking."""
    pointers = {"logits": "*i32", "starts": "*i32", "out": "*i32", "row_stride": "i32"}
    numbers = dict.fromkeys(("out_stride", "k", "kept"), "i32")
    tile = 64
    while tile <= _MOST_SORTED:
        yield Build(
            f"tile {tile}",
            sort_kernel,
            {**pointers, **numbers, "winners": "*i32"},
            {"TILE": tile},
            num_warps=_sort_warps(tile),
        )
        tile *= 2
    yield Build(
        "",
        rank_kernel,
        {**pointers, **numbers, "ends": "*i32", "winners": "*i32", "columns": "i32"},
        {"RANKED": _RANKED, "COMPARED": _COMPARED},
    )
