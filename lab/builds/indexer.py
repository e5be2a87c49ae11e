"""The indexer's calls whose kernels are built, and the requirements on their code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.page_layout import (
    INDEX_FP8,
    INDEX_MXFP4,
    ROWS_BF16_128,
    ROWS_FP32_128,
    get_layout,
)
from anymla.ops.device import Target
from anymla.ops.indexer.config import MAX_GROUPS_K, MAX_ROW_ENTRIES
from anymla.ops.indexer.interface import (
    indexer_q_rope_quant,
    mask_candidates,
    mqa_logits,
    paged_mqa_logits,
    select_candidate_blocks,
    select_topk,
    topk_per_row,
)
from anymla.ops.indexer.shapes import (
    CANDIDATE_BLOCK,
    CANDIDATE_BLOCKS,
    RAGGED_SELECTIONS,
    RANKINGS,
    SELECTIONS,
    V4_FLASH,
    V41_FLASH,
    WITHIN_BLOCKS,
    RowsShape,
    SelectShape,
)
from lab.build import Build, Judgement, empty, float32, int32

_DTYPES = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}
# Kinds of queries, and the layout of keys in pages; V4's come first.
_PAGED = (
    ("e4m3", INDEX_FP8),
    ("bf16", INDEX_FP8),
    ("e2m1", INDEX_MXFP4),
    ("bf16", INDEX_MXFP4),
    ("bf16", ROWS_BF16_128),
    ("fp32", ROWS_FP32_128),
)
_SELECTED = (_PAGED[0], _PAGED[1], _PAGED[2], _PAGED[4])
_DENSE = (("e4m3", "e4m3"), ("bf16", "e4m3"), ("e2m1", "bf16"), ("fp32", "fp32"))


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls with meta tensors; on Hopper, also those that Triton's kernels take."""
    for quant in ("fp8", "mxfp4", "none"):
        for dtype, weights in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")):
            for hadamard in (False, True):
                label = f"{quant} {dtype}, weights {weights}" + ", Hadamard" * hadamard
                call = functools.partial(_quantize, quant, dtype, weights, hadamard)
                yield label, call
    backends = ("gluon_sm90", "triton") if target.name == "sm_90" else ("triton",)
    for backend in backends:
        pairs = [pair for pair in _PAGED if backend == "triton" or pair == _PAGED[0]]
        for kind, layout in pairs:
            for requests, queries in ((32, 1), (32, 2), (1, 2)):
                label = f"{kind} x {layout}, {requests} x {queries} queries, {backend}"
                yield label, functools.partial(_paged, kind, layout, requests, queries, backend)
        for kind, keys in _DENSE if backend == "triton" else _DENSE[:1]:
            for tokens in (1, 2, 1024):
                label = f"{kind} x {keys}, {tokens} tokens, {backend}"
                yield label, functools.partial(_dense, kind, keys, tokens, backend)
        for shape, k in SELECTIONS:
            call = functools.partial(_select, shape, k, backend)
            yield f"top {k}, {shape.label}, {backend}", call
        # Requests of different numbers of tokens, with every kind of queries and keys.
        for shape, k in RAGGED_SELECTIONS:
            for kind, layout in _SELECTED if backend == "triton" else _SELECTED[:1]:
                label = f"top {k}, ragged {shape.label}, {kind} x {layout}, {backend}"
                call = functools.partial(_select, shape, k, backend, kind, layout, ragged=True)
                yield label, call
            call = functools.partial(_select, shape, k, backend, ragged=True, slots=True)
            yield f"top {k}, ragged {shape.label}, slots, {backend}", call
    for rows in RANKINGS:
        yield str(rows), functools.partial(_rank, rows)
    yield f"{CANDIDATE_BLOCKS} blocks of {CANDIDATE_BLOCK} scores", _candidates
    for shape in WITHIN_BLOCKS:
        for kind, layout in _SELECTED:
            label = f"top {V41_FLASH.topk} within blocks, {shape.label}, {kind} x {layout}"
            yield label, functools.partial(_within_blocks, shape, kind, layout)


