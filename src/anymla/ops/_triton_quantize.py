"""Quantisation of activations to e4m3 with a power-of-two scale for each quant block.

Device functions for kernels that hold a row in registers, with quant blocks of 128 channels, and a
kernel for rows in memory, with quant blocks of WIDTH channels: 128, 64 or 32. That kernel's grid is
blocks of quant blocks; a row of K channels has ceil(K / WIDTH) of them.

    BLOCKS x WIDTH values -> BLOCKS x WIDTH codes, BLOCKS scales
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.formats.triton_cast import exp2_int, fp32_to_e4m3, scale_exponent, widen
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.device import target_of
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

# Quant blocks per CTA, which give each thread 16 to 32 values.
_BLOCKS = 16
_FEW_BLOCKS = 4


def blocks_of_cta(blocks: int, width: int = FP8_BLOCK) -> int:
    """Return how many of ``blocks`` quant blocks of ``width`` channels one CTA takes."""
    share = FP8_BLOCK // width
    return share * (_BLOCKS if blocks > 4096 * share else _FEW_BLOCKS)


@triton.jit
def quantize_blocks(x, FLOOR: tl.constexpr, NATIVE: tl.constexpr):
    """Quantise float32 quant blocks x [n, w] to codes [n, w] and float32 scales [n]."""
    exponent = scale_exponent(tl.max(tl.abs(x), 1), 448.0, FLOOR)
    # An infinite value has exponent 128, whose inverse is not a normal number.
    inverse = exp2_int(tl.maximum(-exponent, -126))
    return fp32_to_e4m3(x * inverse[:, None], NATIVE), exp2_int(exponent)


@triton.jit
def store_codes(
    y, codes, code_scales, rows, inside, first, row_stride, block_stride, width,
    FLOOR: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store a tile y [n, c], zero past ``width``, of channels ``first`` .. of rows [n] as codes.

    ``first`` is a multiple of 128, or of c where it is less; strides are those of ``code_scales``.
    """
    COUNT: tl.constexpr = y.shape[0]
    CHANNELS: tl.constexpr = y.shape[1]
    BLOCK: tl.constexpr = CHANNELS if CHANNELS < 128 else 128
    BLOCKS: tl.constexpr = CHANNELS // BLOCK
    values = tl.reshape(widen(y), (COUNT * BLOCKS, BLOCK))
    encoded, scale = quantize_blocks(values, FLOOR, NATIVE)
    channel = first + tl.arange(0, CHANNELS)
    mask = inside[:, None] & (channel < width)[None, :]
    at = codes + (rows * width)[:, None] + channel[None, :]
    tl.store(at, tl.reshape(encoded, (COUNT, CHANNELS)), mask)
    block = first // BLOCK + tl.arange(0, BLOCKS)
    mask = inside[:, None] & (block * BLOCK < width)[None, :]
    at = code_scales + (rows * row_stride)[:, None] + (block * block_stride)[None, :]
    tl.store(at, tl.reshape(scale, (COUNT, BLOCKS)), mask)


@triton.jit
def store_row_codes(
    y, codes, code_scales, first, block_stride, width, FLOOR: tl.constexpr, NATIVE: tl.constexpr
):
    """Store channels y [c] of one row at ``codes`` and ``code_scales``, as ``store_codes`` does."""
    CHANNELS: tl.constexpr = y.shape[0]
    BLOCK: tl.constexpr = CHANNELS if CHANNELS < 128 else 128
    values = tl.reshape(widen(y), (CHANNELS // BLOCK, BLOCK))
    encoded, scale = quantize_blocks(values, FLOOR, NATIVE)
    channel = first + tl.arange(0, CHANNELS)
    tl.store(codes + channel, tl.reshape(encoded, (CHANNELS,)), channel < width)
    block = first // BLOCK + tl.arange(0, CHANNELS // BLOCK)
    tl.store(code_scales + block * block_stride, scale, block * BLOCK < width)


@triton.jit(do_not_specialize=["rows", "column"])
def quantize_rows_kernel(
    x,
    codes,
    scales,
    rows,
    width,
    row_blocks,
    column,
    FLOOR: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    NATIVE: tl.constexpr,
    MN_MAJOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise BLOCKS quant blocks of WIDTH channels.

    Scales that are MN_MAJOR lie in columns of ``column`` rows.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // row_blocks
    channel = (block - row * row_blocks)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = row[:, None] * width + channel
    mask = (row < rows)[:, None] & (channel < width)
    value = tl.load(x + at, mask, other=0.0).to(tl.float32)
    encoded, scale = quantize_blocks(value, FLOOR, NATIVE)
    tl.store(codes + at, encoded, mask)
    place = (block - row * row_blocks) * column + row if MN_MAJOR else block
    tl.store(scales + place, scale, row < rows)


def launch_quantize_rows(
    x: Tensor, codes: Tensor, scales: Tensor, column: int = 0, block: int = FP8_BLOCK
) -> None:
    """Quantise contiguous x [T, K] into ``codes`` and ``scales``.

    Args:
        x: contiguous rows to quantise, [T, K].
        codes: e4m3 codes to write, uint8, at least T rows of K.
        scales: scales to write, float32 [T, ceil(K/block)], or with ``column`` [ceil(K/block),
            column].
        column: elements between a row's consecutive scales; 0 for row-major scales.
        block: number of channels that share a scale: 32, 64 or 128.
    """
    rows, width = x.shape
    if not x.numel():
        return
    _quantization(rows, width, column, block, x.device)(x, codes, scales)


@functools.lru_cache(LAUNCHES)
def _quantization(
    rows: int, width: int, column: int, block: int, device: torch.device
) -> PreparedLaunch:
    row_blocks = cdiv(width, block)
    blocks = blocks_of_cta(rows * row_blocks, block)
    return PreparedLaunch(
        quantize_rows_kernel,
        (cdiv(rows * row_blocks, blocks),),
        rows,
        width,
        row_blocks,
        column,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        WIDTH=block,
        BLOCKS=blocks,
        NATIVE=target_of(device).native_e4m3,
        MN_MAJOR=column > 0,
        **pdl_launch(device),
    )


def quantize_rows(x: Tensor, block: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise contiguous x [T, K] as ``formats.quantize_fp8_rows`` does, into scratch memory."""
    rows, width = x.shape
    codes = scratch((rows, width), torch.uint8, x.device)
    scales = scratch((rows, cdiv(width, block)), torch.float32, x.device)
    launch_quantize_rows(x, codes, scales, block=block)
    return codes, scales


def quantize_rows_mn_major(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Quantise contiguous x [T, K] as ``quantize_rows`` does, with scales stored column by column.

    The row count is rounded up to a multiple of ``step``; rows beyond x are uninitialised. Scales
    [rows, ceil(K/128)] are MN-major: consecutive rows' scales are adjacent in memory.
    """
    rows, width = x.shape
    padded = cdiv(rows, step) * step
    codes = scratch((padded, width), torch.uint8, x.device)
    scales = scratch((cdiv(width, FP8_BLOCK), padded), torch.float32, x.device)
    launch_quantize_rows(x, codes, scales, padded)
    return codes, scales.t()
