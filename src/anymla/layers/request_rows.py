"""Rows that the queries of a decode step see, decoded once a request.

The queries of a request stand at neighbouring positions. Their windows are the same rows but for a
few, and in layers without an indexer they see the same entries but for the last ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.layers.rows import GroupStep, RequestRows


def request_rows(
    positions: Tensor,
    token_to_req: Tensor,
    stops: Tensor,
    window_group: GroupStep,
    *,
    window: int,
    queries: int,
    compressed: GroupStep | None = None,
    ratio: int = 0,
    entries: int = 0,
) -> RequestRows:
    """Return the rows that a step's queries see; nothing is read back from the device."""
    width = window + queries - 1
    requests = len(stops)
    held = stops.clamp(max=width)
    request = token_to_req.clamp(min=0).long()
    lowest = (positions - window + 1).clamp(min=0)
    first = (stops - held).index_select(0, request)
    visible = torch.zeros_like(positions)
    last = None
    if compressed is not None:
        visible = ((positions + 1) // ratio).clamp(max=entries)
        last = torch.div(stops, ratio, rounding_mode="floor").int()
    ranges = torch.stack(
        (
            request * width + lowest - first,
            positions + 1 - lowest,
            requests * width + request * entries,
            visible,
        ),
        1,
    )
    ranges = torch.where((token_to_req >= 0).unsqueeze(1), ranges, 0).int()
    return RequestRows(
        window, width, held, stops, window_group.block_table,
        0 if compressed is None else entries, last,
        None if compressed is None else compressed.block_table, ranges,
    )  # fmt: skip
