"""Choices of tiles for Engram's kernels."""

from __future__ import annotations

import dataclasses

from anymla.ops._sizes import next_power_of_2
from anymla.ops.device import Target

# Channels that a CTA takes at a time: each thread loads 16 bytes of 16-bit streams.
_WIDTH = 1024
# CTAs that fit on an SM: 4 warps each, with up to 128 registers a thread.
_CTAS_PER_SM = 4
# Channels of a tile of rows: for few tokens, so that there are enough CTAs, and for many.
_FEW_CHANNELS, _MANY_CHANNELS = 1024, 4096


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """Channels of a chunk, and warps, of the gate's kernel."""

    width: int
    num_warps: int


def choose_gate_config(hidden: int, target: Target) -> GateConfig:
    """Choose the tile of a CTA, which takes one stream of a token."""
    warps = 16 if target.arc_a else 8 if target.intel else 4
    return GateConfig(min(_WIDTH, next_power_of_2(hidden)), warps)


@dataclasses.dataclass(frozen=True)
class TableRowsConfig:
    """Blocks of channels in a tile, and warps, of the kernel that decodes rows."""

    blocks: int
    num_warps: int


def choose_rows_config(blocks: int, block: int, target: Target) -> TableRowsConfig:
    """Choose the tile for ``blocks`` blocks of ``block`` channels that share a scale each."""
    held = next_power_of_2(block)
    many = blocks * held >= _MANY_CHANNELS * _CTAS_PER_SM * target.sm_count
    tile = _MANY_CHANNELS if many else _FEW_CHANNELS
    return TableRowsConfig(max(1, tile // held), 4)
