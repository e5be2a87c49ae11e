"""Scores by Hopper's own kernel for callers that select by themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.formats.pages import pages_of
from anymla.ops.indexer.gluon_sm90_launch import keys_in_a_list, keys_in_pages, score


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``interface.mqa_logits``; for what ``hopper_dense_support`` lets through."""
    rows, count = len(q), len(k)
    logits = _logits(out, rows, count, q.device)
    if logits.numel():
        assert k_scale is not None
        score(
            q.contiguous(),
            keys_in_a_list(k, k_scale),
            _weights(weights),
            None,
            ends.contiguous(),
            starts.contiguous(),
            None,
            logits,
            None,
            first_row=0,
            per_request=rows,
            requests=1,
            covered=count,
            k=0,
            context=count,
        )
    return logits if out is None or out is logits else out.copy_(logits)


def paged_mqa_logits(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    max_context: int,
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``interface.paged_mqa_logits``; for what ``hopper_paged_support`` lets through."""
    requests, each = q.shape[:2]
    logits = _logits(out, requests * each, max_context, q.device)
    cache = pages_of(index_cache)
    if not len(cache):
        logits.fill_(-torch.inf)
    elif logits.numel():
        lengths = context_lens
        if lengths.ndim == 1:
            lengths = lengths.unsqueeze(1).expand(requests, each)
        score(
            q.reshape(requests * each, *q.shape[2:]).contiguous(),
            keys_in_pages(index_cache),
            _weights(weights),
            block_table,
            lengths.reshape(-1).contiguous(),
            None,
            None,
            logits,
            None,
            first_row=0,
            per_request=each,
            requests=requests,
            covered=min(max_context, block_table.shape[1] * cache.shape[1]),
            k=0,
            context=max_context,
        )
    return logits if out is None or out is logits else out.copy_(logits)


def _logits(out: Tensor | None, rows: int, columns: int, device: torch.device) -> Tensor:
    """The caller's tensor where the kernel can write it, else a new one."""
    if out is not None and out.stride(1) == 1:
        return out
    return torch.empty(rows, columns, dtype=torch.float32, device=device)


def _weights(weights: Tensor) -> Tensor:
    return weights if weights.stride(1) == 1 else weights.contiguous()
