"""Choices of the hyper-connection kernels: tiles, slices, and when dependents are launched.

Thresholds were measured on an H200; docs/performance/elementwise.md has the results.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops._sizes import next_power_of_2
from anymla.ops.device import Target, target_of
from anymla.ops.pdl import target_has_pdl

ROWS = 16
# Largest number of tokens with slices narrower than the widest and one chunk of channels in a large
# tile.
MOST_NARROW_TOKENS = 128
# Channels of a slice for one block of tokens, for a few, for many. Few blocks need many slices.
SLICES = (32, 128, 512)
_CHANNELS = 32
# Fewest tokens for which a CTA computes the gates of several tokens.
MANY_TOKENS = 513
# Largest number of tokens for which the CTAs of two kernels fit beside each other. With more, CTAs
# of a kernel that PDL launches at once would be stacked on the SMs that have space left.
TOGETHER = 64
# Number of tokens whose gates one CTA computes, if there are many.
TOGETHER_MANY = 128
# Fewest tokens that fill the larger tiles of ``triton_mix_many_tokens``.
MORE_TOKENS = 2048
_WIDEST = 8192
# Slices of a token that are summed at a time, for few tokens and for many.
_FEW_LANES, _MANY_LANES = 128, 32
# Channels of an expanding tile: each thread moves 16 bytes of each 16-bit tensor.
_EXPAND_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Tile of ``triton_mix``: tokens, channels of a chunk, chunks of a CTA, and warps.

    Attributes:
        direct: True to multiply four streams from the registers that they were loaded to.
    """

    rows: int
    columns: int
    chunks: int
    num_warps: int
    direct: bool = False


