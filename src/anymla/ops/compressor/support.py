"""Calls that numba's compressor takes."""

from __future__ import annotations

from torch import Tensor

from anymla.ops._few_tokens import few_tokens_support
from anymla.ops.device import Support


def numba_save_support(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
) -> Support:
    """``supports`` of ``save_partial_states``."""
    return few_tokens_support(len(slot_mapping), (), (kv, score, ape, state_cache))
