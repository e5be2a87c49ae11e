"""Group (token, expert) pairs by expert on the device.

Grid: experts. A program passes over all pairs, so that nothing is sorted and nothing is exchanged:

    pairs of lower experts -> where mine begin;  my pairs -> order, in blocks of ROWS

Expert e owns the blocks from begin // ROWS + e on, which its pairs always fit in, whatever the
others have; those it does not need are marked as nobody's. So the number of blocks depends on
shapes only.
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
from anymla.ops.streams import scratch

_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """Pairs by expert.

    Attributes:
        order: int32 [P], the pairs of each expert in a row, ascending.
        blocks: int32 [3, blocks]: a block's expert or -1, and its first and end place in order.
    """

    order: Tensor
    blocks: Tensor


@triton.jit(do_not_specialize=["pairs", "offset", "blocks"])
def plan_kernel(
    ids, order, table, pairs, experts, offset, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One expert's pairs and blocks."""
    me = tl.program_id(0)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        local = tl.load(ids + at, at < pairs, other=-1).to(tl.int64) - offset
        lower += ((at < pairs) & (local >= 0) & (local < me)).to(tl.int32)
    begin = tl.sum(lower, 0)
    end = begin
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        local = tl.load(ids + at, at < pairs, other=-1).to(tl.int64) - offset
        mine = ((at < pairs) & (local == me)).to(tl.int32)
        place = end + tl.cumsum(mine, 0) - mine
        tl.store(order + place, at, mine != 0)
        end += tl.sum(mine, 0)
    first = begin // ROWS + me
    after = tl.where(me == experts - 1, blocks, end // ROWS + me + 1)
    for block in range(first, after):
        start = begin + (block - first) * ROWS
        tl.store(table + block, tl.where(start < end, me, -1))
        tl.store(table + blocks + block, start)
        tl.store(table + 2 * blocks + block, tl.minimum(start + ROWS, end))


@triton.jit
def block_of(ids, order, blocks, count, offset, experts, ROWS: tl.constexpr):
    """Expert (or -1), pairs int64 [ROWS] and which of them are there, of this program's block."""
    block = tl.program_id(1)
    lane = tl.arange(0, ROWS)
    if order is not None:
        expert = tl.load(blocks + block)
        place = tl.load(blocks + count + block) + lane
        inside = place < tl.load(blocks + 2 * count + block)
        pair = tl.load(order + place, inside, other=0).to(tl.int64)
    else:
        local = tl.load(ids + block).to(tl.int64) - offset
        expert = tl.where((local >= 0) & (local < experts), local, -1).to(tl.int32)
        inside = lane == 0
        pair = block.to(tl.int64) + tl.zeros((ROWS,), tl.int64)
    return expert, pair, inside


def make_plan(ids: Tensor, experts: int, offset: int, rows: int) -> Plan:
    """Group the pairs of contiguous ids [T, K] in blocks of ``rows``."""
    pairs = ids.numel()
    blocks = pairs // rows + experts
    order = scratch((pairs,), torch.int32, ids.device)
    table = scratch((3, blocks), torch.int32, ids.device)
    plan_kernel[(experts,)](
        ids, order, table, pairs, experts, offset, blocks, ROWS=rows, BLOCK=_BLOCK
    )
    return Plan(order, table)


def builds(target: Target) -> Iterator[Build]:
    """Both heights of a block."""
    integers = dict.fromkeys(("pairs", "experts", "offset", "blocks"), "i32")
    for rows in (16, 64):
        yield Build(
            f"{rows} rows",
            plan_kernel,
            {"ids": "*i32", "order": "*i32", "table": "*i32", **integers},
            {"ROWS": rows, "BLOCK": _BLOCK},
        )
