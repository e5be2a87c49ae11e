"""Configs of the compressor's kernels, and how much torch gathers at a time.

Measured on an H200; docs/performance/elementwise.md has the rows, under "The compressor".
"""

from __future__ import annotations

import dataclasses

from anymla.ops.device import Target

# States of a tile of a short window: enough loads in flight for a CTA of one warp.
_SHORT_TILE = 16
# From this many states on (ratio 128: 256 KiB of values, and as many of scores), CTAs pool
# _POOL_CHANNELS each in tiles of _LONG_TILE states, and another kernel stores the entries.
_LONG_WINDOW, _LONG_TILE, _POOL_CHANNELS = 64, 128, 32
# Up to here tokens are of different requests, any of which may close a window: a CTA each.
MOST_CTA_PER_TOKEN = 256
# Above it, tokens of a CTA that looks for those that close a long window; 64 or 128: same time.
_MOST_BLOCK_T = 32
# Of more tokens, CTAs of one warp have no PDL: three in four find nothing to do, and waiting costs
# each: index entries of 32,768 tokens take 42 us with it and 27 without.
MOST_PDL = 8192
# Values and scores of a tile of the kernel that saves states.
_SAVE_TILE = 2048

# State elements that torch gathers at a time: 4 MiB of float32 on the host, 256 MiB elsewhere.
HOST_ELEMENTS = 1 << 20
DEVICE_ELEMENTS = 1 << 26
# Up to so many tokens the host saves one by one.
FEW_HOST_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Window:
    """What an entry is compressed from, and how its states lie in pages; a constexpr of kernels.

    Attributes:
        ratio: tokens of a window.
        overlap: whether an entry also pools the window before.
        channels: D, of an entry.
        page_size: tokens of a page of states.
    """

    ratio: int
    overlap: bool
    channels: int
    page_size: int

    @property
    def states(self) -> int:
        """Positions whose states an entry pools."""
        return 2 * self.ratio if self.overlap else self.ratio

    @property
    def width(self) -> int:
        """W, channels of a state's values, or of its scores: of the next window, then its own."""
        return 2 * self.channels if self.overlap else self.channels


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """Tiles of the kernels that compress.

    Attributes:
        block_states: states of a tile.
        pool_channels: channels of a CTA of ``pool_kernel``; 0 where ``compress_kernel`` pools.
        block_t: tokens of a CTA.
        num_warps: of a CTA.
        pdl: whether the kernel that stores entries waits for the one before by PDL.
    """

    block_states: int
    pool_channels: int
    block_t: int
    num_warps: int
    pdl: bool


def choose_compress_config(tokens: int, window: Window, target: Target) -> CompressConfig:
    """Tiles of 32 scores and as many values a thread, if the window has so many."""
    interpreted = target.backend == "cpu"  # which takes its time for every CTA
    few = tokens <= (2 if interpreted else MOST_CTA_PER_TOKEN)
    long = window.states >= _LONG_WINDOW
    # Where every fourth token closes a window, looking for them takes longer than more CTAs.
    blocks = not few and (long or interpreted)
    block_t = min(_MOST_BLOCK_T, _next_power_of_2(window.ratio)) if blocks else 1
    # The order of sums must not depend on the number of tokens, so this does not either.
    block_states = min(_LONG_TILE if long else _SHORT_TILE, _next_power_of_2(window.states))
    apart = long and not (interpreted and few)
    width = window.channels
    if apart:
        width = window.channels // 2 if interpreted else _POOL_CHANNELS
    warps = min(8, max(1, block_states * width // (32 * target.warp_size)))
    if target.backend == "xpu":
        # Intel's compiler has no layout for the Hadamard transform of a row in fewer threads.
        warps = max(warps, min(4, width // target.warp_size))
    if target.intel and apart:
        warps = 8  # 4 spill 3 registers on Max
    if target.arc_a:
        warps = 2 * warps
    pdl = tokens <= MOST_PDL or warps > 1
    return CompressConfig(block_states, width if apart else 0, block_t, warps, pdl)


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """States of a tile of the kernel that only pools and norms; warps."""

    block_states: int
    num_warps: int


def choose_norm_config(window: Window, target: Target) -> NormConfig:
    """Tiles of a short window, whatever its length: 32 scores and as many values a thread."""
    block_states = min(_SHORT_TILE, _next_power_of_2(window.states))
    warps = min(8, max(1, block_states * window.channels // (32 * target.warp_size)))
    return NormConfig(block_states, 2 * warps if target.arc_a else warps)


@dataclasses.dataclass(frozen=True)
class SaveConfig:
    """Tokens and channels of a tile of the kernel that saves states; warps."""

    block_t: int
    block_w: int
    num_warps: int


def choose_save_config(width: int, target: Target) -> SaveConfig:
    """Sixteen values and sixteen scores a thread; a wider row gets more threads."""
    block_w = _next_power_of_2(width)
    warps = max(_SAVE_TILE, block_w) // (16 * target.warp_size)
    return SaveConfig(max(1, _SAVE_TILE // block_w), block_w, min(16, warps))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
