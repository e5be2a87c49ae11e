"""Tiles of the greedy choice's kernels."""

from __future__ import annotations

import dataclasses

from anymla.ops.device import Target

# Logits of a chunk without a low-rank term: 16 bytes a thread of float32.
_CHUNK = 2048
# With one: logits of a chunk, and rows of x that share its weights.
_PRODUCT_CHUNK, _PRODUCT_ROWS = 128, 16
# The same of float32's products, which have no matrix instructions, and columns of their tiles: a
# thread has four sums, and operands of 64 columns stay in its registers.
_WIDE_CHUNK, _WIDE_K_TILE = 32, 64


@dataclasses.dataclass(frozen=True)
class ChoiceConfig:
    """Logits of a chunk, rows that share a chunk's weights, columns of a tile of them, warps."""

    chunk: int
    rows: int
    k_tile: int
    num_warps: int


def choose_config(vocab: int, rank: int, wide: bool, target: Target) -> ChoiceConfig:
    """The config of ``best_logits``.

    Args:
        vocab: logits of a row.
        rank: columns of the low-rank term; 0 without one.
        wide: whether the term's products are float32's.
        target: where it runs.
    """
    if not rank:
        return ChoiceConfig(min(_CHUNK, _power_of_2_above(vocab)), 1, 0, 4)
    k_tile = max(16, _power_of_2_above(rank))
    if wide:
        return ChoiceConfig(_WIDE_CHUNK, _PRODUCT_ROWS, min(k_tile, _WIDE_K_TILE), 4)
    chunk = _PRODUCT_CHUNK
    while chunk > 32 and chunk * rank > 1 << 15:
        chunk //= 2
    return ChoiceConfig(chunk, _PRODUCT_ROWS, k_tile, 8 if target.narrow else 4)


def _power_of_2_above(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()
