"""Selection with Hopper's own kernels: scores, and the k best of rows that registers hold."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.page_layout import INDEX_FP8
from anymla.formats.pages import pages_of
from anymla.ops._triton import Target
from anymla.ops.indexer.gluon_sm90_scores import (
    BUFFERS,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    WIDTH,
    page_scores_kernel,
)
from anymla.ops.indexer.gluon_sm90_topk import held_of, topk_kernel
from anymla.ops.indexer.gluon_sm90_walk import PAGE
from anymla.ops.indexer.selection_plan import SelectionPlan, prefill_parts
from anymla.ops.indexer.triton_select import multiprocessors, select_rounds


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
        GROUPS=held.groups, ELEMENTS=held.elements, KEPT=plan.kept, EARLY=True, WARPS=held.warps,
        num_warps=held.warps, launch_pdl=True, **limits,
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
    rows = len(q)
    cache = pages_of(index_cache)
    pages, entries = cache.shape[:2]
    stride = cache.stride(0)
    codes = cache.view(torch.float8_e4m3fn)
    keys = TensorDescriptor(
        codes, [pages, PAGE, WIDTH], [stride, WIDTH, 1], [1, PAGE, WIDTH],
        NVMMASharedLayout(128, 8, rank=3),
    )  # fmt: skip
    scales = TensorDescriptor(
        cache.view(torch.float32), [pages, entries * (WIDTH + 4) // 4], [stride // 4, 1],
        [1, PAGE], NVMMASharedLayout(0, 32, rank=2),
    )  # fmt: skip
    # Neighbours share keys unless every request has one token.
    shared = per_request > 1 if owners is None else rows > len(block_table)
    together = 2 if shared else 1
    pairs = triton.cdiv(rows, together)
    tiles = triton.cdiv(covered, PAGE)
    span = triton.cdiv(tiles, prefill_parts(pairs, tiles, multiprocessors(q.device))) * PAGE
    page_scores_kernel[(pairs, triton.cdiv(covered, span))](
        q.view(torch.uint8),
        keys,
        scales,
        block_table,
        *block_table.stride(),
        lengths,
        starts,
        owners,
        weights,
        weights.stride(0),
        scores,
        scores.stride(0),
        maxima,
        0 if maxima is None else maxima.stride(0),
        first_row,
        rows,
        max(per_request, 1),
        len(block_table),
        pages,
        covered,
        k,
        span,
        ROWS=together,
        BUFFERS=BUFFERS,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
    )
