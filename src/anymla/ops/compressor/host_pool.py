"""Gather one window's states in NumPy, as decoding does: one entry has no time for tensor calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def window_states(states: Array, table: Array, window: int, ratio: int, parts: int) -> Array | None:
    """Values and scores that are pooled into one entry.

    Args:
        states: [P, S, 2 W], W = parts * D.
        table: [columns] integer page ids of the request.
        window: number of the window.
        ratio: tokens a window.
        parts: 2 if an entry also pools the previous window, else 1.

    Returns:
        [parts * ratio, 2, D], value and score; score -inf where no window precedes the first. None
        if a page id is outside the cache or the table too short.
    """
    pages, entries, width = states.shape
    start, stop = max(window - (parts - 1), 0) * ratio, (window + 1) * ratio
    column, end = start // entries, -(-stop // entries)
    held = table[column:end]
    if end > len(table) or held.min() < 0 or held.max() >= pages:
        return None
    skip = start - column * entries
    rows = states[held].reshape(-1, 2, parts, width // (2 * parts))[skip : skip + stop - start]
    own = rows[-ratio:, :, -1]
    if parts == 1:
        return own
    older = rows[:ratio, :, 0]
    if not window:
        older = np.zeros_like(own)
        older[:, 1] = -np.inf
    return np.concatenate((older, own))
