"""Runs written out as lists, for backends that gather."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_INT32 = 2**31 - 1


def named_rows(
    runs: Tensor, lists: Tensor | None, window: int, entries: int
) -> tuple[Tensor, Tensor]:
    """Rows that ``prefill_attention`` names for each token.

    Args:
        runs: int32 [T, 4].
        lists: int32 [T, K] or None.
        window: the most rows of a window.
        entries: the most rows of a second run.

    Returns:
        int32 [T, window + entries] (K for entries if there are lists), -1 for none; and the number
        of leading columns in use, int32 [T].
    """
    start, count, base, more = runs.long().split(1, dim=1)
    place = torch.arange(window, device=runs.device)
    first = torch.where(place < count, start + place, -1)
    if lists is None:
        place = torch.arange(entries, device=runs.device)
        second = torch.where(place < more, base + place, -1)
    else:
        place = torch.arange(lists.shape[1], device=runs.device)
        second = torch.where((place < more) & (lists >= 0), base + lists, -1)
    width = window + second.shape[1]
    # Where there are entries, the lists begin with the whole width of the window.
    used = torch.where(more > 0, window + more, count).clamp(0, width)
    named = torch.cat((first, second), 1).clamp(-1, _LARGEST_INT32)
    return named.int(), used.squeeze(1).int()
