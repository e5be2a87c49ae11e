"""Selection within listed blocks of entries in torch: gather the blocks' keys, then select.

Work follows the number of listed blocks, whatever the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.formats.pages import PageLayout


def present_blocks(
    blocks: Tensor, block_size: int, visible: Tensor, table: Tensor, cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Sort each row's existing blocks first, ascending, and count their entries.

    Absent blocks become 0. Only a row's last existing block may end before its last entry.

    Args:
        blocks: distinct numbers of blocks, [T, n] int32; negative ones are absent.
        block_size: number of entries in a block.
        visible: one past each row's last visible entry, [T].
        table: page ids of each row, [T, pages] int32.
        cache: index cache with page dimensions, [P, B, row].

    Returns:
        Blocks [T, n], and the number of entries of the existing ones, [T].
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
    """Gather the entries of each row's blocks into new pages, and make their block table.

    Absent blocks, which are 0 in ``blocks``, read an entry of the cache that no score uses.
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
    """Return the number of rows whose gathered keys fit in ``scratch_bytes``."""
    held = blocks * block_size * get_layout(layout).entry_bytes
    return max(1, scratch_bytes // max(1, held))


def entries_of(columns: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Translate columns [T, k] of the blocks [T, n] side by side to entries; -1 stays -1."""
    block = blocks.gather(1, columns.clamp(min=0).long() // block_size)
    return torch.where(columns < 0, -1, block * block_size + columns % block_size)
