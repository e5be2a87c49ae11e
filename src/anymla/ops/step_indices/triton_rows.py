"""Index rows in Triton: slots that tokens write, and cache entries that each token reads.

slot_mapping, token_to_request   grid (blocks of tokens,)
selected entries                 grid (tokens,)
all entries, windows, combined   grid (tokens, blocks of columns)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops.step_indices.reference import combined_width

# Tokens per CTA of slot_mapping and of token_to_request.
_SLOT_BLOCK, _TOKEN_BLOCK = 256, 128
# Prefix sums that a CTA compares at once, if it has many tokens, and if it has one.
_STARTS, _REQUEST_STARTS = 32, 256


def block_of(width: int) -> int:
    """Return a CTA's columns, one of two sizes so that new widths compile nothing new."""
    return 128 if width <= 128 else 512


@triton.jit
def slot_of(
    entry, request, wanted, table, row_stride, column_stride, requests, pages, PAGE: tl.constexpr
):
    """Return int64 slots of entries (int32 or int64, any shape), -1 where there is none."""
    page = entry // PAGE
    covered = tl.where((request >= 0) & (request < requests), pages, 0)
    exists = wanted & (entry >= 0) & (page < covered)
    cell = request.to(tl.int64) * row_stride + page.to(tl.int64) * column_stride
    physical = tl.load(table + cell, mask=exists, other=-1).to(tl.int64)
    return tl.where(physical >= 0, physical * PAGE + (entry - page * PAGE), -1)


@triton.jit
def slot32_of(
    entry, request, wanted, table, row_stride, column_stride, requests, pages, PAGE: tl.constexpr
):
    """Return ``slot_of`` as int32; a slot that would wrap around becomes -1."""
    slot = slot_of(entry, request, wanted, table, row_stride, column_stride, requests, pages, PAGE)
    return tl.where(slot <= 0x7FFFFFFF, slot, -1).to(tl.int32)


@triton.jit
def request_of(token, starts, first, requests, STARTS: tl.constexpr):
    """Return the requests [n] of tokens [n] int32, -1 where there is none.

    ``starts`` points to the requests' prefix sums, of which ``first`` is subtracted.
    """
    passed = tl.full(token.shape, 0, tl.int32)
    for at in range(0, requests + 1, STARTS):
        column = at + tl.arange(0, STARTS)
        known = column <= requests
        start = tl.load(starts + column, mask=known, other=0) - first
        begun = known[None, :] & (start[None, :] <= token[:, None])
        passed += tl.sum(begun.to(tl.int32), 1)
    return tl.where(passed <= requests, passed - 1, -1)


