"""Choices for the Hopper kernel of prefill attention, and checks of the calls that it supports."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anymla.ops._epilogue import InverseRopeQuant
from anymla.ops.device import Support, Target, target_of, triton_support

CHANNELS = 512
HEADS = 64  # heads in a work tile: the M of a wgmma
ROPE_DIM = 64  # channels that the quantising epilogue rotates
# Softmax scales whose product with a masked score, -1e30, is finite in float32 and far below every
# other score.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-60, 2.0**30
_OPERANDS = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Launch parameters of the prefill kernel.

    Attributes:
        ctas: CTAs in the grid, which take work tiles of one query and ``HEADS`` heads in turn.
        tma_store: True if TMA stores the heads from a K buffer, False if threads do.
        lazy_rescale: True to rescale accumulators only when a maximum has grown by more than 2^8.
            False for bfloat16, where rounding a largest weight other than 1 costs 4 % of accuracy.
        consumer0_registers: registers per thread of the consumer of scores and half the output.
        consumer1_registers: registers per thread of the consumer of the other half. The producer
            gets the rest of 168 * 3, which is 88; other divisions spill
            (docs/performance/prefill.md).
    """

    ctas: int
    tma_store: bool
    lazy_rescale: bool
    consumer0_registers: int = 240
    consumer1_registers: int = 176


def choose_config(
    tokens: int,
    heads: int,
    dtype: torch.dtype,
    target: Target,
    *,
    out_dtype: torch.dtype | None = None,
    quantized: bool = False,
) -> PrefillConfig:
    """Choose the launch parameters of a call whose queries and rows are of ``dtype``."""
    return PrefillConfig(
        ctas=min(tokens * -(-heads // HEADS), target.sm_count),
        tma_store=stores_by_tma(heads, dtype, out_dtype, quantized),
        lazy_rescale=dtype == torch.float16,
    )


def stores_by_tma(
    heads: int, dtype: torch.dtype, out_dtype: torch.dtype | None, quantized: bool
) -> bool:
    """True if TMA can store the results: whole head tiles of the rows' ``dtype``, unquantised."""
    return not quantized and heads % HEADS == 0 and out_dtype in (None, dtype)


@cache
def runs_on(device: torch.device) -> Support:
    """Return whether the kernel runs on this device, with the reason if it does not."""
    support = triton_support(torch.empty(0, device=device))
    if not support:
        return support
    if target_of(device).name != "sm_90":
        return Support(False, "needs a Hopper GPU (compute capability 9.0)")
    return Support(True)


def gluon_prefill_support(
    q: Tensor,
    rows: Tensor,
    *args: Any,
    scale: float | None = None,
    value_dim: int | None = None,
    epilogue: InverseRopeQuant | None = None,
    **keywords: Any,
) -> Support:
    """Return support of a ``prefill_attention`` call by backend ``gluon_sm90``."""
    support = runs_on(q.device)
    if not support:
        return support
    if q.dtype not in _OPERANDS or rows.dtype != q.dtype:
        return Support(False, "q and rows must both be float16, or both bfloat16")
    if q.shape[2] != CHANNELS:
        return Support(False, f"{CHANNELS} channels, got {q.shape[2]}")
    if value_dim not in (None, CHANNELS):
        return Support(False, f"all {CHANNELS} channels are values, got {value_dim}")
    if scale is not None and not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
        return Support(False, f"scale must be positive and of ordinary size, got {scale}")
    if len(rows) == 0:
        return Support(False, "at least one row")
    if epilogue is not None:
        table = epilogue.cos_sin_cache
        if table.shape[1] != ROPE_DIM or table.dtype != torch.float32:
            return Support(False, f"{ROPE_DIM} float32 angles a position")
    return support
