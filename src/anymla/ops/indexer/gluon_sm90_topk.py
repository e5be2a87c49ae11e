"""The k best of rows on Hopper, by histograms in shared memory.

The same selection as ``triton_group_select``'s, of rows that are short or come with maxima.

Grid: (rows,). A row's keys, or the maxima of its groups, lie in registers. Three digits of 11, 11
and 10 bits are looked at in turn: keys that begin as the k-th does are counted by their next digit,
and a scan from the largest digit down finds the one in which the k-th lies. It is found early when
all keys of that digit are wanted, which the second digit nearly always shows.

    keys  ->  2,048 counters  ->  scan  ->  digit, keys above it, keys of it  ->  next digit

Counters lie in static shared memory that the kernel reserves beside what the compiler manages.
"""

import dataclasses
from collections.abc import Iterator

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._triton import Build, Target
from anymla.ops.early import launches_early
from anymla.ops.gluon_early import let_dependents_start, wait_for_predecessors
from anymla.ops.indexer.selection_plan import (
    GROUP,
    MOST_GROUP_K,
    MOST_GROUPS,
    MOST_WHOLE,
    SelectionPlan,
)

_MANY_ROWS = 264  # two waves of an H200
_G = gl.constexpr(GROUP)
_NOTHING = gl.constexpr(-0x80000000)
# Shared words: counters of three digits, chosen groups, what a scan has found, and a counter for
# what is not counted.
_DIGITS = gl.constexpr(2048)
_LIST = gl.constexpr(3 * 2048)
_FOUND = gl.constexpr(3 * 2048 + MOST_GROUP_K)
_REST = gl.constexpr(3 * 2048 + MOST_GROUP_K + 4)
_NEW = gl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))


@gluon.jit
def _meet():
    """Barrier of a program's threads."""
    if _NEW:
        gl.barrier()
    else:
        gl.thread_barrier()


