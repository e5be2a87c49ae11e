"""Rows of cache slots that each token reads, on the device.

Grid: (tokens, blocks of columns); ``compute_global_topk_indices_and_lens`` counts a row, so one
program passes over all its columns.

    token t  | BLOCK columns | BLOCK | ...
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.selection.triton_slots import TABLE_TYPES, slot32_of


def block_of(width: int) -> int:
    """Columns of a program: of two sizes, so that an unseen width builds nothing new."""
    return 128 if width <= 128 else 512


@triton.jit
def _valid_request(token, token_to_req, is_valid, requests, HAS_VALID: tl.constexpr):
    """Row of the block table of a token, -1 for padding."""
    request = tl.load(token_to_req + token)
    valid = (request >= 0) & (request < requests)
    if HAS_VALID:
        valid = valid & (tl.load(is_valid + token) != 0)
    return tl.where(valid, request, -1)


@triton.jit(do_not_specialize=["width", "requests", "pages"])
def global_topk_kernel(
    topk,
    topk_stride,
    token_to_req,
    is_valid,
    table,
    slots,
    lens,
    width,
    row_stride,
    column_stride,
    requests,
    pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token: slots of its selected entries, and how many there are."""
    token = tl.program_id(0).to(tl.int64)
    request = _valid_request(token, token_to_req, is_valid, requests, True)
    looked = tl.where(request >= 0, width, 0)
    count = 0
    for at in range(0, width, BLOCK):
        column = at + tl.arange(0, BLOCK)
        entry = tl.load(topk + token * topk_stride + column, mask=column < looked, other=-1)
        count += tl.sum((entry >= 0).to(tl.int32), 0)
        slot = slot32_of(
            entry, request, entry >= 0, table, row_stride, column_stride, requests, pages, PAGE
        )
        tl.store(slots + token * width + column, slot, mask=column < width)
    tl.store(lens + token, count)


@triton.jit(do_not_specialize=["width", "requests", "pages"])
def compressed_rows_kernel(
    positions,
    token_to_req,
    is_valid,
    table,
    slots,
    local,
    lens,
    width,
    row_stride,
    column_stride,
    requests,
    pages,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token and a block of columns: all entries that it sees."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = _valid_request(token, token_to_req, is_valid, requests, HAS_VALID)
    closed = tl.maximum(tl.load(positions + token) + 1, 0) // RATIO
    visible = tl.where(request >= 0, tl.minimum(closed, width), 0).to(tl.int32)
    column = block * BLOCK + tl.arange(0, BLOCK)
    seen = column < visible
    slot = slot32_of(column, request, seen, table, row_stride, column_stride, requests, pages, PAGE)
    tl.store(slots + token * width + column, slot, mask=column < width)
    tl.store(local + token * width + column, tl.where(seen, column, -1), mask=column < width)
    if block == 0:
        tl.store(lens + token, visible)


@triton.jit(do_not_specialize=["window", "requests", "pages"])
def window_rows_kernel(
    positions,
    token_to_req,
    is_valid,
    table,
    slots,
    lens,
    window,
    row_stride,
    column_stride,
    requests,
    pages,
    PAGE: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token and a block of columns: its window in ascending order."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = _valid_request(token, token_to_req, is_valid, requests, HAS_VALID)
    last = tl.where(request >= 0, tl.load(positions + token), -1)
    first = tl.maximum(last - (window - 1), 0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    position = first + column
    slot = slot32_of(
        position,
        request,
        (position <= last) & (column < window),
        table,
        row_stride,
        column_stride,
        requests,
        pages,
        PAGE,
    )
    tl.store(slots + token * window + column, slot, mask=column < window)
    if block == 0:
        length = tl.minimum(tl.maximum(last + 1, 0), window)
        tl.store(lens + token, length.to(tl.int32))


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid_token: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``interface.compute_global_topk_indices_and_lens``."""
    tokens, width = topk_indices.shape
    slots, lens = _rows(topk_indices, tokens, width), _rows(topk_indices, tokens)
    if topk_indices.stride(1) != 1:
        topk_indices = topk_indices.contiguous()
    if tokens:
        global_topk_kernel[(tokens,)](
            topk_indices,
            topk_indices.stride(0),
            token_to_req.contiguous(),
            is_valid_token.contiguous(),
            block_table,
            slots,
            lens,
            width,
            *block_table.stride(),
            *block_table.shape,
            PAGE=block_size,
            BLOCK=block_of(width),
        )
    return slots, lens


def compressed_rows(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    *,
    ratio: int,
    block_size: int,
    width: int,
    is_valid_token: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``interface.compressed_rows``."""
    tokens, block = len(positions), block_of(width)
    slots, local = _rows(positions, tokens, width), _rows(positions, tokens, width)
    lens = _rows(positions, tokens)
    if tokens:
        compressed_rows_kernel[(tokens, max(triton.cdiv(width, block), 1))](
            positions.contiguous(),
            token_to_req.contiguous(),
            None if is_valid_token is None else is_valid_token.contiguous(),
            block_table,
            slots,
            local,
            lens,
            width,
            *block_table.stride(),
            *block_table.shape,
            PAGE=block_size,
            RATIO=ratio,
            HAS_VALID=is_valid_token is not None,
            BLOCK=block,
        )
    return slots, local, lens


def window_rows(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    window: int,
    is_valid_token: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``interface.window_rows``."""
    tokens, block = len(positions), block_of(window)
    slots, lens = _rows(positions, tokens, window), _rows(positions, tokens)
    if tokens:
        window_rows_kernel[(tokens, triton.cdiv(window, block))](
            positions.contiguous(),
            token_to_req.contiguous(),
            None if is_valid_token is None else is_valid_token.contiguous(),
            block_table,
            slots,
            lens,
            window,
            *block_table.stride(),
            *block_table.shape,
            PAGE=block_size,
            HAS_VALID=is_valid_token is not None,
            BLOCK=block,
        )
    return slots, lens


def _rows(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


def builds(target: Target) -> Iterator[Build]:
    """Specialisations; page sizes and ratios are the caller's, so common ones stand for all."""
    results = {"slots": "*i32", "lens": "*i32"}
    tokens = {"positions": "*i64", "token_to_req": "*i32"}
    for width in (128, 512):
        constants = {"PAGE": 64, "BLOCK": block_of(width)}
        yield Build(
            f"block {width}",
            global_topk_kernel,
            {
                **results,
                **TABLE_TYPES,
                "topk": "*i32",
                "topk_stride": "i32",
                "token_to_req": "*i32",
                "is_valid": "*i1",
                "width": "i32",
            },
            constants,
        )
        for has_valid in (False, True):
            # An argument that is None is a constant.
            valid_type = {"is_valid": "*i1"} if has_valid else {}
            valid_constant = {"HAS_VALID": has_valid} | ({} if has_valid else {"is_valid": None})
            label = f"block {width}" + (" valid" if has_valid else "")
            yield Build(
                label,
                compressed_rows_kernel,
                {**tokens, **results, **TABLE_TYPES, **valid_type, "local": "*i32", "width": "i32"},
                {**constants, **valid_constant, "RATIO": 128},
            )
            yield Build(
                label,
                window_rows_kernel,
                {**tokens, **results, **TABLE_TYPES, **valid_type, "window": "i32"},
                {**constants, **valid_constant},
            )
