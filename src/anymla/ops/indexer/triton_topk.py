"""Exact top-k of rows, on the device: select by digits, then order the winners.

Scores become integers of the same order. A program finds the k-th largest of its part of a row
digit by digit, from histograms of 256 bins, and keeps the k best in the order of their columns;
few long rows are cut into parts whose winners are selected from once more. The winners are sorted
last (``triton_winners``). Nothing depends on the order in which programs run.

    select   row | part | part | ..    ->  k candidates a part       grid (rows, parts)
    merge    candidates of a row       ->  k winners                 grid (rows,)
    order    winners of a row          ->  best first                grid (rows,)

Workspace: int32 [rows, parts * k] candidates and [rows, k] winners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.triton_order import ordered
from anymla.ops.indexer.triton_winners import columns_in_sight, order_winners
from anymla.ops.streams import scratch

_SMALL_TILE, _TILE = 1024, 4096
# Parts of a row: enough programs for a GPU, and candidates that are few against the row.
_PROGRAMS = 512
_MOST_CANDIDATES = 2 * _TILE


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows are selected from.

    Attributes:
        parts: parts of a row.
        part_tile: columns that a program looks at together.
        merge_tile: the same among candidates.
        part_resident: a part fits one tile.
        merge_resident: the candidates of a row fit one tile.
    """

    parts: int
    part_tile: int
    merge_tile: int
    part_resident: bool
    merge_resident: bool


def plan_of(rows: int, columns: int, kept: int) -> Plan:
    """The plan for ``kept`` = min(k, columns) winners."""
    parts = min(
        triton.cdiv(columns, _TILE),
        triton.cdiv(_PROGRAMS, max(rows, 1)),
        _MOST_CANDIDATES // kept,
        columns // (2 * kept),
    )
    parts = max(parts, 1)
    part, candidates = triton.cdiv(columns, parts), parts * kept
    part_tile, merge_tile = (_TILE if n > _SMALL_TILE else _SMALL_TILE for n in (part, candidates))
    return Plan(parts, part_tile, merge_tile, part <= part_tile, candidates <= merge_tile)


@triton.jit
def _load(line, candidates, first, at, count, MERGE: tl.constexpr, TILE: tl.constexpr):
    """Columns, existence and keys (unsigned) of elements [at, at + TILE) of ``count``."""
    element = at + tl.arange(0, TILE)
    inside = element < count
    if MERGE:
        column = tl.load(candidates + element, mask=inside, other=-1)
        inside = column >= 0
    else:
        column = first + element
    key = ordered(tl.load(line + column, mask=inside, other=0))
    return column, inside, key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _digits(key, inside, prefix, shift):
    """Histogram of the digit at ``shift`` of the keys that begin with ``prefix``."""
    begins = inside & (((key >> shift) >> 8) == prefix)
    return tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=begins)


