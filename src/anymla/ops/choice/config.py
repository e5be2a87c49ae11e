"""Tiles of the greedy choice's kernels."""

from __future__ import annotations

import dataclasses

from anymla.ops.device import Target

# Logits of a chunk without a low-rank term: 16 bytes a thread of float32.
_CHUNK = 2048
# With one: rows of a weight tile, and the rows of x that share it.
_PRODUCT_CHUNK, _PRODUCT_ROWS = 128, 16


@dataclasses.dataclass(frozen=True)
class ChoiceConfig:
    """Logits of a chunk, rows that share a chunk's weights, warps."""

    chunk: int
    rows: int
    num_warps: int


def choose_config(rows: int, vocab: int, rank: int, target: Target) -> ChoiceConfig:
    """The config of ``best_logits``.

    Args:
        rows: rows of logits.
        vocab: logits of a row.
        rank: columns of the low-rank term; 0 without one.
        target: where it runs.
    """
    if not rank:
        return ChoiceConfig(min(_CHUNK, _power_of_2_above(vocab)), 1, 4)
    chunk = _PRODUCT_CHUNK
    while chunk > 32 and chunk * rank > 1 << 15:
        chunk //= 2
    return ChoiceConfig(chunk, _PRODUCT_ROWS, 4)


def _power_of_2_above(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()
