"""Cache slots of entries, from block tables."""

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
