"""Contracts of the rows that tokens list: windows and compressed entries.

What holds for all selection operations is said in ``interface``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.device import triton_support
from anymla.ops.registry import INT32, INT64, check, operation, require
from anymla.ops.selection import reference, torch_rows


def _int32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


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


_TRITON = "anymla.ops.selection.triton_rows"

compressed_rows.register("reference", reference.compressed_rows)
compressed_rows.register("torch", torch_rows.compressed_rows)
window_rows.register("reference", reference.window_rows)
window_rows.register("torch", torch_rows.window_rows)
compressed_rows.register_lazy("triton", _TRITON, supports=triton_support)
window_rows.register_lazy("triton", _TRITON, supports=triton_support)
