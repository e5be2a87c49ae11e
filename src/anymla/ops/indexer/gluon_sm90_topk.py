"""The k best of rows on Hopper, in registers and shared memory.

The same selection as ``triton_group_select``'s, of rows that are short or come with maxima.

Grid: (rows,). A row's scores, or the maxima of its groups, lie in registers and are selected from
by ``gluon_sm90_bins``. What is chosen is put in order in shared memory, from where it leaves side
by side, with the slots of attention's cache that it stands for.
"""

import dataclasses
from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.gluon_sm90_bins import clear_bins, put_best
from anymla.ops.indexer.gluon_sm90_counters import (
    ENTRIES,
    GROUPS_CHOSEN,
    ask_ahead,
    get,
    hide_behind,
    meet,
    put,
    reserve,
)
from anymla.ops.indexer.selection_plan import (
    GROUP,
    MOST_GROUP_K,
    MOST_GROUPS,
    MOST_WHOLE,
    SelectionPlan,
)
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, target_has_pdl

_MANY_ROWS = 132  # a wave of an H200
_NEXT = gl.constexpr(2 * _MANY_ROWS)
_G = gl.constexpr(GROUP)
_NOTHING = gl.constexpr(-0x80000000)
# Stands for a group that is not there, beyond all that are.
_NO_GROUP = gl.constexpr(1 << 26)


