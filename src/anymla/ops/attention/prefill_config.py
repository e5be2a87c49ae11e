"""Choices of the Hopper kernel of prefill attention, and the calls that it takes."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anymla.ops._epilogue import InverseRopeQuant
from anymla.ops.device import Support, Target, target_of, triton_support

CHANNELS = 512
HEADS = 64  # of a work tile: the M of a wgmma
ROPE_DIM = 64  # channels that the quantising epilogue rotates
# Scales whose product with a masked score, -1e30, is far below all others, and finite in float32.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-60, 2.0**30
_OPERANDS = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """How a call is run.

    Attributes:
        ctas: of the grid; they take work tiles of a query and ``HEADS`` heads in turn.
        tma_store: heads are stored by TMA from a K buffer, not by threads.
        lazy_rescale: accumulators are rescaled only when a maximum has grown by more than 2^8. Not
            in bfloat16, where the rounding of a largest weight that is not 1 costs 4 % of accuracy.
        consumer0_registers: of a thread that computes scores and half the output.
        consumer1_registers: of a thread that computes the other half. The producer gets what is
            left of 168 * 3, 88; other splits spill (docs/performance/prefill.md).
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
    """The configuration of a call whose rows are of ``dtype``."""
    return PrefillConfig(
        ctas=min(tokens * -(-heads // HEADS), target.sm_count),
        tma_store=stores_by_tma(heads, dtype, out_dtype, quantized),
        lazy_rescale=dtype == torch.float16,
    )


def stores_by_tma(
    heads: int, dtype: torch.dtype, out_dtype: torch.dtype | None, quantized: bool
) -> bool:
    """Whether results, of ``dtype`` like the rows unless another is named, leave by TMA."""
    return not quantized and heads % HEADS == 0 and out_dtype in (None, dtype)


@cache
def runs_on(device: torch.device) -> Support:
    """Whether the kernel runs on a device at all."""
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
    if scale is not None and not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
        return Support(False, f"scale must be positive and of ordinary size, got {scale}")
    if len(rows) == 0:
        return Support(False, "at least one row")
    if epilogue is not None:
        table = epilogue.cos_sin_cache
        if table.shape[1] != ROPE_DIM or table.dtype != torch.float32:
            return Support(False, f"{ROPE_DIM} float32 angles a position")
    return support
