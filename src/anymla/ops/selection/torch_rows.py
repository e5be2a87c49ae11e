"""Rows of cache slots that each token reads: selected entries, all entries, the window."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.selection.torch_slots import slots_of


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid_token: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``interface.compute_global_topk_indices_and_lens``."""
    tokens = len(topk_indices)
    requests = _valid_requests(token_to_req[:tokens], block_table, is_valid_token[:tokens])
    in_use = (topk_indices >= 0) & (requests >= 0)
    slots = slots_of(topk_indices.long(), requests, block_table, block_size)
    return _as_int32(slots), in_use.sum(1, dtype=torch.int32)


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
    requests = _valid_requests(token_to_req, block_table, is_valid_token)
    visible = torch.div(positions + 1, ratio, rounding_mode="floor").clamp(0, width)
    visible = torch.where(requests[:, 0] >= 0, visible, 0)
    entries = torch.arange(width, device=positions.device)
    local = torch.where(entries < visible[:, None], entries, -1)
    slots = slots_of(local, requests, block_table, block_size)
    return _as_int32(slots), local.int(), visible.int()


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
    requests = _valid_requests(token_to_req, block_table, is_valid_token)
    last = torch.where(requests[:, 0] >= 0, positions, -1)[:, None]
    first = (last - (window - 1)).clamp(min=0)
    position = first + torch.arange(window, device=positions.device)
    position = torch.where(position <= last, position, -1)
    slots = slots_of(position, requests, block_table, block_size)
    return _as_int32(slots), (last[:, 0] + 1).clamp(0, window).int()


def _as_int32(slots: Tensor) -> Tensor:
    """Narrow; a slot that would wrap around is no slot."""
    return torch.where(slots < 2**31, slots, -1).int()


def _valid_requests(token_to_req: Tensor, block_table: Tensor, is_valid: Tensor | None) -> Tensor:
    """[T, 1] int32 rows of the block table, -1 for padding."""
    valid = (token_to_req >= 0) & (token_to_req < len(block_table))
    if is_valid is not None:
        valid &= is_valid
    return torch.where(valid, token_to_req, -1)[:, None]
