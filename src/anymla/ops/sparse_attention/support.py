"""Calls that the Triton kernels of sparse attention take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import V32_FP8, get_layout
from anymla.ops._operation import Support
from anymla.ops._triton import triton_support

LARGEST_CHANNELS = 640


def triton_attention_support(q: Tensor, rows: Tensor, *args: Any, **keywords: Any) -> Support:
    """``supports`` of both operations; ``rows`` is the first cache, or the rows."""
    support = triton_support(q)
    if not support:
        return support
    if torch.float64 in (q.dtype, rows.dtype):
        return Support(False, "float64 is computed by torch")
    if q.shape[2] > LARGEST_CHANNELS:
        return Support(False, f"at most {LARGEST_CHANNELS} channels, got {q.shape[2]}")
    for cache in (rows, keywords.get("extra_cache")):
        # The tail of a coded row is read as bfloat16, scales in the row as float32.
        if cache is None or cache.dtype != torch.uint8 or not cache.numel():
            continue
        unit = 4 if cache.shape[-1] == get_layout(V32_FP8).row_elements else 2
        if cache.storage_offset() % unit or cache.stride(0) % unit:
            return Support(False, f"coded pages must lie at multiples of {unit} bytes")
    return support
