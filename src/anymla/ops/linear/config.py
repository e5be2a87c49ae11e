"""Configs of the GEMMs on Hopper: kernel and tile for a shape, and the sizes they take.

Measured on an H200 (docs/performance/linear.md): 1 to 128 tokens times the weights of ``shapes``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

# Tiles over SMs: nearly two waves, not so nearly, more than one, nearly one, and most
# of one.
_TWO_WAVES, _HALF_OF_TWO, _MORE_THAN_ONE, _ONE_WAVE, _MOST_OF_ONE = 1.8, 1.6, 1.2, 0.9, 0.65
# Up to here a tile's sums are soon exchanged, which warps with rows of their own need not do; from
# there on what a deep ring gains is more than what the next kernel does, which does not fit beside
# it then; with more than 64 tokens sooner.
_SHORT_K, _LONG_K, _LONG_K_OF_MANY_TOKENS = 16, 48, 32

# Tokens that the kernels take; above MOST_EXACT products are those of the FP8 instruction.
MOST_TOKENS, MOST_EXACT = 128, 32
# Rows of the smallest tiles that every kernel has.
ROW_STEP = 64
# bfloat16: channels of 128 bytes, rows of a tile, tokens of the small tile, and the rows up to
# which it has been measured.
BF16_BLOCK_K, BF16_ROW_STEP, BF16_FEW, MOST_BF16_ROWS = 64, 16, 8, 8192


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """A kernel and its tile.

    Attributes:
        kernel: "warp_split_k" and "warp_split_n", which multiply float16, or "fp8_wgmma", e4m3.
        block_n: rows of the weight.
        block_m: tokens.
        warps: that multiply.
        stages: of the ring.
        ctas_per_sm: resident at a time. With one, a CTA of the next kernel fits beside it and loads
            its weights.
        registers: of a thread on average.
        in_flight: products in flight ("fp8_wgmma").
    """

    kernel: str
    block_n: int
    block_m: int
    warps: int
    stages: int
    ctas_per_sm: int
    registers: int
    in_flight: int = 1


def sm90_config(tokens: int, groups: int, n: int, k_blocks: int, sm_count: int) -> Sm90Config:
    """The config for so many tokens.

    Args:
        tokens: 1 to 128.
        groups: products of one launch.
        n: rows of a group's weight, a multiple of 64.
        k_blocks: its channels over 128.
        sm_count: of the device.
    """

    def waves(block_n: int) -> float:
        return groups * n / block_n / sm_count if n % block_n == 0 else 0.0

    chosen = (_mma_config if tokens <= 32 else _wgmma_config)(tokens, k_blocks, waves)
    fewest = 0.5 if tokens <= 32 else _MOST_OF_ONE
    while chosen.block_n > 16 and waves(chosen.block_n) < fewest:
        chosen = dataclasses.replace(chosen, block_n=chosen.block_n // 2)
    return chosen


def _mma_config(tokens: int, k_blocks: int, waves: Callable[[int], float]) -> Sm90Config:
    short = k_blocks <= _SHORT_K and waves(128) > _TWO_WAVES
    if tokens <= 8:
        if short and k_blocks % 8:
            return Sm90Config("warp_split_k", 64, 8, 4, 3, 1, 104)
        if _MORE_THAN_ONE < waves(32) < _HALF_OF_TWO:
            return Sm90Config("warp_split_k", 16, 8, 8, 4, 1, 64)
        return Sm90Config("warp_split_k", 32, 8, 8, 2, 1, 64)
    if tokens <= 16:
        if short:
            return Sm90Config("warp_split_k", 64, 16, 4, 3, 1, 128)
        return Sm90Config("warp_split_k", 32, 16, 8, 2, 1, 80)
    if short:
        return Sm90Config("warp_split_n", 128, 32, 4, 2, 2, 96)
    if waves(32) > _MORE_THAN_ONE:
        return Sm90Config("warp_split_k", 32, 32, 4, 3, 2, 104)
    return Sm90Config("warp_split_k", 32, 32, 8, 2, 1, 128)


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


def sm90_bf16_config(tokens: int) -> Sm90Config:
    """For bfloat16 products of up to 32 tokens."""
    if tokens <= 8:
        return Sm90Config("warp_split_k", 16, 8, 8, 4, 2, 64)
    return Sm90Config("warp_split_k", 16, 32, 4, 4, 2, 104)


def plain_backend(backend: str | None) -> str | None:
    """The backend of plain products in a model whose layers run on ``backend``.

    Triton has no kernel for them: a model that runs on Triton leaves them to the automatic choice.
    """
    return None if backend == "triton" else backend
