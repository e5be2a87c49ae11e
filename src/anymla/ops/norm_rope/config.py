"""Choices of tiles for the kernels that norm and rotate rows.

Every row is read and written once, so a CTA has whole rows and accesses 16 bytes at a time. Timed
on an H200; docs/performance/elementwise.md has the rows named here.
"""

from __future__ import annotations

import dataclasses

import triton

from anymla.ops.device import Target

# Channels per tile of several rows, and channels per thread, with the rows that were timed:
# "RMSNorm 4096", "norms of latent (with codes) and KV".
_NORM_TILE, _NORM_PER_THREAD = 4096, 32
# The same, timed on "RoPE of 64 heads".
_ROPE_TILE, _ROPE_PER_THREAD = 2048, 16
# The same for tiles of heads, timed on "norm, RoPE, insert"; cache rows have the tiles of
# ``kv_cache.config``.
_HEADS_TILE, _HEADS_PER_THREAD = 4096, 32
_KV_TILE = 2048
# Bounds for very short and very long rows, which no model has.
_MAX_ROWS, _MAX_WARPS = 64, 16


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Tile of a CTA that takes whole rows; a constexpr of the kernels.

    Attributes:
        width: number of channels of a row.
        padded: number of channels of the tile, a power of two.
        rows: number of rows of the tile.
        num_warps: number of warps of the CTA.
    """

    width: int
    padded: int
    rows: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class InsertConfig:
    """Tiles of the two kinds of CTAs that prepare a step's queries and cache rows.

    Attributes:
        heads: number of one token's heads in a CTA for queries.
        rows: number of tokens in a CTA for key-value rows.
        num_warps: number of warps of either CTA.
    """

    heads: int
    rows: int
    num_warps: int


def choose_norm_config(width: int, target: Target) -> RowsConfig:
    """Choose the tile for norms of rows of ``width`` channels."""
    per_thread = _NORM_PER_THREAD // 2 if target.intel else _NORM_PER_THREAD
    return _rows_config(width, target, _NORM_TILE, per_thread)


def choose_rope_config(width: int, target: Target) -> RowsConfig:
    """Choose the tile for rotation of heads of ``width`` channels."""
    return _rows_config(width, target, _ROPE_TILE, _ROPE_PER_THREAD)


def choose_insert_config(heads: int, channels: int, target: Target) -> InsertConfig:
    """Choose the tiles for tokens of ``heads`` heads, and rows of ``channels`` channels."""
    together = max(1, min(_HEADS_TILE // channels, triton.next_power_of_2(heads)))
    # On Arc A, V4.1's rows spill 87 registers with as many channels a thread as elsewhere.
    per_thread = _HEADS_PER_THREAD // 2 if target.arc_a else _HEADS_PER_THREAD
    warps = _HEADS_TILE // (per_thread * target.warp_size)
    return InsertConfig(together, max(1, _KV_TILE // channels), warps)


def _rows_config(width: int, target: Target, tile: int, per_thread: int) -> RowsConfig:
    """Choose a tile of whole rows; a row wider than the tile gets more threads."""
    padded = triton.next_power_of_2(width)
    warps = max(tile, padded) // (per_thread * target.warp_size)
    rows = min(_MAX_ROWS, max(1, tile // padded))
    return RowsConfig(width, padded, rows, min(_MAX_WARPS, warps))