@gluon.constexpr_function
def _few(elements, kept, warps):
    """Neighbours in a thread of which twice as many as are kept have a largest."""
    return max(1, min(elements // (2 * kept), elements // (32 * warps)))


@gluon.jit
def _bounds(lengths, starts, owners, row, first_row, per_request, requests, covered):
    """Request and entries [start, end) of a row; (0, 0) where there is nothing to see."""
    if owners is None:
        request = (first_row + row.to(gl.int32)) // per_request
    else:
        request = gl.load(owners + row)
    end = gl.minimum(gl.load(lengths + row), covered)
    start = 0
    if starts is not None:
        start = gl.maximum(gl.load(starts + row), 0)
    sees = (request >= 0) & (request < requests) & (start < end)
    return request, gl.where(sees, start, 0), gl.where(sees, end, 0)


@gluon.jit(
    do_not_specialize=[
        "first_row", "per_request", "requests", "covered", "k", "table_pages", "slot_page"
    ]
)  # fmt: skip
def topk_kernel(
    scores,
    scores_stride,
    maxima,
    maxima_stride,
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
    GROUPS: gl.constexpr,
    ELEMENTS: gl.constexpr,
    KEPT: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """One row; arguments as of ``group_select_kernel``. GROUPS and ELEMENTS fill the threads."""
    ALL: gl.constexpr = gl.BlockedLayout([ELEMENTS // (32 * WARPS)], [32], [WARPS], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    words = reserve()
    clear_bins(words, WARPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = gl.program_id(0).to(gl.int64)
    request, start, end = _bounds(
        lengths, starts, owners, row, first_row, per_request, requests, covered
    )
    # Whole lines are read, which rows are padded to; where rows begin at 0, without having waited
    # for their lengths.
    seen = covered if starts is None else end
    scores += row * scores_stride
    element = gl.arange(0, ELEMENTS, layout=ALL)
    if GROUPS == 0:
        entry = start // 4 * 4 + element
        if starts is None:
            entry = element
        bits = gl.load(scores + entry, mask=entry < (seen + 3) // 4 * 4, other=0)
        # The row of a program that begins when this one ends.
        if gl.program_id(0) + _NEXT < gl.num_programs(0):
            ask_ahead((scores + _NEXT * scores_stride).to(gl.int64), (covered + 3) // 4 * 16)
    else:
        SOME: gl.constexpr = gl.BlockedLayout([GROUPS // (32 * WARPS)], [32], [WARPS], [0])
        number = gl.arange(0, GROUPS, layout=SOME)
        if starts is not None:
            number += start // _G // 4 * 4
        groups = (seen + _G - 1) // _G
        best = gl.load(
            maxima + row * maxima_stride + number, mask=number < (groups + 3) // 4 * 4, other=0
        )
    meet()
    count = end - start
    if counts is not None:
        gl.store(counts + row, gl.minimum(count, k))
    out += row * out_stride
    place_of = gl.arange(0, KEPT, layout=ONE)
    entry_of = gl.where(place_of < count, place_of, -1)
    if count > k:
        first = start
        if GROUPS > 0:
            first, last = start // _G, (end + _G - 1) // _G
            best = gl.where((number >= first) & (number < last), best, _NOTHING)
            x = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)
            if last - first > k:
                x = gl.where(best == _NOTHING, float("-inf"), x)
                put_best(
                    words, words + GROUPS_CHOSEN * 4, x, number, first, last, k,
                    _few(GROUPS, KEPT, WARPS), WARPS,
                )  # fmt: skip
            else:
                put(words + (GROUPS_CHOSEN + number - first) * 4, number, best != _NOTHING)
            clear_bins(words, WARPS)
            meet()
            line = element // _G
            group = get(words + (GROUPS_CHOSEN + gl.minimum(line, KEPT - 1)) * 4)
            entry = gl.where(line < gl.minimum(last - first, k), group, _NO_GROUP) * _G
            entry = gl.max_contiguous(gl.multiple_of(entry + element % _G, 4), 4)
            bits = gl.load(scores + entry, mask=entry < _NO_GROUP * _G, other=0)
        x = bits.to(gl.float32, bitcast=True)
        if starts is None:
            x = hide_behind(x, entry, end, WARPS)
        else:
            x = gl.where((entry >= start) & (entry < end), x, float("-inf"))
        put_best(
            words, words + ENTRIES * 4, x, entry, start, end, k, _few(ELEMENTS, KEPT, WARPS), WARPS
        )
        meet()
        entry_of = get(words + (ENTRIES + place_of) * 4) - start
    gl.store(out + place_of, entry_of, mask=place_of < k)
    if slots is not None:
        slots += row * slots_stride
        table += gl.maximum(request, 0).to(gl.int64) * table_row_stride
        known = place_of < gl.minimum(count, k)
        entry = start + entry_of
        column = entry // slot_page
        page = gl.load(
            table + column.to(gl.int64) * table_column_stride,
            mask=known & (column < table_pages),
            other=-1,
        )
        slot = page.to(gl.int64) * slot_page + entry % slot_page
        slot = gl.where((page >= 0) & (slot < 0x80000000), slot, -1)
        gl.store(slots + place_of, slot.to(gl.int32), mask=place_of < k)


@dataclasses.dataclass(frozen=True)
class Held:
    """How a program holds a row.

    Attributes:
        warps: of the program.
        registers: of a thread, at most; 0 for as many as it likes.
        groups: maxima, as many as threads at least; 0 of whole rows.
        elements: entries, or candidates from groups, as many as threads at least.
    """

    warps: int
    registers: int
    groups: int
    elements: int


def held_of(plan: SelectionPlan, rows: int) -> Held:
    """8 to 32 values a thread; of many rows two programs fit a multiprocessor."""
    elements = plan.elements or plan.kept * GROUP
    most = max(elements, plan.groups)
    warps = max(4, min(16, most // 8 // 32))
    groups = max(plan.groups, 32 * warps) if plan.groups else 0
    registers = 64 if rows > _MANY_ROWS and warps == 16 and most <= 8192 else 0
    return Held(warps, registers, groups, max(elements, 32 * warps))


def builds(target: Target) -> Iterator[Build]:
    """Whole rows and groups, few rows and many."""
    if target.name != "sm_90":
        return
    numbers = (
        "scores_stride", "maxima_stride", "out_stride", "slots_stride", "table_row_stride",
        "table_column_stride", "table_pages", "slot_page", "first_row", "per_request", "requests",
        "covered", "k",
    )  # fmt: skip
    plans = [SelectionPlan("whole", 1, 512, elements=n) for n in (1024, 8192, MOST_WHOLE)]
    plans += [
        SelectionPlan("groups", 1, kept, groups=groups)
        for kept in (16, 512, MOST_GROUP_K)
        for groups in (64, 2048, MOST_GROUPS)
    ]
    optional = ("maxima", "starts", "owners", "slots", "counts", "table")
    for plan in plans:
        for rows, given in ((1, ("owners", "slots", "counts", "table")), (2048, ("starts",))):
            held = held_of(plan, rows)
            pointers = ("scores", "lengths", "out", *given, *(("maxima",) if plan.groups else ()))
            yield Build(
                f"{plan.kept} of {held.elements}, {held.groups} groups"
                + ", many rows" * (rows > 1),
                topk_kernel,
                {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(numbers, "i32")},
                {
                    **{name: None for name in optional if name not in pointers},
                    "GROUPS": held.groups,
                    "ELEMENTS": held.elements,
                    "KEPT": plan.kept,
                    "PDL": target_has_pdl(target),
                    "WARPS": held.warps,
                },
                num_warps=held.warps,
                divisible=("scores_stride", "maxima_stride", "out_stride"),
                # 32 values a thread, of maxima and of candidates after them.
                spills=110 if plan.kept == MOST_GROUP_K else 80,
                registers=held.registers,
            )
