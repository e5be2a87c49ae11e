"""Selection in bounded memory: scores of a run of keys at a time, merged into the best so far.

A score and its place are one integer that orders as the rule says, so that merging is a top-k of
what was kept and what is new:

    keys   | run | run | ..       tokens of a request (or one of each) x run  ->  scores
    best so far (k)  +  scores of the run (n)   ->   best so far (k)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.ops import _host
from anymla.ops.indexer.reference import wide_dtype
from anymla.ops.indexer.torch_keys import PagedKeys
from anymla.ops.indexer.torch_scores import decoded_queries, score_rows
from anymla.ops.indexer.torch_topk import NOT_A_COLUMN, ordered_keys
from anymla.ops.selection.torch_slots import slots_of

# Bytes that a score costs while it is merged, and a channel of a key while it is decoded.
_MERGE_BYTES = 48
_DECODE_BYTES = 24
# On a CPU: rows that share decoded keys, and scores merged at a time (8 MiB of int64).
_CPU_ROWS = 64
_CPU_MERGED = 1 << 20
_COLUMN = 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class _Batch:
    """What every part of a call needs."""

    q: Tensor
    weights: Tensor
    firsts: Tensor
    lasts: Tensor
    table: Tensor
    keys: PagedKeys
    k: int
    scratch_bytes: int


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
    wide = wide_dtype(q, weights)
    keys = PagedKeys(index_cache, layout, wide)
    tokens, requests = len(q), len(block_table)
    covered = block_table.shape[1] * keys.page_size
    covered = covered if max_context is None else min(covered, max_context)
    each = tokens // requests if token_to_req is None and requests else 0
    if token_to_req is None:
        owners = torch.arange(tokens, device=q.device) // max(each, 1)
    else:
        owners = token_to_req.long()
    firsts = torch.zeros_like(owners) if starts is None else starts.long().clamp(min=0)
    known = (owners >= 0) & (owners < requests)
    lasts = torch.where(known, lengths.long().clamp(max=covered), 0)
    visible = (lasts - firsts).clamp(min=0)

    column = torch.arange(k, device=q.device)
    best = torch.where(column < visible.unsqueeze(1), column, -1)
    # A cache without pages leaves nothing but ties, which the first entries win.
    if covered > k and tokens and keys.pages:
        # Rows that list all of their entries see nothing as far as scores are concerned.
        scored = visible > k
        batch = _Batch(
            decoded_queries(q, q_scales, wide),
            weights.to(wide),
            torch.where(scored, firsts, covered),
            torch.where(scored, lasts, 0),
            block_table,
            keys,
            k,
            scratch_bytes,
        )
        for rows, group in _groups(batch, owners, each):
            chosen = _select(batch, rows, group)
            best[rows] = torch.where(scored[rows].unsqueeze(1), chosen, best[rows])
    if slots is not None:
        assert slot_table is not None
        entry = torch.where(best >= 0, best + firsts.unsqueeze(1), -1)
        found = slots_of(entry, owners.unsqueeze(1), slot_table, slot_page_size)
        slots.copy_(found.masked_fill_(found > _COLUMN, -1))
    if counts is not None:
        counts.copy_(visible.clamp(max=k))
    return best.int() if out is None else out.copy_(best)


def _groups(batch: _Batch, owners: Tensor, each: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows that are scored together, and the block-table row of each of their groups [G]."""
    tokens = len(owners)
    if _host.on_host(owners):
        most = max(1, min(_CPU_ROWS, _merged(batch) // (4 * batch.k)))
        wanted, owner = (batch.lasts > 0).tolist(), owners.tolist()
        token = 0
        while token < tokens:
            end = token + 1
            while end < tokens and owner[end] == owner[token] and end - token < most:
                end += 1
            if any(wanted[token:end]):
                yield slice(token, end), owners[token : token + 1]
            token = end
        return
    alone = len(batch.table) == 1
    rows = min(tokens if alone else max(each, 1), max(1, _merged(batch) // (4 * batch.k)))
    if not alone and each % rows:
        rows = 1  # groups of one owner each
    together = 1
    if not alone:
        decoded = batch.scratch_bytes // 4 // (_DECODE_BYTES * batch.q.shape[-1])
        together = min(
            _merged(batch) // (4 * batch.k * rows), decoded // (4 * batch.keys.page_size)
        )
    step = rows * max(together, 1)
    for token in range(0, tokens, step):
        end = min(token + step, tokens)
        groups = owners[token:end] if alone else owners[token:end:rows]
        yield slice(token, end), groups[: 1 if alone else None].clamp(0, len(batch.table) - 1)


def _merged(batch: _Batch) -> int:
    """Scores that may be merged at a time: half of the scratch."""
    most = batch.scratch_bytes // 2 // _MERGE_BYTES
    return min(most, _CPU_MERGED) if _host.on_host(batch.q) else most


def _select(batch: _Batch, rows: slice, groups: Tensor) -> Tensor:
    """Entries [rows, k], int64, relative to the first visible, ascending, then -1."""
    keys, k = batch.keys, batch.k
    q, weights = batch.q[rows], batch.weights[rows]
    shape = (len(groups), len(q) // len(groups))
    firsts, lasts = batch.firsts[rows], batch.lasts[rows]
    begin, end = 0, batch.table.shape[1] * keys.page_size
    if _host.on_host(q):
        begin, end = int(firsts.amin()), int(lasts.amax())
    begin = begin // keys.page_size * keys.page_size
    pages = -(-end // keys.page_size)
    read = keys.of(batch.table[:, :pages].index_select(0, groups))
    width = max(_merged(batch) // len(q) - k, k)
    decoded = batch.scratch_bytes // 4 // (_DECODE_BYTES * len(groups) * q.shape[-1])
    width = max(min(width, decoded) // keys.page_size, 1) * keys.page_size

    best: Tensor | None = None
    for at in range(begin, end, width):
        stop = min(at + width, end)
        part = q.new_full((len(q), stop - at), -torch.inf)
        score_rows(
            q.unflatten(0, shape),
            weights.unflatten(0, shape),
            (firsts - at).clamp(0).unflatten(0, shape),
            (lasts - at).clamp(max=stop - at).unflatten(0, shape),
            part.unflatten(0, shape),
            lambda first, last, at=at: read(at + first, at + last),  # type: ignore[misc]
            limit=stop - at,
            granularity=keys.page_size,
            scratch_bytes=batch.scratch_bytes // 4,
        )
        column = torch.arange(at, stop, device=q.device)
        hidden = (column < firsts.unsqueeze(1)) | (column >= lasts.unsqueeze(1))
        if part.dtype == torch.float64:
            best = _merge_float64(best, part, column, hidden, k)
        else:
            new = ordered_keys(part, _COLUMN - column).masked_fill_(hidden, NOT_A_COLUMN)
            best = new if best is None else torch.cat((best, new), 1)
            if best.shape[1] > k:
                best = best.topk(k, dim=1, sorted=False).values
    assert best is not None
    if best.dtype == torch.float64:
        entry = best[:, best.shape[1] // 2 :].long()
    else:
        entry = torch.where(best == NOT_A_COLUMN, -1, _COLUMN - (best & _COLUMN))
    none = entry < 0
    entry = torch.where(none, _COLUMN, entry - firsts.unsqueeze(1)).sort(dim=1).values
    entry = torch.where(entry == _COLUMN, -1, entry)
    return torch.nn.functional.pad(entry, (0, k - entry.shape[1]), value=-1)


def _merge_float64(
    best: Tensor | None, part: Tensor, column: Tensor, hidden: Tensor, k: int
) -> Tensor:
    """Scores, and behind them columns, of the best of both: [rows, 2 n], n at most k.

    A float64 score and its column do not fit one integer; -1 stands for no column.
    """
    columns = torch.where(hidden, -1, column).to(part.dtype)
    if best is not None:
        kept = best.shape[1] // 2
        part = torch.cat((best[:, :kept], part), 1)
        columns = torch.cat((best[:, kept:], columns), 1)
    order = torch.sort(part, dim=1, descending=True, stable=True).indices
    absent = columns.gather(1, order) < 0
    order = order.gather(1, torch.sort(absent, dim=1, stable=True).indices)[:, :k]
    # Back in the order of columns, which the next merge rests on.
    order = order.sort(dim=1).values
    return torch.cat((part.gather(1, order), columns.gather(1, order)), 1)
