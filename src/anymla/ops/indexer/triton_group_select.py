"""The k best of rows that are short, or whose scores came with the largest of each 16.

Grid: (rows,). The k-th largest maximum is at most the k-th score, since k groups have a score at
least as large; and of the groups that equal it, the first ones hold all ties that can win, because
each of them has a tie that comes earlier. So the k best groups, first ones among equals, hold the
selection, and no more is read:

    maxima   | 7 | 2 | 9 | 4 | ..   ->  the k best groups, in order of entries
    scores   | .. 16 .. | .. 16 ..   ->  the k best of k * 16 scores, in order of entries

A row with no more groups than are kept is read as it is, without maxima.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.selection_plan import GROUP, MOST_GROUP_K, MOST_GROUPS, MOST_WHOLE
from anymla.ops.indexer.triton_emit import emit_all, emit_slots, places, row_bounds
from anymla.ops.indexer.triton_order import NOTHING, kth_largest, ordered
from anymla.ops.pdl import target_has_pdl

_GROUP = tl.constexpr(GROUP)
_EACH = tl.constexpr(4)  # neighbours that a thread loads at once


@triton.jit(
    do_not_specialize=[
        "first_row", "per_request", "requests", "covered", "k", "table_pages", "slot_page"
    ]
)  # fmt: skip
def group_select_kernel(
    scores,
    scores_stride,
    maxima,
    maxima_stride,
    chosen_groups,
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
    GROUPS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    KEPT: tl.constexpr,
    SCORED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row. ``scores`` are bits of float32; ``chosen_groups`` is scratch, [rows, KEPT].

    With 0 GROUPS the row has no maxima, and at most ELEMENTS entries; else ELEMENTS is KEPT * 16.

    Without SCORED the first entries are chosen: all there are, unless no score could be had. PDL:
    see ``pdl_launch``.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    request, start, end = row_bounds(
        lengths, starts, owners, row, True, first_row, per_request, requests, covered
    )
    count = end - start
    if counts is not None:
        tl.store(counts + row, tl.minimum(count, k))
    out += row * out_stride
    if slots is not None:
        slots += row * slots_stride
        table += tl.maximum(request, 0).to(tl.int64) * table_row_stride
    # Without scores the first entries are chosen; all there are, unless no score could be had.
    if (count <= k) | (not SCORED):
        emit_all(
            out, slots, table, table_column_stride, table_pages, slot_page, start,
            tl.minimum(count, k), k, KEPT,
        )  # fmt: skip
    else:
        scores += row * scores_stride
        if GROUPS == 0:
            # Whole lines are read, which rows are padded to: masks by lines leave loads wide.
            line = tl.arange(0, ELEMENTS // _EACH)[:, None] * _EACH + start // _EACH * _EACH
            entry = line + tl.arange(0, _EACH)[None, :]
            inside = line < end
            at_least = tl.full((), NOTHING + 1, tl.int32)
        else:
            chosen_groups += row * KEPT
            first, last = start // _GROUP, tl.cdiv(end, _GROUP)
            groups = last - first
            at_least = tl.full((), NOTHING + 1, tl.int32)
            if groups > k:
                line = tl.arange(0, GROUPS // _EACH)[:, None] * _EACH + first // _EACH * _EACH
                number = line + tl.arange(0, _EACH)[None, :]
                best = tl.load(
                    maxima + row * maxima_stride + number, mask=line < last, other=NOTHING
                )
                best = tl.where((number >= first) & (number < last), best, NOTHING)
                limit, above = kth_largest(best, groups, k, True)
                place, taken = places(best, limit, k - above)
                tl.store(chosen_groups + place, number, mask=taken)
                at_least = tl.where(above == k, limit + 1, limit)
            else:
                every = tl.arange(0, KEPT)
                tl.store(chosen_groups + every, first + every, mask=every < groups)
            # Written by other threads of this program.
            tl.debug_barrier()
            kept = tl.arange(0, KEPT)
            inside = kept < tl.minimum(groups, k)
            group = tl.load(chosen_groups + kept, mask=inside, other=0)
            entry = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
            inside = inside[:, None]
        key = ordered(tl.load(scores + entry, mask=inside, other=0))
        there = inside & (entry >= start) & (entry < end)
        key = tl.where(there & (key >= at_least), key, NOTHING)
        candidates = tl.sum((key != NOTHING).to(tl.int32))
        limit = tl.full((), NOTHING, tl.int32)
        above = k
        if candidates > k:
            limit, above = kth_largest(key, candidates, k, GROUPS == 0)
        place, taken = places(key, limit, k - above)
        tl.store(out + place, entry - start, mask=taken)
        if slots is not None:
            # Written by other threads of this program.
            tl.debug_barrier()
            emit_slots(
                out, slots, table, table_column_stride, table_pages, slot_page, start, k, k, KEPT
            )


def warps_of(elements: int, groups: int, rows: int, target: Target) -> int:
    """Warps of a program: 32 values a thread at most, and many rows want small programs."""
    lanes = max(elements, groups)
    threads = max(64, min(1024, lanes // 32 if rows > 128 else lanes // 16))
    return max(1, threads // target.warp_size)


def options_of(rows: int, target: Target) -> dict[str, int]:
    """Launch options: many rows want several programs on a multiprocessor."""
    return {"maxnreg": 128} if rows > 128 and target.backend == "cuda" else {}


def builds(target: Target) -> Iterator[Build]:
    """Every number of maxima and of entries kept that the plan can choose, few rows and many."""
    numbers = (
        "scores_stride", "maxima_stride", "out_stride", "slots_stride", "table_row_stride",
        "table_column_stride", "table_pages", "slot_page", "first_row", "per_request", "requests",
        "covered", "k",
    )  # fmt: skip
    pointers = ("scores", "maxima", "chosen_groups", "lengths", "owners", "out")
    nothing = ("maxima", "chosen_groups", "starts", "slots", "counts", "table")
    yield Build(
        "nothing scored",
        group_select_kernel,
        {
            **dict.fromkeys(("scores", "lengths", "owners", "out"), "*i32"),
            **dict.fromkeys(numbers, "i32"),
        },
        {
            **dict.fromkeys(nothing),
            "GROUPS": 0,
            "ELEMENTS": 512,
            "KEPT": 512,
            "SCORED": False,
            "PDL": target_has_pdl(target),
        },
        num_warps=warps_of(512, 0, 1, target),
    )
    for elements in (2048, 8192, MOST_WHOLE):
        yield Build(
            f"whole rows of {elements}",
            group_select_kernel,
            {
                **dict.fromkeys(("scores", "lengths", "owners", "out"), "*i32"),
                **dict.fromkeys(numbers, "i32"),
            },
            {
                **dict.fromkeys(nothing),
                "GROUPS": 0,
                "ELEMENTS": elements,
                "KEPT": 512,
                "SCORED": True,
                "PDL": target_has_pdl(target),
            },
            num_warps=warps_of(elements, 0, 1, target),
            # A few where programs of Ada have no more registers; many in the widest rows.
            spills={MOST_WHOLE: 100, 2048: 4}.get(elements, 0),
        )
    for kept in (16, 512, MOST_GROUP_K):
        for groups in (64, 4096, MOST_GROUPS):
            for rows, with_slots in ((1, True), (2048, False)):
                given = ("slots", "counts", "table") if with_slots else ()
                missing = () if with_slots else ("slots", "counts", "table")
                yield Build(
                    f"{kept} of {groups} groups" + ", many rows" * (rows > 1),
                    group_select_kernel,
                    {
                        **dict.fromkeys((*pointers, *given), "*i32"),
                        **dict.fromkeys(numbers, "i32"),
                    },
                    {
                        "starts": None,
                        **dict.fromkeys(missing),
                        "GROUPS": groups,
                        "ELEMENTS": kept * GROUP,
                        "KEPT": kept,
                        "SCORED": True,
                        "PDL": target_has_pdl(target),
                    },
                    num_warps=warps_of(kept * GROUP, groups, rows, target),
                    # 16 or 32 candidates a thread, in what registers 512 and 1,024 threads have.
                    spills=140 if kept == MOST_GROUP_K else 60,
                )
