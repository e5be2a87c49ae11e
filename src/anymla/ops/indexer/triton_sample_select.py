"""The k best of rows of scores by a threshold from samples.

A part of a row collects the scores that pass the threshold, in order of entries; what is collected
of a row is selected from. If the samples misled (fewer than k, or more than there is room for), the
row is counted through instead, so that the result never depends on them.

    collect  row | part | part | ..   ->  candidates of a part     grid (parts, rows)
    finish   candidates of a row      ->  k entries                grid (rows,)

With one part, ``collect`` finishes its own row.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.triton_emit import emit_all, emit_slots, row_bounds
from anymla.ops.indexer.triton_order import NOTHING
from anymla.ops.indexer.triton_sample_row import count_through, finish, load_keys_at, threshold_of
from anymla.ops.pdl import target_has_pdl

SAMPLES = 2048
_EACH = tl.constexpr(4)  # neighbours that a thread loads at once
_TILES = {True: 4096, False: 8192}


@triton.jit(
    do_not_specialize=[
        "first_row", "per_request", "requests", "covered", "k", "table_pages", "slot_page"
    ]
)  # fmt: skip
def sample_collect_kernel(
    scores,
    scores_stride,
    keys,
    entries,
    found,
    lengths,
    starts,
    owners,
    out,
    out_stride,
    slots,
    slots_stride,
    counts,
    table,
    table_row_stride,
    table_column_stride,
    table_pages,
    slot_page,
    first_row,
    per_request,
    requests,
    covered,
    k,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    TILE: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of a row, TILE entries a step; ``found`` is unbounded.

    PDL: see ``pdl_launch``.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    request, start, end = row_bounds(
        lengths, starts, owners, row, True, first_row, per_request, requests, covered
    )
    count = end - start
    out += row * out_stride
    if slots is not None:
        slots += row * slots_stride
        table += tl.maximum(request, 0).to(tl.int64) * table_row_stride
    if counts is not None:
        tl.store(counts + row, tl.minimum(count, k))
    if count <= k:
        if part == 0:
            emit_all(
                out, slots, table, table_column_stride, table_pages, slot_page, start, count, k,
                KEPT,
            )  # fmt: skip
    else:
        scores += row * scores_stride
        threshold = tl.full((), NOTHING + 1, tl.int32)
        if count > CAPACITY:
            threshold = threshold_of(scores + start, count, k, SAMPLES)
        begin = start // _EACH * _EACH
        share = tl.cdiv(tl.cdiv(end - begin, PARTS), TILE) * TILE
        first = begin + part * share
        last = tl.minimum(first + share, end)
        keys += (row * PARTS + part) * CAPACITY
        entries += (row * PARTS + part) * CAPACITY
        collected = 0
        for at in range(first, last, TILE):
            entry, key = load_keys_at(scores, at, start, last, TILE)
            one = (key >= threshold).to(tl.int32)
            per_line = tl.sum(one, 1)
            if tl.max(per_line, 0) > 0:
                before = collected + tl.cumsum(per_line, 0) - per_line
                place = before[:, None] + tl.cumsum(one, 1) - 1
                room = (one > 0) & (place < CAPACITY)
                tl.store(entries + place, entry, mask=room)
                tl.store(keys + place, key, mask=room)
                collected += tl.sum(per_line, 0)
        if PARTS > 1:
            tl.store(found + row * PARTS + part, collected)
        else:
            # Written by other threads of this program.
            tl.debug_barrier()
            if (collected >= k) & (collected <= CAPACITY):
                finish(keys, entries, found, collected, k, start, out, 1, CAPACITY)
            else:
                count_through(scores, start, end, k, out, TILE)
            if slots is not None:
                tl.debug_barrier()
                emit_slots(
                    out, slots, table, table_column_stride, table_pages, slot_page, start, k, k,
                    KEPT,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "first_row", "per_request", "requests", "covered", "k", "table_pages", "slot_page"
    ]
)  # fmt: skip
def sample_finish_kernel(
    scores,
    scores_stride,
    keys,
    entries,
    found,
    lengths,
    starts,
    owners,
    out,
    out_stride,
    slots,
    slots_stride,
    table,
    table_row_stride,
    table_column_stride,
    table_pages,
    slot_page,
    first_row,
    per_request,
    requests,
    covered,
    k,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row that several programs have collected from."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    request, start, end = row_bounds(
        lengths, starts, owners, row, True, first_row, per_request, requests, covered
    )
    count = end - start
    if count > k:
        out += row * out_stride
        if slots is not None:
            slots += row * slots_stride
            table += tl.maximum(request, 0).to(tl.int64) * table_row_stride
        keys += row * PARTS * CAPACITY
        entries += row * PARTS * CAPACITY
        each = tl.load(found + row * PARTS + tl.arange(0, PARTS))
        total = tl.sum(each, 0)
        if (total >= k) & (total <= CAPACITY):
            finish(keys, entries, found + row * PARTS, total, k, start, out, PARTS, CAPACITY)
        else:
            count_through(scores + row * scores_stride, start, end, k, out, TILE)
        if slots is not None:
            # Written by other threads of this program.
            tl.debug_barrier()
            emit_slots(
                out, slots, table, table_column_stride, table_pages, slot_page, start, k, k, KEPT
            )


def tile_and_warps(rows: int, capacity: int, target: Target) -> tuple[int, int]:
    """Scores that a program passes over at a time, and its warps: small programs for many rows."""
    many = rows > 128
    threads = 256 if many and capacity <= 4096 else 512
    return _TILES[many], max(1, threads // target.warp_size)


def builds(target: Target) -> Iterator[Build]:
    """One part and several, both capacities, few rows and many."""
    numbers = (
        "scores_stride", "out_stride", "slots_stride", "table_row_stride", "table_column_stride",
        "table_pages", "slot_page", "first_row", "per_request", "requests", "covered", "k",
    )  # fmt: skip
    pointers = ("scores", "keys", "entries", "found", "lengths", "owners", "out")
    cases = ((1, 4096, 2048, 512), (32, 4096, 1, 1024), (1, 8192, 2048, 2048), (32, 8192, 1, 2048))
    for parts, capacity, rows, kept in cases:
        tile, warps = tile_and_warps(rows, capacity, target)
        shared = {"starts": None, "PARTS": parts, "CAPACITY": capacity, "TILE": tile, "KEPT": kept}
        shared["PDL"] = target_has_pdl(target)
        extra = ("slots", "table") if parts > 1 else ()
        missing = {} if parts > 1 else {"slots": None, "table": None}
        types = {**dict.fromkeys((*pointers, *extra), "*i32"), **dict.fromkeys(numbers, "i32")}
        label = f"{parts} parts of {capacity}"
        yield Build(
            label,
            sample_collect_kernel,
            types,
            {**shared, **missing, "counts": None, "SAMPLES": SAMPLES},
            num_warps=warps,
            spills=16,
        )
        if parts > 1:
            yield Build(
                label,
                sample_finish_kernel,
                types,
                {**shared, **missing},
                num_warps=warps,
                spills=100 if capacity > 4096 or target.narrow else 16,
            )
