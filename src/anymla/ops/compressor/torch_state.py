"""Store the compressor's projections of each token in the state cache."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops import _host
from anymla.ops._pages import writable

# Up to so many tokens are stored one by one.
_FEW_TOKENS = 4


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
    """See ``interface.save_partial_states``."""
    pages, entries = state_cache.shape[:2]
    count = slot_mapping.shape[0]
    if count <= _FEW_TOKENS and _host.on_host(state_cache):
        _save_on_host(kv, score, ape, positions, state_cache, slot_mapping)
        return
    bias = ape.index_select(0, positions[:count] % compress_ratio)
    rows = torch.cat((kv[:count], score[:count] + bias), dim=1).to(state_cache.dtype)
    slots, rows, nothing = writable(slot_mapping, rows, pages * entries)
    at = (slots // entries, slots % entries)
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
    states, bias, width = state_cache.numpy(), ape.numpy(), ape.shape[1]
    values, logits = kv.numpy(), score.numpy()
    pages, entries = states.shape[:2]
    where = zip(slot_mapping.tolist(), positions.tolist(), strict=False)
    for token, (slot, position) in enumerate(where):
        if 0 <= slot < pages * entries:
            state = states[slot // entries, slot % entries]
            state[:width] = values[token]
            state[width:] = logits[token] + bias[position % len(bias)]
