"""Rows that the queries of a decode step see, listed or decoded once a request.

The queries of a request stand at neighbouring positions. Their windows are the same rows but for a
few, and in layers without an indexer they see the same entries but for the last ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.layers.rows import GroupStep, RequestRows, SharedRows
from anymla.ops.step_indices import window_rows


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
    """Rows that a step's queries see, whatever the device; nothing is read back from it.

    Args:
        positions: int64 [T].
        token_to_req: int32 [T], -1 for padding, which sees nothing.
        stops: int32 [R], positions behind the last tokens; 0 for requests that are not there.
        window_group: of the window cache.
        window: tokens that a query sees, itself included.
        queries: at least the tokens of any request, which are consecutive.
        compressed: group of the layer's compressed cache, or None.
        ratio: tokens of an entry.
        entries: the most entries of a request; a token that sees more keeps the first ones.
    """
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


def shared_rows(
    starts: Tensor,
    counts: Tensor,
    window_group: GroupStep,
    *,
    window: int,
    queries: int,
    backend: str | None = None,
) -> SharedRows:
    """Windows of a step's queries, a list a request; nothing is read back from the device.

    Args:
        starts: int32 [R], positions of the requests' first tokens.
        counts: int32 [R], their tokens, at most ``queries``; 0 for requests that are not there.
        window_group: of the window cache.
        window: tokens that a query sees, itself included.
        queries: rows of each request in the step.
        backend: of the selection operations.
    """
    requests, columns = len(starts), window + queries - 1
    first = (starts - (window - 1)).unsqueeze(1)
    positions = first + torch.arange(columns, device=starts.device)
    there = (positions >= 0) & (positions < (starts + counts).unsqueeze(1))
    request = torch.arange(requests, dtype=torch.int32, device=starts.device).unsqueeze(1)
    slots, _ = window_rows(
        positions.flatten(), torch.where(there, request, -1).flatten(), window_group.block_table,
        block_size=window_group.page_size, window=1, backend=backend,
    )  # fmt: skip
    return SharedRows(slots.view(requests, columns), counts, queries)