@gluon.jit
def _reserve():
    """Where the shared words begin."""
    return gl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 anymla_topk[28704]; mov.u32 $0, anymla_topk; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _clear(at):
    """Four words each."""
    gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.b32 $0, z; }",
        "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _increment(at):
    gl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1; mov.b32 $0, 0;",
        "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _put(at, x, there):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,r,r,r", [at, x, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _get(at):
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _get4(at):
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [at],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _put3(at, x, y, z, there):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5};"
        " mov.b32 $0, 0; }",
        "=r,r,r,r,r,r", [at, x, y, z, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _ordered(bits):
    """Keys of scores: ``triton_order.ordered_result``, where arithmetic makes one NaN only."""
    bits = (bits.to(gl.float32, bitcast=True) + 0.0).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _clear_counters(words, WARPS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, _DIGITS // 4, layout=L)
    for digit in gl.static_range(3):
        _clear(words + (line + digit * (_DIGITS // 4)) * 16)


@gluon.jit
def _scan(words, first, wanted, WARPS: gl.constexpr):
    """(digit, keys of larger digits, keys of the digit) where the ``wanted``-th key lies.

    ``first`` is the first of its counters. All threads have counted.
    """
    L: gl.constexpr = gl.BlockedLayout([_DIGITS // 4 // (32 * WARPS)], [32], [WARPS], [0])
    line = gl.arange(0, _DIGITS // 4, layout=L)
    a, b, c, d = _get4(words + (first + _DIGITS - 4 - 4 * line) * 4)
    total = a + b + c + d
    reached = gl.associative_scan(total, 0, _add)
    above = reached - total
    crosses = (above < wanted) & (reached >= wanted)
    past_d = above + d < wanted
    past_c = above + d + c < wanted
    past_b = above + d + c + b < wanted
    digit = _DIGITS - 1 - 4 * line
    digit -= past_d.to(gl.int32) + past_c.to(gl.int32) + past_b.to(gl.int32)
    hits = gl.where(past_b, a, gl.where(past_c, b, gl.where(past_d, c, d)))
    above += gl.where(past_d, d, 0) + gl.where(past_c, c, 0) + gl.where(past_b, b, 0)
    found = gl.zeros_like(line) + words + _FOUND * 4
    _put3(found, digit, above, hits, crosses)
    _meet()
    digit, above, hits, _ = _get4(words + _FOUND * 4)
    return digit, above, hits


@gluon.jit
def kth_largest(words, key, wanted, WARPS: gl.constexpr):
    """(limit, above): the ``above`` keys > limit and ``wanted - above`` of those == limit are best.

    Counters are zeros, which all threads know, and are not afterwards.

    Args:
        words: of ``_reserve``.
        key: int32, NOTHING where there is none; more than ``wanted`` are there. NOTHING is counted
            without harm, as no key begins with its first digit.
        wanted: at least 1.
        WARPS: of the program.
    """
    # As unsigned numbers in the same order.
    number = key ^ _NOTHING
    _increment(words + ((number >> 21) & 2047) * 4)
    _meet()
    prefix, above, hits = _scan(words, 0, wanted, WARPS)
    shift = 21
    if above + hits > wanted:
        # What does not begin so is counted where nobody looks: cheaper than leaving it out.
        digit = gl.where(((number >> 21) & 2047) == prefix, (number >> 10) & 2047, _REST - _DIGITS)
        _increment(words + (_DIGITS + digit) * 4)
        _meet()
        digit, more, hits = _scan(words, _DIGITS, wanted - above, WARPS)
        above += more
        prefix = (prefix << 11) | digit
        shift = 10
        if above + hits > wanted:
            digit = gl.where(
                ((number >> 10) & 0x3FFFFF) == prefix, number & 1023, _REST - 2 * _DIGITS
            )
            _increment(words + (2 * _DIGITS + digit) * 4)
            _meet()
            digit, more, hits = _scan(words, 2 * _DIGITS, wanted - above, WARPS)
            above += more
            prefix = (prefix << 10) | digit
            shift = 0
    limit = (prefix << shift) ^ _NOTHING
    whole = above + hits == wanted
    return gl.where(whole, limit - 1, limit), gl.where(whole, wanted, above)


@gluon.jit
def places(key, limit, need):
    """``triton_emit.places`` of keys in one dimension."""
    beyond = key > limit
    same = (key == limit) & (key != _NOTHING)
    # Two counts side by side.
    running = gl.associative_scan(beyond.to(gl.int32) + (same.to(gl.int32) << 16), 0, _add)
    equal = running >> 16
    place = (running & 0xFFFF) + gl.minimum(equal, need) - 1
    return place, beyond | (same & (equal <= need))


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
    EARLY: gl.constexpr,
    WARPS: gl.constexpr,
):
    """One row; arguments as of ``group_select_kernel``. GROUPS and ELEMENTS fill the threads."""
    ALL: gl.constexpr = gl.BlockedLayout([ELEMENTS // (32 * WARPS)], [32], [WARPS], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    words = _reserve()
    _clear_counters(words, WARPS)
    if EARLY:
        wait_for_predecessors()
        let_dependents_start()
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
    else:
        SOME: gl.constexpr = gl.BlockedLayout([GROUPS // (32 * WARPS)], [32], [WARPS], [0])
        number = gl.arange(0, GROUPS, layout=SOME)
        if starts is not None:
            number += start // _G // 4 * 4
        groups = (seen + _G - 1) // _G
        best = gl.load(
            maxima + row * maxima_stride + number, mask=number < (groups + 3) // 4 * 4, other=0
        )
    _meet()
    count = end - start
    if counts is not None:
        gl.store(counts + row, gl.minimum(count, k))
    out += row * out_stride
    place_of = gl.arange(0, KEPT, layout=ONE)
    if count <= k:
        gl.store(out + place_of, gl.where(place_of < count, place_of, -1), mask=place_of < k)
    else:
        if GROUPS == 0:
            key = gl.where((entry >= start) & (entry < end), _ordered(bits), _NOTHING)
            candidates = count
        else:
            first, last = start // _G, (end + _G - 1) // _G
            best = gl.where((number >= first) & (number < last), best, _NOTHING)
            groups = last - first
            at_least = _NOTHING + 1
            limit, above = gl.to_tensor(_NOTHING), gl.to_tensor(0)
            if groups > k:
                limit, above = kth_largest(words, best, k, WARPS)
            at_least = gl.where(above == k, limit + 1, gl.maximum(limit, _NOTHING + 1))
            place, taken = places(best, limit, k - above)
            _put(words + (_LIST + place) * 4, number, taken)
            _clear_counters(words, WARPS)
            _meet()
            line = element // _G
            group = _get(words + (_LIST + gl.minimum(line, KEPT - 1)) * 4)
            inside = line < gl.minimum(groups, k)
            entry = gl.where(inside, group, 0) * _G + element % _G
            entry = gl.max_contiguous(gl.multiple_of(entry, 4), 4)
            key = _ordered(gl.load(scores + entry, mask=inside, other=0))
            there = inside & (entry >= start) & (entry < end) & (key >= at_least)
            key = gl.where(there, key, _NOTHING)
            candidates = gl.sum(there.to(gl.int32), 0)
        limit, above = gl.to_tensor(_NOTHING), gl.to_tensor(0)
        above += k
        if candidates > k:
            limit, above = kth_largest(words, key, k, WARPS)
        place, taken = places(key, limit, k - above)
        gl.store(out + place, entry - start, mask=taken)
    if slots is not None:
        # Written by other threads of this program.
        _meet()
        slots += row * slots_stride
        table += gl.maximum(request, 0).to(gl.int64) * table_row_stride
        known = place_of < gl.minimum(count, k)
        entry = start + gl.load(out + place_of, mask=known, other=0)
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
    """16 values a thread, 32 of many; of many rows two programs fit a multiprocessor."""
    elements = plan.elements or plan.kept * GROUP
    most = max(elements, plan.groups)
    warps = max(4, min(16, most // 16 // 32))
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
                    "EARLY": launches_early(target),
                    "WARPS": held.warps,
                },
                num_warps=held.warps,
                divisible=("scores_stride", "maxima_stride", "out_stride"),
                # 32 values a thread, of maxima and of candidates after them.
                spills=80,
            )
