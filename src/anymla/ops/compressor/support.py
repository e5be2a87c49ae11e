"""Support checks of the compressor's backends."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anymla.ops.device import Support, float32_support


def norm_support(
    state_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Support:
    """Return support of Triton's ``compress_norm``, whose tile holds whole entries."""
    channels = len(norm_weight)
    if channels & (channels - 1):
        return Support(False, f"a power of two channels, got {channels}")
    return float32_support(state_cache, norm_weight, *args, **kwargs)
