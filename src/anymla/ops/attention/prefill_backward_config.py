"""Choices for the gradients of prefill attention, and the calls that their backends take."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.attention.prefill_config import CHANNELS, HEADS, runs_on
from anymla.ops.device import Support, Target, float32_support, target_of

# Sums of more channels leave no tile that fits. V3.2's keys have 576.
_MOST_CHANNELS = 576
# Shared memory of NVIDIA's GPUs for a tile of float32 with more channels than V4's.
_WIDE_FLOAT32_BYTES = 112_640
_LEAST_HEADS = 16  # the M of a matrix instruction
# Bytes of addends to rows that are written out before they are summed in order.
PARTS_BYTES = 1 << 30
# Rows and heads that a CTA takes where Hopper's gradients of windows are summed tile by tile.
WINDOW_ROWS, WINDOW_HEADS = 64, 32


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tile of the gradients' kernels.

    Attributes:
        heads: heads of a token that a CTA takes.
        rows: rows that it takes at a time.
        num_warps: warps of a CTA.
        num_stages: depth of the pipeline that loads rows.
        parts: pieces of the channels, which bound what a CTA holds in registers at a time.
        transposed: True to make the addends to rows as [channels, rows]. wgmma reads q and dout
            from shared memory in either direction; mma.sync would load each of them twice.
        window_rows: rows of a window's tile, where their gradient is summed tile by tile.
        window_warps: warps of that tile's CTA; 0 for ``num_warps``.
        divided: True for the kernels in which each warp has one of ``parts`` pieces of the channels
            (``triton_prefill_backward_divided``).
    """

    heads: int
    rows: int
    num_warps: int
    num_stages: int = 1
    parts: int = 1
    transposed: bool = False
    window_rows: int = 16
    window_warps: int = 0
    divided: bool = False


def choose_config(
    heads: int, dtype: torch.dtype, target: Target, channels: int = CHANNELS
) -> BackwardConfig:
    """Choose the tile for heads, a dtype, a target and channels.

    Args:
        heads: query heads H.
        dtype: dtype of queries and rows.
        target: machine that runs the kernel.
        channels: channels D of queries and rows.
    """
    wide = channels > CHANNELS
    if target.intel:
        return _intel_config(heads, dtype, target, wide)
    if target.narrow:
        # Undivided, gfx1151 spills 220 to 490 registers with 16 warps, more with 8. Divided among
        # 8 warps it spills 28, among 16 none, and 12 of more channels.
        return BackwardConfig(_LEAST_HEADS, 16, 16, parts=16, divided=True)
    if dtype == torch.float32:
        return BackwardConfig(_LEAST_HEADS, 16, 8)
    if target.name == "sm_90":
        # 512 listed entries take 3,367 us on an H200; with 64 rows in one stage they take 3,549,
        # with 16 rows 4,196 or more, with 2 parts in one stage 4,278. In one stage with 1 or 4
        # parts, Triton 3.6 makes code that reads shared memory past its end. 32 rows of more
        # channels are 240 KiB of shared memory.
        rows = 16 if wide else 32
        return BackwardConfig(
            _fitting(heads, 64), rows, 8, 2, parts=4, transposed=True, window_rows=32
        )
    if target.name == "sm_80" and not wide:
        # Executed on an H200, 8,804 us of 512 entries; with 32 heads, twice the atomics and 15,470.
        # 64 heads of more channels are 170 KiB of shared memory.
        return BackwardConfig(_fitting(heads, 64), 16, 8, 2, parts=4, window_rows=16)
    if target.name == "sm_100" and not wide:
        return BackwardConfig(_fitting(heads, 32), 32, 8, 2, parts=4, window_rows=32)
    if target.name == "sm_100":
        # 32 rows, or 4 parts, spill 160 registers or more.
        return BackwardConfig(_fitting(heads, 32), 16, 8, 2, parts=8, window_rows=16)
    if target.backend == "cuda":
        return BackwardConfig(_fitting(heads, 32), 16, 8, 2, parts=4, window_rows=16)
    if target.backend == "hip":
        return BackwardConfig(_fitting(heads, 32), 16, 4)
    return BackwardConfig(_LEAST_HEADS, 16, 8)