def _queries(kind: str, *shape: int) -> tuple[Tensor, Tensor | None]:
    """Return queries of a kind for V4's channels, and their scales if they are packed."""
    if kind != "e2m1":
        return empty((*shape, V4_FLASH.channels), dtype=_DTYPES[kind]), None
    codes = empty((*shape, V4_FLASH.channels // 2), dtype=torch.uint8)
    return codes, empty((*shape, V4_FLASH.channels // MXFP4_BLOCK), dtype=torch.uint8)


def _quantize(quant: str, dtype: str, weights: str, hadamard: bool) -> None:
    tokens, heads, channels = 32, V4_FLASH.heads, V4_FLASH.channels
    indexer_q_rope_quant(
        empty((tokens, heads, channels), dtype=_DTYPES[dtype]),
        empty((tokens, heads), dtype=_DTYPES[weights]),
        empty(tokens, dtype=torch.int64),
        float32((4096, V4_FLASH.rope)),
        softmax_scale=channels**-0.5, head_scale=heads**-0.5, quant=quant, hadamard=hadamard,
        backend="triton",
    )  # fmt: skip


def _paged(kind: str, layout: str, requests: int, queries: int, backend: str) -> None:
    heads, pages, page = V4_FLASH.heads, 512, V4_FLASH.page_size
    q, scales = _queries(kind, requests, queries, heads)
    paged_mqa_logits(
        q, get_layout(layout).allocate(pages, page, "meta"), float32((requests * queries, heads)),
        int32(requests), int32((requests, pages)), max_context=pages * page, layout=layout,
        q_scales=scales, backend=backend,
    )  # fmt: skip


def _dense(kind: str, keys: str, tokens: int, backend: str) -> None:
    count = 8192
    q, scales = _queries(kind, tokens, V4_FLASH.heads)
    mqa_logits(
        q, empty((count, V4_FLASH.channels), dtype=_DTYPES[keys]),
        float32(count) if keys == "e4m3" else None, float32((tokens, V4_FLASH.heads)),
        int32(tokens), int32(tokens), q_scales=scales, backend=backend,
    )  # fmt: skip


def _select(
    shape: SelectShape,
    k: int,
    backend: str,
    kind: str = "e4m3",
    layout: str = INDEX_FP8,
    *,
    ragged: bool = False,
    slots: bool = False,
) -> None:
    """Select; while decoding, also with slots and counts as our layers do. vLLM's are ragged."""
    rows, pages = shape.rows, shape.keys // V4_FLASH.page_size
    q, scales = _queries(kind, rows, V4_FLASH.heads)
    options: dict[str, Any] = {}
    if ragged:
        options = {"token_to_req": int32(rows)}
    if slots or not (ragged or shape.prefill):
        options |= {"slots": int32((rows, k)), "counts": int32(rows)}
        options["slot_table"] = int32((shape.requests, pages))
    select_topk(
        q, get_layout(layout).allocate(pages, V4_FLASH.page_size, "meta"),
        float32((rows, V4_FLASH.heads)), int32(rows), int32((shape.requests, pages)), k,
        layout=layout, q_scales=scales, backend=backend, **options,
    )  # fmt: skip


def _rank(shape: RowsShape) -> None:
    bounds = int32(shape.rows), int32(shape.rows)
    topk_per_row(float32((shape.rows, shape.columns)), *bounds, shape.k, backend="triton")


def _candidates() -> None:
    """Select candidate blocks of a request with 65,536 entries, and mask the other scores."""
    logits, size = float32((1, 65_536)), CANDIDATE_BLOCK
    blocks = select_candidate_blocks(logits, int32(1), CANDIDATE_BLOCKS, block_size=size)
    mask_candidates(logits, blocks, block_size=size)


def _within_blocks(shape: SelectShape, kind: str, layout: str) -> None:
    """Select within the blocks that were kept for each token of a request."""
    rows, model = shape.rows, V41_FLASH
    pages, k = shape.keys // model.page_size, model.topk
    q, scales = _queries(kind, rows, model.heads)
    table = int32((shape.requests, pages))
    select_topk(
        q, get_layout(layout).allocate(pages, model.page_size, "meta"),
        float32((rows, model.heads)), int32(rows), table, k, layout=layout, q_scales=scales,
        slot_table=table, slot_page_size=model.page_size, slots=int32((rows, k)),
        counts=int32(rows),
        blocks=int32((rows, CANDIDATE_BLOCKS)), block_size=CANDIDATE_BLOCK, backend="triton",
    )  # fmt: skip


def judgement(build: Build, target: Target) -> Judgement:
    """Return the accepted spills and required matrix instructions of a build."""
    constants = build.constants
    if build.name == "scores_kernel":
        if "MATH" not in constants:
            # Spilled addresses that consumers need for tiles at the ends of rows.
            return Judgement("e4m3", spills=100 if constants["ROWS"] > 1 else 16)
        # Packed queries are decoded once, before the loop; float32 is only for verification.
        matrix = constants["MATH"] != "fp32"
        if not matrix or constants["Q_KIND"] == "e2m1":
            return Judgement(matrix, spills=48)
        return Judgement(matrix, spills=32 if build.registers else 16)
    if build.name == "topk_kernel":
        # A thread has 32 values: maxima, and then candidates.
        return Judgement(spills=110 if constants["PADDED_K"] == MAX_GROUPS_K else 80)
    if build.name == "row_topk_kernel":
        if constants["GROUPS"]:
            # A thread has 16 or 32 candidates, in the registers of a CTA of 512 or 1,024 threads.
            return Judgement(spills=140 if constants["PADDED_K"] == MAX_GROUPS_K else 60)
        # A few spills where CTAs of Ada have no more registers; many in the widest rows.
        return Judgement(spills={MAX_ROW_ENTRIES: 100, 2048: 4}.get(constants["ELEMENTS"], 0))
    if build.name == "sample_merge_kernel":
        if constants["PADDED_K"] > MAX_GROUPS_K:
            # k of 2,048, which no V4 model has, leaves too few registers: sm_90 spills 332.
            return Judgement(spills=400)
        return Judgement(spills=100 if constants["CAPACITY"] > 4096 or target.narrow else 16)
    # sm_80 spills some of a block's keys during a histogram.
    return Judgement(spills={"sample_collect_kernel": 16, "select_kernel": 40}.get(build.name, 0))
