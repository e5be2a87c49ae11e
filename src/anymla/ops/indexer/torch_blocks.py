"""Selection within listed blocks of entries, in torch: their keys are gathered, then selected from.

Work follows the number of blocks, whatever the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.formats.pages import PageLayout


def present_blocks(
    blocks: Tensor, block_size: int, visible: Tensor, table: Tensor, cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Blocks [T, n] that have visible entries, ascending, then others; and how many entries [T].

    Only the last one that is present may end before its last entry. Others are 0.

    Args:
        blocks: [T, n] int32, distinct numbers of blocks; negative ones name none.
        block_size: entries of a block.
        visible: [T], one past the last visible entry of each row.
        table: [T, pages] int32, pages of each row.
        cache: [P, B, row].
    """
    first = blocks.long() * block_size
    there = (blocks >= 0) & (first < visible.unsqueeze(1))
    page = torch.where(there, first // cache.shape[1], 0)
    there &= page < table.shape[1]
    number = table.gather(1, torch.where(there, page, 0))
    there &= (number >= 0) & (number < cache.shape[0])
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(there, blocks, last).sort(1).values
    held = (visible.unsqueeze(1) - first).clamp(max=block_size)
    lengths = torch.where(there, held, 0).sum(1, dtype=torch.int32)
    return torch.where(ordered == last, 0, ordered), lengths


def gathered_keys(
    blocks: Tensor, block_size: int, table: Tensor, cache: Tensor, layout: PageLayout
) -> tuple[Tensor, Tensor]:
    """Pages that hold the entries of each row's blocks one after the other, and their table.

    Blocks that are not there, 0 in ``blocks``, read an entry of the cache, and no score does.
    Arguments are those of ``present_blocks``.
    """
    entries = cache.shape[1]
    share = entries // block_size
    pages = -(-blocks.shape[1] // share)
    keys = layout.allocate(len(blocks) * pages, entries, cache.device)
    page = table.gather(1, (blocks // share).long()).clamp(0, len(cache) - 1).long()
    within = (blocks % share).long()
    number = torch.arange(len(blocks) * pages, dtype=torch.int32, device=cache.device)
    number = number.view(len(blocks), pages)
    place = torch.arange(blocks.shape[1], device=cache.device)
    to_page, to_within = number[:, place // share].long(), place % share
    for source, goal in zip(layout.planes(cache), layout.planes(keys), strict=True):
        if source is not None and goal is not None:
            there = goal.unflatten(1, (share, block_size))
            there[to_page, to_within] = source.unflatten(1, (share, block_size))[page, within]
    return keys, number


def rows_at_once(blocks: int, block_size: int, layout: str, scratch_bytes: int) -> int:
    """Rows whose keys fit ``scratch_bytes``."""
    held = blocks * block_size * get_layout(layout).entry_bytes
    return max(1, scratch_bytes // max(1, held))


def entries_of(columns: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Entries at columns [T, k] of the listed blocks [T, n] side by side; -1 stays."""
    block = blocks.gather(1, columns.clamp(min=0).long() // block_size)
    return torch.where(columns < 0, -1, block * block_size + columns % block_size)
