"""Contracts of the operations that compute a step's index rows.

They turn positions, lengths and block tables into the index rows by which caches are written and
read. A *local* index counts the entries of one request from 0; a *slot* is ``page * page_size +
offset`` in a cache. In all of them, -1 means no entry, and a token whose request is outside [0, R)
is padding. An entry has slot -1 if its page is outside the block table, if the table's value is
negative, or if the slot exceeds the result's dtype. Nothing waits for the device.
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
    """Compute the slot that each token of a step writes in one cache.

    With ratio 1, this is the slot of the token itself, ``table[r, p // B] * B + p % B``. With ratio
    > 1, it is the slot of compressed entry w = p // ratio for the token that closes the entry, (p +
    1) % ratio == 0, and -1 for every other token.

    Args:
        positions: absolute positions of the tokens, [T] int64.
        token_to_req: each token's row of the block table, [T] int32; outside [0, R) for padding.
        block_table: page ids of each request in this cache, [R, P] int32.
        page_size: number of entries B in a page.
        ratio: number of tokens that an entry stands for.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Slots, -1 for tokens that write nothing: [T] int64.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or page_size or ratio is below
            1.

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
    """Compute the request of each token of a batch.

    Args:
        query_start_loc: prefix sums of the requests' token counts, [R + 1] int32.
        num_tokens: number of tokens T; may exceed the last prefix sum (padding for a captured
            graph).
        backend: name of the backend that runs; None for the best that can.

    Returns:
        The request r with start[r] <= t < start[r + 1], else -1: [T] int32.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or num_tokens is negative.
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
    """Translate selected local entries to cache slots, and count each token's.

    Args:
        topk_indices: local entries that each token selected, [T, K] int32; negative ones are
            absent.
        token_to_req: each token's row of the block table, [T or more] int32.
        block_table: page ids of each request in the compressed cache, [R, P] int32.
        block_size: number of compressed entries B in a page.
        is_valid_token: mask of valid tokens, [T or more] bool; an invalid token's row is empty.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        slots: ``table[r, i // B] * B + i % B``, or -1, not compacted, [T, K] int32.
        lens: number of i >= 0 in each row, [T] int32; these are the leading columns, because a
            selection lists its entries first.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or block_size is below 1.

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
    """List the rows of the gathered prefill workspace that each token attends to.

    Request b owns workspace rows [M * b, M * (b + 1)): N rows for compressed entries, then its
    window positions from ``seq_lens[b] - gather_lens[b]`` on. For a token at position p, with n =
    min((p + 1) // compress_ratio, topk) and s = max(p - window_size + 1, 0), the row is

        M * b + topk_indices[:n],  M * b + N + (s .. p) - (seq_lens[b] - gather_lens[b]),  -1 ...

    Entries outside [0, N) and positions that were not gathered become -1 in their place.

    Args:
        topk_indices: local entries that each token selected, valid ones first, [T, K] int32.
        query_start_loc: prefix sums of the requests' token counts, [R + 1] int32; its first element
            is subtracted from all.
        seq_lens: lengths of the requests including this step's tokens, [R] int32.
        gather_lens: number of window positions gathered for each request, [R] int32.
        window_size: number of tokens W in the window.
        compress_ratio: number of tokens of an entry; below 1 counts as 1.
        topk: most entries that a token may select; 0 for a layer without compressed entries.
        M: number of workspace rows of each request.
        N: number of these rows that hold compressed entries.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        indices: workspace rows, then -1, [T, topk + W rounded up to 128] int32.
        lens: n plus the number of window positions, [T] int32; 0 for a token without a request.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, window_size is below 1, topk is
            negative or beyond K, or N is outside [0, M].

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
    """List all compressed entries that each token sees, for a layer without an indexer.

    Entry w is visible to position p if w < (p + 1) // ratio: a token sees the entry that it closes.

    Args:
        positions: absolute positions of the tokens, [T] int64.
        token_to_req: each token's row of the block table, [T] int32.
        block_table: page ids of each request in the compressed cache, [R, P] int32.
        ratio: number of tokens that an entry stands for.
        block_size: number of entries in a page.
        width: number of columns; a token that sees more entries keeps the first ``width``.
        is_valid_token: mask of valid tokens, [T] bool; an invalid token's row is empty. None for
            all.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        slots: slots of entries 0, 1, .., n - 1, then -1, [T, width] int32.
        local: the entries themselves, then -1, [T, width] int32.
        lens: number of entries n = min((p + 1) // ratio, width), [T] int32.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, ratio or block_size is below 1,
            or width is negative.

    Source: semantics of vLLM's precomputed indices for layers of ratio 128.
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
    """List the slots of each token's sliding window: positions max(0, p - window + 1) .. p.

    Args:
        positions: absolute positions of the tokens, [T] int64.
        token_to_req: each token's row of the block table, [T] int32.
        block_table: page ids of each request in the window cache, [R, P] int32; pages older than
            the window may be anything.
        block_size: number of tokens in a page.
        window: number of tokens W in the window, the token itself included.
        is_valid_token: mask of valid tokens, [T] bool; an invalid token's row is empty. None for
            all.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        slots: slots in ascending order of position, then -1, [T, W] int32.
        lens: number of positions min(p + 1, W), [T] int32.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or block_size or window is
            below 1.

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
