"""Launching Hopper's scores: keys in pages or in one list, and the grid."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.pages import pages_of
from anymla.ops.device import target_of
from anymla.ops.indexer.gluon_sm90_scores import (
    BUFFERS,
    PRODUCER_REGISTERS,
    WIDTH,
    page_scores_kernel,
)
from anymla.ops.indexer.gluon_sm90_sums import HEADS
from anymla.ops.indexer.gluon_sm90_walk import PAGE
from anymla.ops.indexer.score_forms import form_of
from anymla.ops.indexer.selection_plan import prefill_parts
from anymla.ops.pdl import pdl_launch

# Keys [pages, 64, 128] of FP8, and float32 among which are the scales of page p in row p.
Keys = tuple[TensorDescriptor, TensorDescriptor]


def keys_in_pages(index_cache: Tensor) -> Keys:
    """Of an index cache of FP8 pages of 64."""
    cache = pages_of(index_cache)
    pages, stride = len(cache), cache.stride(0)
    codes, words = cache.view(torch.float8_e4m3fn), cache.view(torch.float32)
    return (
        TensorDescriptor(
            codes, [pages, PAGE, WIDTH], [stride, WIDTH, 1], [1, PAGE, WIDTH],
            NVMMASharedLayout(128, 8, rank=3),
        ),
        TensorDescriptor(
            words, [pages, PAGE * (WIDTH + 4) // 4], [stride // 4, 1], [1, PAGE],
            NVMMASharedLayout(0, 32, rank=2),
        ),
    )  # fmt: skip


def keys_in_a_list(keys: Tensor, scale: Tensor) -> Keys:
    """Of keys [N, 128] and their scales [N], N a multiple of 64, as pages in order."""
    pages = len(keys) // PAGE
    return (
        TensorDescriptor(
            keys, [pages, PAGE, WIDTH], [PAGE * WIDTH, WIDTH, 1], [1, PAGE, WIDTH],
            NVMMASharedLayout(128, 8, rank=3),
        ),
        TensorDescriptor(
            scale, [pages, PAGE], [PAGE, 1], [1, PAGE], NVMMASharedLayout(0, 32, rank=2)
        ),
    )  # fmt: skip


def score(
    q: Tensor,
    keys: Keys,
    weights: Tensor,
    table: Tensor | None,
    lengths: Tensor,
    starts: Tensor | None,
    owners: Tensor | None,
    scores: Tensor,
    maxima: Tensor | None,
    *,
    first_row: int,
    per_request: int,
    requests: int,
    covered: int,
    k: int,
    context: int = 0,
) -> None:
    """Scores of tokens; arguments as of ``triton_select_scores.select_scores``, and others.

    ``keys`` are in pages that ``table`` lists for ``requests`` requests; without a table there is
    one, which has them in order. With a ``context`` above 0, entries up to there that a token does
    not see become -inf.
    """
    rows, pages = len(q), keys[0].shape[0]
    # Neighbours share keys unless every request has one token.
    shared = per_request > 1 if owners is None else rows > requests
    together = 2 if shared else 1
    items = triton.cdiv(rows, together)
    tiles = triton.cdiv(max(covered, context), PAGE)
    room = target_of(q.device).sm_count
    form = form_of(items, tiles, shared, room)
    room *= form.programs
    span = triton.cdiv(tiles, prefill_parts(items, tiles, room)) * PAGE
    parts = triton.cdiv(max(covered, context), span)
    queries = TensorDescriptor(
        q.view(torch.float8_e4m3fn).view(rows * HEADS, WIDTH), [rows * HEADS, WIDTH], [WIDTH, 1],
        [together * HEADS, WIDTH], NVMMASharedLayout(128, 8, rank=2),
    )  # fmt: skip
    limits = {"maxnreg": form.registers} if form.registers else {}
    page_scores_kernel[(min(items, room) if parts == 1 else items, parts)](
        queries, *keys, table, *((0, 0) if table is None else table.stride()), lengths, starts,
        owners, weights, weights.stride(0), scores, scores.stride(0), maxima,
        0 if maxima is None else maxima.stride(0), first_row, rows, max(per_request, 1), requests,
        pages, covered, k, span, context, items,
        ROWS=together, BUFFERS=BUFFERS, AHEAD=form.ahead,
        CONSUMER_REGISTERS=form.consumer_registers, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        FILL=context > 0, num_warps=4, **limits, **pdl_launch(q.device),
    )  # fmt: skip
