"""Calls that select entries for a step's tokens, and the destination of the selection."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from anymla.ops.indexer import (
    mask_candidates,
    paged_mqa_logits,
    select_candidate_blocks,
    select_topk,
    topk_per_row,
)
from anymla.ops.indexer.interface import LEAST_SCRATCH_BYTES, SCRATCH_BYTES
from anymla.ops.step_indices import compute_global_topk_indices_and_lens

# Bytes for a score, its block's mark, and the integer that orders it.
_ROW_BYTES = 24


@dataclasses.dataclass(frozen=True)
class SlotTarget:
    """Destination of the slots of selected entries.

    Attributes:
        block_table: int32 [R, P], pages of the entries.
        page_size: number of entries per page.
        slots: int32 [T, width], slots of the entries, written.
        counts: int32 [T] number of slots, written.
    """

    block_table: Tensor
    page_size: int
    slots: Tensor
    counts: Tensor

    def arguments(self, requests: slice, tokens: slice) -> dict[str, Any]:
        """Return keyword arguments of ``select_topk`` for a slice of requests and tokens."""
        return {
            "slot_table": self.block_table[requests],
            "slot_page_size": self.page_size,
            "slots": self.slots[tokens],
            "counts": self.counts[tokens],
        }


@dataclasses.dataclass(frozen=True)
class TwoLevels:
    """Blocks of entries of every token, for a selection in two levels.

    Attributes:
        blocks: int32 [T, n], numbers of blocks, then -1.
        block_size: number of entries per block.
        keeps: True if the blocks are written and the selection is over all entries; False if the
            selection is over the entries of the blocks.
    """

    blocks: Tensor
    block_size: int
    keeps: bool


def select_entries(
    q: Tensor,
    q_scales: Tensor | None,
    weights: Tensor,
    visible: Tensor,
    cache: Tensor,
    block_table: Tensor,
    *,
    query_lens: tuple[int, ...],
    num_decodes: int,
    max_context: int,
    layout: str,
    out: Tensor,
    target: SlotTarget | None = None,
    token_to_req: Tensor | None = None,
    levels: TwoLevels | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    backend: str | None = None,
) -> Tensor:
    """Score every visible entry of every token and keep the best.

    Args:
        q: index queries [T, H, 128] (or packed), from ``indexer_q_rope_quant``.
        q_scales: scales of packed queries, from the same operation.
        weights: float32 [T, H] head weights, from the same operation.
        visible: int32 [T], number of entries that each token may select.
        cache: index pages in ``layout``.
        block_table: int32 [R, P], pages of each request.
        query_lens: number of tokens of each request, in batch order.
        num_decodes: number of leading requests that are decodes.
        max_context: upper bound of ``visible``.
        layout: layout id of ``cache``.
        out: int32 [T or more, width], written with the selected entries.
        target: destination of the entries' slots in another cache; None to write no slots.
        token_to_req: int32 [T], request of each token; without it, requests of unequal lengths take
            a call each.
        levels: blocks of entries that are kept for later layers, or selected within; None for
            neither.
        scratch_bytes: upper bound of the memory for scores; raised to the need of one token.
        backend: name of the operations' backend; None for the best.

    Returns:
        ``out`` with request-local entries, ascending, then -1.
    """
    scratch_bytes = max(scratch_bytes, LEAST_SCRATCH_BYTES, 8 * max_context)
    scores = None
    if levels is not None:
        scores = _Scores(q, q_scales, weights, visible, cache, max_context, layout, backend)
    ragged = token_to_req is not None and levels is None
    for call in selection_calls(query_lens, num_decodes, ragged=ragged):
        tokens = slice(call.first_token, call.end_token)
        # Ragged calls index the requests of the whole batch.
        requests = slice(None) if call.ragged else slice(call.first_request, call.end_request)
        more = {} if target is None else target.arguments(requests, tokens)
        if levels is not None and scores is not None:
            each = (call.end_token - call.first_token) // (call.end_request - call.first_request)
            if not _within_blocks(levels, each, scores, out.shape[1]):
                _select_in_levels(call, scores, block_table, levels, out, target, scratch_bytes)
                continue
            more |= {"blocks": levels.blocks[tokens], "block_size": levels.block_size}
        select_topk(
            q[tokens],
            cache,
            weights[tokens],
            visible[tokens],
            block_table[requests],
            out.shape[1],
            max_context=max_context,
            token_to_req=token_to_req[tokens] if call.ragged and token_to_req is not None else None,
            layout=layout,
            q_scales=None if q_scales is None else q_scales[tokens],
            scratch_bytes=scratch_bytes,
            out=out[tokens],
            backend=backend,
            **more,
        )
    return out


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Operands of index scores; see ``select_entries``."""

    q: Tensor
    q_scales: Tensor | None
    weights: Tensor
    visible: Tensor
    cache: Tensor
    max_context: int
    layout: str
    backend: str | None

    def of(self, tokens: slice, block_table: Tensor) -> Tensor:
        """Return scores [n, max_context] of tokens, equally many for each row of the table."""
        by_request = (len(block_table), -1)
        scales = self.q_scales
        scores: Tensor = paged_mqa_logits(
            self.q[tokens].unflatten(0, by_request),
            self.cache,
            self.weights[tokens],
            self.visible[tokens].unflatten(0, by_request),
            block_table,
            max_context=self.max_context,
            layout=self.layout,
            q_scales=None if scales is None else scales[tokens].unflatten(0, by_request),
            backend=self.backend,
        )
        return scores


