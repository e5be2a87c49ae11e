"""The rows that a chunk of prefill can see, decoded side by side: which slots, and who sees which.

A workspace holds, request after request, the window's rows of all tokens of the chunk, and then,
request after request, the compressed entries. It is as long as the requests are, and its contents
are decoded again for every layer, while what is computed here serves all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from anymla.layers.rows import GroupStep, PrefillRows
from anymla.layers.step import Step


def prefill_rows(
    step: Step,
    seq_lens: Sequence[int],
    window_group: GroupStep,
    *,
    window: int,
    compressed: GroupStep | None = None,
    ratio: int = 0,
) -> PrefillRows:
    """Return the rows that the prefill requests of a step see."""
    first = step.num_decodes
    stops, counts = list(seq_lens[first:]), step.query_lens[first:]
    first_token = sum(step.query_lens[:first])
    starts = [max(stop - count - window + 1, 0) for stop, count in zip(stops, counts, strict=True)]
    sizes = [stop - start for stop, start in zip(stops, starts, strict=True)]
    held = [stop // ratio if ratio else 0 for stop in stops]
    base = [0, *accumulate(sizes)]
    entry_base = [base[-1] + more for more in (0, *accumulate(held))]
    device = step.positions.device
    numbers = torch.tensor([starts, sizes, held, base[:-1], entry_base[:-1]], dtype=torch.int64)
    start, size, hold, offset, entry_offset = numbers.to(device, non_blocking=True)

    positions = step.positions[first_token:]
    request = step.token_to_req[first_token:].long() - first
    valid = request >= 0
    request = request.clamp(min=0)
    lowest = (positions - window + 1).clamp(min=0)
    visible = (positions + 1) // ratio if ratio else torch.zeros_like(positions)
    at = lowest - start.index_select(0, request) + offset.index_select(0, request)
    entry_at = entry_offset.index_select(0, request)
    ranges = torch.stack((at, positions + 1 - lowest, entry_at, visible), 1)
    ranges = torch.where(valid[:, None], ranges, 0).int()

    slots = _slots(window_group, first, start, size, base)
    entry_slots = None
    if compressed is not None:
        nothing = torch.zeros_like(hold)
        entry_slots = _slots(compressed, first, nothing, hold, [0, *accumulate(held)])
    return PrefillRows(first_token, window, slots, entry_slots, ranges, max(held, default=0))


def _slots(group: GroupStep, first: int, start: Tensor, size: Tensor, base: list[int]) -> Tensor:
    """Return slots of positions start .. start + size of each request, in the order of requests."""
    total = base[-1]
    request = torch.repeat_interleave(
        torch.arange(len(start), device=start.device), size, output_size=total
    )
    before = (size.cumsum(0) - size).index_select(0, request)
    position = torch.arange(total, device=start.device) - before + start.index_select(0, request)
    page = group.block_table[first:].long()[request, position // group.page_size]
    slot = page * group.page_size + position % group.page_size
    return torch.where(page >= 0, slot, -1).int()
