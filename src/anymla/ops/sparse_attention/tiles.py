"""Tiles and splits of the Triton attention kernels, as a function of shapes and the machine."""

from __future__ import annotations

import dataclasses

from anymla.ops._triton import Target

MODES = ("float16", "bfloat16", "float32")
_KIB = 1024


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a program computes.

    Attributes:
        heads: heads of a program, a power of two of at least 16.
        keys: listed rows a step, a power of two of at least 16.
        keys_first: products are rows x heads instead of heads x rows.
        warps: of a program.
        stages: depth of the pipeline of row loads; 1 is none.
        resident: programs that a multiprocessor holds, for choosing splits.
    """

    heads: int
    keys: int
    keys_first: bool
    warps: int
    stages: int
    resident: int = 1


def tile(heads: int, mode: str, target: Target, *, many: bool) -> Tile:
    """The tile for a call.

    Args:
        heads: query heads H.
        mode: one of MODES, the type of the products' operands.
        target: the machine.
        many: there are programs enough to fill it without splitting a token's list.
    """
    few = 16 if heads <= 16 else 32
    if mode == "float32" or target.backend == "cpu":
        return Tile(16, 32, False, 4, 1)
    if target.name == "sm_90" or target.shared_bytes >= 200 * _KIB:
        if heads > 32:
            return Tile(64, 64, False, 8, 1)
        return Tile(few, 64, True, 4, 1, resident=2)
    if target.backend == "cuda":
        return Tile(few, 32, False, 4, 1, resident=2)
    return Tile(16, 16, False, 4, 1, resident=2)


def split_count(programs: int, keys: int, tile: Tile, multiprocessors: int) -> int:
    """How many programs share a token's list.

    Args:
        programs: tokens x blocks of heads.
        keys: columns of the lists of a token.
        tile: of the call.
        multiprocessors: of the device.

    Returns:
        At least 1, at most one for every step.
    """
    steps = max(1, -(-keys // tile.keys))
    room = multiprocessors * tile.resident // max(programs, 1)
    if room <= 1:
        return 1
    # Equal shares: more splits than that only add empty ones.
    return -(-steps // -(-steps // min(room, steps)))
