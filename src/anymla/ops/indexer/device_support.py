"""What the Triton backends of the indexer can take; answered without importing triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.formats.pages import pages_of
from anymla.formats.records import SplitFp8Layout
from anymla.ops.device import float32_support, target_of, triton_problem
from anymla.ops.registry import Support

_WIDEST = 512
_MOST_HEADS = 256
_MOST_SELECTED = 2048
# Whether Hopper's own scores are chosen without having been named.
_HOPPER_AUTOMATIC = True


def query_support(q: Tensor, *args: Any, **kwargs: Any) -> Support:
    """Of ``indexer_q_rope_quant``: turning pairs stand at even channels."""
    if q.shape[2] % 2:
        return Support(False, f"heads of an even number of channels, got {q.shape[2]}")
    return float32_support(q, *args, **kwargs)


def dense_support(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Support:
    """Of ``mqa_logits``: a tile holds all heads of a row and whole keys."""
    if k.shape[1] > _WIDEST or q.shape[1] > _MOST_HEADS:
        return Support(
            False, f"at most {_WIDEST} channels and {_MOST_HEADS} heads, got {list(q.shape)}"
        )
    return float32_support(q, k, *args, **kwargs)


def paged_support(
    q: Tensor, index_cache: Tensor, *args: Any, layout: str = INDEX_FP8, **kwargs: Any
) -> Support:
    """Of ``paged_mqa_logits``: rows of one kind of value, at addresses of whole numbers."""
    kind = get_layout(layout)
    if isinstance(kind, SplitFp8Layout):
        return Support(False, f"not the split rows of {layout}")
    if q.shape[2] > _MOST_HEADS:
        return Support(False, f"at most {_MOST_HEADS} heads, got {q.shape[2]}")
    # Scales of an FP8 page are float32 numbers.
    step = 4 if kind.dtype == torch.uint8 else kind.dtype.itemsize
    stride = index_cache.stride(0) * kind.dtype.itemsize
    if index_cache.numel() and (stride % step or index_cache.data_ptr() % step):
        return Support(False, f"pages must start at multiples of {step} bytes")
    return float32_support(q, index_cache, *args, **kwargs)


def select_support(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k: int,
    **kwargs: Any,
) -> Support:
    """Of ``select_topk``: as for paged scores, and a selection that fits in registers."""
    if k > _MOST_SELECTED:
        return Support(False, f"selects at most {_MOST_SELECTED}, got {k}")
    layout = kwargs.get("layout", INDEX_FP8)
    return paged_support(q.unsqueeze(1), index_cache, weights, lengths, block_table, layout=layout)


def hopper_support(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k: int,
    **kwargs: Any,
) -> Support:
    """Of ``select_topk`` with Hopper's own scores: FP8 queries of 64 heads, pages of 64 keys."""
    support = _hopper(q.device)
    if support:
        support = select_support(q, index_cache, weights, lengths, block_table, k, **kwargs)
    if support:
        support = _hopper_pages(q, index_cache, kwargs.get("layout", INDEX_FP8))
    return support


def hopper_paged_support(
    q: Tensor, index_cache: Tensor, *args: Any, layout: str = INDEX_FP8, **kwargs: Any
) -> Support:
    """Of ``paged_mqa_logits`` by Hopper's own kernel."""
    support = _hopper(q.device)
    if support:
        support = paged_support(q, index_cache, *args, layout=layout, **kwargs)
    if support:
        support = _hopper_pages(q.flatten(0, 1), index_cache, layout)
    return support


def hopper_dense_support(
    q: Tensor, k: Tensor, k_scale: Tensor | None, *args: Any, **kwargs: Any
) -> Support:
    """Of ``mqa_logits`` by Hopper's own kernel: FP8 keys, a multiple of 64 of them."""
    support = _hopper(q.device)
    if support:
        support = _hopper_queries(q)
    if not support:
        return support
    if k.dtype != torch.float8_e4m3fn or k_scale is None or len(k) % 64 or not len(k):
        return Support(False, f"FP8 keys with scales, a multiple of 64, got {list(k.shape)}")
    if not (k.is_contiguous() and k_scale.is_contiguous()):
        return Support(False, "keys and scales that are contiguous")
    if k.data_ptr() % 16 or k_scale.data_ptr() % 16:
        return Support(False, "keys and scales must lie at multiples of 16 bytes")
    return Support(True, automatic=_HOPPER_AUTOMATIC)


def _hopper(device: torch.device) -> Support:
    if device.type != "cuda" or target_of(device).name != "sm_90":
        return Support(False, "runs on NVIDIA GPUs of compute capability 9.0 only")
    problem = triton_problem()
    return Support(not problem, problem)


def _hopper_queries(q: Tensor) -> Support:
    if q.dtype != torch.float8_e4m3fn or tuple(q.shape[1:]) != (64, 128):
        return Support(False, f"FP8 queries of 64 heads of 128, got {q.dtype} {list(q.shape)}")
    return Support(True)


def _hopper_pages(q: Tensor, index_cache: Tensor, layout: str) -> Support:
    support = _hopper_queries(q)
    if not support:
        return support
    cache = pages_of(index_cache)
    if layout != INDEX_FP8 or cache.shape[1] != 64:
        return Support(False, f"FP8 keys in pages of 64, got {layout}, {cache.shape[1]}")
    if cache.stride(0) % 16 or cache.data_ptr() % 16:
        return Support(False, "pages must lie at multiples of 16 bytes")
    return Support(True, automatic=_HOPPER_AUTOMATIC)
