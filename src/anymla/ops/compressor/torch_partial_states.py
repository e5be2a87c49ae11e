"""Storing of each token's compressor state in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops import _host
from anymla.ops._torch_pages import writable
from anymla.ops.compressor.config import FEW_HOST_TOKENS


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
    """Backend of ``interface.save_partial_states`` in torch; see its contract."""
    pages, page_size = state_cache.shape[:2]
    count = slot_mapping.shape[0]
    if count <= FEW_HOST_TOKENS and _host.on_host(state_cache):
        _save_on_host(kv, score, ape, positions, state_cache, slot_mapping)
        return
    bias = ape.index_select(0, positions[:count] % compress_ratio)
    rows = torch.cat((kv[:count], score[:count] + bias), dim=1).to(state_cache.dtype)
    slots, rows, nothing = writable(slot_mapping, rows, pages * page_size)
    at = (slots // page_size, slots % page_size)
    if nothing is not None:
        rows = torch.where(nothing, state_cache[at], rows)
    state_cache.index_put_(at, rows)


def _save_on_host(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Save in NumPy, one token at a time, since tensor calls are slow in a decode step."""
    states, bias, width = state_cache.numpy(), ape.numpy(), ape.shape[1]
    values, logits = kv.numpy(), score.numpy()
    pages, page_size = states.shape[:2]
    targets = zip(slot_mapping.tolist(), positions.tolist(), strict=False)
    for token, (slot, position) in enumerate(targets):
        if 0 <= slot < pages * page_size:
            state = states[slot // page_size, slot % page_size]
            state[:width] = values[token]
            state[width:] = logits[token] + bias[position % len(bias)]
