"""Slots from positions and block tables, on the device.

Grids: a program is a block of tokens.

    tokens   | BLOCK | BLOCK | ...        token_to_request: tokens x prefix sums, the latter
                                          passed over in a loop
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target

BLOCK = 256
# token_to_request compares so many tokens with so many prefix sums at a time.
_TOKENS = 128
_LOOKED = 32


@triton.jit
def slot_of(
    entry, request, wanted, table, row_stride, column_stride, requests, pages, PAGE: tl.constexpr
):
    """int64 slots of entries (int32 or int64, any shape), -1 for what does not exist."""
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
    """As ``slot_of`` in int32; a slot that would wrap around is no slot."""
    slot = slot_of(entry, request, wanted, table, row_stride, column_stride, requests, pages, PAGE)
    return tl.where(slot <= 0x7FFFFFFF, slot, -1).to(tl.int32)


@triton.jit
def request_of(token, starts, first, requests, LOOKED: tl.constexpr):
    """Requests [n] of tokens [n] int32, -1 where there is none.

    ``starts`` points at the requests' prefix sums, of which ``first`` is subtracted.
    """
    passed = tl.full(token.shape, 0, tl.int32)
    for at in range(0, requests + 1, LOOKED):
        column = at + tl.arange(0, LOOKED)
        known = column <= requests
        start = tl.load(starts + column, mask=known, other=0) - first
        begun = known[None, :] & (start[None, :] <= token[:, None])
        passed += tl.sum(begun.to(tl.int32), 1)
    return tl.where(passed <= requests, passed - 1, -1)


@triton.jit(do_not_specialize=["tokens", "requests", "pages"])
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
    """A block of tokens: where each writes."""
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
    starts, out, tokens, requests, BLOCK: tl.constexpr, LOOKED: tl.constexpr
):
    """A block of tokens: whose each is."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = request_of(token, starts, 0, requests, LOOKED)
    tl.store(out + token, request, mask=token < tokens)


def slot_mapping(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, *, page_size: int, ratio: int = 1
) -> Tensor:
    """See ``interface.slot_mapping``."""
    tokens = len(positions)
    out = torch.empty(tokens, dtype=torch.int64, device=positions.device)
    if tokens:
        slot_mapping_kernel[(triton.cdiv(tokens, BLOCK),)](
            positions.contiguous(),
            token_to_req.contiguous(),
            block_table,
            out,
            tokens,
            *block_table.stride(),
            *block_table.shape,
            PAGE=page_size,
            RATIO=ratio,
            BLOCK=BLOCK,
        )
    return out


def token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """See ``interface.token_to_request``."""
    out = torch.empty(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    if num_tokens:
        token_to_request_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
            query_start_loc.contiguous(),
            out,
            num_tokens,
            len(query_start_loc) - 1,
            BLOCK=_TOKENS,
            LOOKED=_LOOKED,
        )
    return out


# Types of the block table's arguments, for builds.
TABLE_TYPES = {
    "table": "*i32",
    "row_stride": "i32",
    "column_stride": "i32",
    "requests": "i32",
    "pages": "i32",
}


def builds(target: Target) -> Iterator[Build]:
    """Specialisations; page sizes and ratios are the caller's, so common ones stand for all."""
    tokens = {"positions": "*i64", "token_to_req": "*i32", "tokens": "i32"}
    for page, ratio in ((64, 1), (64, 4), (2, 128), (3, 5)):
        yield Build(
            f"page {page} ratio {ratio}",
            slot_mapping_kernel,
            {**tokens, **TABLE_TYPES, "out": "*i64"},
            {"PAGE": page, "RATIO": ratio, "BLOCK": BLOCK},
        )
    yield Build(
        "",
        token_to_request_kernel,
        {"starts": "*i32", "out": "*i32", "tokens": "i32", "requests": "i32"},
        {"BLOCK": _TOKENS, "LOOKED": _LOOKED},
    )
