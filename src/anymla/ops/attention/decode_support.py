"""Calls that the Triton and Gluon kernels of sparse attention take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, V41_LAYOUTS, get_layout
from anymla.formats.records import (
    InlineFp8Layout,
    PlainRowsLayout,
    RowNvfp4Layout,
    SplitFp8Layout,
)
from anymla.ops.attention.decode_config import SWAP_AB_HEADS
from anymla.ops.device import Support, target_of, triton_support

LARGEST_CHANNELS = 640
# Layouts whose rows Triton's kernels decode.
_DECODED = (SplitFp8Layout, InlineFp8Layout, RowNvfp4Layout, PlainRowsLayout)
VALUES = get_layout(MAIN_FP8).channels
_LARGEST_PAGE = 1 << 30
# Scales whose product with a masked score, -1e30, is far below all others, and finite in float32.
# Queries that float16 rounds to a multiple of 2^-24 must not matter either.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-60, 0.25
_LARGEST_ROWS_SCALE = 2.0**30
# A CTA of the prefill kernel goes through a token's whole list. With few tokens many CTAs had
# better share it.
_MANY_TOKENS, _SHORT_LIST = 32, 1024


def triton_attention_support(q: Tensor, rows: Tensor, *args: Any, **keywords: Any) -> Support:
    """``supports`` of Triton's kernels; ``rows`` is the first cache, or the rows."""
    support = triton_support(q)
    if not support:
        return support
    if torch.float64 in (q.dtype, rows.dtype):
        return Support(False, "float64 is computed by torch")
    if q.shape[2] > LARGEST_CHANNELS:
        return Support(False, f"at most {LARGEST_CHANNELS} channels, got {q.shape[2]}")
    for name in ("layout", "extra_layout"):
        layout = get_layout(keywords.get(name, MAIN_FP8))
        if not isinstance(layout, _DECODED):
            return Support(False, f"rows of {layout.layout_id} are decoded by torch")
    for cache in (rows, keywords.get("extra_cache")):
        # The tail of a coded row is read as bfloat16, scales in the row as float32.
        if cache is None or cache.dtype != torch.uint8 or not cache.numel():
            continue
        unit = 4 if cache.shape[-1] == get_layout(V32_FP8).row_elements else 2
        if cache.storage_offset() % unit or cache.stride(0) % unit:
            return Support(False, f"coded pages must lie at multiples of {unit} bytes")
    return support


def gluon_attention_support(
    q: Tensor,
    k_cache: Tensor,
    *args: Any,
    scale: float | None = None,
    extra_cache: Tensor | None = None,
    layout: str = MAIN_FP8,
    extra_layout: str = MAIN_FP8,
    value_dim: int | None = None,
    **keywords: Any,
) -> Support:
    """``supports`` of the Hopper kernels of ``sparse_attention``."""
    if target_of(q.device).name != "sm_90":
        return Support(False, "runs on NVIDIA GPUs of compute capability 9.0 only")
    support = triton_support(q)
    if not support:
        return support
    if q.dtype not in (torch.bfloat16, torch.float16):
        return Support(False, f"q must be bfloat16 or float16, got {q.dtype}")
    if layout == V32_FP8:
        support = _v32_support(q, extra_cache, value_dim)
        if not support:
            return support
    elif not _decoded_alike(layout, layout if extra_cache is None else extra_layout):
        words = f"caches must both be {MAIN_FP8}, or both of V4.1's layouts"
        return Support(False, f"{words}, got {layout} and {extra_layout}")
    elif value_dim not in (None, q.shape[2]):
        return Support(False, f"all {q.shape[2]} channels are values, got {value_dim}")
    if scale is not None and not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
        return Support(False, f"scale must be positive and of ordinary size, got {scale}")
    for cache in (k_cache, extra_cache):
        if cache is None or not cache.numel():
            continue
        if cache.data_ptr() % 16 or (len(cache) > 1 and cache.stride(0) % 16):
            return Support(False, "pages must lie at multiples of 16 bytes")
        if cache.shape[1] * cache.shape[-1] > _LARGEST_PAGE:
            return Support(False, f"pages must be below {_LARGEST_PAGE} bytes")
    # float16 queries are promised more than products of float16 probabilities keep.
    return Support(True, automatic=q.dtype == torch.bfloat16)


def _decoded_alike(layout: str, extra_layout: str) -> bool:
    """Whether rows all end in a tail (V4), or none do (V4.1)."""
    both = {layout, extra_layout}
    return both == {MAIN_FP8} or both <= set(V41_LAYOUTS)


def _v32_support(q: Tensor, extra_cache: Tensor | None, value_dim: int | None) -> Support:
    """What the kernel for V3.2's rows takes beyond that."""
    if q.dtype != torch.bfloat16:
        return Support(False, f"q must be bfloat16 for {V32_FP8}, got {q.dtype}")
    if extra_cache is not None:
        return Support(False, f"one cache of {V32_FP8}")
    if value_dim != VALUES:
        return Support(False, f"{VALUES} channels of {V32_FP8} are values, got {value_dim}")
    if q.shape[1] <= SWAP_AB_HEADS:
        return Support(False, f"more than {SWAP_AB_HEADS} heads for {V32_FP8}, got {q.shape[1]}")
    return Support(True)


def gluon_fp8_quant_support(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    **keywords: Any,
) -> Support:
    """``supports`` of backend ``gluon_sm90`` of ``sparse_attention_fp8_quant``."""
    found = gluon_attention_support(q, k_cache, **keywords)
    if found and q.shape[2] != VALUES:
        return Support(False, f"{VALUES} channels, got {q.shape[2]}")
    return found


def gluon_rows_support(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *args: Any,
    scale: float | None = None,
    value_dim: int = VALUES,
    **keywords: Any,
) -> Support:
    """``supports`` of backend ``gluon_sm90`` of ``sparse_attention_rows``."""
    if target_of(q.device).name != "sm_90":
        return Support(False, "runs on NVIDIA GPUs of compute capability 9.0 only")
    support = triton_support(q)
    if not support:
        return support
    if q.dtype not in (torch.bfloat16, torch.float16) or kv.dtype != q.dtype:
        return Support(False, "q and kv must both be float16, or both bfloat16")
    if q.shape[2] != VALUES or value_dim != VALUES:
        return Support(False, f"{VALUES} channels, all of them values")
    if scale is not None and not _LEAST_SCALE <= scale <= _LARGEST_ROWS_SCALE:
        return Support(False, f"scale must be positive and of ordinary size, got {scale}")
    if not len(kv):
        return Support(False, "at least one row")
    many = len(q) >= _MANY_TOKENS or indices.shape[-1] <= _SHORT_LIST
    return Support(True, automatic=many)
