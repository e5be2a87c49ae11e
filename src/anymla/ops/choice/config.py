"""Choices of tiles for the greedy choice's kernels."""

from __future__ import annotations

import dataclasses

from anymla.ops._sizes import next_power_of_2
from anymla.ops.device import Target

# Logits of a chunk without a low-rank term: 16 bytes of float32 for each thread.
_CHUNK = 2048
# With a low-rank term: logits of a chunk, and rows of x that share its weights.
_PRODUCT_CHUNK, _PRODUCT_ROWS = 128, 16
# For float32 products, which have no matrix instructions: logits of a chunk, and columns of their
# tiles. A thread has four sums, and operands of 64 columns stay in its registers.
_WIDE_CHUNK, _WIDE_K_TILE = 32, 64


@dataclasses.dataclass(frozen=True)
class ChoiceConfig:
    """Logits of a chunk, rows that share its weights, columns of a weight tile, and warps."""

    chunk: int
    rows: int
    k_tile: int
    num_warps: int


def choose_config(vocab: int, rank: int, wide: bool, target: Target) -> ChoiceConfig:
    """Choose the tile of a ``best_logits`` launch.

    Args:
        vocab: number of logits in a row.
        rank: number of columns of the low-rank term; 0 without one.
        wide: True if the term's products are float32.
        target: architecture of the device.
    """
    if not rank:
        return ChoiceConfig(min(_CHUNK, next_power_of_2(vocab)), 1, 0, 4)
    k_tile = max(16, next_power_of_2(rank))
    if wide:
        return ChoiceConfig(_WIDE_CHUNK, _PRODUCT_ROWS, min(k_tile, _WIDE_K_TILE), 4)
    chunk = _PRODUCT_CHUNK
    while chunk > 32 and chunk * rank > 1 << 15:
        chunk //= 2
    return ChoiceConfig(chunk, _PRODUCT_ROWS, k_tile, 8 if target.narrow else 4)
