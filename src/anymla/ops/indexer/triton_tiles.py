"""Tiles of index scores: how many keys and rows a program takes, and how programs share a row."""

from __future__ import annotations

import dataclasses

import triton

from anymla.ops.device import Target

_PROGRAMS = 1024
_MOST_TILES = 64
_ROOMY = 128 * 1024
_MUCH_TO_READ = 1 << 21


@dataclasses.dataclass(frozen=True)
class Tile:
    """One step of a program.

    Attributes:
        rows: rows of queries.
        heads: heads of a row, padded.
        width: channels, padded.
        part: channels that are multiplied at a time.
        keys: keys.
        warps: warps of the program.
        stages: tiles of keys in flight.
    """

    rows: int
    heads: int
    width: int
    part: int
    keys: int
    warps: int
    stages: int


def tile_of(rows: int, heads: int, width: int, math: str, target: Target) -> Tile:
    """The tile for rows that share their keys.

    Heads are the wide dimension of the product: a row of 64 heads against 128 keys, or two rows
    against 64 keys, fill a warp group's accumulators.
    """
    padded_heads = triton.next_power_of_2(heads)
    narrow = target.narrow
    columns = 64 if math == "fp32" or rows == 1 or narrow else 128
    together = 1 if rows == 1 else max(1, columns // padded_heads)
    padded_heads = max(padded_heads, 16 // together)
    columns = together * padded_heads
    padded_width = max(triton.next_power_of_2(width), 32)
    if math == "fp32":
        # Without matrix instructions a thread keeps its operands' channels in registers.
        return Tile(together, padded_heads, padded_width, 32, 32, 4, 1)
    # Accumulators, and bytes of a tile of keys.
    keys = max(16, min((2048 if narrow else 8192) // columns, 128 * 128 // padded_width, 128))
    stages = 4 if target.shared_bytes >= _ROOMY else 2
    warps = 8 if narrow else 4
    return Tile(together, padded_heads, padded_width, padded_width, keys, warps, stages)


def paged_tile_of(
    rows: int, heads: int, width: int, math: str, target: Target, *, keys: int = 0
) -> Tile:
    """The tile for keys that are found through a block table; ``keys`` of all requests together.

    Page ids are copied ahead as well, two loads deep: of four stages one tile of keys is in flight,
    of five two. A row alone has large tiles, of which fewer programs then fit, so that it pays only
    where there is much to read (H200: 152 against 158 us at 4 million keys, 47 against 45 at one).
    """
    tile = tile_of(rows, heads, width, math, target)
    deeper = tile.stages == 4 and target.backend == "cuda"
    deeper &= tile.rows > 1 or keys >= _MUCH_TO_READ
    return dataclasses.replace(tile, stages=5) if deeper else tile


def span_of(groups: int, keys: int, tile: Tile) -> int:
    """Keys that a program scores, of ``keys``, if there are ``groups`` groups of rows."""
    tiles = triton.cdiv(max(keys, 1), tile.keys)
    parts = max(triton.cdiv(_PROGRAMS, max(groups, 1)), triton.cdiv(tiles, _MOST_TILES))
    return triton.cdiv(tiles, min(parts, tiles)) * tile.keys