def _select_in_levels(
    call: SelectionCall,
    scores: _Scores,
    block_table: Tensor,
    levels: TwoLevels,
    out: Tensor,
    target: SlotTarget | None,
    scratch_bytes: int,
) -> None:
    """Select for the tokens of one call, in slices that fit the scratch memory."""
    requests = slice(call.first_request, call.end_request)
    each = (call.end_token - call.first_token) // (call.end_request - call.first_request)
    # A row takes float32 scores and their order.
    rows = max(1, scratch_bytes // (_ROW_BYTES * max(1, scores.max_context)))
    step = max(1, rows // each) * each if requests.stop - requests.start > 1 else rows
    width = out.shape[1]
    for first in range(call.first_token, call.end_token, step):
        tokens = slice(first, min(first + step, call.end_token))
        if requests.stop - requests.start > 1:
            begin = requests.start + (first - call.first_token) // each
            owners = slice(begin, begin + (tokens.stop - first) // each)
        else:
            owners = requests
        table, visible = block_table[owners], scores.visible[tokens]
        logits = scores.of(tokens, table)
        if levels.keeps:
            levels.blocks[tokens] = select_candidate_blocks(
                logits,
                visible,
                levels.blocks.shape[1],
                block_size=levels.block_size,
                backend=scores.backend,
            )
        else:
            mask_candidates(
                logits, levels.blocks[tokens], block_size=levels.block_size, backend=scores.backend
            )
        best = topk_per_row(
            logits, torch.zeros_like(visible), visible, width, backend=scores.backend
        )
        last = torch.iinfo(torch.int32).max
        ordered = torch.where(best < 0, last, best).sort(1).values
        chosen = torch.where(ordered == last, -1, ordered)
        _store(chosen, tokens, owners, out, target, scores.backend)


def _store(
    chosen: Tensor,
    tokens: slice,
    owners: slice,
    out: Tensor,
    target: SlotTarget | None,
    backend: str | None,
) -> None:
    """Write the entries selected for tokens, equally many for each of the requests ``owners``."""
    out[tokens] = chosen
    if target is None:
        return
    table = target.block_table[owners]
    owner = torch.arange(len(table), dtype=torch.int32, device=out.device)
    target.slots[tokens], target.counts[tokens] = compute_global_topk_indices_and_lens(
        chosen,
        owner.repeat_interleave(len(chosen) // len(table)),
        table,
        target.page_size,
        torch.ones(len(chosen), dtype=torch.bool, device=out.device),
        backend=backend,
    )


# On a CPU, keys of a token's blocks are read, written contiguously, and read again for scoring.
_GATHERED_PASSES = 3


def _within_blocks(levels: TwoLevels, each: int, scores: _Scores, width: int) -> bool:
    """True if it moves fewer bytes to score only the keys of each token's blocks.

    Scoring all keys of a request reads them once for its ``each`` tokens. That remains the choice
    if the blocks of a token may have fewer entries than it selects, or lie across pages. It also
    remains for FP8 queries on a device: its kernels may differ in how they sum FP8 products, and
    the device decides which of them scores whole contexts.
    """
    held = levels.blocks.shape[1] * levels.block_size
    on_host = scores.q.device.type == "cpu"
    passes = _GATHERED_PASSES if on_host else 1
    return (
        not levels.keeps
        and (on_host or scores.q.dtype != torch.float8_e4m3fn)
        and scores.cache.shape[1] % levels.block_size == 0
        and held - levels.block_size >= width
        and passes * held * each < scores.max_context
    )


@dataclasses.dataclass(frozen=True)
class SelectionCall:
    """Consecutive requests whose tokens are selected for in one call.

    Attributes:
        first_request, end_request: range of the requests.
        first_token, end_token: range of their tokens.
        ragged: True if the requests have different numbers of tokens.
    """

    first_request: int
    end_request: int
    first_token: int
    end_token: int
    ragged: bool


def selection_calls(
    query_lens: tuple[int, ...], num_decodes: int, *, ragged: bool
) -> Iterator[SelectionCall]:
    """Split a step into calls: decodes of equal lengths, and all other requests.

    Decodes have a call of their own because their tokens share few keys, and are scored in other
    tiles than prefills.

    Args:
        query_lens: number of tokens of each request, in batch order.
        num_decodes: number of leading requests that are decodes.
        ragged: True if a call may take requests of different lengths.
    """
    starts = [0, *accumulate(query_lens)]
    edges = [0] if len(set(query_lens[:num_decodes])) != 1 else [0, num_decodes]
    if not ragged:
        edges += range(edges[-1] + 1, len(query_lens))
    for first, end in pairwise((*edges, len(query_lens))):
        if starts[first] < starts[end]:
            uneven = len(set(query_lens[first:end])) > 1
            yield SelectionCall(first, end, starts[first], starts[end], uneven)


def all_entries(visible: Tensor, width: int) -> Tensor:
    """Return the selection when every visible entry fits: 0, 1, ... then -1.

    Args:
        visible: int32 [T], number of entries visible to each token, at most ``width``.
        width: number of columns of the result.

    Returns:
        Request-local entries of each token, int32 [T, width].
    """
    entry = torch.arange(width, dtype=torch.int32, device=visible.device)
    return torch.where(entry < visible.unsqueeze(1), entry, -1)
