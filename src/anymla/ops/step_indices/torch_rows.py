"""Index rows in torch: slots that tokens write, and cache entries that each token reads."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops._torch_pages import slots_of
from anymla.ops.step_indices.reference import combined_width


def slot_mapping(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, *, page_size: int, ratio: int = 1
) -> Tensor:
    """Backend of ``interface.slot_mapping`` in torch; see its contract."""
    entries = positions
    if ratio > 1:
        closing = (positions + 1) % ratio == 0
        entries = torch.where(closing, torch.div(positions, ratio, rounding_mode="floor"), -1)
    return slots_of(entries, token_to_req, block_table, page_size)


def token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Backend of ``interface.token_to_request`` in torch; see its contract."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    request = torch.searchsorted(query_start_loc, tokens, right=True, out_int32=True) - 1
    # Tokens past the last request; for tokens before the first, the search already gave -1.
    return request.masked_fill_(request == len(query_start_loc) - 1, -1)


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid_token: Tensor,
) -> tuple[Tensor, Tensor]:
    """Backend of ``interface.compute_global_topk_indices_and_lens`` in torch; see its contract."""
    tokens = len(topk_indices)
    requests = _valid_requests(token_to_req[:tokens], block_table, is_valid_token[:tokens])
    in_use = (topk_indices >= 0) & (requests >= 0)
    slots = slots_of(topk_indices.long(), requests, block_table, block_size)
    return _as_int32(slots), in_use.sum(1, dtype=torch.int32)


def compressed_rows(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    *,
    ratio: int,
    block_size: int,
    width: int,
    is_valid_token: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backend of ``interface.compressed_rows`` in torch; see its contract."""
    requests = _valid_requests(token_to_req, block_table, is_valid_token)
    visible = torch.div(positions + 1, ratio, rounding_mode="floor").clamp(0, width)
    visible = torch.where(requests[:, 0] >= 0, visible, 0)
    entries = torch.arange(width, device=positions.device)
    local = torch.where(entries < visible[:, None], entries, -1)
    slots = slots_of(local, requests, block_table, block_size)
    return _as_int32(slots), local.int(), visible.int()


def window_rows(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    window: int,
    is_valid_token: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Backend of ``interface.window_rows`` in torch; see its contract."""
    requests = _valid_requests(token_to_req, block_table, is_valid_token)
    last = torch.where(requests[:, 0] >= 0, positions, -1)[:, None]
    first = (last - (window - 1)).clamp(min=0)
    position = first + torch.arange(window, device=positions.device)
    position = torch.where(position <= last, position, -1)
    slots = slots_of(position, requests, block_table, block_size)
    return _as_int32(slots), (last[:, 0] + 1).clamp(0, window).int()


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[Tensor, Tensor]:
    """Backend of ``interface.combine_topk_swa_indices`` in torch; see its contract."""
    tokens, device = len(topk_indices), topk_indices.device
    width = combined_width(topk, window_size)
    if len(seq_lens) == 0:
        empty = torch.full((tokens, width), -1, dtype=torch.int32, device=device)
        return empty, torch.zeros(tokens, dtype=torch.int32, device=device)
    starts = query_start_loc - query_start_loc[0]
    request = token_to_request(starts, tokens).long()
    in_batch = request >= 0
    row = request.clamp(min=0)

    # Columns by token: position, first gathered position, entries, first window position.
    seq_len = seq_lens.long()[row]
    position = seq_len - starts.long()[row + 1] + torch.arange(tokens, device=device)
    first_gathered = seq_len - gather_lens.long()[row]
    ratio = max(compress_ratio, 1)
    entries = torch.div(position + 1, ratio, rounding_mode="floor").clamp(0, topk)
    window_start = (position - (window_size - 1)).clamp(min=0)
    length = torch.where(in_batch, entries + (position + 1 - window_start).clamp(min=0), 0)

    column = torch.arange(width, device=device)
    offset = column + (N + window_start - first_gathered - entries)[:, None]
    offset = torch.where(offset >= N, offset, -1)
    if topk:
        chosen = topk_indices[:, :topk].long()
        selected = torch.nn.functional.pad(chosen, (0, width - topk), value=-1)
        selected = torch.where(selected < N, selected, -1)
        offset = torch.where(column < entries[:, None], selected, offset)
    exists = (column < length[:, None]) & (offset >= 0) & (offset < M)
    indices = torch.where(exists, row[:, None] * M + offset, -1)
    return indices.int(), length.int()


def _as_int32(slots: Tensor) -> Tensor:
    """Narrow slots to int32; those that would wrap around become -1."""
    return torch.where(slots < 2**31, slots, -1).int()


def _valid_requests(token_to_req: Tensor, block_table: Tensor, is_valid: Tensor | None) -> Tensor:
    """Return each token's row of the block table, [T, 1] int32, -1 for padding."""
    valid = (token_to_req >= 0) & (token_to_req < len(block_table))
    if is_valid is not None:
        valid &= is_valid
    return torch.where(valid, token_to_req, -1)[:, None]
