"""Choices of the compressor's kernels, and how much torch gathers at a time.

Measured on an H200; docs/performance/elementwise.md has the results, under "The compressor".
"""

from __future__ import annotations

import dataclasses

from anymla.ops._sizes import next_power_of_2
from anymla.ops.device import Target

# States in a tile of a short window; enough loads in flight for a CTA of one warp.
_SHORT_TILE = 16
# Fewest states of a long window (ratio 128: 256 KiB of values, and as many of scores). Its CTAs
# pool _POOL_CHANNELS channels each in tiles of _LONG_TILE states, and another kernel stores
# entries.
_LONG_WINDOW, _LONG_TILE, _POOL_CHANNELS = 64, 128, 32
# Largest number of tokens for which each has its own CTA: they belong to different requests, and
# any may close a window.
MOST_CTA_PER_TOKEN = 256
# With more tokens, how many one CTA searches for those that close a long window; 64 or 128 take the
# same time.
_MOST_BLOCK_T = 32
# Largest number of tokens for which CTAs of one warp use PDL: three in four find nothing to do, and
# each wait costs time. Index entries of 32,768 tokens take 42 us with PDL and 27 without.
MOST_PDL = 8192
# Values and scores in a tile of the kernel that saves states.
_SAVE_TILE = 2048

# State elements that torch gathers at a time: 4 MiB of float32 on the host, 256 MiB elsewhere.
HOST_ELEMENTS = 1 << 20
DEVICE_ELEMENTS = 1 << 26
# Largest number of tokens that the host saves one by one.
FEW_HOST_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Window:
    """Window that an entry is compressed from, and its states' pages; a constexpr of kernels.

    Attributes:
        ratio: number of tokens in a window.
        overlap: True if an entry also pools the window before.
        channels: number of channels D of an entry.
        page_size: number of tokens in a page of states.
    """

    ratio: int
    overlap: bool
    channels: int
    page_size: int

    @property
    def states(self) -> int:
        """Number of positions whose states an entry pools."""
        return 2 * self.ratio if self.overlap else self.ratio

    @property
    def width(self) -> int:
        """Width W of a state's values, and of its scores: with overlap for two windows."""
        return 2 * self.channels if self.overlap else self.channels


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """Tile sizes and launch options of the kernels that compress.

    Attributes:
        block_states: number of states in a tile.
        pool_channels: channels of a ``pool_kernel`` CTA; 0 if ``compress_kernel`` pools.
        block_t: number of tokens that a CTA searches.
        num_warps: number of warps of a CTA.
        pdl: True if the kernel that stores entries waits for its predecessor by PDL.
    """

    block_states: int
    pool_channels: int
    block_t: int
    num_warps: int
    pdl: bool


def choose_compress_config(tokens: int, window: Window, target: Target) -> CompressConfig:
    """Choose tiles of 32 scores and 32 values a thread, if the window has as many."""
    interpreted = target.backend == "cpu"  # whose time grows with the number of CTAs
    few = tokens <= (2 if interpreted else MOST_CTA_PER_TOKEN)
    long = window.states >= _LONG_WINDOW
    # If every fourth token closes a window, searching for them costs more than a CTA for each
    # token.
    blocks = not few and (long or interpreted)
    block_t = min(_MOST_BLOCK_T, next_power_of_2(window.ratio)) if blocks else 1
    # The order of sums must not depend on the number of tokens, so block_states does not either.
    block_states = min(_LONG_TILE if long else _SHORT_TILE, next_power_of_2(window.states))
    apart = long and not (interpreted and few)
    width = window.channels
    if apart:
        width = window.channels // 2 if interpreted else _POOL_CHANNELS
    warps = min(8, max(1, block_states * width // (32 * target.warp_size)))
    if target.backend == "xpu":
        # Intel's compiler has no layout for the Hadamard transform of a row in fewer threads.
        warps = max(warps, min(4, width // target.warp_size))
    if target.intel and apart:
        warps = 8  # 4 warps spill 3 registers on Max
    if target.arc_a:
        warps = 2 * warps
    pdl = tokens <= MOST_PDL or warps > 1
    return CompressConfig(block_states, width if apart else 0, block_t, warps, pdl)


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """States in a tile, and warps, of the kernel that only pools and norms."""

    block_states: int
    num_warps: int


def choose_norm_config(window: Window, target: Target) -> NormConfig:
    """Choose a short window's tile for windows of any length: 32 scores and values a thread."""
    block_states = min(_SHORT_TILE, next_power_of_2(window.states))
    warps = min(8, max(1, block_states * window.channels // (32 * target.warp_size)))
    return NormConfig(block_states, 2 * warps if target.arc_a else warps)


@dataclasses.dataclass(frozen=True)
class SaveConfig:
    """Tokens and channels in a tile, and warps, of the kernel that saves states."""

    block_t: int
    block_w: int
    num_warps: int


def choose_save_config(width: int, target: Target) -> SaveConfig:
    """Choose tiles of sixteen values and sixteen scores a thread; wider rows get more threads."""
    block_w = next_power_of_2(width)
    warps = max(_SAVE_TILE, block_w) // (16 * target.warp_size)
    return SaveConfig(max(1, _SAVE_TILE // block_w), block_w, min(16, warps))
