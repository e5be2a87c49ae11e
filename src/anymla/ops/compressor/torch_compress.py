"""Pool closed windows into entries, norm, rotate and store them, all entries at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anymla.formats.hadamard import hadamard_transform
from anymla.ops import _host
from anymla.ops.kv_cache.torch_pages import write_rows
from anymla.ops.norm_rope.torch_rope import rotate_, turns

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
    host = _host.on_host(positions)
    requests = state_block_table.shape[0]
    states = state_cache.shape[0] * state_cache.shape[1]
    if not (positions.shape[0] and requests and states and state_block_table.shape[1]):
        return
    if host:
        # Most decode steps close no window: leave before anything else is looked at.
        closing = (k_slot_mapping >= 0).nonzero().squeeze(1)
        if not closing.shape[0]:
            return
        if closing.shape[0] < positions.shape[0]:
            state_slot_mapping = state_slot_mapping.index_select(0, closing)
            token_to_req = token_to_req.index_select(0, closing)
            positions = positions.index_select(0, closing)
            k_slot_mapping = k_slot_mapping.index_select(0, closing)
    first = positions + (1 - compress_ratio)
    wanted = (positions >= 0) & (first % compress_ratio == 0)
    wanted &= (state_slot_mapping >= 0) & (state_slot_mapping < states)
    wanted &= (token_to_req >= 0) & (token_to_req < requests)
    if host and not bool(wanted.all()):
        kept = wanted.nonzero().squeeze(1)
        if not kept.shape[0]:
            return
        token_to_req, positions = token_to_req[kept], positions[kept]
        k_slot_mapping, first = k_slot_mapping[kept], first[kept]

    width = norm_weight.shape[0]
    parts = 2 if overlap else 1
    window = parts * compress_ratio
    known = token_to_req.clamp(0, requests - 1)
    entries = torch.empty(
        (positions.shape[0], width), dtype=state_cache.dtype, device=positions.device
    )
    pooled = torch.empty_like(positions, dtype=torch.bool)
    step = max(1, (_HOST_ELEMENTS if host else _DEVICE_ELEMENTS) // (2 * window * width))
    for start in range(0, positions.shape[0], step):
        part = slice(start, start + step)
        tables = state_block_table.index_select(0, known[part])
        entries[part], pooled[part] = _pool(
            state_cache.unflatten(-1, (2, parts, width)), tables, positions[part], compress_ratio
        )
    slots = torch.where(pooled if host else pooled & wanted, k_slot_mapping, -1)

    wide = entries.dtype
    rows = F.rms_norm(entries, (width,), norm_weight.to(wide), eps)
    rotate_(rows, turns(first, cos_sin_cache, wide))
    write_rows(k_cache, slots, hadamard_transform(rows) if hadamard else rows, layout)


def _pool(state: Tensor, tables: Tensor, positions: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Pool the windows that close at ``positions``.

    Args:
        state: [P, S, 2, parts, D], kv and score of each token, each in ``parts`` parts.
        tables: [n, columns] integer page ids, columns >= 1.
        positions: [n] int64.
        ratio: tokens a window.

    Returns:
        [n, D] entries, and bool [n]: whether any of an entry's rows is there (if not, the entry is
        undefined).
    """
    pages, entries, _, parts, _ = state.shape
    place = torch.arange(parts * ratio, device=positions.device)
    before = positions.unsqueeze(1) - (parts * ratio - 1) + place
    column = torch.div(before, entries, rounding_mode="floor")
    page = tables.gather(1, column.clamp(0, tables.shape[1] - 1)).long()
    present = (before >= 0) & (column < tables.shape[1]) & (page >= 0) & (page < pages)
    complete = _host.on_host(state) and bool(present.all())
    if not complete:
        page = torch.where(present, page, 0)
    # The older window gives its first part, the closing one its last.
    part = place // ratio
    rows = state.transpose(2, 3)[page, before - column * entries, part]
    kv, score = rows.unbind(2)
    if not complete:
        absent = ~present.unsqueeze(2)
        kv = kv.masked_fill(absent, 0)
        score = score.masked_fill(absent, -torch.inf)
    pooled = (torch.softmax(score, dim=1) * kv).sum(dim=1)
    return pooled, present.any(dim=1)
