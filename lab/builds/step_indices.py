"""Index-row calls whose kernels are built; no build may spill."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from anymla.ops.device import Target
from anymla.ops.step_indices.interface import (
    combine_topk_swa_indices,
    compressed_rows,
    compute_global_topk_indices_and_lens,
    slot_mapping,
    token_to_request,
    window_rows,
)
from anymla.ops.step_indices.shapes import SHAPES, SHORT_ALL, RowsShape
from lab.build import empty, int32


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    for shape in SHAPES:
        for valid in (False, True):
            label = f"{shape}, valid tokens" if valid else str(shape)
            yield label, functools.partial(_rows, shape, valid)
    # A block table with a column stride other than 1.
    yield f"{SHORT_ALL}, strided table", functools.partial(_rows, SHORT_ALL, False, 4)


def _rows(shape: RowsShape, valid: bool, column_stride: int = 1) -> None:
    """Compute all index rows of a step."""
    tokens, requests, pages, ratio = shape.tokens, shape.requests, shape.pages, shape.ratio
    of_tokens = (empty(tokens, dtype=torch.int64), int32(tokens))
    table = int32((requests, pages * column_stride))[:, ::column_stride]
    flags = empty(tokens, dtype=torch.bool)
    known = flags if valid else None
    starts = int32(requests + 1)
    token_to_request(starts, tokens)
    slot_mapping(*of_tokens, table, page_size=shape.page_size, ratio=ratio)
    window_rows(
        *of_tokens, table, block_size=shape.page_size, window=shape.window, is_valid_token=known
    )
    if ratio > 4:
        compressed_rows(
            *of_tokens, table, ratio=ratio, block_size=shape.page_size, width=shape.topk,
            is_valid_token=known,
        )  # fmt: skip
        return
    chosen = int32((tokens, shape.topk))
    compute_global_topk_indices_and_lens(chosen, of_tokens[1], table, shape.page_size, flags)
    combine_topk_swa_indices(
        chosen, starts, int32(requests), int32(requests), window_size=shape.window,
        compress_ratio=ratio, topk=shape.topk, M=4096, N=3072,
    )  # fmt: skip
