"""Selection on two levels in Triton: choose blocks by their scores, mask all other scores.

score    writes the bits of every block's highest visible score   grid (rows, blocks)
select   lists the top blocks (``triton_topk``), ascending        grid (rows, splits), (rows,)
close    drops blocks whose scores are all -inf                   grid (rows,)

mark     marks the blocks that a row keeps                        grid (rows, its list)
hide     masks the scores of all other blocks                     grid (rows, columns)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._sizes import next_power_of_2
from anymla.ops._triton_launch import cdiv
from anymla.ops.device import target_of
from anymla.ops.indexer.config import candidates_warps
from anymla.ops.indexer.triton_topk import NOTHING, ordered, winners_of
from anymla.ops.streams import scratch

# Number of scores, or of blocks, in a tile.
_TILE = 2048
_POSITIVE_INF = tl.constexpr(0x7F800000)
_NEGATIVE_INF = tl.constexpr(-0x800000)  # bits of -inf as an int32


@triton.jit(do_not_specialize=["columns", "blocks"])
def block_scores_kernel(
    logits,
    row_stride,
    lengths,
    best,
    starts,
    held,
    columns,
    blocks,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute scores of BLOCKS blocks of a row, as bits of float32, and count the row's blocks.

    The newest block's score is +inf. ``logits`` are given as their bits; SIZE is BLOCK_SIZE or the
    next power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.maximum(tl.load(lengths + row), 0), columns)
    mine = tl.cdiv(seen, BLOCK_SIZE)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    place = tl.arange(0, SIZE)
    column = block[:, None] * BLOCK_SIZE + place[None, :]
    there = (place < BLOCK_SIZE)[None, :] & (column < seen)
    bits = tl.load(logits + row * row_stride + column, mask=there, other=0)
    key = tl.max(tl.where(there, ordered(bits), NOTHING), 1)
    found = tl.where(block == mine - 1, _POSITIVE_INF, key ^ ((key >> 31) & 0x7FFFFFFF))
    tl.store(best + row * blocks + block, found, mask=block < blocks)
    if tl.program_id(1) == 0:
        tl.store(starts + row, 0)
        tl.store(held + row, mine)


@triton.jit(do_not_specialize=["blocks", "kept", "count"])
def close_kernel(best, winners, out, blocks, kept, count, BLOCK: tl.constexpr):
    """Copy a row's winners, except those of -inf, and fill with -1 up to ``count``."""
    row = tl.program_id(0).to(tl.int64)
    out += row * count
    found = 0
    for at in range(0, kept, BLOCK):
        place = at + tl.arange(0, BLOCK)
        block = tl.load(winners + row * kept + place, mask=place < kept, other=-1)
        bits = tl.load(best + row * blocks + block, mask=block >= 0, other=_NEGATIVE_INF)
        keeps = (bits != _NEGATIVE_INF).to(tl.int32)
        tl.store(out + found + tl.cumsum(keeps, 0) - 1, block, mask=keeps > 0)
        found += tl.sum(keeps, 0)
    for at in range(found, count, BLOCK):
        place = at + tl.arange(0, BLOCK)
        tl.store(out + place, tl.full((BLOCK,), -1, tl.int32), mask=place < count)


def select_candidate_blocks(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int
) -> Tensor:
    """Backend of ``interface.select_candidate_blocks`` in Triton; see its contract."""
    rows, columns = logits.shape
    out = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    blocks = cdiv(columns, block_size)
    if not rows or not blocks:
        return out.fill_(-1)
    bits = (logits if logits.stride(1) == 1 else logits.contiguous()).view(torch.int32)
    warps = candidates_warps(target_of(logits.device))
    best = scratch((rows, blocks), torch.int32, logits.device)
    starts, held = (scratch((rows,), torch.int32, logits.device) for _ in range(2))
    size = next_power_of_2(block_size)
    tile = max(1, _TILE // size)
    block_scores_kernel[(rows, cdiv(blocks, tile))](
        bits, bits.stride(0), lengths.contiguous(), best, starts, held, columns, blocks,
        BLOCK_SIZE=block_size, SIZE=size, BLOCKS=tile, num_warps=warps,
    )  # fmt: skip
    winners = winners_of(best, starts, held, count)
    block = min(_TILE, next_power_of_2(count))
    close_kernel[(rows,)](
        best, winners, out, blocks, winners.shape[1], count, BLOCK=block, num_warps=warps
    )
    return out


@triton.jit(do_not_specialize=["listed", "blocks"])
def mark_kernel(chosen, chosen_stride, keeps, listed, blocks, BLOCK: tl.constexpr):
    """Store 1 where a row keeps a block; numbers that are no block mark nothing."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(chosen + row * chosen_stride + place, mask=place < listed, other=-1)
    one = tl.full((BLOCK,), 1, tl.int8)
    tl.store(keeps + row * blocks + block, one, mask=(block >= 0) & (block < blocks))


@triton.jit(do_not_specialize=["columns", "blocks"])
def hide_kernel(
    logits,
    row_stride,
    keeps,
    columns,
    blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store -inf for the scores whose block is not kept."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    kept = tl.load(keeps + row * blocks + column // BLOCK_SIZE, mask=inside, other=1)
    hidden = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits + row * row_stride + column, hidden, mask=inside & (kept == 0))


def mask_candidates(logits: Tensor, blocks: Tensor, *, block_size: int) -> None:
    """Backend of ``interface.mask_candidates`` in Triton; see its contract."""
    rows, columns = logits.shape
    if not rows or not columns:
        return
    count, listed = cdiv(columns, block_size), blocks.shape[1]
    warps = candidates_warps(target_of(logits.device))
    blocks = blocks if blocks.stride(1) == 1 else blocks.contiguous()
    scores = logits if logits.stride(1) == 1 else logits.contiguous()
    keeps = scratch((rows, count), torch.int8, logits.device).zero_()
    if listed:
        mark_kernel[(rows, cdiv(listed, _TILE))](
            blocks, blocks.stride(0), keeps, listed, count, BLOCK=_TILE, num_warps=warps
        )
    hide_kernel[(rows, cdiv(columns, _TILE))](
        scores, scores.stride(0), keeps, columns, count,
        BLOCK_SIZE=block_size, BLOCK=_TILE, num_warps=warps,
    )  # fmt: skip
    if scores is not logits:
        logits.copy_(scores)
