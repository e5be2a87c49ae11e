"""Tiles and splits of the Triton attention kernels, as a function of shapes and the machine."""

from __future__ import annotations

import dataclasses

from anymla.ops.device import Target

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
        once: see ``triton_rows.coded_tile``.
    """

    heads: int
    keys: int
    keys_first: bool
    warps: int
    stages: int = 1
    once: bool = True


# Measured on an H200 (FP8 rows, 128 + 512 slots): the fastest of some forty tiles each. Pipelines
# deeper than 1 and rows x heads lost everywhere.
_ONE_STEP = Tile(16, 32, False, 4)
_FEW_HEADS = Tile(16, 64, False, 8)
_HALF_HEADS = Tile(32, 64, False, 8)
_MANY_HEADS = Tile(64, 64, False, 8, once=False)


def tile(
    heads: int,
    keys: int,
    tokens: int | None,
    mode: str,
    target: Target,
    processors: int,
    channels: int = 512,
) -> Tile:
    """The tile for a call.

    Args:
        heads: query heads H.
        keys: columns of the lists of a token.
        tokens: T, or None for a tile that suits any number.
        mode: one of MODES, the type of the products' operands.
        target: the machine.
        processors: multiprocessors of the device.
        channels: of a row.
    """
    if target.backend == "cpu":
        return Tile(16, 32, False, 4)
    if target.name.startswith("gfx1"):
        return Tile(16, 16, False, 8)
    if mode == "float32" or target.shared_bytes < 64 * _KIB:
        return Tile(16, 16, False, 4)
    if target.backend != "cuda":
        return Tile(16, 32, False, 4)
    if target.name != "sm_90":
        # 32 heads and 32 rows of more than 512 channels are 104 KiB.
        fits = channels <= 512 or target.shared_bytes >= 128 * _KIB
        return Tile(32, 32, False, 8) if heads > 16 and fits else _ONE_STEP
    if tokens is not None:
        # Every step of every token has a multiprocessor of its own, or half of one.
        steps = tokens * -(-heads // _ONE_STEP.heads) * -(-keys // _ONE_STEP.keys)
        if steps <= processors * (2 if heads > 32 else 1):
            return _ONE_STEP
    if heads > 32:
        return _MANY_HEADS
    return _FEW_HEADS if heads <= 16 else _HALF_HEADS


def splits(programs: int, keys: int, tile: Tile, processors: int) -> int:
    """How many programs share a token's lists.

    Args:
        programs: tokens x blocks of heads.
        keys: columns of the lists of a token.
        tile: of the call.
        processors: multiprocessors of the device.

    Returns:
        At least 1, at most one for every step.
    """
    steps = max(1, -(-keys // tile.keys))
    room = min(processors // max(programs, 1), steps)
    if room <= 1:
        return 1
    # As few as leave the longest share as short.
    return -(-steps // -(-steps // room))


def invariant_splits(keys: int, tile: Tile) -> int:
    """How many programs share a token's lists in a batch-invariant call."""
    return splits(1, keys, tile, _INVARIANT_SPLITS)


_INVARIANT_SPLITS = 4
