"""Pool the states of windows into entries: whole pages where values are known, else row by row."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.compressor.host_pool import window_states


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive windows of one request.

    Attributes:
        request: row of the block table.
        first: number of the first window.
        count: how many.
    """

    request: int
    first: int
    count: int


def pool_run(
    state_cache: Tensor, tables: Tensor, run: Run, ratio: int, parts: int
) -> Tensor | None:
    """Pool consecutive windows out of whole pages; on the host only.

    Args:
        state_cache: [P, S, 2 W], W = parts * D.
        tables: [R, columns] integer page ids.
        run: the windows.
        ratio: tokens a window.
        parts: 2 if an entry also pools the previous window, else 1.

    Returns:
        [count, D] entries, or None if a page id is outside the cache or the table too short.
    """
    if run.count == 1:
        states, table = state_cache.numpy(), tables[run.request].numpy()
        rows = window_states(states, table, run.first, ratio, parts)
        return None if rows is None else _pool(torch.from_numpy(rows).unsqueeze(0))
    entries = state_cache.shape[1]
    oldest = run.first - (parts - 1)
    start, stop = max(oldest, 0) * ratio, (run.first + run.count) * ratio
    column, end = start // entries, -(-stop // entries)
    if end > tables.shape[1]:
        return None
    pages = tables[run.request, column:end]
    low, high = torch.aminmax(pages)
    if int(low) < 0 or int(high) >= state_cache.shape[0]:
        return None
    skip = start - column * entries
    run_rows = state_cache.index_select(0, pages).flatten(0, 1)[skip : skip + stop - start]
    # [windows, ratio, 2, parts, D]
    windows = run_rows.view(-1, ratio, 2, parts, state_cache.shape[2] // (2 * parts))
    own = windows[-run.count :, :, :, -1]
    if parts == 1:
        return _pool(own)
    older = windows[:-1, :, :, 0]
    if oldest < 0:
        # No window precedes the first: weight exp(-inf) = 0.
        nothing = torch.zeros_like(own[:1])
        nothing[:, :, 1] = -torch.inf
        older = torch.cat((nothing, windows[:-1, :, :, 0]))
    return _pool(torch.cat((older, own), dim=1))


def pool_rows(
    state_cache: Tensor, tables: Tensor, positions: Tensor, ratio: int, parts: int
) -> tuple[Tensor, Tensor]:
    """Pool the windows that close at ``positions``, leaving out rows that are not there.

    Args:
        state_cache: [P, S, 2 W], W = parts * D.
        tables: [n, columns] integer page ids of each window's request, columns >= 1.
        positions: [n] int64.
        ratio: tokens a window.
        parts: 2 if an entry also pools the previous window, else 1.

    Returns:
        [n, D] entries, and bool [n]: whether any of an entry's rows is there (if not, the entry is
        undefined).
    """
    pages, entries = state_cache.shape[:2]
    place = torch.arange(parts * ratio, device=positions.device)
    before = positions.unsqueeze(1) - (parts * ratio - 1) + place
    column = torch.div(before, entries, rounding_mode="floor")
    page = tables.gather(1, column.clamp(0, tables.shape[1] - 1)).long()
    present = (before >= 0) & (column < tables.shape[1]) & (page >= 0) & (page < pages)
    page = torch.where(present, page, 0)
    # The older window gives its first part, the closing one its last.
    states = state_cache.unflatten(-1, (2, parts, -1)).transpose(2, 3)
    rows = states[page, before - column * entries, place // ratio]
    absent = ~present.view(*present.shape, 1, 1)
    rows[:, :, :1].masked_fill_(absent, 0)
    rows[:, :, 1:].masked_fill_(absent, -torch.inf)
    return _pool(rows), present.any(dim=1)


def _pool(rows: Tensor) -> Tensor:
    """Weight values by the softmax of their scores, channel by channel.

    Args:
        rows: [n, window, 2, D], value and score.

    Returns:
        [n, D].
    """
    kv, score = rows.unbind(2)
    return (torch.softmax(score, dim=1) * kv).sum(dim=1)
