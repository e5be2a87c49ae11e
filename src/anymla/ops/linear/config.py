"""Choices of kernel, tile and splits for the GEMMs ``x @ weight^T`` of a shape and target.

Each threshold stands beside the measurement on an H200 that it rests on; docs/performance/linear.md
has the results of Hopper's kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._gemm_config import (
    TileConfig,
    choose_tile,
    operand_dtype,
    uses_mma_sync,
    uses_wgmma,
    within_quant_blocks,
)
from anymla.ops._sizes import cdiv
from anymla.ops.device import Target

# Result dtypes of ``grouped_output_projection_fp8``, by the names that it takes.
OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

# Thresholds, with the shape of the measurement behind each (rows of the weight x channels).
#
# Hopper. Numbers of waves (tiles over SMs): nearly two, more than one, nearly one, and most of one.
# Measured on all products of both models with 17 to 128 tokens.
_TWO_WAVES, _MORE_THAN_ONE, _ONE_WAVE, _MOST_OF_ONE = 1.8, 1.2, 0.9, 0.65
# Largest number of tokens for which two CTAs an SM are best, in chains of all products: V4-Flash's
# six with 1, 8 and 16 tokens take 43.5, 43.3 and 46.7 us (45.0, 46.4 and 53.6 with one CTA),
# V4-Pro's 99.6, 99.5 and 103.9 (99.4, 102.3 and 123.3).
_VERY_FEW = 16
# _SHORT_K: K blocks up to which the exchange of a tile's sums weighs much, so that warps have rows
# of their own instead: wq_b, 32768 x 1024 and 65536 x 1536. _LONG_K: K blocks from which a deep
# ring gains more than it costs the next kernel, which then does not fit beside it: wo_b of V4-Pro,
# 7168 x 16384, 64 tokens 49.5 us to 35.0; the last, with more than 64 tokens: V4-Flash's six
# products, 91.1 to 84.7.
_SHORT_K, _LONG_K, _LONG_K_OF_MANY_TOKENS = 16, 48, 32
# Largest number of tokens that the kernels take, and most with exact products: with 64 tokens, the
# six products take 145 us in float16 and 66.6 by the FP8 instruction; with 32, 55.9 and 61.
MAX_TOKENS, MAX_EXACT_TOKENS = 128, 32
# bfloat16: tokens of the small tile, and rows up to which it was compared with cuBLAS: the
# compressors' product, 2624 x 4096, 7.6 us instead of 10.6, and V4-Pro's.
BF16_SMALL_BLOCK_M, MAX_BF16_ROWS = 8, 8192
#
# cuBLAS. Tokens from which its FP8 GEMM is chosen: 4096 x 4096, 256 tokens 18 us (Triton 47), 2048
# tokens 66 (Triton 244). Grouped products are one GEMM a group, eight of 17 us each: 8 x 1024 x
# 4096 by Triton, 333 tokens 128 us and 2048 tokens 467.
VENDOR_TOKENS, VENDOR_GROUPED_TOKENS = 64, 512
#
# Triton. Most tokens for which operands are swapped: 4096 x 4096 in FP8, one token 12.6 us not
# swapped and 14.8 swapped, 32 tokens 14.2 and 10.8. With more tokens, rows of the weight are read
# twice.
_SWAP_AB_TOKENS = {"fp8": 17, "mxfp4": 1}
MAX_SWAP_AB_TOKENS = 32
# CTAs that K is split for, and fewest channels of a split. 512 CTAs fill any GPU; swapped, three an
# SM, 396 on an H200, keep enough loads in flight.
_CTAS, _MIN_SPLIT = 512, 512
_SWAP_AB_CTAS_PER_SM, _SWAP_AB_MIN_SPLIT = 3, 512
# mma.sync, FP8, as sm_80 on an H200, 1 and 16 tokens, us with 16 rows and 4 warps that share K, 16
# and 8, 32 and 4, 64 and 2: 1536 x 4096 (at most one tile of 16 rows an SM) 9.6, 8.6, 12.0, -, and
# 12.7, 11.5, 14.2, - (8.6 if a tile has 8 tokens); 4096 x 4096 12.5, 12.6, 13.2, -, and 16.5, -,
# 15.3, -; 4096 x 8192 (very long) 19.8, 18.6, 20.9, -; 32768 x 1024 (many tiles an SM) 20.2, -,
# 20.6, 17.4, and 31.8, -, 28.8, 25.7 (24.5 with 32 and 2). Warps that share rows took 12.4, 19.0,
# 30.5 and 26.5 with one token.
_VERY_SHORT_K, _VERY_LONG_K, _MANY_WAVES = 512, 8192, 12
# mma.sync, FP8 with more tokens, which become float16 fragments. K is split for so many CTAs, and
# not at all up to so many channels: as sm_80 on an H200, 8192 x 1024, 64 tokens 11.7 us and in two
# parts 15.5, 128 tokens 16.4 and 22.7. The narrowest tile wins where rows of the weight are few or
# wider tiles leave SMs without two CTAs: 768 x 7168, 64 tokens, 14.5 us for 16.3.
_FRAGMENT_CTAS, _WHOLE_K, _FEW_ROWS = 256, 2048, 1536
_NARROW = TileConfig(64, 32, 128, 4, 3)
_SQUARE = TileConfig(64, 64, 128, 4, 3)
_TALL = TileConfig(128, 64, 128, 4, 2)
# Intel: rows of a tile, and channels of a step up to which its 4 warps do not spill: V4.1's FP8 in
# blocks of 32 takes 43 to 47 instructions for 1,000 multiply-adds, but 82 to 87 with 8 warps (built
# for Arc B); MXFP4 spills 11 registers on Max.
_INTEL_ROWS, _INTEL_SHORT_STEP = 64, 32

# CPU. Most tokens for which weights are decoded in registers instead of in memory. 4096 x 4096 on
# one core, ms by numba and by torch: 64 tokens of FP8 23 and 29, of MXFP4 15 and 28; 128 tokens of
# FP8 45 and 37, of MXFP4 34 and 39.
MAX_NUMBA_TOKENS = 64

# Divisors that sizes must have: rows, of every kernel's smallest tile on Hopper; channels of a K
# block and rows of a tile, of bfloat16; tokens (4 would do) and channels, of cuBLAS, which reads
# scales as 16 bytes; channels, of two or four K blocks in flight.
ROW_STEP = 64
BF16_BLOCK_K, BF16_ROW_STEP = 64, 16
VENDOR_TOKEN_STEP, VENDOR_CHANNEL_STEP = 16, 4 * FP8_BLOCK
WGMMA_CHANNEL_STEP = 4 * FP8_BLOCK
NUMBA_CHANNEL_STEP = 32


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """Sizes of the products of one launch, each [tokens, k] by [n, k]^T.

    Attributes:
        tokens: number of rows of activations.
        n: number of rows of a group's weight.
        k: number of channels.
        groups: number of products, one for each group.
    """

    tokens: int
    n: int
    k: int
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """Kernel, tile and pipeline of a GEMM on Hopper.

    Attributes:
        kernel: name of the kernel: "warp_split_k" or "warp_split_n", which multiply float16, or
            "fp8_wgmma", which multiplies e4m3.
        block_n: rows of the weight in a tile.
        block_m: tokens in a tile.
        warps: number of warps that multiply.
        stages: number of stages of the ring.
        ctas_per_sm: number of CTAs resident on an SM. With one, a CTA of the next kernel fits
            beside it and loads its weights early.
        registers: average number of registers of a thread.
        in_flight: number of instructions in flight, for "fp8_wgmma".
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
    """Choose the config of FP8 products with 1 to 128 tokens and a multiple of 64 rows.

    With a scale for 32 rows and channels, the kernel is "warp_split_k", for up to MAX_EXACT_TOKENS
    tokens.
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
    """Choose two CTAs an SM; with few tiles, smaller tiles whose K is shared by more warps."""
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
    """Choose a tile for scales of 32 rows and channels, at most 32 rows high."""
    if waves(32) < _MOST_OF_ONE:
        return Sm90Config("warp_split_k", 16, 32, 8, 3, 1, 104)
    return Sm90Config("warp_split_k", 32, 32, 4, 2, 2, 128)


def _wgmma_config(tokens: int, k_blocks: int, waves: Callable[[int], float]) -> Sm90Config:
    """Choose a tile for the FP8 instruction; for long K the ring fills shared memory."""
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
    """Choose the config of bfloat16 products with up to 32 tokens."""
    if tokens <= BF16_SMALL_BLOCK_M:
        return Sm90Config("warp_split_k", 16, 8, 8, 4, 2, 64)
    return Sm90Config("warp_split_k", 16, 32, 4, 4, 2, 104)


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Kernel, tile and K splits of a GEMM in Triton.

    Attributes:
        swap_ab: True if the weight's rows are rows of the matrix instruction
            (``triton_gemm_swap_ab``).
        operand: dtype of the matrix instruction's operands.
        tile: tile and pipeline of the product.
        split_k: number of channels in a split of K, a multiple of 128.
        block_diagonal: True if 128 channels of mxfp4 are one instruction (only with swap_ab).
        k_warps: number of warps that share a step's channels, a quant block each; 0 if they share
            the tile's rows (only with swap_ab).
        by_words: True to decode four e4m3 codes at a time (only without swap_ab).
        float16_x: True if activations become float16 fragments before the product, once for all of
            its tiles (only with by_words, and K a multiple of 128).
        scales_ahead: True to load scales ahead of their step, as operands are (only without
            swap_ab).
    """

    swap_ab: bool
    operand: torch.dtype
    tile: TileConfig
    split_k: int
    block_diagonal: bool = False
    k_warps: int = 0
    by_words: bool = False
    float16_x: bool = False
    scales_ahead: bool = False

    def splits(self, k: int) -> int:
        """Return the number of splits of ``k`` channels."""
        return max(1, cdiv(k, self.split_k))


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
    """Choose the config of a launch of products.

    Args:
        shape: sizes of the products.
        weight_format: format of the weight, "plain", "fp8", "mxfp4" or "nvfp4".
        target: architecture that they run on.
        x_dtype: dtype of the activations before they are quantised.
        weight_dtype: dtype of the weight's tensor.
        quantized: True if activations are e4m3.
        aligned: True if the weight starts at a multiple of 16 bytes, and its scales at one of 4.
        quant_block: number of rows and columns of an FP8 weight, and of channels of activations,
            that share a scale.
    """
    if quantized and aligned and _takes_k_warps(shape, weight_format, target, quant_block):
        return _k_warps_config(shape, target, quant_block)
    if quantized and aligned and _takes_swap_ab(shape, weight_format, target):
        return swap_ab_config(shape, weight_format, target)
    coded = quantized and aligned and weight_format == "fp8" and shape.k % 16 == 0
    by_words = coded and uses_mma_sync(target) and not target.dot_e4m3
    if by_words and shape.tokens > MAX_SWAP_AB_TOKENS and shape.k % FP8_BLOCK == 0:
        return _fragments_config(shape, target, quant_block)
    operand = operand_dtype(x_dtype, weight_format, weight_dtype, quantized, target)
    tile = choose_tile(shape.tokens, operand, target)
    if quantized or weight_format == "fp8":
        tile = within_quant_blocks(tile, quant_block)
    short = tile.block_m == _INTEL_ROWS and tile.block_k <= _INTEL_SHORT_STEP
    if target.intel and weight_format == "fp8" and short:
        tile = dataclasses.replace(tile, num_warps=4)
    return TritonConfig(
        False, operand, tile, channels_of_split(shape, tile, _CTAS), by_words=by_words
    )