@triton.jit(do_not_specialize=["columns", "k", "kept", "parts"])
def select_kernel(
    logits,
    row_stride,
    starts,
    ends,
    candidates,
    out,
    columns,
    k,
    kept,
    parts,
    MERGE: tl.constexpr,
    RESIDENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The k best of a part of a row, or of a row's candidates, as columns in ascending order.

    ``kept`` columns are written, -1 where there are fewer. With MERGE the elements are the
    ``parts * kept`` candidates of the row.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first, length = columns_in_sight(starts, ends, row, columns)
    line = logits + row * row_stride
    if MERGE:
        count = parts * kept
        candidates += row * count
        out += row * kept
        exist = length
    else:
        share = tl.cdiv(length, parts)
        first += part * share
        count = tl.minimum(tl.maximum(length - part * share, 0), share)
        out += (row * parts + part) * kept
        exist = count
    wanted = tl.minimum(k, exist)

    # The k-th largest key begins with ``prefix`` at ``shift``; of the keys that do, the first
    # ``need`` are taken, and all larger ones. Zeros take everything.
    prefix = tl.full((), 0, tl.uint32)
    shift = tl.full((), 0, tl.uint32)
    need = wanted
    left = tl.where(exist > k, 4, 0)
    if RESIDENT:
        column, inside, key = _load(line, candidates, first, 0, count, MERGE, TILE)
    bins = tl.arange(0, 256)
    while left > 0:
        shift = ((left - 1) * 8).to(tl.uint32)
        if RESIDENT:
            found = _digits(key, inside, prefix, shift)
        else:
            found = tl.zeros((256,), tl.int32)
            for at in range(0, count, TILE):
                column, inside, key = _load(line, candidates, first, at, count, MERGE, TILE)
                found += _digits(key, inside, prefix, shift)
        at_least = tl.sum(found, 0) - tl.cumsum(found, 0) + found
        digit = tl.max(tl.where(at_least >= need, bins, 0), 0)
        need -= tl.sum(tl.where(bins > digit, found, 0), 0)
        alike = tl.sum(tl.where(bins == digit, found, 0), 0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
        left = tl.where(alike == need, 0, left - 1)

    above, equal = 0, 0
    for at in range(0, count, TILE):
        if not RESIDENT:
            column, inside, key = _load(line, candidates, first, at, count, MERGE, TILE)
        beyond = inside & ((key >> shift) > prefix)
        same = inside & ((key >> shift) == prefix)
        # Two counts side by side: a tile has fewer than 2^15 elements.
        pair = beyond.to(tl.int32) + (same.to(tl.int32) << 16)
        running = tl.cumsum(pair, 0)
        above_here = above + (running & 0xFFFF)
        equal_here = equal + (running >> 16)
        place = above_here + tl.minimum(equal_here, need) - 1
        tl.store(out + place, column, mask=beyond | (same & (equal_here <= need)))
        total = tl.sum(pair, 0)
        above += total & 0xFFFF
        equal += total >> 16
    for at in range(wanted, kept, TILE):
        rest = at + tl.arange(0, TILE)
        tl.store(out + rest, tl.full((TILE,), -1, tl.int32), mask=rest < kept)


def topk_per_row(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, *, out: Tensor | None = None
) -> Tensor:
    """See ``interface.topk_per_row``."""
    rows, columns = logits.shape
    kept = min(k, columns)
    best = out
    if best is None or best.stride(1) != 1:
        best = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if not rows or not kept:
        best.fill_(-1)
        return best if out is None or out is best else out.copy_(best)
    plan = plan_of(rows, columns, kept)
    # As integers, so that a score is its bits, whatever they mean.
    bits = (logits if logits.stride(1) == 1 else logits.contiguous()).view(torch.int32)
    stride = bits.stride(0)
    starts, ends = starts.contiguous(), ends.contiguous()
    winners = scratch((rows, kept), torch.int32, logits.device)
    found = winners
    if plan.parts > 1:
        found = scratch((rows, plan.parts * kept), torch.int32, logits.device)
    select_kernel[(rows, plan.parts)](
        bits, stride, starts, ends, found, found, columns, k, kept, plan.parts,
        MERGE=False, RESIDENT=plan.part_resident, TILE=plan.part_tile,
        num_warps=_warps(plan.part_tile),
    )  # fmt: skip
    if plan.parts > 1:
        select_kernel[(rows, 1)](
            bits, stride, starts, ends, found, winners, columns, k, kept, plan.parts,
            MERGE=True, RESIDENT=plan.merge_resident, TILE=plan.merge_tile,
            num_warps=_warps(plan.merge_tile),
        )  # fmt: skip
    order_winners(bits, starts, ends, winners, best)
    return best if out is None or out is best else out.copy_(best)


def _warps(tile: int) -> int:
    return 8 if tile > _SMALL_TILE else 4


def builds(target: Target) -> Iterator[Build]:
    """Every tile: resident or not, parts and merging."""
    pointers = {"logits": "*i32", "starts": "*i32", "out": "*i32", "row_stride": "i32"}
    for tile in (_SMALL_TILE, _TILE):
        for resident in (True, False):
            if not resident and tile == _SMALL_TILE:
                continue
            for merge in (False, True):
                yield Build(
                    f"tile {tile}" + (" resident" if resident else "") + " merge" * merge,
                    select_kernel,
                    {
                        **pointers,
                        "ends": "*i32",
                        "candidates": "*i32",
                        **dict.fromkeys(("columns", "k", "kept", "parts"), "i32"),
                    },
                    {"MERGE": merge, "RESIDENT": resident, "TILE": tile},
                    num_warps=_warps(tile),
                    # sm_80 puts some of a tile's keys aside during a histogram.
                    spills=40,
                )
