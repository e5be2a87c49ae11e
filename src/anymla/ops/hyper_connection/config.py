"""Choices of the hyper-connection kernels: tiles, slices, and when dependents launch.

The thresholds were measured on an H200; docs/performance/elementwise.md has the rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.device import Target, target_of
from anymla.ops.pdl import target_has_pdl

ROWS = 16
# Up to here slices are not the widest, and a CTA of a large tile has one chunk of channels.
MOST_NARROW_TOKENS = 128
# Channels of a slice: of one block of tokens, of some, of many. One has few CTAs otherwise.
SLICES = (32, 128, 512)
_CHANNELS = 32
# From here on a CTA finds the gates of several tokens.
MANY_TOKENS = 513
# From more tokens on, the CTAs of two kernels do not fit beside each other: those of the next one,
# launched at once (PDL), would be stacked on the SMs that have space left.
TOGETHER = 64
# Of so many tokens one CTA finds the gates, where there are many.
TOGETHER_MANY = 128
# From here on tokens are enough for the larger tiles of ``triton_mix_many_tokens``.
MORE_TOKENS = 2048
_WIDEST = 8192
# Slices of a token that are summed at a time, of few tokens and of many.
_FEW_LANES, _MANY_LANES = 128, 32
# Channels of a tile that expands: 16 bytes a thread of each tensor for 16-bit streams.
_EXPAND_ELEMENTS = 1024


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Tokens, channels of a chunk and chunks of a CTA; warps.

    Attributes:
        direct: four streams are multiplied from the registers that they were loaded to.
    """

    rows: int
    columns: int
    chunks: int
    num_warps: int
    direct: bool = False


def choose_mix_config(tokens: int, d: int, dtype: torch.dtype, target: Target) -> MixConfig:
    """Tiles for a call; of the number of tokens only its order of magnitude matters.

    Only bfloat16 streams are multiplied as they are; other dtypes need more registers a channel.
    """
    if dtype == torch.bfloat16 and target.backend == "cuda" and target.shared_bytes > 200 << 10:
        return _large_tile(tokens, d)
    joined = dtype == torch.bfloat16 and not target.arc_a
    columns = min(_CHANNELS if joined else _CHANNELS // 2, _width(d))
    width = SLICES[(tokens > ROWS) + (tokens > MOST_NARROW_TOKENS)]
    warps = 16 if target.arc_a else 4
    return MixConfig(ROWS, columns, min(width // columns, -(-d // columns)), warps)


def _large_tile(tokens: int, d: int) -> MixConfig:
    """Measured on an H200, slices of one chunk while that leaves every CTA a place."""
    columns = min(_CHANNELS, _width(d))
    if tokens <= TOGETHER:
        return MixConfig(ROWS, columns, 1, 8 if ROWS < tokens <= 2 * ROWS else 4)
    if tokens <= MOST_NARROW_TOKENS and columns == _CHANNELS:
        return MixConfig(4 * ROWS, columns, 1, 4, direct=True)
    chunks = 1 if tokens <= MOST_NARROW_TOKENS else min(4, -(-d // columns))
    return MixConfig(4 * ROWS, columns, chunks, 8)


def _width(d: int) -> int:
    """A power of two, d or the next one, at least what a matrix instruction takes."""
    return max(16, next_power_of_2(d))


def dependents_late(tokens: int, target: Target) -> bool:
    """Whether the kernels of these tokens launch their dependents (PDL) only when they end."""
    return target_has_pdl(target) and TOGETHER < tokens < MANY_TOKENS


def joins_streams(n: int, dtype: torch.dtype, target: Target) -> bool:
    """Whether the streams are one operand, for which RDNA and Arc A have too few registers.

    Intel's others have them for bfloat16: float16 spills 44 and float32 114, one by one 0.
    """
    fits = dtype == torch.bfloat16 and not target.arc_a if target.intel else not target.narrow
    return n == 4 and fits


@dataclasses.dataclass(frozen=True)
class ManyTokensConfig:
    """Tokens and channels of a tile; warps; pipeline depth; channels of a slice."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    slice: int


def choose_many_tokens_config(tokens: int, d: int, target: Target) -> ManyTokensConfig:
    """Large tiles, and as few slices as leave a CTA to every SM."""
    more = tokens >= MORE_TOKENS
    rows, columns, warps, stages = (128, 128, 8, 3) if more else (64, 64, 4, 4)
    slices = max(1, target.sm_count * rows // next_power_of_2(tokens))
    width = max(columns, next_power_of_2(-(-d // slices)))
    return ManyTokensConfig(rows, columns, warps, stages, min(width, 1024))


def takes_many_tokens(h: Tensor) -> bool:
    """Whether these tokens are for ``triton_mix_many_tokens`` rather than ``triton_mix``."""
    target = target_of(h.device)
    large = target.backend == "cuda" and target.shared_bytes > 200 << 10
    return large and h.dtype == torch.bfloat16 and h.shape[0] >= MANY_TOKENS


def collapse_columns(d: int, many: bool, target: Target) -> tuple[int, int]:
    """Channels of a tile and warps of the collapsing kernel."""
    columns = min(_WIDEST, next_power_of_2(d))
    warps = 4 if columns <= 4096 and not many else 8
    if target.arc_a:
        return columns, 4 * warps
    return columns, 2 * warps if target.intel else warps


def collapse_lanes(slices: int, many: bool) -> int:
    """How many slices of a token the collapsing kernel sums at a time."""
    return min(_MANY_LANES if many else _FEW_LANES, next_power_of_2(slices))


@dataclasses.dataclass(frozen=True)
class ExpandConfig:
    """Tokens and channels of a tile."""

    rows: int
    columns: int


def choose_expand_config(d: int) -> ExpandConfig:
    """One token's channels, or several tokens where they are short."""
    columns = min(_EXPAND_ELEMENTS, next_power_of_2(d))
    return ExpandConfig(_EXPAND_ELEMENTS // columns, columns)
