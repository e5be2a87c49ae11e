"""Quantised activations of (token, expert) pairs, sorted by expert, as operands of W4A8 GEMMs.

    blocks with gaps -> adjacent blocks, and their number
    rows of sorted pairs -> e4m3 [P, K] in the order of decoded weights, scales [K / 128, N] a block

The scales of a block are contiguous, because TMA starts at multiples of 16 bytes.

A thread of four that hold a row of a matrix instruction decodes eight channels at a time, of which
the instruction's operand 16 h + 4 t + b is number 2 b + h of thread t. Where scales are multiplied
into codes, a thread has 16 adjacent bytes, which have one scale: of 128 channels instruction j
takes 32 t + 8 j + 2 b + h. Where sums are scaled (``by_group``), an instruction has one scale and
takes 32 j + 8 t + 2 b + h.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_quantize import quantize_blocks
from anymla.ops.moe.triton_align import AlignedPairs, align
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

_AT_ONCE = 1024
# Rows per CTA, and quant blocks of each row per CTA.
_ROWS, _QUANT_BLOCKS = 4, 8


@triton.jit(do_not_specialize=["count"])
def close_gaps_kernel(blocks, closed, count, AT_ONCE: tl.constexpr, PDL: tl.constexpr):
    """Copy the blocks that have pairs to adjacent places, in order, with one CTA."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    found = 0
    for start in range(0, count, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)
        exists = block < count
        expert = tl.load(blocks + block, exists, other=-1)
        first = tl.load(blocks + count + block, exists, other=0)
        end = tl.load(blocks + 2 * count + block, exists, other=0)
        here = (expert >= 0).to(tl.int32)
        place = closed + found + tl.cumsum(here, 0) - here
        tl.store(place, expert, here != 0)
        tl.store(place + count, first, here != 0)
        tl.store(place + 2 * count, end, here != 0)
        found += tl.sum(here, 0)
    tl.store(closed + 3 * count, found)


def align_closely(ids: Tensor, experts: int, offset: int, block_m: int) -> AlignedPairs:
    """Group pairs as ``align`` does, but in adjacent blocks that are followed by their number."""
    aligned = align(ids, experts, offset, block_m)
    closed = scratch((3 * aligned.count + 1,), torch.int32, ids.device)
    launch = _closing(aligned.count, ids.device)
    launch(aligned.blocks, closed)
    return AlignedPairs(aligned.sorted_pairs, closed, aligned.count)


@functools.lru_cache(LAUNCHES)
def _closing(count: int, device: torch.device) -> PreparedLaunch:
    return PreparedLaunch(close_gaps_kernel, (1,), count, AT_ONCE=_AT_ONCE, **pdl_launch(device))


@triton.jit(do_not_specialize=["count"])
def quantize_pairs_kernel(
    x,
    sorted_pairs,
    blocks,
    codes,
    scales,
    count,
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    QUANT_BLOCKS: tl.constexpr,
    BY_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise QUANT_BLOCKS of ROWS rows of a block of pairs; PER_TOKEN is 0 for sorted rows.

    WIDTH channels of the 128 of a block share a scale.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0) // (BLOCK_M // ROWS)
    first = tl.program_id(0) % (BLOCK_M // ROWS) * ROWS
    exists = block < tl.load(blocks + 3 * count)
    begin = tl.load(blocks + count + block, exists, other=0)
    end = tl.load(blocks + 2 * count + block, exists, other=0)
    if begin + first < end:
        i = tl.arange(0, ROWS * QUANT_BLOCKS)
        line = first + i // QUANT_BLOCKS
        of_row = tl.program_id(1) * QUANT_BLOCKS + i % QUANT_BLOCKS
        inside = (begin + line < end) & (of_row < K // 128)
        row = (begin + line).to(tl.int64)
        source = row
        if PER_TOKEN > 0:
            source = (tl.load(sorted_pairs + row, inside, other=0) // PER_TOKEN).to(tl.int64)
        channel = tl.arange(0, 128)
        at = (source * K + of_row * 128)[:, None] + channel[None, :]
        value = tl.load(x + at, inside[:, None], other=0.0).to(tl.float32)
        COUNT: tl.constexpr = ROWS * QUANT_BLOCKS
        PARTS: tl.constexpr = 128 // WIDTH
        value = tl.reshape(value, (COUNT * PARTS, WIDTH))
        encoded, scale = quantize_blocks(value, FLOOR, True)
        encoded = tl.reshape(encoded, (COUNT, 4, 4, 4, 2))
        if BY_GROUP:
            encoded = tl.permute(encoded, (0, 1, 4, 2, 3))
        else:
            encoded = tl.permute(encoded, (0, 2, 4, 1, 3))
        encoded = tl.reshape(encoded, (COUNT, 128))
        to = (row * K + of_row * 128)[:, None] + channel[None, :]
        tl.store(codes + to, encoded, inside[:, None])
        part = tl.arange(0, PARTS)[None, :]
        to = ((block * (K // 128) + of_row).to(tl.int64)[:, None] * PARTS + part) * BLOCK_M
        tl.store(scales + to + line[:, None], tl.reshape(scale, (COUNT, PARTS)), inside[:, None])


def quantize_pairs(
    x: Tensor,
    pairs: int,
    aligned: AlignedPairs,
    block_m: int,
    per_token: int,
    *,
    by_group: bool = False,
    quant_block: int = FP8_BLOCK,
) -> tuple[Tensor, Tensor]:
    """Quantise contiguous x to e4m3 operands and scales [blocks * K / quant_block, block_m].

    Args:
        x: rows of tokens, or of sorted pairs if ``per_token`` is 0.
        pairs: number of all pairs, including those without an expert here; of operands [pairs, K].
        aligned: grouped pairs from ``align_closely``.
        block_m: number of pairs in a block.
        per_token: number of pairs of a token, or 0.
        by_group: True if an instruction takes 32 adjacent channels.
        quant_block: number of channels that share a scale, 128 or 32.
    """
    width = x.shape[1]
    codes = scratch((pairs, width), torch.uint8, x.device)
    scales = scratch((aligned.count * (width // quant_block), block_m), torch.float32, x.device)
    sizes = width, aligned.count, block_m, per_token
    launch = _quantization(sizes, by_group, quant_block, x.device)
    launch(x, aligned.sorted_pairs, aligned.blocks, codes, scales)
    return codes, scales


@functools.lru_cache(LAUNCHES)
def _quantization(
    sizes: tuple[int, int, int, int], by_group: bool, quant_block: int, device: torch.device
) -> PreparedLaunch:
    width, count, block_m, per_token = sizes
    return PreparedLaunch(
        quantize_pairs_kernel,
        (count * (block_m // _ROWS), cdiv(width // FP8_BLOCK, _QUANT_BLOCKS)),
        count,
        K=width,
        PER_TOKEN=per_token,
        BLOCK_M=block_m,
        ROWS=_ROWS,
        QUANT_BLOCKS=_QUANT_BLOCKS,
        BY_GROUP=by_group,
        WIDTH=quant_block,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        **pdl_launch(device),
    )
