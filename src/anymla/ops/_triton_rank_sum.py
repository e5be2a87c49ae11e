"""Sum over all ranks' tensors in one kernel; each rank pushes its own tensor to the others.

Grid: SLICE elements for each CTA, which waits only for its slice of the other ranks' tensors.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._inboxes import Inboxes
from anymla.ops._triton_inboxes import exchange, load_inboxes
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch

# Elements per CTA, so that each thread moves 16 bytes of 16-bit elements, and warps per CTA.
SLICE, _WARPS = 1024, 4


@triton.jit(do_not_specialize=["count"])
def push_sum_kernel(
    partial,
    out,
    addresses,
    turns,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_2: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLANK: tl.constexpr,
    WORD: tl.constexpr,
    SLICE: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum a slice in float32 and round it once; slices are WHOLE, or end at ``count``."""
    program = tl.program_id(0)
    offset = program * SLICE + tl.arange(0, SLICE)
    inside = None
    if not WHOLE:
        inside = offset < count
    inboxes = load_inboxes(addresses, RANKS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mine = tl.load(partial + offset, inside)
    words = mine.to(WORD, bitcast=True)
    words = tl.where(words == BLANK, 0, words).to(WORD)
    turn = tl.load(turns + program)
    arrived = exchange(words, inboxes, turn, offset, inside, RANK, RANKS, RANKS_2, CAPACITY, BLANK)
    total = tl.sum(arrived.to(mine.dtype, bitcast=True).to(tl.float32), 0)
    tl.store(out + offset, total.to(mine.dtype), inside)
    tl.store(turns + program, (turn + 1) % 3)


def sum_over_ranks(partial: Tensor, inboxes: Inboxes) -> Tensor:
    """Return the sum of all ranks' tensors, the same bits on every rank.

    Every rank must call it with a tensor of the same shape.

    Args:
        partial: this rank's tensor, contiguous float16, bfloat16 or float32, with at most
            ``inboxes.capacity`` elements of the inboxes' word size.
        inboxes: inboxes that all ranks share, as mapped by this rank.

    Returns:
        New tensor of ``partial``'s shape and dtype; sums are float32 and rounded once, and NaN
        where a rank has NaN.
    """
    out = torch.empty_like(partial)
    launch = _sum(partial.numel(), partial.dtype, inboxes.size, inboxes.rank, inboxes.capacity,
                  partial.device)  # fmt: skip
    launch(partial, out, inboxes.addresses, inboxes.turns)
    return out


@functools.lru_cache(LAUNCHES)
def _sum(
    count: int, dtype: torch.dtype, size: int, rank: int, capacity: int, device: torch.device
) -> PreparedLaunch:
    wide = dtype.itemsize == 4
    return PreparedLaunch(
        push_sum_kernel,
        (cdiv(count, SLICE),),
        count,
        RANK=rank,
        RANKS=size,
        RANKS_2=triton.next_power_of_2(size),
        CAPACITY=capacity,
        BLANK=-(1 << (8 * dtype.itemsize - 1)),
        WORD=tl.int32 if wide else tl.int16,
        SLICE=SLICE,
        WHOLE=count % SLICE == 0,
        num_warps=_WARPS,
        **pdl_launch(device),
    )