def choose_mix_config(tokens: int, d: int, dtype: torch.dtype, target: Target) -> MixConfig:
    """Choose the tile of a call; only the order of magnitude of ``tokens`` matters.

    Only bfloat16 streams are multiplied unconverted; other dtypes need more registers a channel.
    """
    if dtype == torch.bfloat16 and target.backend == "cuda" and target.shared_bytes > 200 << 10:
        return _large_tile(tokens, d)
    joined = dtype == torch.bfloat16 and not target.arc_a
    columns = min(_CHANNELS if joined else _CHANNELS // 2, _width(d))
    # As sm_80 on an H200, 64 tokens in slices of 32 channels take 8.9 us, and in those of 128 9.8.
    few = TOGETHER if target.backend == "cuda" else ROWS
    width = SLICES[(tokens > few) + (tokens > MOST_NARROW_TOKENS)]
    warps = 16 if target.arc_a else 4
    return MixConfig(ROWS, columns, min(width // columns, -(-d // columns)), warps)


def _large_tile(tokens: int, d: int) -> MixConfig:
    """Choose a tile for many tokens, with slices of one chunk as long as every CTA gets an SM."""
    columns = min(_CHANNELS, _width(d))
    if tokens <= TOGETHER:
        return MixConfig(ROWS, columns, 1, 8 if ROWS < tokens <= 2 * ROWS else 4)
    if tokens <= MOST_NARROW_TOKENS and columns == _CHANNELS:
        return MixConfig(4 * ROWS, columns, 1, 4, direct=True)
    chunks = 1 if tokens <= MOST_NARROW_TOKENS else min(4, -(-d // columns))
    return MixConfig(4 * ROWS, columns, chunks, 8)


def _width(d: int) -> int:
    """Return the power of two from ``d`` on, at least the channels of a matrix instruction."""
    return max(16, next_power_of_2(d))


def dependents_late(tokens: int, target: Target) -> bool:
    """Return True if kernels of so many tokens launch dependents (PDL) only when they end."""
    return target_has_pdl(target) and TOGETHER < tokens < MANY_TOKENS


def joins_streams(n: int, dtype: torch.dtype, target: Target) -> bool:
    """Return True if all streams form one operand, for which registers must suffice.

    RDNA and Arc A have too few registers; Intel's other GPUs have enough for bfloat16 only: float16
    spills 44 and float32 114, one stream at a time 0.
    """
    fits = dtype == torch.bfloat16 and not target.arc_a if target.intel else not target.narrow
    return n == 4 and fits


@dataclasses.dataclass(frozen=True)
class ManyTokensConfig:
    """Tile of ``triton_mix_many_tokens``: tokens, channels, warps, stages, channels of a slice."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    slice: int


def choose_many_tokens_config(tokens: int, d: int, target: Target) -> ManyTokensConfig:
    """Choose a large tile, and as few slices as give every SM a CTA."""
    more = tokens >= MORE_TOKENS
    rows, columns, warps, stages = (128, 128, 8, 3) if more else (64, 64, 4, 4)
    slices = max(1, target.sm_count * rows // next_power_of_2(tokens))
    width = max(columns, next_power_of_2(-(-d // slices)))
    return ManyTokensConfig(rows, columns, warps, stages, min(width, 1024))


def takes_many_tokens(h: Tensor) -> bool:
    """Return True if ``triton_mix_many_tokens`` takes these streams instead of ``triton_mix``."""
    target = target_of(h.device)
    large = target.backend == "cuda" and target.shared_bytes > 200 << 10
    return large and h.dtype == torch.bfloat16 and h.shape[0] >= MANY_TOKENS


def collapse_columns(d: int, many: bool, target: Target) -> tuple[int, int]:
    """Return channels of a tile, and warps, of the collapsing kernel."""
    columns = min(_WIDEST, next_power_of_2(d))
    warps = 4 if columns <= 4096 and not many else 8
    if target.arc_a:
        return columns, 4 * warps
    return columns, 2 * warps if target.intel else warps


def collapse_lanes(slices: int, many: bool) -> int:
    """Return how many slices of a token the collapsing kernel sums at a time."""
    return min(_MANY_LANES if many else _FEW_LANES, next_power_of_2(slices))


@dataclasses.dataclass(frozen=True)
class ExpandConfig:
    """Tile of ``triton_expand``: tokens and channels."""

    rows: int
    columns: int


def choose_expand_config(d: int) -> ExpandConfig:
    """Choose a tile of one token's channels, or of several tokens if they are short."""
    columns = min(_EXPAND_ELEMENTS, next_power_of_2(d))
    return ExpandConfig(_EXPAND_ELEMENTS // columns, columns)


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tiles of the gradients' kernels.

    Attributes:
        expand_columns: channels that ``expand_backward_kernel`` takes at a time.
        expand_warps: warps of its CTA.
        collapse_columns: channels that ``collapse_backward_kernel`` takes at a time.
        collapse_warps: warps of its CTA.
        together: tokens whose gates a CTA of ``gates_backward_kernel`` differentiates.
        rows: tokens of a tile of ``streams_backward_kernel``.
        columns: channels of that tile, in each stream.
        num_warps: warps of its CTA.
        ctas: largest number of its CTAs for which tokens are split.
        alone: True if each of its CTAs differentiates one stream.
    """

    expand_columns: int = 256
    expand_warps: int = 1
    collapse_columns: int = 4096
    collapse_warps: int = 8
    together: int = 32
    rows: int = 16
    columns: int = 32
    num_warps: int = 4
    ctas: int = 1024
    alone: bool = False


def choose_backward_config(dtype: torch.dtype, target: Target) -> BackwardConfig:
    """Choose the tiles of the gradients for streams of a dtype on a target."""
    if target.arc_a:
        return BackwardConfig(
            expand_columns=128, expand_warps=4, collapse_columns=1024, collapse_warps=16,
            together=16, columns=16, num_warps=16, alone=True,
        )  # fmt: skip
    if target.intel:
        # As compiled for Max and Arc B, what has no products takes few values a thread, and these
        # products spill nothing; with 32 channels they spill 107 registers, with 4 warps those of
        # float32 54.
        return BackwardConfig(
            expand_columns=64, collapse_warps=16, columns=16,
            num_warps=8 if dtype == torch.float32 else 4,
        )  # fmt: skip
    # mma.sync holds the weights of all streams in registers, of which RDNA has the fewest; wgmma
    # reads them from shared memory.
    wgmma = target.name == "sm_90" and dtype == torch.bfloat16
    columns = 64 if wgmma else 16 if target.narrow else 32
    # RDNA spills 92 registers with two warps by Triton 3.7.1, and 130 with four.
    warps = 2 if target.narrow else 4
    return BackwardConfig(columns=columns, num_warps=warps)
