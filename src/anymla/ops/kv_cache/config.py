"""Choices of tiles for the kernels that store and read cache rows, and their support."""

from __future__ import annotations

import dataclasses
from typing import Any

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.records import InlineFp8Layout
from anymla.ops.device import Support, Target, float32_support

# Channels of a tile, and of a thread: 16 bytes of codes, and two accesses of 16 bytes of bfloat16.
# Timed on an H200 for 4,096 and 32,768 rows with 1 to 16 rows a tile and 1 to 8 warps ("Cache rows"
# in docs/performance/elementwise.md).
_TILE, _PER_THREAD = 2048, 16


@dataclasses.dataclass(frozen=True)
class CacheTileConfig:
    """Rows of a CTA's tile, and its number of warps."""

    rows: int
    num_warps: int


def choose_config(channels: int, target: Target) -> CacheTileConfig:
    """Choose the tile for rows of ``channels`` channels."""
    return CacheTileConfig(max(1, _TILE // channels), _TILE // (_PER_THREAD * target.warp_size))


def row_support(*args: Any, layout: str = MAIN_FP8, **keywords: Any) -> Support:
    """Return support of operations on whole rows of a cache in ``layout``."""
    if isinstance(get_layout(layout), InlineFp8Layout):
        return Support(False, f"rows of {layout} are coded by torch")
    return float32_support(*args, **keywords)
