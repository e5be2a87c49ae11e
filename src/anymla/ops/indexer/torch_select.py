"""Top-k of index scores in bounded memory: chunks of keys, each merged into the top-k so far.

A score and its column form one integer that sorts by the contract's order, so a merge is a top-k of
the kept and the new integers:

    keys   | chunk | chunk | ..   tokens of a request (or one of each) x chunk  ->  scores
    top-k so far (k)  +  scores of the chunk (n)   ->   top-k so far (k)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.formats.pages import pages_of
from anymla.ops import _host
from anymla.ops._check import wide_dtype
from anymla.ops._torch_pages import slots_of
from anymla.ops.indexer.torch_blocks import (
    entries_of,
    gathered_keys,
    present_blocks,
    rows_at_once,
)
from anymla.ops.indexer.torch_scores import PagedKeys, decoded_queries, score_rows

# Bytes of scratch for each score being merged, and for each channel of a key being decoded.
_MERGE_BYTES = 48
_DECODE_BYTES = 24
# Keys gathered from blocks get one part in this many of the scratch.
_GATHERED_SHARE = 8
# On a CPU: rows that share decoded keys, and scores merged at a time (8 MiB of int64).
_CPU_ROWS = 64
_CPU_MERGED = 1 << 20
_COLUMN = 0x7FFFFFFF
_NAN_RANK = 0x7F800001  # float32 bits just above +inf's
NOT_A_COLUMN = torch.iinfo(torch.int64).min
# ``topk_per_row``: elements of a block of rows, 2 MiB of int64 on a CPU, 128 MiB elsewhere.
_CPU_BLOCK = 1 << 18
_DEVICE_BLOCK = 1 << 24


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Operands of one ``select_topk`` call."""

    q: Tensor
    weights: Tensor
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
    """Backend of ``interface.select_topk`` in torch; see its contract."""
    wide = wide_dtype(q.dtype, weights.dtype)
    keys = PagedKeys(index_cache, layout, wide)
    tokens, requests = len(q), len(block_table)
    covered = block_table.shape[1] * keys.page_size
    covered = covered if max_context is None else min(covered, max_context)
    each = tokens // requests if token_to_req is None and requests else 0
    if token_to_req is None:
        owners = torch.arange(tokens, device=q.device) // max(each, 1)
    else:
        owners = token_to_req.long()
    known = (owners >= 0) & (owners < requests)
    visible = torch.where(known, lengths.long().clamp(0, covered), 0)
    if blocks is not None:
        top, visible = _select_within(
            q, index_cache, weights, visible, block_table, k, owners, layout=layout,
            q_scales=q_scales, scratch_bytes=scratch_bytes, blocks=blocks, block_size=block_size,
        )  # fmt: skip
        return _results(top, visible, owners, out, slot_table, slot_page_size, slots, counts)

    column = torch.arange(k, device=q.device)
    top = torch.where(column < visible.unsqueeze(1), column, -1)
    # Without pages all scores are equal, and the first entries win.
    if covered > k and tokens and keys.pages:
        # Rows that list all of their entries are not scored.
        scored = visible > k
        batch = _Batch(
            decoded_queries(q, q_scales, wide),
            weights.to(wide),
            torch.where(scored, visible, 0),
            block_table,
            keys,
            k,
            scratch_bytes,
        )
        for rows, group in _groups(batch, owners, each):
            chosen = _select(batch, rows, group)
            top[rows] = torch.where(scored[rows].unsqueeze(1), chosen, top[rows])
    return _results(top, visible, owners, out, slot_table, slot_page_size, slots, counts)


