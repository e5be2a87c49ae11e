"""Tiles of Engram's kernels."""

from __future__ import annotations

import dataclasses

from anymla.ops.device import Target

# Channels that all threads of a CTA take at a time: 16 bytes a thread of 16-bit streams.
_WIDTH = 1024
# CTAs that an SM holds: of 4 warps with up to 128 registers a thread.
_CTAS_PER_SM = 4
# Channels of a tile of rows: few where there are few tokens, so that there are CTAs.
_FEW_CHANNELS, _MANY_CHANNELS = 1024, 4096


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """Channels of a chunk, warps."""

    width: int
    num_warps: int


def choose_gate_config(hidden: int, target: Target) -> GateConfig:
    """A CTA has one stream of a token."""
    warps = 16 if target.arc_a else 8 if target.intel else 4
    return GateConfig(min(_WIDTH, _power_of_2_above(hidden)), warps)


@dataclasses.dataclass(frozen=True)
class TableRowsConfig:
    """Blocks of channels of a tile, warps."""

    blocks: int
    num_warps: int


def choose_rows_config(blocks: int, block: int, target: Target) -> TableRowsConfig:
    """Of so many blocks, each of ``block`` channels that share a scale."""
    held = _power_of_2_above(block)
    many = blocks * held >= _MANY_CHANNELS * _CTAS_PER_SM * target.sm_count
    tile = _MANY_CHANNELS if many else _FEW_CHANNELS
    return TableRowsConfig(max(1, tile // held), 4)


def _power_of_2_above(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()
