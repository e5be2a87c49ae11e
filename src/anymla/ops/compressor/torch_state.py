"""Store the compressor's projections of each token in the state cache."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.kv_cache.torch_pages import writable


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
    bias = ape.index_select(0, positions[:count] % compress_ratio)
    rows = torch.cat((kv[:count], score[:count] + bias), dim=1).to(state_cache.dtype)
    slots, rows, nothing = writable(slot_mapping, rows, pages * entries)
    at = (slots // entries, slots % entries)
    if nothing is not None:
        rows = torch.where(nothing, state_cache[at], rows)
    state_cache.index_put_(at, rows)
