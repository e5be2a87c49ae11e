"""Selection on two levels in torch: choose blocks by their scores, mask all other scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from anymla.ops.indexer.torch_select import topk_per_row


def select_candidate_blocks(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int
) -> Tensor:
    """Backend of ``interface.select_candidate_blocks`` in torch; see its contract."""
    rows, width = logits.shape
    blocks = -(-width // block_size)
    if not blocks or not rows:
        return lengths.new_full((rows, count), -1)
    seen = lengths.long().clamp(min=0, max=width).unsqueeze(1)
    column = torch.arange(width, device=logits.device)
    scores = logits.masked_fill(column >= seen, -torch.inf)
    best = functional.pad(scores, (0, -width % block_size), value=-torch.inf)
    best = best.unflatten(1, (blocks, block_size)).amax(2)
    # The newest block is always kept, since its few entries may not score high. A row without
    # entries has no newest block, and its mark must not be taken for one.
    block = torch.arange(blocks, device=logits.device)
    best.masked_fill_(block == (seen - 1).div(block_size, rounding_mode="floor"), torch.inf)
    held = (seen + block_size - 1).div(block_size, rounding_mode="floor")
    starts = torch.zeros_like(lengths)
    chosen = topk_per_row(best, starts, held.squeeze(1).int(), count).long()
    dropped = (chosen < 0) | (best.gather(1, chosen.clamp(min=0)) == -torch.inf)
    ordered = chosen.masked_fill(dropped, blocks).sort(1).values
    return ordered.masked_fill_(ordered == blocks, -1).int()


def mask_candidates(logits: Tensor, blocks: Tensor, *, block_size: int) -> None:
    """Backend of ``interface.mask_candidates`` in torch; see its contract."""
    rows, width = logits.shape
    count = -(-width // block_size)
    # Numbers that name no block go to a spare last column.
    kept = torch.zeros(rows, count + 1, dtype=torch.bool, device=logits.device)
    inside = (blocks >= 0) & (blocks < count)
    kept.scatter_(1, torch.where(inside, blocks, count).long(), True)
    entries = kept[:, :count].repeat_interleave(block_size, 1)[:, :width]
    logits.masked_fill_(~entries, -torch.inf)
