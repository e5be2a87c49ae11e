"""Support checks of the indexer's device backends, which do not import triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.formats.pages import pages_of
from anymla.formats.records import RowNvfp4Layout, SplitFp8Layout
from anymla.ops.device import Support, float32_support, target_of, triton_problem

_MAX_WIDTH = 512
_MAX_HEADS = 256
_MAX_K = 2048
_MAX_CANDIDATE_BLOCK = 2048


def query_support(q: Tensor, *args: Any, **kwargs: Any) -> Support:
    """Return support of ``indexer_q_rope_quant``, whose RoPE rotates pairs of channels."""
    if q.shape[2] % 2:
        return Support(False, f"heads of an even number of channels, got {q.shape[2]}")
    return float32_support(q, *args, **kwargs)


def dense_support(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Support:
    """Return support of ``mqa_logits``, whose tile holds all heads of a row and whole keys."""
    if k.shape[1] > _MAX_WIDTH or q.shape[1] > _MAX_HEADS:
        return Support(
            False, f"at most {_MAX_WIDTH} channels and {_MAX_HEADS} heads, got {list(q.shape)}"
        )
    return float32_support(q, k, *args, **kwargs)


def paged_support(
    q: Tensor, index_cache: Tensor, *args: Any, layout: str = INDEX_FP8, **kwargs: Any
) -> Support:
    """Return support of ``paged_mqa_logits`` for a layout and the alignment of its pages."""
    kind = get_layout(layout)
    if isinstance(kind, (SplitFp8Layout, RowNvfp4Layout)):
        return Support(False, f"not the rows of {layout}")
    if q.shape[2] > _MAX_HEADS:
        return Support(False, f"at most {_MAX_HEADS} heads, got {q.shape[2]}")
    # FP8 pages contain float32 scales, which must be aligned.
    step = 4 if kind.dtype == torch.uint8 else kind.dtype.itemsize
    stride = index_cache.stride(0) * kind.dtype.itemsize
    if index_cache.numel() and (stride % step or index_cache.data_ptr() % step):
        return Support(False, f"pages must start at multiples of {step} bytes")
    return float32_support(q, index_cache, *args, **kwargs)


def candidates_support(logits: Tensor, *args: Any, block_size: int, **kwargs: Any) -> Support:
    """Return support of the candidate blocks' operations, whose tile holds a whole block."""
    if block_size > _MAX_CANDIDATE_BLOCK:
        return Support(False, f"blocks of at most {_MAX_CANDIDATE_BLOCK} entries, got {block_size}")
    return float32_support(logits, *args, **kwargs)


def select_support(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k: int,
    **kwargs: Any,
) -> Support:
    """Return support of ``select_topk``: paged scores, and a k that fits in registers."""
    if k > _MAX_K:
        return Support(False, f"selects at most {_MAX_K}, got {k}")
    layout = kwargs.get("layout", INDEX_FP8)
    return paged_support(q.unsqueeze(1), index_cache, weights, lengths, block_table, layout=layout)


def sm90_select_support(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k: int,
    **kwargs: Any,
) -> Support:
    """Return support of ``gluon_sm90``'s ``select_topk``: FP8, 64 heads, pages of 64 keys."""
    support = _sm90(q.device)
    if support and kwargs.get("blocks") is not None:
        return Support(False, "scores whole contexts, not listed blocks")
    if support:
        support = select_support(q, index_cache, weights, lengths, block_table, k, **kwargs)
    if support:
        support = _sm90_pages(q, index_cache, kwargs.get("layout", INDEX_FP8))
    return support


def sm90_paged_support(
    q: Tensor, index_cache: Tensor, *args: Any, layout: str = INDEX_FP8, **kwargs: Any
) -> Support:
    """Return support of ``gluon_sm90``'s ``paged_mqa_logits``: FP8, 64 heads, pages of 64 keys."""
    support = _sm90(q.device)
    if support:
        support = paged_support(q, index_cache, *args, layout=layout, **kwargs)
    if support:
        support = _sm90_pages(q.flatten(0, 1), index_cache, layout)
    return support


def sm90_dense_support(
    q: Tensor, k: Tensor, k_scale: Tensor | None, *args: Any, **kwargs: Any
) -> Support:
    """Return support of ``gluon_sm90``'s ``mqa_logits``: FP8 keys, a multiple of 64 of them."""
    support = _sm90(q.device)
    if support:
        support = _sm90_queries(q)
    if not support:
        return support
    if k.dtype != torch.float8_e4m3fn or k_scale is None or len(k) % 64 or not len(k):
        return Support(False, f"FP8 keys with scales, a multiple of 64, got {list(k.shape)}")
    if not (k.is_contiguous() and k_scale.is_contiguous()):
        return Support(False, "keys and scales that are contiguous")
    if k.data_ptr() % 16 or k_scale.data_ptr() % 16:
        return Support(False, "keys and scales must lie at multiples of 16 bytes")
    return Support(True)


def _sm90(device: torch.device) -> Support:
    if target_of(device).name != "sm_90":
        return Support(False, "runs on NVIDIA GPUs of compute capability 9.0 only")
    problem = triton_problem()
    return Support(not problem, problem)


def _sm90_queries(q: Tensor) -> Support:
    if q.dtype != torch.float8_e4m3fn or tuple(q.shape[1:]) != (64, 128):
        return Support(False, f"FP8 queries of 64 heads of 128, got {q.dtype} {list(q.shape)}")
    return Support(True)


def _sm90_pages(q: Tensor, index_cache: Tensor, layout: str) -> Support:
    support = _sm90_queries(q)
    if not support:
        return support
    cache = pages_of(index_cache)
    if layout != INDEX_FP8 or cache.shape[1] != 64:
        return Support(False, f"FP8 keys in pages of 64, got {layout}, {cache.shape[1]}")
    if cache.stride(0) % 16 or cache.data_ptr() % 16:
        return Support(False, "pages must lie at multiples of 16 bytes")
    return Support(True)
