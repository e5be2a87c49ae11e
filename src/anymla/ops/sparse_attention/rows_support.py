"""Calls on decoded rows that Hopper's kernel of attention during prefill takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.ops.device import target_of, triton_support
from anymla.ops.registry import Support

_CHANNELS = 512
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-60, 2.0**30
# A program goes through a token's whole list. With few tokens many programs had better share it.
_FEW_TOKENS, _SHORT_LIST = 32, 1024
# Whether the kernel is chosen without having been named.
AUTOMATIC = True


def gluon_rows_support(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *args: Any,
    scale: float | None = None,
    value_dim: int = _CHANNELS,
    **keywords: Any,
) -> Support:
    """``supports`` of backend ``gluon_sm90`` of ``sparse_attention_rows``."""
    if q.device.type != "cuda" or target_of(q.device).name != "sm_90":
        return Support(False, "runs on NVIDIA GPUs of compute capability 9.0 only")
    support = triton_support(q)
    if not support:
        return support
    if q.dtype not in (torch.bfloat16, torch.float16) or kv.dtype != q.dtype:
        return Support(False, "q and kv must both be float16, or both bfloat16")
    if q.shape[2] != _CHANNELS or value_dim != _CHANNELS:
        return Support(False, f"{_CHANNELS} channels, all of them values")
    if scale is not None and not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
        return Support(False, f"scale must be positive and of ordinary size, got {scale}")
    if not len(kv):
        return Support(False, "at least one row")
    many = len(q) >= _FEW_TOKENS or indices.shape[-1] <= _SHORT_LIST
    return Support(True, automatic=AUTOMATIC and many)
