"""Calls of attention over listed rows that each kernel takes."""

from __future__ import annotations

from collections.abc import Sequence
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
from anymla.ops._epilogue import InverseRopeQuant
from anymla.ops.attention.cache_rows import CacheRows
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


def triton_attention_support(q: Tensor, rows: Sequence[CacheRows], **keywords: Any) -> Support:
    """Return support of a ``sparse_attention`` call by Triton's kernels."""
    support = triton_rows_support(q, rows[0].cache)
    if not support:
        return support
    for cache, layout, *_ in rows:
        if not isinstance(get_layout(layout), _DECODED):
            return Support(False, f"rows of {layout} are decoded by torch")
        # The tail of a coded row is read as bfloat16, scales in the row as float32.
        if cache.dtype != torch.uint8 or not cache.numel():
            continue
        unit = 4 if cache.shape[-1] == get_layout(V32_FP8).row_elements else 2
        if cache.storage_offset() % unit or cache.stride(0) % unit:
            return Support(False, f"coded pages must lie at multiples of {unit} bytes")
    return support


def triton_rows_support(q: Tensor, kv: Tensor, *args: Any, **keywords: Any) -> Support:
    """Return support of a ``sparse_attention_rows`` call by Triton's kernels."""
    support = triton_support(q)
    if not support:
        return support
    if torch.float64 in (q.dtype, kv.dtype):
        return Support(False, "float64 is computed by torch")
    if q.shape[2] > LARGEST_CHANNELS:
        return Support(False, f"at most {LARGEST_CHANNELS} channels, got {q.shape[2]}")
    return support


def gluon_attention_support(
    q: Tensor,
    rows: Sequence[CacheRows],
    *,
    scale: float | None = None,
    value_dim: int | None = None,
    epilogue: InverseRopeQuant | None = None,
    **keywords: Any,
) -> Support:
    """Return support of a ``sparse_attention`` call by the Hopper kernels."""
    if target_of(q.device).name != "sm_90":
        return Support(False, "runs on NVIDIA GPUs of compute capability 9.0 only")
    support = triton_support(q)
    if not support:
        return support
    if q.dtype not in (torch.bfloat16, torch.float16):
        return Support(False, f"q must be bfloat16 or float16, got {q.dtype}")
    layouts = [each.layout for each in rows]
    if layouts[0] == V32_FP8:
        support = _v32_support(q, len(rows), value_dim)
        if not support:
            return support
    elif not _decoded_alike({*layouts}):
        words = f"caches must all be {MAIN_FP8}, or all of V4.1's layouts"
        return Support(False, f"{words}, got {' and '.join(layouts)}")
    elif value_dim not in (None, q.shape[2]):
        return Support(False, f"all {q.shape[2]} channels are values, got {value_dim}")
    if scale is not None and not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
        return Support(False, f"scale must be positive and of ordinary size, got {scale}")
    for each in rows:
        cache = each.cache
        if not cache.numel():
            continue
        if cache.data_ptr() % 16 or (len(cache) > 1 and cache.stride(0) % 16):
            return Support(False, "pages must lie at multiples of 16 bytes")
        if cache.shape[1] * cache.shape[-1] > _LARGEST_PAGE:
            return Support(False, f"pages must be below {_LARGEST_PAGE} bytes")
    if epilogue is not None and q.shape[2] != VALUES:
        return Support(False, f"{VALUES} channels for an epilogue, got {q.shape[2]}")
    # float16 queries are promised more than products of float16 probabilities keep.
    return Support(True, automatic=q.dtype == torch.bfloat16)


def _decoded_alike(layouts: set[str]) -> bool:
    """Return True if rows all end in a tail (V4), or none do (V4.1)."""
    return layouts == {MAIN_FP8} or layouts <= set(V41_LAYOUTS)


def _v32_support(q: Tensor, caches: int, value_dim: int | None) -> Support:
    """Return support of queries [T, H, D] over V3.2's rows in a number of caches."""
    if q.dtype != torch.bfloat16:
        return Support(False, f"q must be bfloat16 for {V32_FP8}, got {q.dtype}")
    if caches > 1:
        return Support(False, f"one cache of {V32_FP8}")
    if value_dim != VALUES:
        return Support(False, f"{VALUES} channels of {V32_FP8} are values, got {value_dim}")
    if q.shape[1] <= SWAP_AB_HEADS:
        return Support(False, f"more than {SWAP_AB_HEADS} heads for {V32_FP8}, got {q.shape[1]}")
    return Support(True)


def gluon_rows_support(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *args: Any,
    scale: float | None = None,
    value_dim: int = VALUES,
    **keywords: Any,
) -> Support:
    """Return support of a ``sparse_attention_rows`` call by backend ``gluon_sm90``."""
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
