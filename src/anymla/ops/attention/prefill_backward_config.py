"""Choices for Triton's gradients of prefill attention, and the calls that it takes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.device import Support, Target, float32_support, target_of

_CHANNELS = 512  # sums of more channels leave no tile that fits
_LEAST_HEADS = 16  # the M of a matrix instruction
# Bytes of addends to rows that are written out before they are summed in order.
PARTS_BYTES = 1 << 30
# Listed entries from which on windows' rows are summed tile by tile on an H200.
_WINDOW_BY_TILES = 512


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tile of the gradients' kernel.

    Attributes:
        heads: heads of a token that a CTA takes.
        rows: rows that it takes at a time.
        num_warps: warps of a CTA.
        num_stages: depth of the pipeline that loads rows.
        transposed: True to make the addends to rows as [channels, rows]. wgmma reads q and dout
            from shared memory in either direction; mma.sync would load each of them twice.
        window_rows: rows of a window's tile, where their gradient is summed tile by tile.
        window_by_tiles: True to sum windows tile by tile in any case, False where the order is
            asked for.
    """

    heads: int
    rows: int
    num_warps: int
    num_stages: int = 1
    transposed: bool = False
    window_rows: int = 16
    window_by_tiles: bool = False


def choose_config(
    heads: int, dtype: torch.dtype, target: Target, listed: int = 0
) -> BackwardConfig:
    """Choose the tile for heads, a dtype, a target and lists of a length.

    Args:
        heads: query heads H.
        dtype: dtype of queries and rows.
        target: machine that runs the kernel.
        listed: entries listed for each query; 0 without lists.
    """
    if dtype == torch.float32:
        return BackwardConfig(_LEAST_HEADS, 16, 8)
    if target.name == "sm_90":
        # 4 to 12 % faster with 512 to 2,048 entries; 23 % slower with 256 that all see.
        by_tiles = listed >= _WINDOW_BY_TILES
        return BackwardConfig(
            _fitting(heads, 64), 32, 8, transposed=True, window_rows=32, window_by_tiles=by_tiles
        )
    if target.name in ("sm_80", "sm_100"):
        return BackwardConfig(_fitting(heads, 32), 32, 8, window_rows=32)
    if target.backend == "cuda":
        return BackwardConfig(_LEAST_HEADS, 32, 8, window_rows=32)
    if target.backend == "hip" and not target.narrow:
        return BackwardConfig(_fitting(heads, 32), 16, 4)
    return BackwardConfig(_LEAST_HEADS, 16, 8)


def _fitting(heads: int, most: int) -> int:
    """Return the smallest power of two that holds ``heads``, within a matrix tile and ``most``."""
    return min(max(1 << max(heads - 1, 0).bit_length(), _LEAST_HEADS), most)


def triton_backward_support(
    dout: Tensor, q: Tensor, rows: Tensor, *args: object, **keywords: object
) -> Support:
    """Return support of a ``prefill_attention_backward`` call by backend "triton"."""
    support = float32_support(q, rows)
    if support and rows.dtype != q.dtype:
        return Support(False, f"q and rows must be of one dtype, got {q.dtype} and {rows.dtype}")
    if support and q.shape[2] > _CHANNELS:
        return Support(False, f"at most {_CHANNELS} channels, got {q.shape[2]}")
    if support and target_of(q.device).intel:
        return Support(False, "a token's heads and rows do not fit the registers of Intel's GPUs")
    if support and q.dtype == torch.float32:
        # No matrix instruction keeps float32; torch multiplies with the vendor's library instead.
        return dataclasses.replace(support, automatic=False)
    return support
