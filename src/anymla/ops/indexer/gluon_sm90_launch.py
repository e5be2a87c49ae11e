"""Launches of Hopper's index scores, over keys in pages or in one list, and top-k of rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.pages import pages_of
from anymla.ops.device import Target
from anymla.ops.indexer.config import (
    SelectConfig,
    choose_sm90_score_config,
    choose_sm90_topk_config,
    sm90_context_splits,
)
from anymla.ops.indexer.gluon_sm90_scores import (
    HEADS,
    PAGE,
    PRODUCER_REGISTERS,
    STAGES,
    WIDTH,
    scores_kernel,
)
from anymla.ops.indexer.gluon_sm90_topk import topk_kernel
from anymla.ops.indexer.inputs import (
    ScoreInputs,
    dense_logits,
    paged_logits,
)
from anymla.ops.indexer.triton_select import select_with
from anymla.ops.pdl import pdl_launch


def write_scores(
    inputs: ScoreInputs,
    scores: Tensor,
    maxima: Tensor | None,
    target: Target,
    *,
    context: int = 0,
) -> None:
    """Write scores as ``triton_scores.write_scores`` does, for calls that the supports accept."""
    keys, scales = _descriptors(inputs)
    rows, pages = len(inputs.q), keys.shape[0]
    table = inputs.block_table
    together = 2 if inputs.neighbours_share_keys else 1
    items = triton.cdiv(rows, together)
    tiles = triton.cdiv(max(inputs.covered, context), PAGE)
    config = choose_sm90_score_config(items, tiles, together == 2, target.sm_count)
    ctas = target.sm_count * config.ctas_per_sm
    split_size = triton.cdiv(tiles, sm90_context_splits(items, tiles, ctas)) * PAGE
    splits = triton.cdiv(max(inputs.covered, context), split_size)
    queries = TensorDescriptor(
        inputs.q.view(torch.float8_e4m3fn).view(rows * HEADS, WIDTH), [rows * HEADS, WIDTH],
        [WIDTH, 1], [together * HEADS, WIDTH], NVMMASharedLayout(128, 8, rank=2),
    )  # fmt: skip
    limits = {"maxnreg": config.registers} if config.registers else {}
    scores_kernel[(min(items, ctas) if splits == 1 else items, splits)](
        queries, keys, scales, table, *((0, 0) if table is None else table.stride()),
        inputs.lengths, inputs.starts, inputs.requests, inputs.weights, inputs.weights.stride(0),
        scores, scores.stride(0), maxima, 0 if maxima is None else maxima.stride(0),
        inputs.first_row, rows, max(inputs.rows_per_request, 1), inputs.num_requests, pages,
        inputs.covered, inputs.k, split_size, context, items,
        ROWS=together, STAGES=STAGES, OVERLAP=config.overlap,
        CONSUMER_REGISTERS=config.consumer_registers, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        FILL=context > 0, num_warps=4, **limits, **pdl_launch(inputs.q.device),
    )  # fmt: skip


# For calls that ``sm90_dense_support`` and ``sm90_paged_support`` accept.
mqa_logits = functools.partial(dense_logits, write_scores)
paged_mqa_logits = functools.partial(paged_logits, write_scores)


def row_topk(
    config: SelectConfig, scores: Tensor, maxima: Tensor | None, arguments: tuple[Any, ...]
) -> None:
    """Launch the top-k of rows that are held whole ("row") or by groups ("groups").

    Args:
        config: choices of the ``select_topk`` call.
        scores: bits of float32 scores, [rows, entries] int32.
        maxima: maximum of every 16 scores, [rows, groups] int32; None for whole rows.
        arguments: remaining kernel arguments, from ``lengths`` on.
    """
    rows = len(arguments[0])
    topk = choose_sm90_topk_config(config, rows)
    limits = {"maxnreg": topk.registers} if topk.registers else {}
    topk_kernel[(rows,)](
        scores, scores.stride(0), maxima, 0 if maxima is None else maxima.stride(0), *arguments,
        GROUPS=topk.groups, ELEMENTS=topk.elements, PADDED_K=config.padded_k, WARPS=topk.warps,
        num_warps=topk.warps, **limits, **pdl_launch(scores.device),
    )  # fmt: skip


# For calls that ``sm90_select_support`` accepts.
select_topk = functools.partial(select_with, write_scores, row_topk)


def _descriptors(inputs: ScoreInputs) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return TMA descriptors of FP8 keys [pages, 64, 128], and of scales: row p has page p's."""
    if inputs.layout is None:
        # A list of keys, a multiple of 64, is read as consecutive pages.
        keys, scales = inputs.keys, inputs.key_scale
        pages = len(keys) // PAGE
        stride, scales_width, scales_stride = PAGE * WIDTH, PAGE, PAGE
    else:
        cache = pages_of(inputs.keys)
        pages, stride = len(cache), cache.stride(0)
        keys, scales = cache.view(torch.float8_e4m3fn), cache.view(torch.float32)
        scales_width, scales_stride = PAGE * (WIDTH + 4) // 4, stride // 4
    return (
        TensorDescriptor(
            keys, [pages, PAGE, WIDTH], [stride, WIDTH, 1], [1, PAGE, WIDTH],
            NVMMASharedLayout(128, 8, rank=3),
        ),
        TensorDescriptor(
            scales, [pages, scales_width], [scales_stride, 1], [1, PAGE],
            NVMMASharedLayout(0, 32, rank=2),
        ),
    )  # fmt: skip
