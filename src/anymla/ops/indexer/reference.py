"""Reference of the lightning indexer in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.formats.hadamard import hadamard_transform
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.formats.pages import pages_of
from anymla.formats.records import KV_AMAX_FLOOR
from anymla.ops._check import wide_dtype
from anymla.ops._reference import rope


def indexer_q_rope_quant(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    softmax_scale: float,
    head_scale: float,
    quant: str = "fp8",
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of ``interface.indexer_q_rope_quant``; see its contract."""
    q = rope(q, positions, cos_sin_cache)
    if quant != "none":
        q = q.bfloat16()
    if hadamard:
        q = hadamard_transform(q)
    wide = wide_dtype(weights.dtype)
    scaled = weights.to(wide) * (softmax_scale * head_scale)
    no_scales = torch.empty(0, dtype=torch.uint8, device=q.device)
    if quant == "none":
        return q, no_scales, scaled
    if quant == "mxfp4":
        return *quantize_mxfp4(q), scaled
    codes, scale = quantize_fp8_rows(q, block=q.shape[-1], floor=KV_AMAX_FLOOR)
    return codes.view(torch.float8_e4m3fn), no_scales, scaled * scale.squeeze(-1)


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
    """Reference of ``interface.mqa_logits``; see its contract."""
    wide = wide_dtype(q.dtype, weights.dtype)
    queries, keys = values_of(q, q_scales, wide), k.to(wide)
    if k_scale is not None:
        keys = keys * k_scale.to(wide).unsqueeze(1)
    logits = torch.full((len(q), len(k)), -torch.inf, dtype=wide, device=q.device)
    bounds = zip(starts.clamp(min=0).tolist(), ends.clamp(max=len(k)).tolist(), strict=True)
    for m, (start, end) in enumerate(bounds):
        if start < end:
            logits[m, start:end] = scores(queries[m], weights[m], keys[start:end])
    return logits if out is None else out.copy_(logits)


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
    """Reference of ``interface.paged_mqa_logits``; see its contract."""
    wide = wide_dtype(q.dtype, weights.dtype)
    queries, cache = values_of(q, q_scales, wide), pages_of(index_cache)
    pages, page_size = cache.shape[:2]
    requests, tokens = q.shape[:2]
    logits = torch.full((requests * tokens, max_context), -torch.inf, dtype=wide, device=q.device)
    lengths = context_lens if context_lens.ndim == 2 else context_lens.unsqueeze(1)
    lengths = lengths.expand(requests, tokens)
    for r in range(requests):
        page = block_table[r].long()
        present = ((page >= 0) & (page < pages)).repeat_interleave(page_size)
        offset = torch.arange(page_size, device=q.device)
        slots = (page.unsqueeze(1) * page_size + offset).flatten()
        slots = torch.where(present, slots, -1)
        for j in range(tokens):
            end = min(max(int(lengths[r, j]), 0), max_context, len(slots))
            keys = get_layout(layout).read(cache, slots[:end], wide)
            row = scores(queries[r, j], weights[r * tokens + j], keys)
            logits[r * tokens + j, :end] = torch.where(present[:end], row, -torch.inf)
    return logits if out is None else out.copy_(logits)


def topk_per_row(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, *, out: Tensor | None = None
) -> Tensor:
    """Reference of ``interface.topk_per_row``; see its contract."""
    best = torch.full((len(logits), k), -1, dtype=torch.int32, device=logits.device)
    bounds = zip(starts.tolist(), ends.tolist(), strict=True)
    for m, (start, end) in enumerate(bounds):
        first, last = max(start, 0), min(end, logits.shape[1])
        # torch sorts NaN above +inf, and a stable sort keeps the lower index first.
        row = logits[m, first : max(first, last)]
        order = torch.sort(row, descending=True, stable=True).indices[:k]
        best[m, : len(order)] = order + (first - start)
    return best if out is None else out.copy_(best)


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
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    scratch_bytes: int = 9 << 25,
    out: Tensor | None = None,
    slot_table: Tensor | None = None,
    slot_page_size: int = 64,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 8,
) -> Tensor:
    """Reference of ``interface.select_topk``; see its contract."""
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
        last = min(int(lengths[token]), covered)
        if last <= 0:
            continue
        row = torch.full((last,), -torch.inf, dtype=torch.float64, device=q.device)
        keys, present = _keys(cache, block_table[request], last, layout)
        row[present] = scores(queries[token], weights[token].double(), keys)[present]
        # The contract defines scores in this precision; float64 only computes them accurately.
        row = row.to(wide_dtype(q.dtype, weights.dtype))
        seen = torch.arange(last, device=q.device)
        if blocks is not None:
            seen = seen[present & torch.isin(seen // block_size, blocks[token])]
        best_first = torch.sort(row[seen], descending=True, stable=True).indices
        order = seen[best_first[:k]].sort().values
        best[token, : len(order)] = order
        chosen[token] = len(order)
        if slot_table is not None:
            page, place = order // slot_page_size, order % slot_page_size
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


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Score q [H, D], weights [H] against keys [N, D]: ``sum_h weights[h] * relu(q[h] . key)``."""
    return weights.to(q.dtype) @ torch.relu(q @ keys.T)


def values_of(q: Tensor, q_scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Convert queries to ``dtype``; packed ones are decoded with their scales."""
    if q.dtype == torch.uint8:
        assert q_scales is not None
        return dequantize_mxfp4(q, q_scales, dtype)
    return q.to(dtype)


def _keys(cache: Tensor, table: Tensor, count: int, layout: str) -> tuple[Tensor, Tensor]:
    """Return a request's first ``count`` entries in float64, and a mask of those that exist."""
    pages, page_size = cache.shape[:2]
    entry = torch.arange(count, device=cache.device)
    page = table.long()[entry // page_size]
    present = (page >= 0) & (page < pages)
    slots = torch.where(present, page * page_size + entry % page_size, -1)
    return get_layout(layout).read(cache, slots, torch.float64), present


def select_candidate_blocks(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int
) -> Tensor:
    """Reference of ``interface.select_candidate_blocks``; see its contract."""
    out = lengths.new_full((len(logits), count), -1)
    for row, (scores, length) in enumerate(zip(logits, lengths.tolist(), strict=True)):
        seen = scores[: max(0, length)]
        if not len(seen):
            continue
        best = torch.stack([part.amax() for part in seen.split(block_size)])
        best[-1] = torch.inf
        # A stable sort keeps the lower of equal blocks first, and NaN before everything else.
        order = best.sort(descending=True, stable=True).indices[:count]
        kept = [block for block in order.tolist() if best[block] != -torch.inf]
        out[row, : len(kept)] = out.new_tensor(sorted(kept))
    return out


def mask_candidates(logits: Tensor, blocks: Tensor, *, block_size: int) -> None:
    """Reference of ``interface.mask_candidates``; see its contract."""
    for row, chosen in enumerate(blocks.tolist()):
        for column in range(logits.shape[1]):
            if column // block_size not in chosen:
                logits[row, column] = -torch.inf
