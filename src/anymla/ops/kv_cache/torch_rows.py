"""Cache rows in torch: stored by slot, read by slot, and read as the ends of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.formats.pages import pages_of
from anymla.ops import _host
from anymla.ops._torch_pages import read_rows, slots_of, write_rows


def quantize_and_insert_k_cache(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, layout: str = MAIN_FP8
) -> None:
    """Backend of ``interface.quantize_and_insert_k_cache`` in torch; see its contract."""
    write_rows(k_cache, slot_mapping, k[: slot_mapping.shape[0]], layout)


def dequant_gather_slots(
    out: Tensor, k_cache: Tensor, indices: Tensor, *, layout: str = MAIN_FP8
) -> None:
    """Backend of ``interface.dequant_gather_slots`` in torch; see its contract."""
    read_rows(k_cache, indices, layout, out)


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
    """Backend of ``interface.dequantize_and_gather_k_cache`` in torch; see its contract."""
    entries = pages_of(k_cache).shape[1]
    lengths = seq_lens if gather_lens is None else gather_lens
    limit = max(0, out.shape[1] - offset)
    if not limit or not out.shape[0]:
        return
    if _host.on_host(out):
        for request, (stop, length) in enumerate(
            zip(seq_lens.tolist(), lengths.tolist(), strict=True)
        ):
            if length > 0:
                count = min(length, limit)
                positions = torch.arange(stop - length, stop - length + count)
                slots = slots_of(positions, torch.tensor(request), block_table, entries)
                read_rows(k_cache, slots, layout, out[request, offset : offset + count])
        return
    row = torch.arange(limit, device=out.device)
    positions = (seq_lens.long() - lengths.long()).unsqueeze(1) + row
    requests = torch.arange(len(block_table), device=out.device).unsqueeze(1)
    slots = slots_of(positions, requests, block_table, entries)
    rows = torch.empty((slots.numel(), out.shape[2]), dtype=out.dtype, device=out.device)
    read_rows(k_cache, slots.flatten(), layout, rows)
    target = out[:, offset:]
    wanted = (row < lengths.unsqueeze(1)).unsqueeze(2)
    target.copy_(torch.where(wanted, rows.view(target.shape), target))
