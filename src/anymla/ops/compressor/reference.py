"""Reference of the compressor in plain torch, one token and one entry at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.hadamard import hadamard_transform
from anymla.formats.pages import pages_of
from anymla.ops._reference import quantize_and_insert_k_cache, rms_norm, rope


def save_partial_states(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
) -> None:
    """Reference of ``interface.save_partial_states``; see its contract."""
    pages, page_size = state_cache.shape[:2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < pages * page_size:
            biased = score[token] + ape[int(positions[token]) % compress_ratio]
            state_cache[slot // page_size, slot % page_size] = torch.cat((kv[token], biased))


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
    """Reference of ``interface.compress_norm_rope_insert``; see its contract."""
    states = state_cache.shape[0] * state_cache.shape[1]
    cache = pages_of(k_cache)
    for token, position in enumerate(positions.tolist()):
        closes = position >= 0 and (position + 1) % compress_ratio == 0
        stored = 0 <= int(state_slot_mapping[token]) < states
        wanted = 0 <= int(k_slot_mapping[token]) < cache.shape[0] * cache.shape[1]
        known = 0 <= int(token_to_req[token]) < len(state_block_table)
        if not (closes and stored and wanted and known):
            continue
        table = state_block_table[int(token_to_req[token])]
        entry = _pool(state_cache, table, position, compress_ratio, overlap)
        if entry is None:
            continue
        row = rms_norm(entry, norm_weight, eps).view(1, 1, -1)
        row = rope(row, positions.new_tensor([position + 1 - compress_ratio]), cos_sin_cache)[0]
        if hadamard:
            row = hadamard_transform(row)
        slot = k_slot_mapping[token : token + 1]
        quantize_and_insert_k_cache(row, k_cache, slot, layout=layout)


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
    """Reference of ``interface.compress_norm``; see its contract."""
    states = state_cache.shape[0] * state_cache.shape[1]
    out = state_cache.new_zeros((len(positions), len(norm_weight)))
    for token, position in enumerate(positions.tolist()):
        closes = position >= 0 and (position + 1) % compress_ratio == 0
        stored = 0 <= int(state_slot_mapping[token]) < states
        known = 0 <= int(token_to_req[token]) < len(state_block_table)
        if closes and stored and known:
            table = state_block_table[int(token_to_req[token])]
            entry = _pool(state_cache, table, position, compress_ratio, overlap)
            if entry is not None:
                out[token] = rms_norm(entry, norm_weight, eps)
    return out


def _pool(
    state_cache: Tensor, table: Tensor, position: int, ratio: int, overlap: bool
) -> Tensor | None:
    """Pool the window that closes at ``position`` to [D]; None if no position of it is present."""
    pages, page_size = state_cache.shape[:2]
    halves = 2 if overlap else 1
    rows = []
    for age in reversed(range(halves * ratio)):
        before, column = position - age, (position - age) // page_size
        page = int(table[column]) if 0 <= column < len(table) else -1
        if before < 0 or not 0 <= page < pages:
            continue
        # [value or score, for the next window and its own, D]; the window before gives the former.
        state = state_cache[page, before % page_size].view(2, halves, -1)
        rows.append(state[:, 0 if age >= ratio or not overlap else 1])
    if not rows:
        return None
    kv, score = torch.stack(rows, dim=1)
    return (torch.softmax(score, dim=0) * kv).sum(dim=0)
