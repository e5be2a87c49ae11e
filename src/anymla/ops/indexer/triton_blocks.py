"""Selection within listed blocks: find the blocks that exist, translate chosen columns to entries.

The entries of a row's existing blocks, side by side, are columns 0, 1, ..; scores and top-k work on
columns alone.

list     finds existing blocks, their places in the cache, and the number of entries; grid (rows,)
entries  finds entries and slots of the chosen columns; grid (rows,)
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.pages import pages_of
from anymla.ops._sizes import next_power_of_2
from anymla.ops.device import Target
from anymla.ops.indexer.config import candidates_warps
from anymla.ops.indexer.inputs import ScoreInputs, SelectOutputs, unit_stride
from anymla.ops.indexer.triton_scores import row_ranges
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

# Number of listed blocks that a CTA processes at once.
_TILE = 2048


@triton.jit
def store_slots(
    out,
    slots,
    table,
    table_stride,
    table_pages,
    slot_page,
    count,
    k,
    PADDED_K: tl.constexpr,
):
    """Store the slots of a row's ``count`` chosen entries, then -1.

    ``out`` and ``slots`` point to the row's results, ``table`` to its request's pages.
    """
    place = tl.arange(0, PADDED_K)
    there = place < count
    entry = tl.load(out + place, mask=there, other=0)
    column = entry // slot_page
    page = tl.load(
        table + column.to(tl.int64) * table_stride, mask=there & (column < table_pages), other=-1
    )
    slot = page.to(tl.int64) * slot_page + entry % slot_page
    slot = tl.where((page >= 0) & (slot < 0x80000000), slot, -1)
    tl.store(slots + place, slot.to(tl.int32), mask=place < k)


@triton.jit(
    do_not_specialize=[
        "listed", "first_row", "per_request", "num_requests", "pages", "covered", "table_row_stride"
    ]
)  # fmt: skip
def list_blocks_kernel(
    blocks,
    blocks_stride,
    listed,
    lengths,
    requests,
    table,
    table_row_stride,
    table_column_stride,
    numbers,
    places,
    counts,
    first_row,
    per_request,
    num_requests,
    pages,
    covered,
    ENTRIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """List a row's blocks that have visible entries on a page of the cache, in the given order.

    ``blocks`` has ``listed`` blocks a row. Of each row, ``numbers`` gets those that exist,
    ``places`` their places in the cache, counted in blocks, both [rows, listed], and ``counts`` the
    number of their entries. TILE blocks are processed at once. Pages have ENTRIES entries; all
    other arguments are those of ``triton_scores.scores_kernel``.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    SHARE: tl.constexpr = ENTRIES // BLOCK_SIZE
    row = tl.program_id(0).to(tl.int64)
    request, _, end = row_ranges(
        lengths, None, requests, row, True, first_row, per_request, num_requests, covered
    )
    table += tl.maximum(request, 0).to(tl.int64) * table_row_stride
    blocks += row * blocks_stride
    numbers += row * listed
    places += row * listed
    found, seen = 0, 0
    for at in range(0, listed, TILE):
        column = at + tl.arange(0, TILE)
        block = tl.load(blocks + column, mask=column < listed, other=-1)
        # Compare numbers of blocks, because a block's first entry may be beyond 2^31.
        there = (block >= 0) & (block < tl.cdiv(end, BLOCK_SIZE))
        block = tl.where(there, block, 0)
        page = tl.load(
            table + (block // SHARE).to(tl.int64) * table_column_stride, mask=there, other=-1
        )
        there = there & (page >= 0) & (page < pages)
        goal = found + tl.cumsum(there.to(tl.int32), 0) - 1
        tl.store(numbers + goal, block, mask=there)
        tl.store(places + goal, page * SHARE + block % SHARE, mask=there)
        held = tl.minimum(end - block * BLOCK_SIZE, BLOCK_SIZE)
        seen += tl.sum(tl.where(there, held, 0), 0)
        found += tl.sum(there.to(tl.int32), 0)
    tl.store(counts + row, seen)


@triton.jit(
    do_not_specialize=[
        "listed", "first_row", "per_request", "num_requests", "covered", "k", "table_pages",
        "slot_page", "table_row_stride",
    ]
)  # fmt: skip
def entries_kernel(
    out,
    out_stride,
    numbers,
    listed,
    counts,
    lengths,
    requests,
    slots,
    slots_stride,
    table,
    table_row_stride,
    table_column_stride,
    table_pages,
    slot_page,
    first_row,
    per_request,
    num_requests,
    covered,
    k,
    BLOCK_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replace a row's chosen columns by the entries that they stand for, and store their slots.

    ``numbers`` and ``counts`` come from ``list_blocks_kernel``; arguments from ``slots`` on are
    those of the top-k kernels.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    out += row * out_stride
    count = tl.minimum(tl.load(counts + row), k)
    place = tl.arange(0, PADDED_K)
    there = place < count
    column = tl.load(out + place, mask=there, other=0)
    block = tl.load(numbers + row * listed + column // BLOCK_SIZE, mask=there, other=0)
    tl.store(out + place, block * BLOCK_SIZE + column % BLOCK_SIZE, mask=there)
    if slots is not None:
        request, _, _end = row_ranges(
            lengths, None, requests, row, True, first_row, per_request, num_requests, covered
        )
        slots += row * slots_stride
        table += tl.maximum(request, 0).to(tl.int64) * table_row_stride
        # Wait for other threads of this CTA, which have written the entries.
        tl.debug_barrier()
        store_slots(
            out, slots, table, table_column_stride, table_pages, slot_page, count, k, PADDED_K
        )


@dataclasses.dataclass(frozen=True)
class ListedBlocks:
    """Blocks that each row selects within, with scratch for the existing ones of a chunk.

    Attributes:
        blocks: numbers of listed blocks, [rows, B] int32 with unit stride in a row.
        block_size: number of entries in a block.
        numbers: numbers of the existing blocks, [chunk, B] int32.
        places: places of the existing blocks in the cache, [chunk, B] int32.
        counts: number of entries in the existing blocks, [chunk] int32.
    """

    blocks: Tensor
    block_size: int
    numbers: Tensor
    places: Tensor
    counts: Tensor

    @classmethod
    def of(cls, blocks: Tensor, block_size: int, chunk: int) -> ListedBlocks:
        """Allocate scratch for ``chunk`` rows at a time."""
        shape, device = (chunk, blocks.shape[1]), blocks.device
        numbers, places = (scratch(shape, torch.int32, device) for _ in range(2))
        counts = scratch((chunk,), torch.int32, device)
        return cls(unit_stride(blocks), block_size, numbers, places, counts)

    @staticmethod
    def row_bytes(blocks: Tensor) -> int:
        """Return the bytes of scratch for one row."""
        return 8 * blocks.shape[1] + 4

    def columns_of(self, inputs: ScoreInputs, first: int, target: Target) -> ScoreInputs:
        """List the chunk's existing blocks from row ``first`` on; return inputs over columns."""
        rows, listed = len(inputs.q), self.blocks.shape[1]
        table, cache = inputs.block_table, pages_of(inputs.keys)
        assert table is not None
        blocks = self.blocks[first : first + rows]
        list_blocks_kernel[(rows,)](
            blocks, blocks.stride(0), listed, inputs.lengths, inputs.requests, table,
            *table.stride(), self.numbers, self.places, self.counts, inputs.first_row,
            max(inputs.rows_per_request, 1), inputs.num_requests, len(cache), inputs.covered,
            ENTRIES=cache.shape[1], BLOCK_SIZE=self.block_size,
            TILE=min(_TILE, max(16, next_power_of_2(listed))), num_warps=candidates_warps(target),
            **pdl_launch(inputs.q.device),
        )  # fmt: skip
        return dataclasses.replace(
            inputs,
            block_table=self.places[:rows],
            lengths=self.counts[:rows],
            requests=None,
            rows_per_request=1,
            first_row=0,
            covered=min(listed * self.block_size, inputs.covered),
            block_size=self.block_size,
        )

    def store_entries(self, inputs: ScoreInputs, outputs: SelectOutputs, target: Target) -> None:
        """Replace the chosen columns in ``outputs`` by entries, for a chunk of ``inputs``."""
        slots, table = outputs.slots, outputs.slot_table
        entries_kernel[(len(inputs.q),)](
            outputs.out, outputs.out.stride(0), self.numbers, self.blocks.shape[1], self.counts,
            inputs.lengths, inputs.requests, slots, 0 if slots is None else slots.stride(0), table,
            *((0, 0) if table is None else table.stride()), 0 if table is None else table.shape[1],
            outputs.slot_page_size, inputs.first_row, max(inputs.rows_per_request, 1),
            inputs.num_requests, inputs.covered, inputs.k,
            BLOCK_SIZE=self.block_size, PADDED_K=next_power_of_2(max(inputs.k, 16)),
            num_warps=candidates_warps(target), **pdl_launch(inputs.q.device),
        )  # fmt: skip
