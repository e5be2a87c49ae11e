"""From the index cache to the best entries, on the device, a round of tokens at a time.

A round is two launches: scores into scratch that the next round uses again, then a selector, which
writes entries, slots and counts. Sizes decide everything (``selection_plan``), values nothing, so a
call can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.formats.pages import pages_of
from anymla.ops import device as device_facts
from anymla.ops.indexer import triton_sample_select
from anymla.ops.indexer.selection_plan import (
    GROUP,
    SelectionPlan,
    padded_entries,
    plan_selection,
)
from anymla.ops.indexer.triton_group_select import group_select_kernel, options_of, warps_of
from anymla.ops.indexer.triton_sample_select import (
    sample_collect_kernel,
    sample_finish_kernel,
    tile_and_warps,
)
from anymla.ops.indexer.triton_select_scores import select_scores
from anymla.ops.pdl import pdl_launch
from anymla.ops.streams import scratch

# Writes the scores of a round; arguments of ``triton_select_scores.select_scores``.
Scorer = Callable[..., None]
# Launches a backend's own selector: (plan, scores, maxima, what every selector's kernel is given).
Selector = Callable[[SelectionPlan, Tensor, Tensor | None, tuple[Any, ...]], None]


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
    return select_rounds(
        select_scores,
        q, index_cache, weights, lengths, block_table, k, max_context, token_to_req, starts,
        layout, q_scales, scratch_bytes, out, slot_table, slot_page_size, slots, counts,
    )  # fmt: skip


def select_rounds(
    scorer: Scorer,
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k: int,
    max_context: int | None,
    token_to_req: Tensor | None,
    starts: Tensor | None,
    layout: str,
    q_scales: Tensor | None,
    scratch_bytes: int,
    out: Tensor | None,
    slot_table: Tensor | None,
    slot_page_size: int,
    slots: Tensor | None,
    counts: Tensor | None,
    selector: Selector | None = None,
) -> Tensor:
    """``select_topk`` with scores from ``scorer``, and ``selector`` for rows that it can hold."""
    tokens, requests = len(q), len(block_table)
    cache = pages_of(index_cache)
    covered = block_table.shape[1] * cache.shape[1]
    covered = covered if max_context is None else min(covered, max_context)
    best = _writable(out, (tokens, k), q.device)
    filled = None if slots is None else _writable(slots, (tokens, k), q.device)
    if tokens:
        target = device_facts.target_of(q.device)
        # Without pages all scores are -inf, and the first entries win.
        entries = covered if cache.shape[0] else 0
        plan = plan_selection(
            tokens,
            entries,
            k,
            multiprocessors=device_facts.target_of(q.device).sm_count,
            scratch_bytes=scratch_bytes,
            histograms=selector is not None,
        )
        q, weights = q.contiguous(), weights if weights.stride(1) == 1 else weights.contiguous()
        q_scales = None if q_scales is None else q_scales.contiguous()
        lengths = lengths.contiguous()
        starts = None if starts is None else starts.contiguous()
        owners = None if token_to_req is None else token_to_req.contiguous()
        counted = counts if counts is None or counts.is_contiguous() else torch.empty_like(lengths)
        memory = _Scratch(plan, covered, q.device)
        each = tokens // requests if requests and token_to_req is None else 1
        for first in range(0, tokens, plan.rows):
            part = slice(first, first + plan.rows)
            begin = None if starts is None else starts[part]
            owner = None if owners is None else owners[part]
            if plan.form != "all":
                scorer(
                    q[part],
                    None if q_scales is None else q_scales[part],
                    weights[part],
                    index_cache,
                    layout,
                    block_table,
                    lengths[part],
                    begin,
                    owner,
                    memory.scores,
                    memory.maxima,
                    first_row=first,
                    per_request=each,
                    covered=covered,
                    k=k,
                    target=target,
                )
            results = (
                best[part],
                None if filled is None else filled[part],
                None if counted is None else counted[part],
            )
            _select(
                plan, memory, lengths[part], begin, owner, results, slot_table, slot_page_size,
                first, each, requests, covered, k, target, selector,
            )  # fmt: skip
        if counts is not None and counted is not counts:
            counts.copy_(counted)
    if slots is not None and filled is not slots:
        slots.copy_(filled)
    return best if out is None or best is out else out.copy_(best)


class _Scratch:
    """What a round needs; made once a call."""

    def __init__(self, plan: SelectionPlan, covered: int, device: torch.device) -> None:
        def integers(*shape: int) -> Tensor:
            return scratch(shape, torch.int32, device)

        columns = padded_entries(covered)
        rows = plan.rows if plan.form != "all" else 0
        self.scores = scratch((rows, columns), torch.float32, device)
        self.maxima = integers(rows, columns // GROUP) if plan.form == "groups" else None
        self.groups = integers(rows, plan.kept) if plan.form == "groups" else None
        if plan.form == "samples":
            self.keys = integers(rows, plan.parts, plan.capacity)
            self.entries = integers(rows, plan.parts, plan.capacity)
            self.found = integers(rows, plan.parts)


def _select(
    plan: SelectionPlan,
    memory: _Scratch,
    lengths: Tensor,
    starts: Tensor | None,
    owners: Tensor | None,
    results: tuple[Tensor, Tensor | None, Tensor | None],
    slot_table: Tensor | None,
    slot_page_size: int,
    first_row: int,
    per_request: int,
    requests: int,
    covered: int,
    k: int,
    target: device_facts.Target,
    selector: Selector | None,
) -> None:
    """Launch the selector of a round."""
    best, slots, counts = results
    rows = len(best)
    scores = memory.scores.view(torch.int32)
    if slots is None:
        slot_table = None
    table_strides = (0, 0) if slot_table is None else slot_table.stride()
    given = (lengths, starts, owners, best, best.stride(0))
    given += (slots, 0 if slots is None else slots.stride(0))
    about_slots = (
        slot_table,
        *table_strides,
        0 if slot_table is None else slot_table.shape[1],
        slot_page_size,
    )
    sizes = (first_row, max(per_request, 1), requests, covered, k)
    if selector is not None and plan.form in ("whole", "groups"):
        selector(plan, scores, memory.maxima, (*given, counts, *about_slots, *sizes))
        return
    options = pdl_launch(best.device) | options_of(rows, target)
    if plan.form == "samples":
        tile, warps = tile_and_warps(rows, plan.capacity, target)
        found = (memory.keys, memory.entries, memory.found)
        sample_collect_kernel[(plan.parts, rows)](
            scores, scores.stride(0), *found, *given, counts, *about_slots, *sizes,
            PARTS=plan.parts, CAPACITY=plan.capacity, SAMPLES=triton_sample_select.SAMPLES,
            TILE=tile, KEPT=plan.kept, num_warps=warps, **options,
        )  # fmt: skip
        if plan.parts > 1:
            sample_finish_kernel[(rows,)](
                scores, scores.stride(0), *found, *given, *about_slots, *sizes,
                PARTS=plan.parts, CAPACITY=plan.capacity, TILE=tile, KEPT=plan.kept,
                num_warps=warps, **options,
            )  # fmt: skip
        return
    maxima = memory.maxima
    elements = plan.elements or plan.kept * GROUP
    held = plan.kept if plan.form == "all" else elements
    group_select_kernel[(rows,)](
        scores, scores.stride(0), maxima, 0 if maxima is None else maxima.stride(0),
        memory.groups, *given, counts, *about_slots, *sizes,
        GROUPS=plan.groups, ELEMENTS=elements, KEPT=plan.kept, SCORED=plan.form != "all",
        num_warps=warps_of(held, plan.groups, rows, target), **options,
    )  # fmt: skip


def _writable(given: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    """The caller's tensor where kernels can write it, else a new one."""
    if given is not None and given.stride(1) == 1:
        return given
    return torch.empty(shape, dtype=torch.int32, device=device)
