"""Reference of reading cache rows, one at a time through the codecs of ``formats``."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.pages import PageLayout, pages_of


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    offset: int = 0,
    layout: str = MAIN_FP8,
) -> None:
    """Reference of ``interface.dequantize_and_gather_k_cache``; see its contract."""
    row_layout, cache = get_layout(layout), pages_of(k_cache)
    entries = cache.shape[1]
    lengths = seq_lens if gather_lens is None else gather_lens
    for request, (stop, length) in enumerate(zip(seq_lens.tolist(), lengths.tolist(), strict=True)):
        for row in range(min(length, out.shape[1] - offset)):
            position = stop - length + row
            slot = -1
            if 0 <= position < block_table.shape[1] * entries:
                page = int(block_table[request, position // entries])
                slot = page * entries + position % entries if page >= 0 else -1
            out[request, offset + row] = _row(row_layout, cache, slot, out.dtype)


def dequant_gather_slots(
    out: Tensor, k_cache: Tensor, indices: Tensor, *, layout: str = MAIN_FP8
) -> None:
    """Reference of ``interface.dequant_gather_slots``; see its contract."""
    row_layout, cache = get_layout(layout), pages_of(k_cache)
    for row, slot in enumerate(indices.tolist()):
        out[row] = _row(row_layout, cache, slot, out.dtype)


def _row(layout: PageLayout, cache: Tensor, slot: int, dtype: torch.dtype) -> Tensor:
    """Decode the row [channels] of one slot; zeros for a slot outside the cache."""
    pages, entries = cache.shape[:2]
    if not 0 <= slot < pages * entries:
        return torch.zeros(layout.channels, dtype=dtype, device=cache.device)
    page, offset = divmod(slot, entries)
    data_plane, scale_plane = layout.planes(cache)
    scales = None if scale_plane is None else scale_plane[page, offset].unsqueeze(0)
    return layout.decode(data_plane[page, offset].unsqueeze(0), scales, dtype)[0]
