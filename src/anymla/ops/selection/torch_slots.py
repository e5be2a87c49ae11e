"""Slots from positions and block tables."""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(entries: Tensor, requests: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """Slots of entries of requests, -1 for what does not exist.

    Args:
        entries: int64, any shape.
        requests: integer, broadcastable to ``entries``.
        block_table: [R, P] int32.
        page_size: entries per page.

    Returns:
        int64, shape of ``entries``.
    """
    rows, columns = block_table.shape
    if block_table.numel() == 0:
        return torch.full_like(entries, -1)
    page = torch.div(entries, page_size, rounding_mode="floor")
    exists = (page >= 0) & (page < columns) & (requests >= 0) & (requests < rows)
    cell = torch.where(exists, requests.long() * columns + page, 0)
    physical = block_table.reshape(-1).take(cell).long()
    slot = physical * page_size + (entries - page * page_size)
    return torch.where(exists & (physical >= 0), slot, -1)


def slot_mapping(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, *, page_size: int, ratio: int = 1
) -> Tensor:
    """See ``interface.slot_mapping``."""
    entries = positions
    if ratio > 1:
        closing = (positions + 1) % ratio == 0
        entries = torch.where(closing, torch.div(positions, ratio, rounding_mode="floor"), -1)
    return slots_of(entries, token_to_req, block_table, page_size)


def token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """See ``interface.token_to_request``."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    request = torch.searchsorted(query_start_loc, tokens, right=True, out_int32=True) - 1
    # Past the last request; before the first, the search has given -1 already.
    return request.masked_fill_(request == len(query_start_loc) - 1, -1)
