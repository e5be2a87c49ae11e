"""The selection as its contract says, one token at a time, scores in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.formats.pages import pages_of
from anymla.ops.indexer.reference import scores, values_of, wide_dtype


def select_topk(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k: int,
    *,
    max_context: int | None = None,
    token_to_req: Tensor | None = None,
    starts: Tensor | None = None,
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    scratch_bytes: int = 9 << 25,
    out: Tensor | None = None,
    slot_table: Tensor | None = None,
    slot_page_size: int = 64,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """See ``interface_select.select_topk``."""
    queries, cache = values_of(q, q_scales, torch.float64), pages_of(index_cache)
    requests, columns = block_table.shape
    covered = columns * cache.shape[1]
    covered = covered if max_context is None else min(covered, max_context)
    best = lengths.new_full((len(q), k), -1)
    places = torch.full_like(best, -1)
    chosen = torch.zeros_like(lengths)
    for token in range(len(q)):
        request = token * requests // len(q) if token_to_req is None else int(token_to_req[token])
        if not 0 <= request < requests:
            continue
        first = 0 if starts is None else max(int(starts[token]), 0)
        last = min(int(lengths[token]), covered)
        if first >= last:
            continue
        row = torch.full((last,), -torch.inf, dtype=torch.float64, device=q.device)
        keys, present = _keys(cache, block_table[request], last, layout)
        row[present] = scores(queries[token], weights[token].double(), keys)[present]
        # The precision in which scores are defined; float64 only computes them well.
        row = row[first:].to(wide_dtype(q, weights))
        order = torch.sort(row, descending=True, stable=True).indices[:k].sort().values
        best[token, : len(order)] = order
        chosen[token] = len(order)
        if slot_table is not None:
            page, place = (order + first) // slot_page_size, (order + first) % slot_page_size
            known = page < slot_table.shape[1]
            page = slot_table[request, page.clamp(max=max(slot_table.shape[1] - 1, 0))].long()
            slot = page * slot_page_size + place
            known &= (page >= 0) & (slot < 2**31)
            places[token, : len(order)] = torch.where(known, slot, -1)
    if slots is not None:
        slots.copy_(places)
    if counts is not None:
        counts.copy_(chosen)
    return best if out is None else out.copy_(best)


def _keys(cache: Tensor, table: Tensor, count: int, layout: str) -> tuple[Tensor, Tensor]:
    """The first ``count`` entries of a request in float64, and which of them exist."""
    pages, page_size = cache.shape[:2]
    entry = torch.arange(count, device=cache.device)
    page = table.long()[entry // page_size]
    present = (page >= 0) & (page < pages)
    slots = torch.where(present, page * page_size + entry % page_size, -1)
    return get_layout(layout).read(cache, slots, torch.float64), present
