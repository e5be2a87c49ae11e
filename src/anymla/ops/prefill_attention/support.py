"""Calls that the Hopper kernel of attention during prefill takes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from anymla.ops.device import target_of, triton_support
from anymla.ops.registry import Support

CHANNELS = 512
ROPE_DIM = 64  # channels that the quantising epilogue rotates
# Scales whose product with a masked score, -1e30, is far below all others, and finite in float32.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-60, 2.0**30
_OPERANDS = (torch.float16, torch.bfloat16)


@cache
def runs_on(device: torch.device) -> Support:
    """Whether the kernel runs on a device at all."""
    support = triton_support(torch.empty(0, device=device))
    if not support:
        return support
    if target_of(device).name != "sm_90":
        return Support(False, "needs a Hopper GPU (compute capability 9.0)")
    return Support(True)


def gluon_support(
    q: Tensor, rows: Tensor, *args: Any, scale: float | None = None, **keywords: Any
) -> Support:
    """``supports`` of backend ``gluon_sm90``."""
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
    return support


def gluon_fp8_quant_support(
    q: Tensor,
    rows: Tensor,
    runs: Tensor,
    lists: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    **keywords: Any,
) -> Support:
    """``supports`` of backend ``gluon_sm90`` of ``prefill_attention_fp8_quant``."""
    if cos_sin_cache.shape[1] != ROPE_DIM or cos_sin_cache.dtype != torch.float32:
        return Support(False, f"{ROPE_DIM} float32 angles a position")
    return gluon_support(q, rows)
