"""Every choice of the GEMMs ``x @ weight^T``: kernel, tile and splits for a shape and a target.

A threshold stands here once, beside what it was measured with on an H200;
docs/performance/linear.md has the rows of Hopper's kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._gemm_config import (
    TileConfig,
    choose_tile,
    operand_dtype,
    uses_wgmma,
    within_quant_blocks,
)
from anymla.ops.device import Target

# Result types of ``grouped_output_projection_fp8`` by the names that it takes.
OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

# Threshold, and what it was measured on (rows of the weight x channels).
#
# Hopper. Tiles over SMs: nearly two waves, more than one, nearly one, and most of one: all products
# of both models, 17 to 128 tokens.
_TWO_WAVES, _MORE_THAN_ONE, _ONE_WAVE, _MOST_OF_ONE = 1.8, 1.2, 0.9, 0.65
# Tokens up to which two CTAs an SM are best, in chains of all products: V4-Flash's six with 1, 8
# and 16 tokens 43.5, 43.3 and 46.7 us (45.0, 46.4 and 53.6 with one), V4-Pro's 99.6, 99.5 and 103.9
# (99.4, 102.3 and 123.3).
_VERY_FEW = 16
# K blocks up to which a tile's sums are soon exchanged, which warps with rows of their own need
# not do: wq_b, 32768 x 1024 and 65536 x 1536. K blocks from which what a deep ring gains is more
# than what the next kernel does, which does not fit beside it then: wo_b of V4-Pro, 7168 x 16384,
# 64 tokens 49.5 us to 35.0; and with more than 64 tokens: V4-Flash's six products, 91.1 to 84.7.
_SHORT_K, _LONG_K, _LONG_K_OF_MANY_TOKENS = 16, 48, 32
# Tokens that the kernels take, and up to which products are exact: with 64 float16 takes 145 us of
# the six products, the FP8 instruction 66.6; with 32 it is 55.9 and 61.
MAX_TOKENS, MAX_EXACT_TOKENS = 128, 32
# bfloat16: tokens of the small tile, and rows up to which cuBLAS has been measured: the
# compressors' product 2624 x 4096, 7.6 us for 10.6, and V4-Pro's.
BF16_SMALL_BLOCK_M, MAX_BF16_ROWS = 8, 8192
#
# cuBLAS. Tokens from which its FP8 GEMM is chosen: 4096 x 4096, 18 us for Triton's 47 with 256
# tokens, 66 for 244 with 2048. Grouped it is a GEMM a group, eight of 17 us each: 8 x 1024 x 4096,
# 333 tokens 128 us and 2048 tokens 467 us by Triton.
VENDOR_TOKENS, VENDOR_GROUPED_TOKENS = 64, 512
#
# Triton. Tokens from which operands are swapped: 4096 x 4096 of FP8, 12.6 us not swapped and 14.8
# swapped for one token, 14.2 and 10.8 for 32. With more, rows of the weight are read twice.
_SWAP_AB_TOKENS = {"fp8": 17, "mxfp4": 1}
MAX_SWAP_AB_TOKENS = 32
# CTAs that K is split for, and the least channels of a split: 512 fill any GPU; swapped, three an
# SM keep enough loads in flight, 396 on an H200.
_CTAS, _MIN_SPLIT = 512, 512
_SWAP_AB_CTAS_PER_SM, _SWAP_AB_MIN_SPLIT = 3, 512
# Intel: rows of a tile, and channels of a step up to which its 4 warps spill nothing: V4.1's FP8 in
# blocks of 32, 43 to 47 instructions for 1,000 multiply-adds, 82 to 87 by 8 warps (built for Arc
# B); MXFP4 spills 11 registers on Max.
_INTEL_ROWS, _INTEL_SHORT_STEP = 64, 32

# CPU. Tokens up to which weights are decoded in registers rather than first: 4096 x 4096, one core,
# 64 tokens of FP8 23 ms by numba and 29 by torch, of MXFP4 15 and 28; 128 tokens 45 and 37, 34 and
# 39.
MAX_NUMBA_TOKENS = 64

# What sizes are multiples of: rows of every kernel's smallest tile on Hopper; channels of a K block
# and rows of a tile of bfloat16; cuBLAS's tokens (4 would do) and channels, whose scales are read
# as 16 bytes; and channels of two or four K blocks in flight.
ROW_STEP = 64
BF16_BLOCK_K, BF16_ROW_STEP = 64, 16
VENDOR_TOKEN_STEP, VENDOR_CHANNEL_STEP = 16, 4 * FP8_BLOCK
WGMMA_CHANNEL_STEP = 4 * FP8_BLOCK
NUMBA_CHANNEL_STEP = 32


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """Products of one launch, each [tokens, k] by [n, k]^T.

    Attributes:
        tokens: rows of activations.
        n: rows of a group's weight.
        k: channels.
        groups: products.
    """

    tokens: int
    n: int
    k: int
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """A kernel of Hopper and its tile.

    Attributes:
        kernel: "warp_split_k" and "warp_split_n", which multiply float16, or "fp8_wgmma", e4m3.
        block_n: rows of the weight.
        block_m: tokens.
        warps: that multiply.
        stages: of the ring.
        ctas_per_sm: resident at a time. With one, a CTA of the next kernel fits beside it and loads
            its weights.
        registers: of a thread on average.
        in_flight: instructions in flight ("fp8_wgmma").
    """

    kernel: str
    block_n: int
    block_m: int
    warps: int
    stages: int
    ctas_per_sm: int
    registers: int
    in_flight: int = 1


def choose_sm90_config(
    shape: GemmShape, target: Target, quant_block: int = FP8_BLOCK
) -> Sm90Config:
    """The config of FP8 products, 1 to 128 tokens by a multiple of 64 rows.

    With 32 rows and channels a scale it is "warp_split_k", for up to MAX_EXACT_TOKENS.
    """

    def waves(block_n: int) -> float:
        tiles = shape.groups * shape.n / block_n
        return tiles / target.sm_count if shape.n % block_n == 0 else 0.0

    few, k_blocks = shape.tokens <= MAX_EXACT_TOKENS, shape.k // FP8_BLOCK
    if shape.tokens <= _VERY_FEW:
        config = _very_few_config(shape.tokens, k_blocks, waves)
    elif quant_block != FP8_BLOCK:
        config = _small_blocks_config(waves)
    else:
        config = (_mma_config if few else _wgmma_config)(shape.tokens, k_blocks, waves)
    least = 0.5 if few else _MOST_OF_ONE
    while config.block_n > 16 and waves(config.block_n) < least:
        config = dataclasses.replace(config, block_n=config.block_n // 2)
    return config


def _very_few_config(tokens: int, k_blocks: int, waves: Callable[[int], float]) -> Sm90Config:
    """Two CTAs an SM; where there are few tiles, more of them, and K shared by more warps."""
    block_m = 8 if tokens <= 8 else 16
    if waves(32) <= 1.0 and k_blocks > _SHORT_K:
        return Sm90Config("warp_split_k", 16, block_m, 8, 2, 2, 80)
    return Sm90Config("warp_split_k", 32, block_m, 4, 3, 2, 96)


def _mma_config(tokens: int, k_blocks: int, waves: Callable[[int], float]) -> Sm90Config:
    if k_blocks <= _SHORT_K and waves(128) > _TWO_WAVES:
        return Sm90Config("warp_split_n", 128, 32, 4, 2, 2, 96)
    if waves(32) > _MORE_THAN_ONE:
        return Sm90Config("warp_split_k", 32, 32, 4, 3, 2, 104)
    return Sm90Config("warp_split_k", 32, 32, 8, 2, 1, 128)


def _small_blocks_config(waves: Callable[[int], float]) -> Sm90Config:
    """A scale for 32 rows and channels: no tile has rows of two."""
    if waves(32) < _MOST_OF_ONE:
        return Sm90Config("warp_split_k", 16, 32, 8, 3, 1, 104)
    return Sm90Config("warp_split_k", 32, 32, 4, 2, 2, 128)


def _wgmma_config(tokens: int, k_blocks: int, waves: Callable[[int], float]) -> Sm90Config:
    """Rings of long tiles take what there is of shared memory."""
    wide, long = waves(128) > _TWO_WAVES, k_blocks >= _LONG_K
    if tokens <= 64:
        if wide:
            return Sm90Config("fp8_wgmma", 128, 64, 4, 4, 1, 128, 2)
        if long and waves(64) > _MOST_OF_ONE:
            return Sm90Config("fp8_wgmma", 64, 64, 4, 12, 1, 128, 4)
        if waves(64) > _ONE_WAVE:
            return Sm90Config("fp8_wgmma", 64, 64, 4, 6, 1, 96, 2)
        if long and waves(32) > _MOST_OF_ONE:
            return Sm90Config("fp8_wgmma", 32, 64, 4, 14, 1, 96, 4)
        return Sm90Config("fp8_wgmma", 32, 64, 4, 8, 1, 80, 4)
    if wide:
        return Sm90Config("fp8_wgmma", 128, 128, 8, 4, 1, 168, 2)
    if k_blocks < _LONG_K_OF_MANY_TOKENS:
        return Sm90Config("fp8_wgmma", 64, 128, 8, 4, 1, 96, 2)
    if waves(64) > _MOST_OF_ONE:
        return Sm90Config("fp8_wgmma", 64, 128, 8, 8, 1, 168, 4)
    return Sm90Config("fp8_wgmma", 32, 128, 8, 8, 1, 96, 4)


def choose_sm90_bf16_config(tokens: int) -> Sm90Config:
    """The config of bfloat16 products of up to 32 tokens."""
    if tokens <= BF16_SMALL_BLOCK_M:
        return Sm90Config("warp_split_k", 16, 8, 8, 4, 2, 64)
    return Sm90Config("warp_split_k", 16, 32, 4, 4, 2, 104)


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """A kernel of Triton, its tile, and splits of K.

    Attributes:
        swap_ab: rows of the weight are those of the matrix instruction (``triton_gemm_swap_ab``).
        operand: dtype of the matrix instruction's operands.
        tile: of the product.
        split_k: channels of a split of K, a multiple of 128.
        block_diagonal: 128 channels of mxfp4 are one instruction (swap_ab).
    """

    swap_ab: bool
    operand: torch.dtype
    tile: TileConfig
    split_k: int
    block_diagonal: bool = False

    def splits(self, k: int) -> int:
        """Splits of so many channels."""
        return max(1, _cdiv(k, self.split_k))


def choose_triton_config(
    shape: GemmShape,
    weight_format: str,
    target: Target,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype = torch.uint8,
    quantized: bool,
    aligned: bool = True,
    quant_block: int = FP8_BLOCK,
) -> TritonConfig:
    """The config for a shape.

    Args:
        shape: of the products.
        weight_format: "plain", "fp8", "mxfp4" or "nvfp4".
        target: what they run on.
        x_dtype: of the activations before they are quantised.
        weight_dtype: of the weight as stored.
        quantized: activations are e4m3.
        aligned: the weight lies at a multiple of 16 bytes, its scales at one of 4.
        quant_block: rows and columns of an FP8 weight, and channels of activations, that share a
            scale.
    """
    if quantized and aligned and _takes_swap_ab(shape, weight_format, target):
        return swap_ab_config(shape, weight_format, target)
    operand = operand_dtype(x_dtype, weight_format, weight_dtype, quantized, target)
    tile = choose_tile(shape.tokens, operand, target)
    if quantized or weight_format == "fp8":
        tile = within_quant_blocks(tile, quant_block)
    short = tile.block_m == _INTEL_ROWS and tile.block_k <= _INTEL_SHORT_STEP
    if target.intel and weight_format == "fp8" and short:
        tile = dataclasses.replace(tile, num_warps=4)
    k = max(1, shape.k)
    splits = max(1, min(_CTAS // max(1, _tiles(shape, tile)), shape.k // _MIN_SPLIT))
    return TritonConfig(False, operand, tile, _cdiv(_cdiv(k, splits), FP8_BLOCK) * FP8_BLOCK)


def _takes_swap_ab(shape: GemmShape, weight_format: str, target: Target) -> bool:
    """Whether the shape is for swapped operands; RDNA and Arc A have no registers for them."""
    least = _SWAP_AB_TOKENS.get(weight_format, MAX_SWAP_AB_TOKENS + 1)
    whole = shape.k % FP8_BLOCK == 0 and shape.n % ROW_STEP == 0
    return (
        whole
        and least <= shape.tokens <= MAX_SWAP_AB_TOKENS
        and not (target.narrow or target.arc_a)
    )


def swap_ab_config(shape: GemmShape, weight_format: str, target: Target) -> TritonConfig:
    """Operands are float16, whose products are exact everywhere."""
    wgmma = uses_wgmma(target) and weight_format == "mxfp4"
    # Registers for more sums of decoded rows are not everywhere.
    wide = shape.tokens > 16 and (weight_format == "fp8" or wgmma)
    # Intel: 4 warps of the wide tile spill 94 registers, 8 none (docs/intel.md).
    warps = 8 if wide and target.backend == "xpu" else 4
    tile = TileConfig(32 if wide else 16, ROW_STEP, FP8_BLOCK, warps, 4)
    ctas = _SWAP_AB_CTAS_PER_SM * target.sm_count
    splits = min(_cdiv(ctas, max(1, _tiles(shape, tile))), shape.k // _SWAP_AB_MIN_SPLIT)
    split = _cdiv(shape.k // FP8_BLOCK, max(1, splits)) * FP8_BLOCK
    return TritonConfig(True, torch.float16, tile, split, wgmma and not wide)


def _tiles(shape: GemmShape, tile: TileConfig) -> int:
    return shape.groups * _cdiv(shape.n, tile.block_n) * _cdiv(shape.tokens, tile.block_m)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def plain_backend(backend: str | None) -> str | None:
    """The backend of plain products in a model whose layers run on ``backend``.

    Triton has no kernel for them: a model that runs on Triton leaves them to the automatic choice.
    """
    return None if backend == "triton" else backend