def channels_of_split(shape: GemmShape, tile: TileConfig, ctas: int) -> int:
    """Return the channels of a split with which there are at most ``ctas`` CTAs, if possible."""
    splits = max(1, min(ctas // max(1, _tiles(shape, tile)), shape.k // _MIN_SPLIT))
    return cdiv(cdiv(max(1, shape.k), splits), FP8_BLOCK) * FP8_BLOCK


def _fragments_config(shape: GemmShape, target: Target, quant_block: int) -> TritonConfig:
    """Choose a tile for e4m3 codes of weights, and of activations that become fragments."""
    whole = shape.k <= _WHOLE_K
    tile = within_quant_blocks(_fragment_tile(shape, 2 * target.sm_count, whole), quant_block)
    ctas = 1 if whole else _FRAGMENT_CTAS
    return TritonConfig(
        False, torch.float16, tile, channels_of_split(shape, tile, ctas),
        by_words=True, float16_x=True, scales_ahead=True,
    )  # fmt: skip


def _fragment_tile(shape: GemmShape, many: int, whole: bool) -> TileConfig:
    """Choose the largest tile of which there are at least ``many``, unless K is split."""
    few = shape.groups * shape.n <= _FEW_ROWS
    if shape.tokens > 128 or (shape.tokens > 64 and _tiles(shape, _TALL) >= many):
        return _TALL
    if whole:
        return _SQUARE if _tiles(shape, _SQUARE) >= many else _NARROW
    if shape.tokens > 64:
        return _SQUARE if few else _TALL
    return _NARROW if few else _SQUARE


def _takes_k_warps(shape: GemmShape, weight_format: str, target: Target, quant_block: int) -> bool:
    """Return True for few tokens of FP8 where codes are decoded by bits for mma.sync."""
    known = weight_format == "fp8" and uses_mma_sync(target) and not target.dot_e4m3
    whole = shape.k % (2 * FP8_BLOCK) == 0 and shape.n % 16 == 0
    return known and whole and 1 <= shape.tokens <= MAX_SWAP_AB_TOKENS


def _k_warps_config(shape: GemmShape, target: Target, quant_block: int) -> TritonConfig:
    """Choose a tile whose channels are shared by warps, so that K is not split over CTAs."""
    rows, warps, stages, block_m = 16, 4, 3, 8 if shape.tokens <= 8 else 16
    waves = shape.groups * shape.n / 16 / target.sm_count
    if waves <= 1 or shape.k <= _VERY_SHORT_K:
        block_m, warps = 8, 8
    elif waves >= _MANY_WAVES and shape.n % 64 == 0:
        rows, warps, stages = (64, 2, 3) if shape.tokens <= 8 else (32, 2, 4)
    elif shape.tokens <= 8:
        warps = 8 if shape.k >= _VERY_LONG_K else 4
    elif shape.tokens <= 16 and shape.n % 32 == 0:
        rows = 32
    if shape.tokens > 16 and block_m == 16:
        block_m = 32
    warps = math.gcd(shape.k // quant_block, warps)
    tile = TileConfig(block_m, rows, quant_block * warps, warps, stages)
    return TritonConfig(True, torch.float16, tile, shape.k, k_warps=warps)


def _takes_swap_ab(shape: GemmShape, weight_format: str, target: Target) -> bool:
    """Return True for few tokens of a packed format; RDNA and Arc A lack the registers."""
    least = _SWAP_AB_TOKENS.get(weight_format, MAX_SWAP_AB_TOKENS + 1)
    whole = shape.k % FP8_BLOCK == 0 and shape.n % ROW_STEP == 0
    return (
        whole
        and least <= shape.tokens <= MAX_SWAP_AB_TOKENS
        and not (target.narrow or target.arc_a)
    )


def swap_ab_config(shape: GemmShape, weight_format: str, target: Target) -> TritonConfig:
    """Choose a swap-AB tile; operands are float16, whose products are exact on every target."""
    wgmma = uses_wgmma(target) and weight_format == "mxfp4"
    # Only some targets have registers for more sums of decoded rows.
    wide = shape.tokens > 16 and (weight_format == "fp8" or wgmma)
    # On Intel, 4 warps of the wide tile spill 94 registers, 8 warps none (docs/intel.md).
    warps = 8 if wide and target.backend == "xpu" else 4
    tile = TileConfig(32 if wide else 16, ROW_STEP, FP8_BLOCK, warps, 4)
    ctas = _SWAP_AB_CTAS_PER_SM * target.sm_count
    splits = min(cdiv(ctas, max(1, _tiles(shape, tile))), shape.k // _SWAP_AB_MIN_SPLIT)
    split = cdiv(shape.k // FP8_BLOCK, max(1, splits)) * FP8_BLOCK
    return TritonConfig(True, torch.float16, tile, split, wgmma and not wide)


def _tiles(shape: GemmShape, tile: TileConfig) -> int:
    return shape.groups * cdiv(shape.n, tile.block_n) * cdiv(shape.tokens, tile.block_m)


def plain_backend(backend: str | None) -> str | None:
    """Return the backend for plain products in a model whose layers run on ``backend``.

    Triton has no kernel for them, so models that run on Triton leave the choice automatic.
    """
    return None if backend == "triton" else backend