def _intel_config(heads: int, dtype: torch.dtype, target: Target, wide: bool) -> BackwardConfig:
    """Choose a tile that spills nothing, as compiled for Max, Arc A and Arc B (docs/intel.md).

    For Arc B and 16 bits, the tile of 32 heads has the fewest instructions a product and adds half
    as often to rows; with 16 warps it spills 183 registers. More channels are 130 KiB of shared
    memory there. In float32, 16 heads spill 46.
    """
    if target.arc_a:
        return BackwardConfig(8, 8, 32, parts=16, window_rows=8, divided=True)
    if dtype == torch.float32:
        return BackwardConfig(8, 16, 32, parts=16, divided=True)
    if heads > 16 and not wide:
        return BackwardConfig(32, 16, 32, parts=16, divided=True)
    # With 16 warps a window's tile of more channels spills 31, with 32 the other one 11.
    window_warps = 32 if wide else 16
    return BackwardConfig(16, 16, 16, parts=16, window_warps=window_warps, divided=True)


def _fitting(heads: int, most: int) -> int:
    """Return the smallest power of two that holds ``heads``, within a matrix tile and ``most``."""
    return min(max(1 << max(heads - 1, 0).bit_length(), _LEAST_HEADS), most)


def float32_fits(channels: int, target: Target) -> bool:
    """Return True if the tile for float32 rows of so many channels fits the target."""
    small = target.backend == "cuda" and target.shared_bytes < _WIDE_FLOAT32_BYTES
    return channels <= CHANNELS or not small


def triton_backward_support(
    dout: Tensor, q: Tensor, rows: Tensor, *args: object, **keywords: object
) -> Support:
    """Return support of a ``prefill_attention_backward`` call by backend "triton"."""
    support = float32_support(q, rows)
    if support and rows.dtype != q.dtype:
        return Support(False, f"q and rows must be of one dtype, got {q.dtype} and {rows.dtype}")
    if support and q.shape[2] > _MOST_CHANNELS:
        return Support(False, f"at most {_MOST_CHANNELS} channels, got {q.shape[2]}")
    target = target_of(q.device)
    if support and q.shape[2] > CHANNELS and target.arc_a:
        return Support(False, f"at most {CHANNELS} channels on Arc A, got {q.shape[2]}")
    if support and dout.shape[2] > CHANNELS and (target.intel or target.narrow):
        return Support(False, f"at most {CHANNELS} values where warps divide the channels")
    if support and q.dtype == torch.float32:
        if not float32_fits(q.shape[2], target):
            return Support(False, f"at most {CHANNELS} channels of float32, got {q.shape[2]}")
        # No matrix instruction keeps float32; torch multiplies with the vendor's library instead.
        return dataclasses.replace(support, automatic=False)
    if support and q.shape[2] > CHANNELS and target.backend == "hip" and not target.narrow:
        # Tiles of more channels are built and interpreted for CDNA, and no such GPU has run them.
        return dataclasses.replace(support, automatic=False)
    return support


def gluon_backward_support(
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    *args: object,
    mass: Tensor | None = None,
    **keywords: object,
) -> Support:
    """Return support of a ``prefill_attention_backward`` call by backend "gluon_sm90"."""
    support = runs_on(q.device)
    if not support:
        return support
    if q.dtype not in (torch.float16, torch.bfloat16) or rows.dtype != q.dtype:
        return Support(False, "q and rows must both be float16, or both bfloat16")
    if q.shape[2] != CHANNELS or dout.shape[2] != CHANNELS:
        words = f"{q.shape[2]} and {dout.shape[2]} values"
        return Support(False, f"{CHANNELS} channels, all of them values, got {words}")
    if q.shape[1] % HEADS:
        return Support(False, f"a multiple of {HEADS} heads, got {q.shape[1]}")
    if mass is not None:
        return Support(False, "no sums of probabilities over heads (mass)")
    return support
