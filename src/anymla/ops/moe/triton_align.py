"""Grouping of (token, expert) pairs by expert on the device, in blocks of BLOCK_M pairs.

    pairs of lower experts -> start of an expert's pairs;  its pairs -> sorted_pairs, in blocks

The grid is one CTA for each expert. A CTA reads all pairs, so nothing is sorted or exchanged, and
grids depend on shapes only.

``align`` leaves gaps: expert e owns the blocks from begin // BLOCK_M + e on, which always suffice
for its pairs; unused blocks get expert -1. The persistent kernel on Hopper divides blocks evenly,
and with few pairs of many experts most CTAs would find a gap, so the blocks of
``align_and_quantize`` are adjacent; further CTAs of that launch quantise the activations to e4m3,
or the same numbers in float16, in the order of decoded e2m1.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.formats.triton_cast import e4m3_to_fp16
from anymla.formats.triton_words import channel_at
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_quantize import quantize_blocks
from anymla.ops.device import target_of
from anymla.ops.moe.config import ALIGN_PAIRS, choose_align_config
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch


@dataclasses.dataclass(frozen=True)
class AlignedPairs:
    """Pairs sorted by expert, and the blocks that they form.

    Attributes:
        sorted_pairs: numbers of the pairs, int32 [P]; each expert's are adjacent and ascending.
        blocks: for each block its expert (or -1) and its first and end place in ``sorted_pairs``,
            int32 in three rows of ``count``. Blocks without gaps are followed by their number, and
            no expert is -1.
        count: largest possible number of blocks.
    """

    sorted_pairs: Tensor
    blocks: Tensor
    count: int


@triton.jit(do_not_specialize=["pairs", "offset", "count"])
def align_kernel(
    ids, sorted_pairs, blocks, pairs, experts, offset, count,
    BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sort one expert's pairs and write its blocks; slots after its last block hold -1."""
    me = tl.program_id(0)
    lower = tl.zeros((AT_ONCE,), tl.int32)
    for start in range(0, pairs, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        local = tl.load(ids + at, at < pairs, other=-1).to(tl.int64) - offset
        lower += ((at < pairs) & (local >= 0) & (local < me)).to(tl.int32)
    begin = tl.sum(lower, 0)
    end = begin
    for start in range(0, pairs, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        local = tl.load(ids + at, at < pairs, other=-1).to(tl.int64) - offset
        mine = ((at < pairs) & (local == me)).to(tl.int32)
        place = end + tl.cumsum(mine, 0) - mine
        tl.store(sorted_pairs + place, at, mine != 0)
        end += tl.sum(mine, 0)
    first = begin // BLOCK_M + me
    after = tl.where(me == experts - 1, count, end // BLOCK_M + me + 1)
    for block in range(first, after):
        start = begin + (block - first) * BLOCK_M
        tl.store(blocks + block, tl.where(start < end, me, -1))
        tl.store(blocks + count + block, start)
        tl.store(blocks + 2 * count + block, tl.minimum(start + BLOCK_M, end))


def align(ids: Tensor, experts: int, offset: int, block_m: int) -> AlignedPairs:
    """Group the pairs of contiguous ids [T, K] in blocks of ``block_m``, with gaps."""
    pairs = ids.numel()
    count = pairs // block_m + experts
    sorted_pairs = scratch((pairs,), torch.int32, ids.device)
    blocks = scratch((3, count), torch.int32, ids.device)
    _alignment(pairs, experts, offset, block_m, count)(ids, sorted_pairs, blocks)
    return AlignedPairs(sorted_pairs, blocks, count)


@functools.lru_cache(LAUNCHES)
def _alignment(pairs: int, experts: int, offset: int, block_m: int, count: int) -> PreparedLaunch:
    numbers = pairs, experts, offset, count
    return PreparedLaunch(align_kernel, (experts,), *numbers, BLOCK_M=block_m, AT_ONCE=ALIGN_PAIRS)


@triton.jit
def load_block(
    ids, sorted_pairs, blocks, count, offset, experts, BLOCK_M: tl.constexpr, GAPS: tl.constexpr
):
    """Load expert (or -1), pairs int64 [BLOCK_M] and mask of existing pairs, of a CTA's block."""
    block = tl.program_id(1)
    lane = tl.arange(0, BLOCK_M)
    if sorted_pairs is not None:
        expert = tl.load(blocks + block)
        place = tl.load(blocks + count + block) + lane
        inside = place < tl.load(blocks + 2 * count + block)
        if not GAPS:
            written = block < tl.load(blocks + 3 * count)
            expert = tl.where(written, expert, -1)
            inside &= written
        pair = tl.load(sorted_pairs + place, inside, other=0).to(tl.int64)
    else:
        local = tl.load(ids + block).to(tl.int64) - offset
        expert = tl.where((local >= 0) & (local < experts), local, -1).to(tl.int32)
        inside = lane == 0
        pair = block.to(tl.int64) + tl.zeros((BLOCK_M,), tl.int64)
    return expert, pair, inside


@triton.jit
def _quantize(
    x, operands, scales, first, rows, width, row_blocks,
    FLOOR: tl.constexpr, QUANT_BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantise QUANT_BLOCKS quant blocks of WIDTH channels from ``first`` on to operands."""
    block = tl.cast(first, tl.int64) + tl.arange(0, QUANT_BLOCKS)
    row = block // row_blocks
    place = tl.arange(0, WIDTH)
    start = (row * width + (block - row * row_blocks) * WIDTH)[:, None]
    inside = (row < rows)[:, None]
    CODED: tl.constexpr = operands.dtype.element_ty == tl.uint8
    BYTES: tl.constexpr = 1 if CODED else 2
    value = tl.load(x + start + channel_at(place, BYTES, PAIRS)[None, :], inside, other=0.0)
    codes, scale = quantize_blocks(value.to(tl.float32), FLOOR, NATIVE)
    tl.store(scales + block, scale, row < rows)
    operand = codes if CODED else e4m3_to_fp16(codes, NATIVE)
    tl.store(operands + start + place[None, :], operand, inside)


@triton.jit
def _align_without_gaps(
    me, ids, sorted_pairs, blocks, pairs, experts, offset, count,
    BLOCK_M: tl.constexpr, COMPARED: tl.constexpr, EXPERTS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of expert ``me`` and write its blocks, adjacent to those of other experts."""
    each = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    # With many experts there are many rounds, so their results are summed only once, at the end.
    found = tl.zeros((EXPERTS, COMPARED if EXPERTS > 64 else 1), tl.int32)
    for start in range(0, pairs, COMPARED):
        at = start + tl.arange(0, COMPARED)
        # Experts of other devices are compared as -1, which equals none of ours.
        local = tl.load(ids + at, at < pairs, other=-1) - offset
        local = tl.where((at < pairs) & (local >= 0) & (local < experts), local, -1)
        equal = (each[:, None] == local[None, :]).to(tl.int32)
        if EXPERTS > 64:
            found += equal
        else:
            counts += tl.sum(equal, 1)
    counts += tl.sum(found, 1)
    needed = (counts + (BLOCK_M - 1)) // BLOCK_M
    begin = tl.sum(tl.where(each < me, counts, 0), 0)
    first = tl.sum(tl.where(each < me, needed, 0), 0)
    end = begin
    for start in range(0, pairs, PLACED):
        at = start + tl.arange(0, PLACED)
        local = tl.load(ids + at, at < pairs, other=-1) - offset
        mine = ((at < pairs) & (local == me)).to(tl.int32)
        place = end + tl.cumsum(mine, 0) - mine
        tl.store(sorted_pairs + place, at, mine != 0)
        end += tl.sum(mine, 0)
    after = first + (end - begin + (BLOCK_M - 1)) // BLOCK_M
    for block in range(first, after):
        start = begin + (block - first) * BLOCK_M
        tl.store(blocks + block, me)
        tl.store(blocks + count + block, start)
        tl.store(blocks + 2 * count + block, tl.minimum(start + BLOCK_M, end))
    if me == experts - 1:
        tl.store(blocks + 3 * count, after)


@triton.jit(do_not_specialize=["rows", "pairs", "offset", "count"])
def align_and_quantize_kernel(
    x,
    operands,
    scales,
    ids,
    sorted_pairs,
    blocks,
    rows,
    width,
    row_blocks,
    pairs,
    experts,
    offset,
    count,
    FLOOR: tl.constexpr,
    QUANT_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COMPARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACED: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Align one expert's pairs, or quantise QUANT_BLOCKS quant blocks of WIDTH channels."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    me = tl.program_id(0)
    if me < experts:
        _align_without_gaps(
            me, ids, sorted_pairs, blocks, pairs, experts, offset, count,
            BLOCK_M, COMPARED, EXPERTS, PLACED,
        )  # fmt: skip
    else:
        first = (me - experts) * QUANT_BLOCKS
        _quantize(
            x, operands, scales, first, rows, width, row_blocks, FLOOR, QUANT_BLOCKS, WIDTH,
            PAIRS, NATIVE,
        )  # fmt: skip


def align_and_quantize(
    x: Tensor,
    ids: Tensor,
    experts: int,
    offset: int,
    block_m: int,
    quant_block: int = FP8_BLOCK,
    *,
    pairs_of_run: int = 0,
) -> tuple[Tensor, Tensor, AlignedPairs]:
    """Quantise contiguous x to operands [T, D], and group the pairs in blocks without gaps.

    Operands are e4m3 codes, or float16 in runs of ``pairs_of_run`` pairs if that is not 0.
    Returns operands, their float32 scales [T, D / quant_block], and the grouped pairs.
    """
    (rows, width), pairs = x.shape, ids.numel()
    row_blocks = width // quant_block
    dtype = torch.float16 if pairs_of_run else torch.uint8
    operands = scratch((rows, width), dtype, x.device)
    scales = scratch((rows, row_blocks), torch.float32, x.device)
    count = pairs // block_m + min(pairs, experts)
    sorted_pairs = scratch((pairs,), torch.int32, x.device)
    blocks = scratch((3 * count + 1,), torch.int32, x.device)
    sizes = rows, width, pairs, experts, offset, count
    launch = _alignment_with_rows(sizes, block_m, quant_block, pairs_of_run, x.device)
    launch(x, operands, scales, ids, sorted_pairs, blocks)
    return operands, scales, AlignedPairs(sorted_pairs, blocks, count)


@functools.lru_cache(LAUNCHES)
def _alignment_with_rows(
    sizes: tuple[int, int, int, int, int, int],
    block_m: int,
    quant_block: int,
    pairs_of_run: int,
    device: torch.device,
) -> PreparedLaunch:
    rows, width, pairs, experts, offset, count = sizes
    row_blocks, config = width // quant_block, choose_align_config(pairs, experts, block_m)
    quant_blocks = config.num_warps * FP8_BLOCK // quant_block
    return PreparedLaunch(
        align_and_quantize_kernel,
        (experts + cdiv(rows * row_blocks, quant_blocks),),
        rows,
        width,
        row_blocks,
        pairs,
        experts,
        offset,
        count,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        QUANT_BLOCKS=quant_blocks,
        WIDTH=quant_block,
        BLOCK_M=block_m,
        COMPARED=config.compared,
        EXPERTS=config.experts,
        PLACED=config.placed,
        PAIRS=pairs_of_run,
        # Codes are Hopper's, whose instruction rounds values that were clamped before.
        NATIVE=target_of(device).native_e4m3 if pairs_of_run else True,
        num_warps=config.num_warps,
        **pdl_launch(device),
    )
