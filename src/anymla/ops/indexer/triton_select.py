"""``select_topk`` in Triton: scores of a chunk of tokens, then top-k of each row.

A chunk takes two launches: scores into scratch that the next chunk reuses, then a top-k kernel that
writes entries, slots and counts. Launches depend on sizes only (``config``), never on values, so a
call can be captured in a graph.

Algorithms "row" and "groups" serve short rows, and rows whose scores came with the maximum of each
16. The k-th largest maximum is at most the k-th score, since k groups contain a score at least as
large. Of the groups whose maximum equals it, the first ones contain all ties that can win, because
each has a tie that comes earlier. So the top-k groups, first ones among equals, contain the
selection, and nothing else is read:

    maxima   | 7 | 2 | 9 | 4 | ..   ->  the top-k groups, in order of entries
    scores   | .. 16 .. | .. 16 ..   ->  top-k of k * 16 scores, in order of entries

A row with no more groups than k is read whole, without maxima.

Algorithm "samples" serves other rows. Each split of a row collects the scores that pass a threshold
taken from samples, in order of entries; the selection is made from the collected scores. If the
threshold was bad (fewer than k pass, or more than the capacity), the row is bisected instead, so
the result never depends on the samples.

    collect  row | split | split | ..  ->  candidates of a split    grid (splits, rows)
    merge    candidates of a row       ->  k entries                grid (rows,)

With one split, ``collect`` also merges its own row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.formats.pages import pages_of
from anymla.ops import device as device_facts
from anymla.ops.device import Target
from anymla.ops.indexer.config import (
    GROUP,
    SelectConfig,
    choose_select_config,
    padded_entries,
    row_registers,
    row_warps,
    sample_block_and_warps,
)
from anymla.ops.indexer.inputs import ScoreInputs, SelectOutputs, select_inputs, writable
from anymla.ops.indexer.triton_blocks import ListedBlocks, store_slots
from anymla.ops.indexer.triton_scores import row_ranges, write_scores
from anymla.ops.indexer.triton_topk import NOTHING, kth_largest, narrow, ordered, places
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

_GROUP = tl.constexpr(GROUP)
_EACH = tl.constexpr(4)  # neighbours that a thread loads at once
_RUN = tl.constexpr(8)  # number of adjacent samples
_LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _store_all(
    out,
    slots,
    table,
    table_stride,
    table_pages,
    slot_page,
    count,
    k,
    PADDED_K: tl.constexpr,
):
    """Store the row of a token with at most k entries: all of them, then -1."""
    place = tl.arange(0, PADDED_K)
    tl.store(out + place, tl.where(place < count, place, -1), mask=place < k)
    if slots is not None:
        # Wait for other threads of this CTA, which have written the entries.
        tl.debug_barrier()
        store_slots(out, slots, table, table_stride, table_pages, slot_page, count, k, PADDED_K)


@triton.jit(
    do_not_specialize=[
        "first_row", "per_request", "num_requests", "covered", "k", "table_pages", "slot_page",
        "table_row_stride",
    ]
)  # fmt: skip
def row_topk_kernel(
    scores,
    scores_stride,
    maxima,
    maxima_stride,
    chosen_groups,
    lengths,
    requests,
    out,
    out_stride,
    slots,
    slots_stride,
    counts,
    table,
    table_row_stride,
    table_column_stride,
    table_pages,
    slot_page,
    first_row,
    per_request,
    num_requests,
    covered,
    k,
    GROUPS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PADDED_K: tl.constexpr,
    SCORED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the top-k of a row.

    ``scores`` are bits of float32, and ``chosen_groups`` is scratch [rows, PADDED_K].
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    request, _, count = row_ranges(
        lengths, None, requests, row, True, first_row, per_request, num_requests, covered
    )
    if counts is not None:
        tl.store(counts + row, tl.minimum(count, k))
    out += row * out_stride
    if slots is not None:
        slots += row * slots_stride
        table += tl.maximum(request, 0).to(tl.int64) * table_row_stride
    # Without scores, as without pages, choose the first entries.
    if (count <= k) | (not SCORED):
        _store_all(
            out, slots, table, table_column_stride, table_pages, slot_page,
            tl.minimum(count, k), k, PADDED_K,
        )  # fmt: skip
    else:
        scores += row * scores_stride
        if GROUPS == 0:
            # Read whole lines, to which rows are padded: masks by lines leave loads wide.
            line = tl.arange(0, ELEMENTS // _EACH)[:, None] * _EACH
            entry = line + tl.arange(0, _EACH)[None, :]
            inside = line < count
            at_least = tl.full((), NOTHING + 1, tl.int32)
        else:
            chosen_groups += row * PADDED_K
            groups = tl.cdiv(count, _GROUP)
            at_least = tl.full((), NOTHING + 1, tl.int32)
            if groups > k:
                line = tl.arange(0, GROUPS // _EACH)[:, None] * _EACH
                number = line + tl.arange(0, _EACH)[None, :]
                best = tl.load(
                    maxima + row * maxima_stride + number, mask=line < groups, other=NOTHING
                )
                best = tl.where(number < groups, best, NOTHING)
                limit, above = kth_largest(best, groups, k, True)
                place, taken = places(best, limit, k - above)
                tl.store(chosen_groups + place, number, mask=taken)
                at_least = tl.where(above == k, limit + 1, limit)
            else:
                every = tl.arange(0, PADDED_K)
                tl.store(chosen_groups + every, every, mask=every < groups)
            # Wait for other threads of this CTA, which have written the entries.
            tl.debug_barrier()
            kept = tl.arange(0, PADDED_K)
            inside = kept < tl.minimum(groups, k)
            group = tl.load(chosen_groups + kept, mask=inside, other=0)
            entry = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
            inside = inside[:, None]
        key = ordered(tl.load(scores + entry, mask=inside, other=0))
        there = inside & (entry < count)
        key = tl.where(there & (key >= at_least), key, NOTHING)
        candidates = tl.sum((key != NOTHING).to(tl.int32))
        limit = tl.full((), NOTHING, tl.int32)
        above = k
        if candidates > k:
            limit, above = kth_largest(key, candidates, k, GROUPS == 0)
        place, taken = places(key, limit, k - above)
        tl.store(out + place, entry, mask=taken)
        if slots is not None:
            # Wait for other threads of this CTA, which have written the entries.
            tl.debug_barrier()
            store_slots(
                out, slots, table, table_column_stride, table_pages, slot_page, k, k, PADDED_K
            )


@triton.jit
def _load_keys(scores, at, end, BLOCK: tl.constexpr):
    """Load keys of entries [at, at + BLOCK), neighbours in a line; NOTHING from ``end`` on.

    ``at`` is a multiple of 4. Whole lines are read, to which rows are padded: masks by lines leave
    loads wide.
    """
    line = at + tl.arange(0, BLOCK // _EACH)[:, None] * _EACH
    entry = line + tl.arange(0, _EACH)[None, :]
    key = ordered(tl.load(scores + entry, mask=line < end, other=0))
    return entry, tl.where(entry < end, key, NOTHING)


@triton.jit
def _sample_threshold(scores, count, k, SAMPLES: tl.constexpr):
    """Return a key that at least k of a row's keys are likely to reach, but not many more.

    ``scores`` points to the first of ``count``.
    """
    number = tl.arange(0, SAMPLES)
    at = (number // _RUN).to(tl.int64) * (count // (SAMPLES // _RUN)) + number % _RUN
    key = ordered(tl.load(scores + at))
    expected = k.to(tl.float32) * SAMPLES / count
    # The rank is three and a half standard deviations above the expected share of k among the
    # samples.
    rank = (expected + 3.5 * tl.sqrt(expected) + 4.0).to(tl.int32)
    low = tl.full((), NOTHING + 1, tl.int32)
    if rank < SAMPLES:
        every = tl.full((), SAMPLES, tl.int32)
        low, _reach, _above = narrow(key, every, rank, rank // 8 + 1, True)
    return low


@triton.jit
def _select_candidates(
    keys,
    entries,
    found,
    total,
    k,
    out,
    SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Select the top-k of ``total`` candidates; split p has found[p] of them from p * CAPACITY on.

    There are at most CAPACITY candidates.
    """
    element = tl.arange(0, CAPACITY // _EACH)[:, None] * _EACH + tl.arange(0, _EACH)[None, :]
    at = element
    if SPLITS > 1:
        end = 0
        for split in tl.static_range(SPLITS - 1):
            here = tl.load(found + split)
            end += here
            at += tl.where(element >= end, CAPACITY - here, 0)
    there = element < total
    entry = tl.load(entries + at, mask=there, other=0)
    key = tl.where(there, tl.load(keys + at, mask=there, other=0), NOTHING)
    limit = tl.full((), NOTHING, tl.int32)
    above = k
    if total > k:
        limit, above = kth_largest(key, total, k, False)
    place, taken = places(key, limit, k - above)
    tl.store(out + place, entry, mask=taken)


@triton.jit
def _select_by_bisection(scores, count, k, out, BLOCK: tl.constexpr):
    """Select the top-k of any row by bisecting the range of keys.

    This is slow, because the row is read each time.
    """
    low = tl.full((), NOTHING + 1, tl.int32)
    high = tl.full((), _LARGEST, tl.int32)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        reach = 0
        for at in range(0, count, BLOCK):
            entry, key = _load_keys(scores, at, count, BLOCK)
            reach += tl.sum((key >= middle).to(tl.int32))
        if reach >= k:
            low = middle
        else:
            high = middle - 1
    above = 0
    for at in range(0, count, BLOCK):
        entry, key = _load_keys(scores, at, count, BLOCK)
        above += tl.sum((key > low).to(tl.int32))
    need = k - above
    written = 0
    for at in range(0, count, BLOCK):
        entry, key = _load_keys(scores, at, count, BLOCK)
        place, taken = places(key, low, need)
        tl.store(out + written + place, entry, mask=taken)
        written += tl.sum(taken.to(tl.int32))
        need -= tl.minimum(tl.sum((key == low).to(tl.int32)), need)


@triton.jit(
    do_not_specialize=[
        "first_row", "per_request", "num_requests", "covered", "k", "table_pages", "slot_page",
        "table_row_stride",
    ]
)  # fmt: skip
def sample_collect_kernel(
    scores,
    scores_stride,
    keys,
    entries,
    found,
    lengths,
    requests,
    out,
    out_stride,
    slots,
    slots_stride,
    counts,
    table,
    table_row_stride,
    table_column_stride,
    table_pages,
    slot_page,
    first_row,
    per_request,
    num_requests,
    covered,
    k,
    SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Collect candidates of a row's split, BLOCK entries a step; ``found`` counts all that pass."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    request, _, count = row_ranges(
        lengths, None, requests, row, True, first_row, per_request, num_requests, covered
    )
    out += row * out_stride
    if slots is not None:
        slots += row * slots_stride
        table += tl.maximum(request, 0).to(tl.int64) * table_row_stride
    if counts is not None:
        tl.store(counts + row, tl.minimum(count, k))
    if count <= k:
        if split == 0:
            _store_all(
                out, slots, table, table_column_stride, table_pages, slot_page, count, k, PADDED_K
            )
    else:
        scores += row * scores_stride
        threshold = tl.full((), NOTHING + 1, tl.int32)
        if count > CAPACITY:
            threshold = _sample_threshold(scores, count, k, SAMPLES)
        size = tl.cdiv(tl.cdiv(count, SPLITS), BLOCK) * BLOCK
        first = split * size
        last = tl.minimum(first + size, count)
        keys += (row * SPLITS + split) * CAPACITY
        entries += (row * SPLITS + split) * CAPACITY
        collected = 0
        for at in range(first, last, BLOCK):
            entry, key = _load_keys(scores, at, last, BLOCK)
            one = (key >= threshold).to(tl.int32)
            per_line = tl.sum(one, 1)
            if tl.max(per_line, 0) > 0:
                before = collected + tl.cumsum(per_line, 0) - per_line
                place = before[:, None] + tl.cumsum(one, 1) - 1
                fits = (one > 0) & (place < CAPACITY)
                tl.store(entries + place, entry, mask=fits)
                tl.store(keys + place, key, mask=fits)
                collected += tl.sum(per_line, 0)
        if SPLITS > 1:
            tl.store(found + row * SPLITS + split, collected)
        else:
            # Wait for other threads of this CTA, which have written the entries.
            tl.debug_barrier()
            if (collected >= k) & (collected <= CAPACITY):
                _select_candidates(keys, entries, found, collected, k, out, 1, CAPACITY)
            else:
                _select_by_bisection(scores, count, k, out, BLOCK)
            if slots is not None:
                tl.debug_barrier()
                store_slots(
                    out, slots, table, table_column_stride, table_pages, slot_page, k, k, PADDED_K
                )


@triton.jit(
    do_not_specialize=[
        "first_row", "per_request", "num_requests", "covered", "k", "table_pages", "slot_page",
        "table_row_stride",
    ]
)  # fmt: skip
def sample_merge_kernel(
    scores,
    scores_stride,
    keys,
    entries,
    found,
    lengths,
    requests,
    out,
    out_stride,
    slots,
    slots_stride,
    table,
    table_row_stride,
    table_column_stride,
    table_pages,
    slot_page,
    first_row,
    per_request,
    num_requests,
    covered,
    k,
    SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the top-k of a row from the candidates of its splits."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    request, _, count = row_ranges(
        lengths, None, requests, row, True, first_row, per_request, num_requests, covered
    )
    if count > k:
        out += row * out_stride
        if slots is not None:
            slots += row * slots_stride
            table += tl.maximum(request, 0).to(tl.int64) * table_row_stride
        keys += row * SPLITS * CAPACITY
        entries += row * SPLITS * CAPACITY
        each = tl.load(found + row * SPLITS + tl.arange(0, SPLITS))
        total = tl.sum(each, 0)
        if (total >= k) & (total <= CAPACITY):
            _select_candidates(keys, entries, found + row * SPLITS, total, k, out, SPLITS, CAPACITY)
        else:
            _select_by_bisection(scores + row * scores_stride, count, k, out, BLOCK)
        if slots is not None:
            # Wait for other threads of this CTA, which have written the entries.
            tl.debug_barrier()
            store_slots(
                out, slots, table, table_column_stride, table_pages, slot_page, k, k, PADDED_K
            )


# Function (inputs, scores, maxima, target) that writes the scores of a chunk.
WriteScores = Callable[[ScoreInputs, Tensor, Tensor | None, Target], None]
# Function (config, scores, maxima, kernel arguments) that launches a backend's own top-k.
RowTopk = Callable[[SelectConfig, Tensor, Tensor | None, tuple[Any, ...]], None]


def select_with(
    score: WriteScores,
    row_topk: RowTopk | None,
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
    """Run ``interface.select_topk`` with scores from ``score``.

    A backend's own top-k kernel ``row_topk``, if given, takes the rows that it can hold.
    """
    inputs = select_inputs(
        q, q_scales, weights, index_cache, layout, block_table, lengths, token_to_req,
        max_context, k,
    )  # fmt: skip
    device, shape = inputs.q.device, (len(inputs.q), inputs.k)
    outputs = SelectOutputs(
        writable(out, shape, torch.int32, device),
        None if slots is None else writable(slots, shape, torch.int32, device),
        counts if counts is None or counts.is_contiguous() else torch.empty_like(inputs.lengths),
        None if slots is None else slot_table,
        slot_page_size,
    )
    if len(inputs.q):
        target = device_facts.target_of(device)
        # With blocks, scores and top-k work on the columns of their entries.
        columns = inputs.covered if blocks is None else blocks.shape[1] * block_size
        columns = min(columns, inputs.covered)
        config = choose_select_config(
            len(inputs.q),
            # Without pages all scores are -inf, and the first entries win.
            columns if len(pages_of(inputs.keys)) else 0,
            inputs.k,
            target=target,
            scratch_bytes=scratch_bytes,
            histograms=row_topk is not None,
            further_row_bytes=0 if blocks is None else ListedBlocks.row_bytes(blocks),
        )
        memory = _Scratch(config, columns, device)
        listed = None if blocks is None else ListedBlocks.of(blocks, block_size, config.chunk)
        for first in range(0, len(inputs.q), config.chunk):
            chunk, chunk_outputs = inputs, outputs
            if config.chunk < len(inputs.q):
                part = slice(first, first + config.chunk)
                chunk, chunk_outputs = inputs.chunk(part), outputs.chunk(part)
            of_entries = chunk, chunk_outputs
            if listed is not None:
                chunk = listed.columns_of(chunk, first, target)
                chunk_outputs = dataclasses.replace(chunk_outputs, slots=None, slot_table=None)
            if config.algorithm != "all":
                score(chunk, memory.scores, memory.maxima, target)
            arguments = _row_arguments(chunk, chunk_outputs)
            if row_topk is not None and config.algorithm in ("row", "groups"):
                bits = memory.scores.view(torch.int32)
                row_topk(config, bits, memory.maxima, arguments)
            else:
                _launch_topk(config, memory, arguments, target)
            if listed is not None:
                listed.store_entries(*of_entries, target)
    for given, written in ((counts, outputs.counts), (slots, outputs.slots)):
        if given is not None and written is not None and written is not given:
            given.copy_(written)
    return outputs.out if out is None or outputs.out is out else out.copy_(outputs.out)


select_topk = functools.partial(select_with, write_scores, None)


class _Scratch:
    """Scratch of a chunk's top-k, allocated once for each call."""

    def __init__(self, config: SelectConfig, covered: int, device: torch.device) -> None:
        def integers(*shape: int) -> Tensor:
            return scratch(shape, torch.int32, device)

        # A stride of 1, as rows without columns have, would compile the top-k once more.
        columns = padded_entries(max(covered, 1))
        rows = config.chunk if config.algorithm != "all" else 0
        self.scores = scratch((rows, columns), torch.float32, device)
        self.maxima = integers(rows, columns // GROUP) if config.algorithm == "groups" else None
        self.groups = integers(rows, config.padded_k) if config.algorithm == "groups" else None
        if config.algorithm == "samples":
            self.keys = integers(rows, config.splits, config.capacity)
            self.entries = integers(rows, config.splits, config.capacity)
            self.found = integers(rows, config.splits)


def _row_arguments(inputs: ScoreInputs, outputs: SelectOutputs) -> tuple[Any, ...]:
    """Return the arguments that all top-k kernels share, from ``lengths`` to ``k``."""
    slots, table = outputs.slots, outputs.slot_table
    return (
        inputs.lengths,
        inputs.requests,
        outputs.out,
        outputs.out.stride(0),
        slots,
        0 if slots is None else slots.stride(0),
        outputs.counts,
        table,
        *((0, 0) if table is None else table.stride()),
        0 if table is None else table.shape[1],
        outputs.slot_page_size,
        inputs.first_row,
        max(inputs.rows_per_request, 1),
        inputs.num_requests,
        inputs.covered,
        inputs.k,
    )


_COUNTS = 6  # index of ``counts`` among them


def _launch_topk(
    config: SelectConfig, memory: _Scratch, arguments: tuple[Any, ...], target: Target
) -> None:
    """Launch the top-k of one chunk by the configured algorithm."""
    scores, rows = memory.scores.view(torch.int32), len(arguments[0])
    options = pdl_launch(scores.device) | row_registers(rows, target)
    if config.algorithm == "samples":
        block, warps = sample_block_and_warps(rows, config, target)
        found = (memory.keys, memory.entries, memory.found)
        sample_collect_kernel[(config.splits, rows)](
            scores, scores.stride(0), *found, *arguments,
            SPLITS=config.splits, CAPACITY=config.capacity, SAMPLES=config.samples,
            BLOCK=block, PADDED_K=config.padded_k, num_warps=warps, **options,
        )  # fmt: skip
        if config.splits > 1:
            sample_merge_kernel[(rows,)](
                scores, scores.stride(0), *found, *arguments[:_COUNTS], *arguments[_COUNTS + 1 :],
                SPLITS=config.splits, CAPACITY=config.capacity, BLOCK=block,
                PADDED_K=config.padded_k, num_warps=warps, **options,
            )  # fmt: skip
        return
    maxima = memory.maxima
    elements = config.elements or config.padded_k * GROUP
    held = config.padded_k if config.algorithm == "all" else elements
    row_topk_kernel[(rows,)](
        scores, scores.stride(0), maxima, 0 if maxima is None else maxima.stride(0),
        memory.groups, *arguments,
        GROUPS=config.groups, ELEMENTS=elements, PADDED_K=config.padded_k,
        SCORED=config.algorithm != "all",
        num_warps=row_warps(held, config.groups, rows, target), **options,
    )  # fmt: skip
