"""Contracts of the operations that make a step's index rows.

They turn positions, lengths and block tables into the index rows that caches are written and read
by. A *local* index counts the entries of one request from 0; a *slot* is ``page * page_size +
offset`` in a cache. Everywhere: -1 means nothing, a token whose request is outside [0, R) is
padding, an entry whose page lies outside the block table or whose table value is negative has
slot -1, as has one whose slot exceeds the result's dtype, and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.device import triton_support
from anymla.ops.registry import INT32, INT64, check, operation, require
from anymla.ops.step_indices.reference import combined_width


def _int32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


@operation(outputs=lambda positions, **_: (torch.empty_like(positions),))
def slot_mapping(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    ratio: int = 1,
    backend: str | None = None,
) -> Tensor:
    """Slot that each token of a step writes in one cache.

    With ratio 1, the slot of the token itself: ``table[r, p // B] * B + p % B``. With ratio > 1,
    the slot of compressed entry w = p // ratio, at the token that closes it,
    (p + 1) % ratio == 0, and -1 at every other token.

    Args:
        positions: [T] int64, absolute positions.
        token_to_req: [T] int32, row of the block table; outside [0, R) for padding.
        block_table: [R, P] int32, pages of each request in this cache.
        page_size: entries per page B.
        ratio: tokens per entry.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [T] int64 slots, -1 where the token writes nothing.

    Raises:
        TypeError, ValueError: as ``check`` says; page_size or ratio below 1.

    Source: semantics of vLLM's slot mappings for DeepSeek-V4's cache groups.
    """
    name = "slot_mapping"
    check(
        name,
        positions=(positions, "T", INT64),
        token_to_req=(token_to_req, "T", INT32),
        block_table=(block_table, "R P", INT32),
    )
    require(page_size >= 1, name, "page_size", ">= 1", page_size)
    require(ratio >= 1, name, "ratio", ">= 1", ratio)


@operation(outputs=lambda query_start_loc, num_tokens: (_int32(query_start_loc, num_tokens),))
def token_to_request(
    query_start_loc: Tensor, num_tokens: int, *, backend: str | None = None
) -> Tensor:
    """Request of each token of a batch.

    Args:
        query_start_loc: [R + 1] int32, prefix sums of the requests' token counts.
        num_tokens: T; may exceed the last prefix sum (padding for a captured graph).
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [T] int32: the r with start[r] <= t < start[r + 1], else -1.

    Raises:
        TypeError, ValueError: as ``check`` says; num_tokens below 0.
    """
    name = "token_to_request"
    check(name, query_start_loc=(query_start_loc, "_", INT32))
    require(len(query_start_loc) >= 1, name, "query_start_loc", "[R + 1]", "[0]")
    require(num_tokens >= 0, name, "num_tokens", ">= 0", num_tokens)


@operation(
    outputs=lambda topk_indices, **_: (
        torch.empty_like(topk_indices),
        _int32(topk_indices, topk_indices.shape[0]),
    )
)
def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid_token: Tensor,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn selected local entries into cache slots.

    Args:
        topk_indices: [T, K] int32, local entries; negative = none.
        token_to_req: [T or more] int32, row of the block table.
        block_table: [R, P] int32, pages of the compressed cache.
        block_size: compressed entries per page B.
        is_valid_token: [T or more] bool; the row of an invalid token is empty.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        slots: [T, K] int32, ``table[r, i // B] * B + i % B``, or -1, not compacted; and
        lens [T] int32, the number of i >= 0: the leading columns in use, because selection puts
        valid entries first.

    Raises:
        TypeError, ValueError: as ``check`` says; block_size below 1.

    Source: semantics of vLLM's operation of this name.
    """
    name = "compute_global_topk_indices_and_lens"
    check(
        name,
        topk_indices=(topk_indices, "T K", INT32),
        token_to_req=(token_to_req, "T+", INT32),
        block_table=(block_table, "R P", INT32),
        is_valid_token=(is_valid_token, "T+", torch.bool),
    )
    require(block_size >= 1, name, "block_size", ">= 1", block_size)


@operation(
    outputs=lambda topk_indices, *, topk, window_size, **_: (
        _int32(topk_indices, topk_indices.shape[0], combined_width(topk, window_size)),
        _int32(topk_indices, topk_indices.shape[0]),
    )
)
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of the gathered prefill workspace that each token attends.

    Request b owns workspace rows [M * b, M * (b + 1)): first N rows of compressed entries, then
    its window positions from ``seq_lens[b] - gather_lens[b]`` on. For a token at position p,
    with n = min((p + 1) // compress_ratio, topk) and s = max(p - window_size + 1, 0), the row is

        M * b + topk_indices[:n],  M * b + N + (s .. p) - (seq_lens[b] - gather_lens[b]),  -1 ...

    An entry outside [0, N), or a position that was not gathered, is -1 in its place.

    Args:
        topk_indices: [T, K] int32, local entries, valid ones first.
        query_start_loc: [R + 1] int32; rebased by its first element.
        seq_lens: [R] int32, lengths including this step's tokens.
        gather_lens: [R] int32, window positions gathered per request.
        window_size: W.
        compress_ratio: tokens per entry; below 1 is read as 1.
        topk: entries a token may select; 0 for a layer without compressed entries.
        M: workspace rows per request.
        N: of these, rows for compressed entries.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        indices: [T, topk + W rounded up to 128] int32.
        lens: [T] int32, n plus the number of window positions; 0 for a token of no request.

    Raises:
        TypeError, ValueError: as ``check`` says; window_size below 1, topk below 0 or beyond K,
            N outside [0, M].

    Source: semantics of vLLM's operation of this name.
    """
    name = "combine_topk_swa_indices"
    sizes = check(
        name,
        topk_indices=(topk_indices, "T K", INT32),
        query_start_loc=(query_start_loc, "_", INT32),
        seq_lens=(seq_lens, "R", INT32),
        gather_lens=(gather_lens, "R", INT32),
    )
    starts = len(query_start_loc)
    require(starts == sizes["R"] + 1, name, "query_start_loc", f"[{sizes['R'] + 1}]", f"[{starts}]")
    require(window_size >= 1, name, "window_size", ">= 1", window_size)
    require(0 <= topk <= sizes["K"], name, "topk", f"in [0, K={sizes['K']}]", topk)
    require(0 <= N <= M, name, "N", f"in [0, M={M}]", N)


@operation(
    outputs=lambda positions, *, width, **_: (
        _int32(positions, len(positions), width),
        _int32(positions, len(positions), width),
        _int32(positions, len(positions)),
    )
)
def compressed_rows(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    *,
    ratio: int,
    block_size: int,
    width: int,
    is_valid_token: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All compressed entries that each token sees, for a layer without an indexer.

    Entry w is visible to position p iff w < (p + 1) // ratio: a token sees the entry it closes.

    Args:
        positions: [T] int64.
        token_to_req: [T] int32, row of the block table.
        block_table: [R, P] int32, pages of the compressed cache.
        ratio: tokens per entry.
        block_size: entries per page.
        width: columns; a token that sees more entries keeps the first ``width``.
        is_valid_token: [T] bool, or None for all; the row of an invalid token is empty.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        slots: [T, width] int32, slots of entries 0, 1, .., n - 1, then -1.
        local: [T, width] int32, the entries themselves, then -1.
        lens: [T] int32, n = min((p + 1) // ratio, width).

    Raises:
        TypeError, ValueError: as ``check`` says; ratio or block_size below 1, width below 0.

    Source: semantics of vLLM's precomputed indices for ratio-128 layers.
    """
    name = "compressed_rows"
    check(
        name,
        positions=(positions, "T", INT64),
        token_to_req=(token_to_req, "T", INT32),
        block_table=(block_table, "R P", INT32),
        is_valid_token=(is_valid_token, "T", torch.bool),
    )
    require(ratio >= 1, name, "ratio", ">= 1", ratio)
    require(block_size >= 1, name, "block_size", ">= 1", block_size)
    require(width >= 0, name, "width", ">= 0", width)


@operation(
    outputs=lambda positions, *, window, **_: (
        _int32(positions, len(positions), window),
        _int32(positions, len(positions)),
    )
)
def window_rows(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    window: int,
    is_valid_token: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Slots of the sliding window of each token: positions max(0, p - window + 1) .. p.

    Args:
        positions: [T] int64.
        token_to_req: [T] int32, row of the block table.
        block_table: [R, P] int32, pages of the window cache; pages older than the window may be
            anything.
        block_size: tokens per page.
        window: W, the token itself included.
        is_valid_token: [T] bool, or None for all; the row of an invalid token is empty.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        slots: [T, W] int32 in ascending order of position, then -1.
        lens: [T] int32, min(p + 1, W).

    Raises:
        TypeError, ValueError: as ``check`` says; block_size or window below 1.

    Source: DeepSeek-V4 reference, inference/model.py (window of the last W tokens).
    """
    name = "window_rows"
    check(
        name,
        positions=(positions, "T", INT64),
        token_to_req=(token_to_req, "T", INT32),
        block_table=(block_table, "R P", INT32),
        is_valid_token=(is_valid_token, "T", torch.bool),
    )
    require(block_size >= 1, name, "block_size", ">= 1", block_size)
    require(window >= 1, name, "window", ">= 1", window)


_FAMILY = "anymla.ops.step_indices"
for _operation in (
    slot_mapping,
    token_to_request,
    compute_global_topk_indices_and_lens,
    combine_topk_swa_indices,
    compressed_rows,
    window_rows,
):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_rows")
    _operation.register_lazy("triton", f"{_FAMILY}.triton_rows", supports=triton_support)
