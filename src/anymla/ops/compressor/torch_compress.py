"""Compression of closed windows in torch: pool, norm, rotate and store all entries of a step.

On the host, values can be read, so windows are pooled from whole pages; elsewhere every token's
window is gathered row by row and masked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anymla.formats.hadamard import hadamard_transform
from anymla.ops import _host
from anymla.ops._torch_norm_rope import freqs_cis, rms_norm, rotate_
from anymla.ops._torch_pages import write_rows
from anymla.ops.compressor import config
from anymla.ops.compressor.config import Window


@dataclasses.dataclass(frozen=True)
class States:
    """Saved states of all requests, with their page tables.

    Attributes:
        cache: saved states by page, [P, S, 2 W].
        tables: page ids of each request, [R, columns] int32.
        window: window that an entry is compressed from.
    """

    cache: Tensor
    tables: Tensor
    window: Window


@dataclasses.dataclass(frozen=True)
class WindowRange:
    """Range of consecutive windows of one request.

    Attributes:
        request: row of the block table.
        first: number of the first window.
        count: number of windows in the range.
    """

    request: int
    first: int
    count: int


def compress_norm_rope_insert(
    state_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    k_slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    layout: str,
    hadamard: bool = False,
) -> None:
    """Backend of ``interface.compress_norm_rope_insert`` in torch; see its contract."""
    requests, columns = state_block_table.shape
    slots_of_states = state_cache.shape[0] * state_cache.shape[1]
    if not (positions.shape[0] and requests and columns and slots_of_states):
        return
    on_host = _host.on_host(positions)
    if on_host:
        # Most decode steps close no window, so that is checked before everything else.
        targets = k_slot_mapping.tolist()
        closing = [token for token, slot in enumerate(targets) if slot >= 0]
        if not closing:
            return
    window = Window(compress_ratio, overlap, norm_weight.shape[0], state_cache.shape[1])
    states = States(state_cache, state_block_table, window)
    if on_host:
        pooled = _closed_on_host(closing, states, state_slot_mapping, token_to_req, positions)
        if pooled is None:
            return
        entries, kept = pooled
        positions, slots = positions.index_select(0, kept), k_slot_mapping.index_select(0, kept)
    else:
        # A position below 0 has no rows, so present rows already exclude it.
        wanted = (positions + 1) % compress_ratio == 0
        wanted &= (state_slot_mapping >= 0) & (state_slot_mapping < slots_of_states)
        wanted &= (token_to_req >= 0) & (token_to_req < requests)
        entries, there = _pool_tokens(states, token_to_req, positions)
        slots = torch.where(wanted & there, k_slot_mapping, -1)

    rows = rms_norm(entries, norm_weight, eps)
    first = positions + (1 - compress_ratio)
    rotate_(rows, freqs_cis(first, cos_sin_cache, rows.dtype))
    write_rows(k_cache, slots, hadamard_transform(rows) if hadamard else rows, layout)


def compress_norm(
    state_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    compress_ratio: int,
    overlap: bool,
) -> Tensor:
    """Backend of ``interface.compress_norm`` in torch; see its contract."""
    out = state_cache.new_zeros((len(positions), len(norm_weight)))
    requests, columns = state_block_table.shape
    slots_of_states = state_cache.shape[0] * state_cache.shape[1]
    if not (len(positions) and requests and columns and slots_of_states):
        return out
    window = Window(compress_ratio, overlap, len(norm_weight), state_cache.shape[1])
    states = States(state_cache, state_block_table, window)
    if _host.on_host(positions):
        every = list(range(len(positions)))
        pooled = _closed_on_host(every, states, state_slot_mapping, token_to_req, positions)
        if pooled is not None:
            entries, kept = pooled
            out[kept] = rms_norm(entries, norm_weight, eps)
        return out
    wanted = (positions + 1) % compress_ratio == 0
    wanted &= (state_slot_mapping >= 0) & (state_slot_mapping < slots_of_states)
    wanted &= (token_to_req >= 0) & (token_to_req < requests)
    entries, there = _pool_tokens(states, token_to_req, positions)
    kept = (wanted & there).unsqueeze(1)
    # Absent entries are undefined and must not reach the norm.
    return rms_norm(torch.where(kept, entries, 0), norm_weight, eps).masked_fill_(~kept, 0)


def _closed_on_host(
    closing: list[int],
    states: States,
    state_slots: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Return entries [n, D] of tokens that close a window, and the tokens [n]; None without any."""
    (pages, page_size), ratio = states.cache.shape[:2], states.window.ratio
    longest = max(1, config.HOST_ELEMENTS // (ratio * states.cache.shape[2]))
    tokens: list[int] = []
    ranges: list[WindowRange] = []
    state_slot, token_request = state_slots.tolist(), token_to_req.tolist()
    token_position = positions.tolist()
    for token in closing:
        slot, request, position = state_slot[token], token_request[token], token_position[token]
        known = 0 <= slot < pages * page_size and 0 <= request < len(states.tables)
        if not known or position < 0 or (position + 1) % ratio:
            continue
        number = position // ratio
        last = ranges[-1] if ranges else None
        follows = last is not None and (last.request, last.first + last.count) == (request, number)
        if last is not None and follows and last.count < longest:
            ranges[-1] = WindowRange(request, last.first, last.count + 1)
        else:
            ranges.append(WindowRange(request, number, 1))
        tokens.append(token)
    if not ranges:
        return None

    pooled = [_pool_range(states, windows) for windows in ranges]
    kept = torch.tensor(tokens)
    known_entries = [entries for entries in pooled if entries is not None]
    if len(known_entries) == len(pooled):
        return torch.cat(known_entries) if len(pooled) > 1 else known_entries[0], kept
    entries, there = _pool_tokens(
        states, token_to_req.index_select(0, kept), positions.index_select(0, kept)
    )
    return entries[there], kept[there]


def _pool_range(states: States, windows: WindowRange) -> Tensor | None:
    """Pool windows to entries [count, D] from whole pages; on the host only.

    Returns None if a page id is outside the cache or the table is too short.
    """
    cache, window = states.cache, states.window
    if windows.count == 1:
        table = states.tables[windows.request].numpy()
        found = _window_states(cache.numpy(), table, windows.first, window)
        return None if found is None else _pool(torch.from_numpy(found).unsqueeze(0))
    page_size, ratio = window.page_size, window.ratio
    oldest = windows.first - window.overlap
    start, stop = max(oldest, 0) * ratio, (windows.first + windows.count) * ratio
    column, end = start // page_size, -(-stop // page_size)
    if end > states.tables.shape[1]:
        return None
    pages = states.tables[windows.request, column:end]
    low, high = torch.aminmax(pages)
    if int(low) < 0 or int(high) >= cache.shape[0]:
        return None
    skip = start - column * page_size
    rows = cache.index_select(0, pages).flatten(0, 1)[skip : skip + stop - start]
    # [windows, ratio, value and score, for the next window and its own, D]
    by_window = rows.view(-1, ratio, 2, 1 + window.overlap, window.channels)
    own = by_window[-windows.count :, :, :, -1]
    if not window.overlap:
        return _pool(own)
    older = by_window[:-1, :, :, 0]
    if oldest < 0:
        # No window precedes the first, so its weight is exp(-inf) = 0.
        nothing = torch.zeros_like(own[:1])
        nothing[:, :, 1] = -torch.inf
        older = torch.cat((nothing, by_window[:-1, :, :, 0]))
    return _pool(torch.cat((older, own), dim=1))


def _window_states(
    states: NDArray[Any], table: NDArray[Any], number: int, window: Window
) -> NDArray[Any] | None:
    """Read values and scores [window.states, 2, D] of a request's window of that number, in NumPy.

    Tensor calls are slow in decoding. Scores are -inf where no window precedes the first. The
    result is None if a page id is outside the cache or the table is too short.
    """
    page_size, ratio = window.page_size, window.ratio
    start, stop = max(number - window.overlap, 0) * ratio, (number + 1) * ratio
    column, end = start // page_size, -(-stop // page_size)
    held = table[column:end]
    if end > len(table) or held.min() < 0 or held.max() >= len(states):
        return None
    skip = start - column * page_size
    rows = states[held].reshape(-1, 2, 1 + window.overlap, window.channels)
    rows = rows[skip : skip + stop - start]
    own = rows[-ratio:, :, -1]
    if not window.overlap:
        return own
    older = rows[:ratio, :, 0]
    if not number:
        older = np.zeros_like(own)
        older[:, 1] = -np.inf
    return np.concatenate((older, own))


def _pool_tokens(states: States, token_to_req: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Call ``_pool_rows`` for all tokens, a bounded number of them at a time."""
    on_host = _host.on_host(positions)
    limit = config.HOST_ELEMENTS if on_host else config.DEVICE_ELEMENTS
    step = max(1, limit // (states.window.ratio * states.cache.shape[2]))
    request = token_to_req.clamp(0, states.tables.shape[0] - 1)
    pooled = [
        _pool_rows(states, some, at)
        for some, at in zip(request.split(step), positions.split(step), strict=True)
    ]
    entries, there = zip(*pooled, strict=True)
    return torch.cat(entries), torch.cat(there)


def _pool_rows(states: States, requests: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Pool the windows that close at ``positions`` [n] of ``requests`` [n].

    Positions without a row are left out of the pool.

    Returns:
        Entries [n, D], and a bool mask [n]: True if any row of an entry is present; an entry
        without one is undefined.
    """
    window, tables = states.window, states.tables.index_select(0, requests)
    term = torch.arange(window.states, device=positions.device)
    before = positions.unsqueeze(1) - (window.states - 1) + term
    column = torch.div(before, window.page_size, rounding_mode="floor")
    page = tables.gather(1, column.clamp(0, tables.shape[1] - 1)).long()
    present = (before >= 0) & (column < tables.shape[1]) & (page >= 0)
    present &= page < states.cache.shape[0]
    page = torch.where(present, page, 0)
    # The window before contributes its channels for the next window, the closing one its own.
    halves = states.cache.unflatten(-1, (2, 1 + window.overlap, -1)).transpose(2, 3)
    rows = halves[page, before - column * window.page_size, term // window.ratio]
    absent = ~present.view(*present.shape, 1, 1)
    rows[:, :, :1].masked_fill_(absent, 0)
    rows[:, :, 1:].masked_fill_(absent, -torch.inf)
    return _pool(rows), present.any(dim=1)


def _pool(rows: Tensor) -> Tensor:
    """Average values with the softmax of their scores as weights, channel by channel.

    Args:
        rows: values and scores of each window, [n, window, 2, D].

    Returns:
        Entries of the windows, [n, D].
    """
    kv, score = rows.unbind(2)
    return (torch.softmax(score, dim=1) * kv).sum(dim=1)
