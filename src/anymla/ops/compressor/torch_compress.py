"""Turn closed windows into cache entries: pool, norm, rotate and store all of a step at once."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.hadamard import hadamard_transform
from anymla.ops import _host
from anymla.ops._pages import write_rows
from anymla.ops._torch_norm_rope import freqs_cis, rms_norm, rotate_
from anymla.ops.compressor.torch_pool import Run, pool_rows, pool_run

# State elements gathered at a time: 4 MiB of float32 on the host, 256 MiB elsewhere.
_HOST_ELEMENTS = 1 << 20
_DEVICE_ELEMENTS = 1 << 26


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
    """See ``interface.compress_norm_rope_insert``."""
    requests, columns = state_block_table.shape
    states = state_cache.shape[0] * state_cache.shape[1]
    if not (positions.shape[0] and requests and columns and states):
        return
    if _host.on_host(positions):
        # Most decode steps close no window: leave before anything else is looked at.
        targets = k_slot_mapping.tolist()
        closing = [token for token, slot in enumerate(targets) if slot >= 0]
        if not closing:
            return
        pooled = _closed_on_host(
            closing,
            state_cache,
            state_block_table,
            state_slot_mapping,
            token_to_req,
            positions,
            compress_ratio,
            overlap,
        )
        if pooled is None:
            return
        entries, kept = pooled
        positions, slots = positions.index_select(0, kept), k_slot_mapping.index_select(0, kept)
    else:
        # A position below 0 has no row, so it is not among those that are there.
        wanted = (positions + 1) % compress_ratio == 0
        wanted &= (state_slot_mapping >= 0) & (state_slot_mapping < states)
        wanted &= (token_to_req >= 0) & (token_to_req < requests)
        entries, there = _in_blocks(
            state_cache, state_block_table, token_to_req, positions, compress_ratio, overlap
        )
        slots = torch.where(wanted & there, k_slot_mapping, -1)

    rows = rms_norm(entries, norm_weight, eps)
    first = positions + (1 - compress_ratio)
    rotate_(rows, freqs_cis(first, cos_sin_cache, rows.dtype))
    write_rows(k_cache, slots, hadamard_transform(rows) if hadamard else rows, layout)


def _closed_on_host(
    closing: list[int],
    state_cache: Tensor,
    tables: Tensor,
    state_slots: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[Tensor, Tensor] | None:
    """Entries [n, D] of the tokens that close a window, and which tokens [n]; None if none does."""
    states = state_cache.shape[0] * state_cache.shape[1]
    parts = 2 if overlap else 1
    longest = max(1, _HOST_ELEMENTS // (ratio * state_cache.shape[2]))
    tokens: list[int] = []
    runs: list[Run] = []
    state_slot, token_request = state_slots.tolist(), token_to_req.tolist()
    token_position = positions.tolist()
    for token in closing:
        slot, request, position = state_slot[token], token_request[token], token_position[token]
        known = 0 <= slot < states and 0 <= request < len(tables)
        if not known or position < 0 or (position + 1) % ratio:
            continue
        window = position // ratio
        last = runs[-1] if runs else None
        if (
            last
            and (last.request, last.first + last.count) == (request, window)
            and last.count < longest
        ):
            runs[-1] = Run(request, last.first, last.count + 1)
        else:
            runs.append(Run(request, window, 1))
        tokens.append(token)
    if not runs:
        return None

    pieces = [pool_run(state_cache, tables, run, ratio, parts) for run in runs]
    kept = torch.tensor(tokens)
    whole = [piece for piece in pieces if piece is not None]
    if len(whole) == len(pieces):
        return torch.cat(whole) if len(whole) > 1 else whole[0], kept
    entries, there = _in_blocks(
        state_cache,
        tables,
        token_to_req.index_select(0, kept),
        positions.index_select(0, kept),
        ratio,
        overlap,
    )
    return entries[there], kept[there]


def _in_blocks(
    state_cache: Tensor,
    tables: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[Tensor, Tensor]:
    """``pool_rows`` of every token, a bounded number of them at a time."""
    parts = 2 if overlap else 1
    limit = _HOST_ELEMENTS if _host.on_host(positions) else _DEVICE_ELEMENTS
    step = max(1, limit // (ratio * state_cache.shape[2]))
    request = token_to_req.clamp(0, tables.shape[0] - 1)
    pieces = [
        pool_rows(state_cache, tables.index_select(0, some), at, ratio, parts)
        for some, at in zip(request.split(step), positions.split(step), strict=True)
    ]
    entries, there = zip(*pieces, strict=True)
    return torch.cat(entries), torch.cat(there)