@triton.jit(do_not_specialize=["tokens", "requests", "pages", "row_stride"])
def slot_mapping_kernel(
    positions,
    token_to_req,
    table,
    out,
    tokens,
    row_stride,
    column_stride,
    requests,
    pages,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the slots of a block of tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    position = tl.load(positions + token, mask=inside, other=-1)
    request = tl.load(token_to_req + token, mask=inside, other=-1)
    entry = position // RATIO
    closes = (position >= 0) & (position - entry * RATIO == RATIO - 1)
    slot = slot_of(entry, request, closes, table, row_stride, column_stride, requests, pages, PAGE)
    tl.store(out + token, slot, mask=inside)


@triton.jit(do_not_specialize=["tokens", "requests"])
def token_to_request_kernel(
    starts, out, tokens, requests, BLOCK: tl.constexpr, STARTS: tl.constexpr
):
    """Compute the requests of a block of tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = request_of(token, starts, 0, requests, STARTS)
    tl.store(out + token, request, mask=token < tokens)


@triton.jit
def _valid_request(token, token_to_req, is_valid, requests, HAS_VALID: tl.constexpr):
    """Return a token's row of the block table, -1 for padding."""
    request = tl.load(token_to_req + token)
    valid = (request >= 0) & (request < requests)
    if HAS_VALID:
        valid = valid & (tl.load(is_valid + token) != 0)
    return tl.where(valid, request, -1)


@triton.jit(do_not_specialize=["width", "requests", "pages", "row_stride"])
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
    """Compute the slots of a token's selected entries, and their number."""
    token = tl.program_id(0).to(tl.int64)
    request = _valid_request(token, token_to_req, is_valid, requests, True)
    end = tl.where(request >= 0, width, 0)
    count = 0
    for at in range(0, width, BLOCK):
        column = at + tl.arange(0, BLOCK)
        entry = tl.load(topk + token * topk_stride + column, mask=column < end, other=-1)
        count += tl.sum((entry >= 0).to(tl.int32), 0)
        slot = slot32_of(
            entry, request, entry >= 0, table, row_stride, column_stride, requests, pages, PAGE
        )
        tl.store(slots + token * width + column, slot, mask=column < width)
    tl.store(lens + token, count)


@triton.jit(do_not_specialize=["width", "requests", "pages", "row_stride"])
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
    """Compute a block of columns of a token: all entries that it sees."""
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


@triton.jit(do_not_specialize=["window", "requests", "pages", "row_stride"])
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
    """Compute a block of columns of a token: its window in ascending order."""
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


@triton.jit(do_not_specialize=["requests", "topk", "width", "window", "rows", "entry_rows"])
def combine_kernel(
    topk_indices,
    topk_stride,
    query_start_loc,
    seq_lens,
    gather_lens,
    indices,
    lens,
    requests,
    topk,
    width,
    window,
    rows,
    entry_rows,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
):
    """Compute a block of columns of a token's combined row; ``rows`` is M and ``entry_rows`` N."""
    token = tl.program_id(0)
    block = tl.program_id(1)
    base = tl.load(query_start_loc)
    tokens = token + tl.arange(0, 1)
    request = tl.max(request_of(tokens, query_start_loc, base, requests, STARTS), 0)
    known = request >= 0
    end = tl.load(query_start_loc + request + 1, mask=known, other=0) - base
    seq_len = tl.load(seq_lens + request, mask=known, other=0).to(tl.int64)
    gathered = tl.load(gather_lens + request, mask=known, other=0)

    position = seq_len - end + token
    entries = tl.minimum(tl.maximum(position + 1, 0) // RATIO, topk)
    entries = tl.where(known, entries, 0)
    window_start = tl.maximum(position - (window - 1), 0)
    length = entries + tl.maximum(position + 1 - window_start, 0)
    length = tl.where(known, length, 0)

    column = block * BLOCK + tl.arange(0, BLOCK)
    selects = column < entries
    line = topk_indices + token.to(tl.int64) * topk_stride
    chosen = tl.load(line + column, mask=selects, other=-1).to(tl.int64)
    moved = entry_rows + (window_start - (seq_len - gathered)) + (column - entries)
    offset = tl.where(selects, chosen, moved)
    lowest = tl.where(selects, 0, entry_rows)
    limit = tl.where(selects, entry_rows, rows)
    exists = (column < length) & (offset >= lowest) & (offset < limit)
    index = tl.where(exists, request.to(tl.int64) * rows + offset, -1)
    out = indices + token.to(tl.int64) * width
    tl.store(out + column, index.to(tl.int32), mask=column < width)
    if block == 0:
        tl.store(lens + token, length.to(tl.int32))


def slot_mapping(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, *, page_size: int, ratio: int = 1
) -> Tensor:
    """Backend of ``interface.slot_mapping`` in Triton; see its contract."""
    tokens = len(positions)
    out = torch.empty(tokens, dtype=torch.int64, device=positions.device)
    if tokens:
        slot_mapping_kernel[(triton.cdiv(tokens, _SLOT_BLOCK),)](
            positions.contiguous(),
            token_to_req.contiguous(),
            block_table,
            out,
            tokens,
            *block_table.stride(),
            *block_table.shape,
            PAGE=page_size,
            RATIO=ratio,
            BLOCK=_SLOT_BLOCK,
        )
    return out


def token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Backend of ``interface.token_to_request`` in Triton; see its contract."""
    out = torch.empty(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    if num_tokens:
        token_to_request_kernel[(triton.cdiv(num_tokens, _TOKEN_BLOCK),)](
            query_start_loc.contiguous(),
            out,
            num_tokens,
            len(query_start_loc) - 1,
            BLOCK=_TOKEN_BLOCK,
            STARTS=_STARTS,
        )
    return out


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid_token: Tensor,
) -> tuple[Tensor, Tensor]:
    """Backend of ``interface.compute_global_topk_indices_and_lens`` in Triton; see its contract."""
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
    """Backend of ``interface.compressed_rows`` in Triton; see its contract."""
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
    """Backend of ``interface.window_rows`` in Triton; see its contract."""
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


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[Tensor, Tensor]:
    """Backend of ``interface.combine_topk_swa_indices`` in Triton; see its contract."""
    tokens, device = len(topk_indices), topk_indices.device
    width = combined_width(topk, window_size)
    indices = torch.empty(tokens, width, dtype=torch.int32, device=device)
    lens = torch.empty(tokens, dtype=torch.int32, device=device)
    if topk_indices.stride(1) != 1:
        topk_indices = topk_indices.contiguous()
    block = block_of(width)
    if tokens:
        combine_kernel[(tokens, triton.cdiv(width, block))](
            topk_indices,
            topk_indices.stride(0),
            query_start_loc.contiguous(),
            seq_lens.contiguous(),
            gather_lens.contiguous(),
            indices,
            lens,
            len(seq_lens),
            topk,
            width,
            window_size,
            M,
            N,
            RATIO=max(compress_ratio, 1),
            BLOCK=block,
            STARTS=_REQUEST_STARTS,
        )
    return indices, lens


def _rows(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)
