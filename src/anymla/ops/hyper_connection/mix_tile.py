"""Tiles of the kernel that mixes, and how it meets the kernel after it."""

from __future__ import annotations

import dataclasses

import torch

from anymla.ops.device import Target
from anymla.ops.pdl import target_has_pdl

ROWS = 16
FEW_TOKENS = 128
# Channels of a slice: of one block of tokens, of some, of many. One has few programs otherwise.
SLICES = (32, 128, 512)
_CHANNELS = 32
# From here on a program finds the gates of several tokens.
MANY_TOKENS = 513
# From more tokens on, the programs of two kernels have no room beside each other: those of the next
# one, let in at once, would be stacked where some is left.
TOGETHER = 64


@dataclasses.dataclass(frozen=True)
class MixTile:
    """Tokens, channels of a chunk and chunks of a program; warps.

    Attributes:
        direct: four streams are multiplied from the registers that they were loaded to.
    """

    rows: int
    columns: int
    chunks: int
    num_warps: int
    direct: bool = False


def mix_tile(tokens: int, d: int, dtype: torch.dtype, target: Target) -> MixTile:
    """Tiles for a call; of the number of tokens only its order of magnitude matters.

    Only bfloat16 streams are multiplied as they are; other dtypes need more registers a channel.
    """
    if dtype == torch.bfloat16 and target.backend == "cuda" and target.shared_bytes > 200 << 10:
        return _large_tile(tokens, d)
    columns = min(_CHANNELS if dtype == torch.bfloat16 else _CHANNELS // 2, _width(d))
    width = SLICES[(tokens > ROWS) + (tokens > FEW_TOKENS)]
    return MixTile(ROWS, columns, min(width // columns, -(-d // columns)), 4)


def _large_tile(tokens: int, d: int) -> MixTile:
    """Measured on an H200, slices of one chunk while that leaves every program a place."""
    columns = min(_CHANNELS, _width(d))
    if tokens <= TOGETHER:
        return MixTile(ROWS, columns, 1, 8 if ROWS < tokens <= 2 * ROWS else 4)
    if tokens <= FEW_TOKENS and columns == _CHANNELS:
        return MixTile(4 * ROWS, columns, 1, 4, direct=True)
    chunks = 1 if tokens <= FEW_TOKENS else min(4, -(-d // columns))
    return MixTile(4 * ROWS, columns, chunks, 8)


def _width(d: int) -> int:
    """A power of two, d or the next one, at least what a matrix instruction takes."""
    return max(16, 1 << (d - 1).bit_length())


def late(tokens: int, target: Target) -> bool:
    """Whether the kernels of these tokens let the next one in late."""
    return target_has_pdl(target) and TOGETHER < tokens < MANY_TOKENS


def joined(n: int, target: Target) -> bool:
    """Whether the streams are one operand, for which RDNA has too few registers."""
    return n == 4 and not target.narrow