def _results(
    top: Tensor,
    visible: Tensor,
    owners: Tensor,
    out: Tensor | None,
    slot_table: Tensor | None,
    slot_page_size: int,
    slots: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """Store entries, slots and counts of chosen entries, int64 [T, k], of ``visible`` [T]."""
    if slots is not None:
        assert slot_table is not None
        found = slots_of(top, owners.unsqueeze(1), slot_table, slot_page_size)
        slots.copy_(found.masked_fill_(found > _COLUMN, -1))
    if counts is not None:
        counts.copy_(visible.clamp(max=top.shape[1]))
    return top.int() if out is None else out.copy_(top)


def _select_within(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    visible: Tensor,
    block_table: Tensor,
    k: int,
    owners: Tensor,
    *,
    layout: str,
    q_scales: Tensor | None,
    scratch_bytes: int,
    blocks: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Select entries [T, k], int64, within each row's blocks; return also the visible numbers [T].

    ``owners`` [T] are the rows' requests; ``visible`` [T] is 0 for rows without a request.
    """
    cache = pages_of(index_cache)
    top = torch.full((len(q), k), -1, dtype=torch.int64, device=q.device)
    seen = torch.zeros_like(visible)
    if not len(cache) or not blocks.shape[1] or not block_table.numel():
        return top, seen
    gathered = scratch_bytes // _GATHERED_SHARE
    step = rows_at_once(blocks.shape[1], block_size, layout, gathered)
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        table = block_table[owners[rows].clamp(0, len(block_table) - 1)]
        listed, seen_here = present_blocks(blocks[rows], block_size, visible[rows], table, cache)
        keys, places = gathered_keys(listed, block_size, table, cache, get_layout(layout))
        columns = select_topk(
            q[rows],
            keys,
            weights[rows],
            seen_here,
            places,
            k,
            max_context=blocks.shape[1] * block_size,
            layout=layout,
            q_scales=None if q_scales is None else q_scales[rows],
            scratch_bytes=scratch_bytes - gathered,
        )
        top[rows], seen[rows] = entries_of(columns, listed, block_size).long(), seen_here.long()
    return top, seen


def _groups(batch: _Batch, owners: Tensor, each: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows that are scored together, and the block-table row of each group [G]."""
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
        rows = 1  # each group has one owner
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
    """Return how many scores may be merged at a time, in half of the scratch."""
    most = batch.scratch_bytes // 2 // _MERGE_BYTES
    return min(most, _CPU_MERGED) if _host.on_host(batch.q) else most


def _select(batch: _Batch, rows: slice, groups: Tensor) -> Tensor:
    """Select the rows' top-k entries [rows, k], int64, ascending, then -1."""
    keys, k = batch.keys, batch.k
    q, weights = batch.q[rows], batch.weights[rows]
    shape = (len(groups), len(q) // len(groups))
    lasts, end = batch.lasts[rows], batch.table.shape[1] * keys.page_size
    if _host.on_host(q):
        end = int(lasts.amax())
    pages = -(-end // keys.page_size)
    read = keys.of(batch.table[:, :pages].index_select(0, groups))
    width = max(_merged(batch) // len(q) - k, k)
    decoded = batch.scratch_bytes // 4 // (_DECODE_BYTES * len(groups) * q.shape[-1])
    width = max(min(width, decoded) // keys.page_size, 1) * keys.page_size

    top: Tensor | None = None
    for at in range(0, end, width):
        stop = min(at + width, end)
        part = q.new_full((len(q), stop - at), -torch.inf)
        score_rows(
            q.unflatten(0, shape),
            weights.unflatten(0, shape),
            torch.zeros_like(lasts).unflatten(0, shape),
            (lasts - at).clamp(max=stop - at).unflatten(0, shape),
            part.unflatten(0, shape),
            lambda first, last, at=at: read(at + first, at + last),  # type: ignore[misc]
            limit=stop - at,
            granularity=keys.page_size,
            scratch_bytes=batch.scratch_bytes // 4,
        )
        column = torch.arange(at, stop, device=q.device)
        hidden = column >= lasts.unsqueeze(1)
        if part.dtype == torch.float64:
            top = _merge_float64(top, part, column, hidden, k)
        else:
            new = ordered_keys(part, _COLUMN - column).masked_fill_(hidden, NOT_A_COLUMN)
            top = new if top is None else torch.cat((top, new), 1)
            if top.shape[1] > k:
                top = top.topk(k, dim=1, sorted=False).values
    assert top is not None
    if top.dtype == torch.float64:
        entry = top[:, top.shape[1] // 2 :].long()
    else:
        entry = torch.where(top == NOT_A_COLUMN, -1, _COLUMN - (top & _COLUMN))
    none = entry < 0
    entry = torch.where(none, _COLUMN, entry).sort(dim=1).values
    entry = torch.where(entry == _COLUMN, -1, entry)
    return torch.nn.functional.pad(entry, (0, k - entry.shape[1]), value=-1)


def _merge_float64(
    top: Tensor | None, part: Tensor, column: Tensor, hidden: Tensor, k: int
) -> Tensor:
    """Merge float64 scores; return scores and then their columns, [rows, 2 n] with n at most k.

    A float64 score and its column do not fit in one integer; column -1 marks an absent entry.
    """
    columns = torch.where(hidden, -1, column).to(part.dtype)
    if top is not None:
        kept = top.shape[1] // 2
        part = torch.cat((top[:, :kept], part), 1)
        columns = torch.cat((top[:, kept:], columns), 1)
    order = torch.sort(part, dim=1, descending=True, stable=True).indices
    absent = columns.gather(1, order) < 0
    order = order.gather(1, torch.sort(absent, dim=1, stable=True).indices)[:, :k]
    # Restore the order of columns, which the next merge relies on for ties.
    order = order.sort(dim=1).values
    return torch.cat((part.gather(1, order), columns.gather(1, order)), 1)


def topk_per_row(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, *, out: Tensor | None = None
) -> Tensor:
    """Backend of ``interface.topk_per_row`` in torch; see its contract."""
    shape = (len(logits), k)
    top = starts.new_full(shape, -1) if out is None else out.fill_(-1)
    width = logits.shape[1]
    starts = starts.long()
    firsts, lasts = starts.clamp(min=0), ends.long().clamp(max=width)
    if _host.on_host(logits):
        blocks = _blocks_of_similar_rows(firsts.tolist(), lasts.tolist())
    else:
        blocks = _blocks_of_all_columns(len(logits), width)
    for row, row_end, first, last in blocks:
        rows = slice(row, row_end)
        order = _topk_columns(
            logits[rows, first:last],
            (firsts[rows] - first).unsqueeze(1),
            (lasts[rows] - first).unsqueeze(1),
            min(k, last - first),
        )
        relative = order + (first - starts[rows]).unsqueeze(1)
        top[rows, : order.shape[1]] = torch.where(order >= 0, relative, -1).int()
    return top


def _topk_columns(scores: Tensor, first: Tensor, last: Tensor, k: int) -> Tensor:
    """Return columns of each row's top-k scores with first <= column < last, then -1; int64."""
    column = torch.arange(scores.shape[1], device=scores.device)
    outside = (column < first) | (column >= last)
    if scores.dtype == torch.float64:
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        unseen, moved = torch.sort(outside.gather(1, order), dim=1, stable=True)
        return order.gather(1, moved).masked_fill_(unseen, -1)[:, :k]
    key = ordered_keys(scores, column.flip(0)).masked_fill_(outside, NOT_A_COLUMN)
    top = key.topk(k, dim=1)
    return top.indices.masked_fill_(top.values == NOT_A_COLUMN, -1)


def ordered_keys(scores: Tensor, low: Tensor) -> Tensor:
    """Pack float32 scores [.., N] and tie-breakers below 2^31 [N] into int64 that sort alike.

    -0 equals 0, and NaN is the highest score. Among equal scores the larger tie-breaker is larger.
    """
    # Adding zero turns -0 into 0; flipping a negative number's other bits orders bits as numbers.
    bits = (scores + 0.0).view(torch.int32)
    rank = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    rank.masked_fill_(scores.isnan(), _NAN_RANK)
    return rank.long().bitwise_left_shift_(32).bitwise_or_(low)


def _blocks_of_all_columns(rows: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, row_end, first, last) for blocks of rows of full width."""
    step = max(1, _DEVICE_BLOCK // max(width, 1))
    for row in range(0, rows if width else 0, step):
        yield row, min(row + step, rows), 0, width


def _blocks_of_similar_rows(
    firsts: Sequence[int], lasts: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, row_end, first, last) for blocks of rows that see nearly the same columns.

    Columns [first, last) cover what each row sees; a block is not much wider than its narrowest
    row.
    """
    row = 0
    while row < len(firsts):
        first, last = firsts[row], lasts[row]
        if first >= last:
            row += 1
            continue
        row_end, shortest = row + 1, last - first
        while row_end < len(firsts):
            wider = min(first, firsts[row_end]), max(last, lasts[row_end])
            width = wider[1] - wider[0]
            least = min(shortest, lasts[row_end] - firsts[row_end])
            if width > 1024 + 2 * least or width * (row_end + 1 - row) > _CPU_BLOCK or least < 1:
                break
            (first, last), shortest = wider, least
            row_end += 1
        yield row, row_end, first, last
        row = row_end
