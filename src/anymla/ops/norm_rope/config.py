"""Tiles of the kernels that norm and rotate rows.

Every row is read once and written once, so tiles are chosen for whole rows in one CTA and accesses
of 16 bytes. Timed on an H200; docs/performance/elementwise.md has the rows named here.
"""

from __future__ import annotations

import dataclasses

import triton

from anymla.ops.device import Target

# Channels of a tile of several rows, and channels of a thread.
#
# "RMSNorm 4096", "norms of latent (with codes) and KV".
_NORM_TILE, _NORM_PER_THREAD = 4096, 32
# "RoPE of 64 heads".
_ROPE_TILE, _ROPE_PER_THREAD = 2048, 16
# "norm, RoPE, insert": heads of a token; rows for the cache, as in ``kv_cache.config``.
_HEADS_TILE, _HEADS_PER_THREAD = 4096, 32
_KV_TILE = 2048
# Bounds that only shapes beyond the models' reach: very short rows, very long ones.
_MAX_ROWS, _MAX_WARPS = 64, 16


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Tile of a CTA that takes whole rows; a constexpr of the kernels.

    Attributes:
        width: channels of a row.
        padded: channels of the tile, a power of two.
        rows: of the tile.
        num_warps: of the CTA.
    """

    width: int
    padded: int
    rows: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class InsertConfig:
    """Tiles of the two kinds of CTAs that prepare a step's queries and cache rows.

    Attributes:
        heads: of one token, in a CTA of queries.
        rows: tokens, in a CTA of key-value rows.
        num_warps: of either.
    """

    heads: int
    rows: int
    num_warps: int


def choose_norm_config(width: int, target: Target) -> RowsConfig:
    """Rows of ``width`` that are normed."""
    per_thread = _NORM_PER_THREAD // 2 if target.intel else _NORM_PER_THREAD
    return _rows_config(width, target, _NORM_TILE, per_thread)


def choose_rope_config(width: int, target: Target) -> RowsConfig:
    """Heads of ``width`` that are rotated."""
    return _rows_config(width, target, _ROPE_TILE, _ROPE_PER_THREAD)


def choose_insert_config(heads: int, channels: int, target: Target) -> InsertConfig:
    """Tokens of so many heads, heads and rows of ``channels``."""
    together = max(1, min(_HEADS_TILE // channels, triton.next_power_of_2(heads)))
    # Arc A: rows of V4.1 spill 87 registers with as many channels a thread.
    per_thread = _HEADS_PER_THREAD // 2 if target.arc_a else _HEADS_PER_THREAD
    warps = _HEADS_TILE // (per_thread * target.warp_size)
    return InsertConfig(together, max(1, _KV_TILE // channels), warps)


def _rows_config(width: int, target: Target, tile: int, per_thread: int) -> RowsConfig:
    """A row wider than the tile gets more threads."""
    padded = triton.next_power_of_2(width)
    warps = max(tile, padded) // (per_thread * target.warp_size)
    rows = min(_MAX_ROWS, max(1, tile // padded))
    return RowsConfig(width, padded, rows, min(_MAX_WARPS, warps))
