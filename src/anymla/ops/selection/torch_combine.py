"""Rows of the gathered prefill workspace: selected entries first, then the window."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.selection.reference import combined_width
from anymla.ops.selection.torch_slots import token_to_request


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
    """See ``interface.combine_topk_swa_indices``."""
    tokens, device = len(topk_indices), topk_indices.device
    width = combined_width(topk, window_size)
    if len(seq_lens) == 0:
        empty = torch.full((tokens, width), -1, dtype=torch.int32, device=device)
        return empty, torch.zeros(tokens, dtype=torch.int32, device=device)
    starts = query_start_loc - query_start_loc[0]
    request = token_to_request(starts, tokens).long()
    in_batch = request >= 0
    row = request.clamp(min=0)

    # Per token, as columns: position, first gathered position, entries, first window position.
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
