"""Reference of the index rows in plain torch, one token at a time."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# vLLM pads combined rows to FlashMLA's tile; so do we, so that rows are interchangeable.
_ROW_ALIGNMENT = 128


def combined_width(topk: int, window_size: int) -> int:
    """Return the number of columns of ``combine_topk_swa_indices``' result."""
    return -(-(topk + window_size) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def slot_mapping(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, *, page_size: int, ratio: int = 1
) -> Tensor:
    """Reference of ``interface.slot_mapping``; see its contract."""
    slots = [
        _slot(block_table, request, p // ratio, page_size) if (p + 1) % ratio == 0 else -1
        for p, request in zip(positions.tolist(), token_to_req.tolist(), strict=True)
    ]
    return torch.tensor(slots, dtype=torch.int64, device=positions.device)


def token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Reference of ``interface.token_to_request``; see its contract."""
    starts = query_start_loc.tolist()
    rows = [-1] * num_tokens
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        for token in range(max(start, 0), min(end, num_tokens)):
            rows[token] = request
    return torch.tensor(rows, dtype=torch.int32, device=query_start_loc.device)


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid_token: Tensor,
) -> tuple[Tensor, Tensor]:
    """Reference of ``interface.compute_global_topk_indices_and_lens``; see its contract."""
    slots = torch.full_like(topk_indices, -1)
    lens = torch.zeros(len(slots), dtype=torch.int32, device=slots.device)
    for token, entries in enumerate(topk_indices.tolist()):
        request = int(token_to_req[token])
        if not is_valid_token[token] or not 0 <= request < len(block_table):
            continue
        for column, entry in enumerate(entries):
            slots[token, column] = _slot32(block_table, request, entry, block_size)
        lens[token] = sum(entry >= 0 for entry in entries)
    return slots, lens


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
    """Reference of ``interface.combine_topk_swa_indices``; see its contract."""
    tokens = len(topk_indices)
    shape = (tokens, combined_width(topk, window_size))
    indices = torch.full(shape, -1, dtype=torch.int32, device=topk_indices.device)
    lens = torch.zeros(tokens, dtype=torch.int32, device=topk_indices.device)
    starts = (query_start_loc - query_start_loc[0]).tolist()
    lengths = zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)
    for b, (seq_len, gather_len) in enumerate(lengths):
        first_gathered = seq_len - gather_len
        for token in range(starts[b], min(starts[b + 1], tokens)):
            p = seq_len - starts[b + 1] + token
            visible = max(p + 1, 0) // max(compress_ratio, 1)
            entries = topk_indices[token, : min(visible, topk)].tolist()
            window = range(max(p - window_size + 1, 0), p + 1)
            row = [M * b + w if 0 <= w < N else -1 for w in entries]
            offsets = [N + position - first_gathered for position in window]
            row += [M * b + offset if N <= offset < M else -1 for offset in offsets]
            indices[token, : len(row)] = torch.tensor(row, dtype=torch.int32)
            lens[token] = len(row)
    return indices, lens


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
    """Reference of ``interface.compressed_rows``; see its contract."""
    tokens = len(positions)
    slots = torch.full((tokens, width), -1, dtype=torch.int32, device=positions.device)
    local = torch.full_like(slots, -1)
    lens = torch.zeros(tokens, dtype=torch.int32, device=positions.device)
    for token, request in enumerate(_requests(token_to_req, block_table, is_valid_token)):
        if request < 0:
            continue
        visible = min(max(int(positions[token]) + 1, 0) // ratio, width)
        for w in range(visible):
            slots[token, w] = _slot32(block_table, request, w, block_size)
            local[token, w] = w
        lens[token] = visible
    return slots, local, lens


def window_rows(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    window: int,
    is_valid_token: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of ``interface.window_rows``; see its contract."""
    tokens = len(positions)
    slots = torch.full((tokens, window), -1, dtype=torch.int32, device=positions.device)
    lens = torch.zeros(tokens, dtype=torch.int32, device=positions.device)
    for token, request in enumerate(_requests(token_to_req, block_table, is_valid_token)):
        if request < 0:
            continue
        p = int(positions[token])
        for column, position in enumerate(range(max(p - window + 1, 0), p + 1)):
            slots[token, column] = _slot32(block_table, request, position, block_size)
        lens[token] = min(max(p + 1, 0), window)
    return slots, lens


def _slot(block_table: Tensor, request: int, entry: int, page_size: int) -> int:
    requests, pages = block_table.shape
    if not 0 <= request < requests or not 0 <= entry < pages * page_size:
        return -1
    page = int(block_table[request, entry // page_size])
    return page * page_size + entry % page_size if page >= 0 else -1


def _slot32(block_table: Tensor, request: int, entry: int, page_size: int) -> int:
    slot = _slot(block_table, request, entry, page_size)
    return slot if slot < 2**31 else -1


def _requests(token_to_req: Tensor, block_table: Tensor, is_valid: Tensor | None) -> list[int]:
    """List the block-table row of each token, -1 for padding."""
    requests = token_to_req.tolist()
    valid = [True] * len(requests) if is_valid is None else is_valid.tolist()
    in_batch = range(len(block_table))
    return [r if ok and r in in_batch else -1 for r, ok in zip(requests, valid, strict=True)]
