"""Selection with Hopper's own kernels: scores, and the k best of rows that registers hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.device import Target
from anymla.ops.indexer.gluon_sm90_launch import keys_in_pages, score
from anymla.ops.indexer.gluon_sm90_topk import held_of, topk_kernel
from anymla.ops.indexer.selection_plan import SelectionPlan
from anymla.ops.indexer.triton_select import select_rounds
from anymla.ops.pdl import pdl_launch


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
        select_best,
    )  # fmt: skip


def select_best(
    plan: SelectionPlan, scores: Tensor, maxima: Tensor | None, given: tuple[Any, ...]
) -> None:
    """The k best of a round's rows, which are held whole or by groups.

    Args:
        plan: of the call.
        scores: [rows, entries] bits of float32.
        maxima: [rows, groups] or None.
        given: further arguments of the kernel, from ``lengths`` on.
    """
    rows = len(given[0])
    held = held_of(plan, rows)
    limits = {"maxnreg": held.registers} if held.registers else {}
    topk_kernel[(rows,)](
        scores, scores.stride(0), maxima, 0 if maxima is None else maxima.stride(0), *given,
        GROUPS=held.groups, ELEMENTS=held.elements, KEPT=plan.kept, WARPS=held.warps,
        num_warps=held.warps, **limits, **pdl_launch(scores.device),
    )  # fmt: skip


def select_scores(
    q: Tensor,
    q_scales: Tensor | None,
    weights: Tensor,
    index_cache: Tensor,
    layout: str,
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    owners: Tensor | None,
    scores: Tensor,
    maxima: Tensor | None,
    *,
    first_row: int,
    per_request: int,
    covered: int,
    k: int,
    target: Target,
) -> None:
    """``triton_select_scores.select_scores`` for what ``hopper_support`` lets through."""
    score(
        q,
        keys_in_pages(index_cache),
        weights,
        block_table,
        lengths,
        starts,
        owners,
        scores,
        maxima,
        first_row=first_row,
        per_request=per_request,
        requests=len(block_table),
        covered=covered,
        k=k,
    )
