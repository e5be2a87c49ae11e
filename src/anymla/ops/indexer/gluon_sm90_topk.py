"""Top-k of rows on Hopper in registers and shared memory, by histogram or radix select.

It selects the same entries as ``triton_select.row_topk_kernel``, from rows that are short or have
maxima. The grid is (rows,). A row's scores, or the maxima of its groups, stay in registers; the
top-k entries are put in order in shared memory and stored contiguously, with their slots in
attention's cache.

Neighbouring scores form groups with a maximum, at least k of them, so at least k scores reach the
smallest maximum. Scores that reach it are counted in a histogram of equal bins up to the largest
score:

    scores  ->  histogram  ->  scan  ->  bin of the k-th, scores above it  ->  candidates, ranked
                                                                           ->  the k-th, its entry

Bins rise with the score, so all scores of a higher bin are larger. Few scores share the bin of the
k-th (one or two of 8,192 normally distributed ones), and each of these counts how many of them are
better. Rows that this does not suit (scores that are not finite, equal scores, too few or too many
candidates) use radix select with digits of 11, 11 and 10 bits: keys that share the k-th key's
higher digits are counted by their next digit, and a scan from the largest digit down finds the k-th
key's digit. The search stops early if all keys of that digit are wanted.

    keys  ->  2,048 counters  ->  scan  ->  digit, keys above it, keys of it  ->  next digit
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import warpgroup_barrier
from anymla.ops._gluon_ptx import (
    atom_shared_append_if_equal,
    cp_async_bulk_prefetch_l2,
    gdc_launch_dependents,
    gdc_wait,
    ld_shared_b32,
    ld_shared_f32_b32,
    ld_shared_max_f32x2,
    ld_shared_sum_before,
    ld_shared_v4_b32,
    mask_from,
    red_shared_add_1,
    redux_add_st_shared,
    redux_max_st_shared_f32x2,
    scan_add_st_shared,
    shared_array,
    st_shared_b32_if,
    st_shared_crossing,
    st_shared_in_order_if_reached,
    st_shared_v4_if,
    st_shared_v4_zero,
)
from anymla.ops.indexer.config import (
    GROUP,
    MAX_GROUPS_K,
)

# A row is prefetched this many rows ahead, two waves of an H200.
_PREFETCHED = gl.constexpr(2 * 132)
_G = gl.constexpr(GROUP)
_NOTHING = gl.constexpr(-0x80000000)
# Marks a group that does not exist; larger than the number of any group.
_NO_GROUP = gl.constexpr(1 << 26)
_KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)
# As a float32, 2^23 + n holds n in its lowest bits.
_MAGIC = gl.constexpr(0x4B000000)

# Shared memory that the kernel manages itself: Triton has no shared-memory atomics, and its threads
# cannot write to computed addresses there. Offsets in int32:
#
#     0      counters of the histogram
#     2048   number of candidates, three unused words, (score, entry) of each candidate
#     4096   chosen entries, in order
#     6144   chosen groups, in order
#     7168   results of a scan, and a counter that nobody reads
#     7176   values that warps exchange: two extremes each, sums, ranks
#
# Counters of the second and third digit reuse the space of candidates and entries.
_DIGITS = gl.constexpr(2048)
_CANDIDATES = gl.constexpr(2048)
_MAX_CANDIDATES = gl.constexpr(128)  # one for each thread of 4 warps
_ENTRIES = gl.constexpr(2 * 2048)
_GROUPS_CHOSEN = gl.constexpr(3 * 2048)
_FOUND = gl.constexpr(3 * 2048 + MAX_GROUPS_K)
_UNREAD = gl.constexpr(3 * 2048 + MAX_GROUPS_K + 4)
_EXTREMES = gl.constexpr(3 * 2048 + MAX_GROUPS_K + 8)
_WARP_SUMS = gl.constexpr(3 * 2048 + MAX_GROUPS_K + 8 + 2 * 16)
_RANKS = gl.constexpr(3 * 2048 + MAX_GROUPS_K + 8 + 3 * 16)
_SCRATCH_BYTES = gl.constexpr(28960)


# --- shared memory ------------------------------------------------------------------------------


@gluon.jit
def _store_in_order(scratch, at, x, limit, entry, WARPS: gl.constexpr):
    """Write the entries of all x that reach ``limit``, in order, from ``at`` on."""
    THREADS: gl.constexpr = 32 * WARPS
    EACH: gl.constexpr = x.shape[0] // THREADS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # Count in float32, whose sums use other units than comparisons do.
    count = gl.sum(gl.reshape(gl.where(x >= limit, 1.0, 0.0), [THREADS, EACH]), 1).to(gl.int32)
    LINE: gl.constexpr = count.type.layout
    warp = gl.arange(0, THREADS, layout=ONE) // 32
    before = scan_add_st_shared(scratch + (_RANKS + warp) * 4, gl.convert_layout(count, ONE))
    warpgroup_barrier()
    before += ld_shared_sum_before(scratch + _RANKS * 4, warp)
    before = gl.expand_dims(gl.convert_layout(before, LINE), 1)
    before = gl.reshape(gl.broadcast(before, gl.reshape(entry, [THREADS, EACH]))[0], [x.shape[0]])
    before = gl.convert_layout(before, x.type.layout)
    st_shared_in_order_if_reached(at + before * 4, x, entry, limit, EACH)


@gluon.jit
def _add(a, b):
    """Add two numbers, as a scan requires."""
    return a + b


# --- radix select -------------------------------------------------------------------------------


@gluon.jit
def _ordered(bits):
    """Map scores to keys as ``triton_topk.ordered_result`` does, for arithmetic with one NaN."""
    bits = (bits.to(gl.float32, bitcast=True) + 0.0).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _clear_digits(scratch, WARPS: gl.constexpr):
    """Clear the counters of all three digits."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, _DIGITS // 4, layout=L)
    for digit in gl.static_range(3):
        st_shared_v4_zero(scratch + (line + digit * (_DIGITS // 4)) * 16)


@gluon.jit
def _scan_digits(scratch, first, wanted, WARPS: gl.constexpr):
    """Find the digit of the ``wanted``-th key.

    Returns the digit, the number of keys of larger digits, and that of keys of this digit.
    ``first`` is the index of the digit's first counter. All threads must have counted.
    """
    L: gl.constexpr = gl.BlockedLayout([_DIGITS // 4 // (32 * WARPS)], [32], [WARPS], [0])
    line = gl.arange(0, _DIGITS // 4, layout=L)
    a, b, c, d = ld_shared_v4_b32(scratch + (first + _DIGITS - 4 - 4 * line) * 4)
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
    found = gl.zeros_like(line) + scratch + _FOUND * 4
    st_shared_v4_if(found, digit, above, hits, crosses)
    warpgroup_barrier()
    digit, above, hits, _ = ld_shared_v4_b32(scratch + _FOUND * 4)
    return digit, above, hits


@gluon.jit
def _radix_select(scratch, key, wanted, WARPS: gl.constexpr):
    """Find (limit, above): the best keys are ``above`` that are > limit and others == limit.

    Of the latter ``wanted - above`` are taken. All counters must be visibly zero before; they are
    not afterwards.

    Args:
        scratch: address of the reserved shared memory.
        key: int32, NOTHING where there is none. More than ``wanted`` keys exist. NOTHING is counted
            without harm, as no key begins with its first digit.
        wanted: number of keys to select, at least 1.
        WARPS: warps per CTA.
    """
    # Map keys to unsigned numbers in the same order.
    number = key ^ _NOTHING
    red_shared_add_1(scratch + ((number >> 21) & 2047) * 4)
    warpgroup_barrier()
    prefix, above, hits = _scan_digits(scratch, 0, wanted, WARPS)
    shift = 21
    if above + hits > wanted:
        # Keys with another prefix go to a counter that nobody reads, which is cheaper than a mask.
        digit = gl.where(
            ((number >> 21) & 2047) == prefix, (number >> 10) & 2047, _UNREAD - _DIGITS
        )
        red_shared_add_1(scratch + (_DIGITS + digit) * 4)
        warpgroup_barrier()
        digit, more, hits = _scan_digits(scratch, _DIGITS, wanted - above, WARPS)
        above += more
        prefix = (prefix << 11) | digit
        shift = 10
        if above + hits > wanted:
            digit = gl.where(
                ((number >> 10) & 0x3FFFFF) == prefix, number & 1023, _UNREAD - 2 * _DIGITS
            )
            red_shared_add_1(scratch + (2 * _DIGITS + digit) * 4)
            warpgroup_barrier()
            digit, more, hits = _scan_digits(scratch, 2 * _DIGITS, wanted - above, WARPS)
            above += more
            prefix = (prefix << 10) | digit
            shift = 0
    limit = (prefix << shift) ^ _NOTHING
    whole = above + hits == wanted
    return gl.where(whole, limit - 1, limit), gl.where(whole, wanted, above)


@gluon.jit
def _places(key, limit, need):
    """Return ``triton_topk.places`` of keys in one dimension."""
    beyond = key > limit
    same = (key == limit) & (key != _NOTHING)
    # Scan two counts packed into one int32.
    running = gl.associative_scan(beyond.to(gl.int32) + (same.to(gl.int32) << 16), 0, _add)
    equal = running >> 16
    place = (running & 0xFFFF) + gl.minimum(equal, need) - 1
    return place, beyond | (same & (equal <= need))


# --- histogram ----------------------------------------------------------------------------------


@gluon.jit
def _max_nan(a, b):
    return gl.maximum(a, b, propagate_nan=_KEEP_NAN)


@gluon.jit
def _clear_bins(scratch, WARPS: gl.constexpr):
    """Clear the histogram, the number of candidates, and the results of a scan."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, 32 * WARPS, layout=L)
    st_shared_v4_zero(scratch + line * 16)
    st_shared_v4_zero(scratch + _CANDIDATES * 4 + line * 0)
    st_shared_v4_zero(scratch + _FOUND * 4 + line * 0)


@gluon.jit
def _score_range(scratch, x, FEW: gl.constexpr, WARPS: gl.constexpr):
    """Return the largest score, and minus the smallest of the maxima of groups of FEW scores."""
    N: gl.constexpr = x.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    nothing = float("-inf")
    best = gl.reduce(gl.reshape(x, [N // FEW, FEW]), 1, _max_nan)
    # A group without scores gives no lower bound.
    bound = gl.where(best == nothing, nothing, -best)
    EACH: gl.constexpr = N // FEW // (32 * WARPS)
    best = gl.reduce(gl.reshape(best, [32 * WARPS, EACH]), 1, _max_nan)
    bound = gl.reduce(gl.reshape(bound, [32 * WARPS, EACH]), 1, _max_nan)
    warp = gl.arange(0, 32 * WARPS, layout=ONE) // 32
    redux_max_st_shared_f32x2(
        scratch + (_EXTREMES + 2 * warp) * 4,
        gl.convert_layout(best, ONE),
        gl.convert_layout(bound, ONE),
    )
    warpgroup_barrier()
    return ld_shared_max_f32x2(scratch + _EXTREMES * 4, WARPS - 1)


@gluon.jit
def _scan_bins(scratch, wanted, BINS: gl.constexpr, WARPS: gl.constexpr):
    """Return (bin, scores in higher bins, 0, 1) of the ``wanted``-th score, or all zeros."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, BINS // 4, layout=L)
    a, b, c, d = ld_shared_v4_b32(scratch + (BINS - 4 - 4 * line) * 4)
    own = redux_add_st_shared(scratch + (_WARP_SUMS + line // 32) * 4, a + b + c + d)
    warpgroup_barrier()
    before = ld_shared_sum_before(scratch + _WARP_SUMS * 4, line // 32)
    found = scratch + _FOUND * 4
    st_shared_crossing(found, before, own, d, c, b, a, wanted, BINS - 1 - 4 * line)
    warpgroup_barrier()
    return ld_shared_v4_b32(found)


@gluon.jit
def _kth_candidate(scratch, count, wanted, WARPS: gl.constexpr):
    """Find the ``wanted``-th best of ``count`` candidates.

    Returns its score, its entry, and the number of equal scores behind it.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    who = gl.arange(0, 32 * WARPS, layout=L)
    at = scratch + _CANDIDATES * 4 + 16
    x, entry = ld_shared_f32_b32(at + gl.minimum(who, _MAX_CANDIDATES - 1) * 8)
    better, behind = gl.zeros_like(who), gl.zeros_like(who)
    for i in range(0, count):
        other, its_entry = ld_shared_f32_b32(at + i * 8)
        same = other == x
        better += ((other > x) | (same & (its_entry < entry))).to(gl.int32)
        behind += (same & (its_entry > entry)).to(gl.int32)
    it = (who < count) & (better == wanted - 1)
    bits = x.to(gl.int32, bitcast=True)
    st_shared_v4_if(gl.zeros_like(who) + scratch + _FOUND * 4, bits, entry, behind, it)
    warpgroup_barrier()
    bits, entry, behind, _ = ld_shared_v4_b32(scratch + _FOUND * 4)
    return bits.to(gl.float32, bitcast=True), entry, behind


@gluon.jit
def _store_topk(scratch, at, x, entry, end, wanted, FEW: gl.constexpr, WARPS: gl.constexpr):
    """Store the entries of the top ``wanted`` scores from ``at`` on, in order.

    All counters must be visibly zero before; they are not afterwards.

    Args:
        scratch: address of the reserved shared memory.
        at: shared-memory address of the first entry to store.
        x: float32, -inf from entry ``end`` on; neighbours in a thread.
        entry: int32, rising; of equal scores the lower entry is better.
        end: one past the last entry; at least ``wanted`` entries exist.
        wanted: number of scores to select, at least 1.
        FEW: neighbours in a thread that share a maximum.
        WARPS: warps per CTA, at least 4.
    """
    BINS: gl.constexpr = 128 * WARPS
    most, least = _score_range(scratch, x, FEW, WARPS)
    width = most + least
    # The width is neither NaN nor infinite, nor so small that the width of a bin would vanish.
    found = (width > 1e-30) & (width < 1e38)
    limit, last, behind = most, gl.to_tensor(0), gl.to_tensor(0)
    if found:
        scale = (BINS - 2) / width
        # Scores below the bound have the lowest bin to themselves.
        number = gl.maximum(gl.fma(x + least, scale, 8388609.0), 8388608.0)
        red_shared_add_1(scratch + (number.to(gl.int32, bitcast=True) - _MAGIC) * 4)
        warpgroup_barrier()
        its, above, zero, crossed = _scan_bins(scratch, wanted, BINS, WARPS)
        # Compute the number again with a zero unknown to the compiler, so that no registers keep
        # the first one.
        number = gl.fma(x + (least + zero.to(gl.float32, bitcast=True)), scale, 8388609.0)
        atom_shared_append_if_equal(
            scratch + _CANDIDATES * 4,
            number.to(gl.int32, bitcast=True),
            its + _MAGIC,
            x,
            entry,
            x.shape[0] // (32 * WARPS),
        )
        warpgroup_barrier()
        count = ld_shared_b32(scratch + _CANDIDATES * 4)
        # With few entries, fewer scores than are wanted may reach the bound.
        found = (crossed > 0) & (its > 0) & (count <= _MAX_CANDIDATES)
        if found:
            limit, last, behind = _kth_candidate(scratch, count, wanted - above, WARPS)
    if found:
        if behind > 0:
            x = gl.where((x == limit) & (entry > last), float("-inf"), x)
        _store_in_order(scratch, at, x, limit, entry, WARPS)
    else:
        zero = ld_shared_b32(scratch + _FOUND * 4 + 8)
        warpgroup_barrier()
        _clear_digits(scratch, WARPS)
        warpgroup_barrier()
        # Compute keys again rather than keep them in registers, since this path is rare.
        there = entry < end + zero
        key = gl.where(there, _ordered(x.to(gl.int32, bitcast=True)), _NOTHING)
        key_limit, above = _radix_select(scratch, key, wanted, WARPS)
        place, taken = _places(key, key_limit, wanted - above)
        st_shared_b32_if(at + place * 4, entry, taken)


# --- the kernel ---------------------------------------------------------------------------------


@gluon.constexpr_function
def _neighbours(elements, kept, warps):
    """Return the group size for which there are at least twice as many maxima as are kept."""
    return max(1, min(elements // (2 * kept), elements // (32 * warps)))


@gluon.jit
def _row_length(lengths, row_requests, row, first_row, per_request, num_requests, covered):
    """Return a row's request and its number of entries."""
    if row_requests is None:
        request = (first_row + row.to(gl.int32)) // per_request
    else:
        request = gl.load(row_requests + row)
    count = gl.minimum(gl.load(lengths + row), covered)
    sees = (request >= 0) & (request < num_requests) & (count > 0)
    return request, gl.where(sees, count, 0)


@gluon.jit(
    do_not_specialize=[
        "first_row", "per_request", "num_requests", "covered", "k", "table_pages", "slot_page",
        "table_row_stride",
    ]
)  # fmt: skip
def topk_kernel(
    scores,
    scores_stride,
    maxima,
    maxima_stride,
    lengths,
    row_requests,
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
    num_requests,
    covered,
    k,
    GROUPS: gl.constexpr,
    ELEMENTS: gl.constexpr,
    PADDED_K: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Select the top-k of a row; arguments are those of ``triton_select.row_topk_kernel``.

    GROUPS and ELEMENTS fill the threads.
    """
    ALL: gl.constexpr = gl.BlockedLayout([ELEMENTS // (32 * WARPS)], [32], [WARPS], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    scratch = shared_array("anymla_topk", _SCRATCH_BYTES, 16)
    _clear_bins(scratch, WARPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = gl.program_id(0).to(gl.int64)
    request, count = _row_length(
        lengths, row_requests, row, first_row, per_request, num_requests, covered
    )
    # Read whole lines, to which rows are padded, without waiting for lengths.
    scores += row * scores_stride
    element = gl.arange(0, ELEMENTS, layout=ALL)
    if GROUPS == 0:
        entry = element
        bits = gl.load(scores + entry, mask=entry < (covered + 3) // 4 * 4, other=0)
        # Prefetch the row of a CTA that begins when this one ends.
        if gl.program_id(0) + _PREFETCHED < gl.num_programs(0):
            cp_async_bulk_prefetch_l2(
                (scores + _PREFETCHED * scores_stride).to(gl.int64), (covered + 3) // 4 * 16
            )
    else:
        SOME: gl.constexpr = gl.BlockedLayout([GROUPS // (32 * WARPS)], [32], [WARPS], [0])
        number = gl.arange(0, GROUPS, layout=SOME)
        groups = (covered + _G - 1) // _G
        best = gl.load(
            maxima + row * maxima_stride + number, mask=number < (groups + 3) // 4 * 4, other=0
        )
    warpgroup_barrier()
    if counts is not None:
        gl.store(counts + row, gl.minimum(count, k))
    out += row * out_stride
    place_of = gl.arange(0, PADDED_K, layout=ONE)
    entry_of = gl.where(place_of < count, place_of, -1)
    if count > k:
        if GROUPS > 0:
            last = (count + _G - 1) // _G
            best = gl.where(number < last, best, _NOTHING)
            x = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)
            if last > k:
                x = gl.where(best == _NOTHING, float("-inf"), x)
                _store_topk(
                    scratch, scratch + _GROUPS_CHOSEN * 4, x, number, last, k,
                    _neighbours(GROUPS, PADDED_K, WARPS), WARPS,
                )  # fmt: skip
            else:
                st_shared_b32_if(scratch + (_GROUPS_CHOSEN + number) * 4, number, best != _NOTHING)
            _clear_bins(scratch, WARPS)
            warpgroup_barrier()
            line = element // _G
            group = ld_shared_b32(scratch + (_GROUPS_CHOSEN + gl.minimum(line, PADDED_K - 1)) * 4)
            entry = gl.where(line < gl.minimum(last, k), group, _NO_GROUP) * _G
            entry = gl.max_contiguous(gl.multiple_of(entry + element % _G, 4), 4)
            bits = gl.load(scores + entry, mask=entry < _NO_GROUP * _G, other=0)
        x = bits.to(gl.float32, bitcast=True)
        x = mask_from(x, entry, count, ELEMENTS // (32 * WARPS))
        _store_topk(
            scratch, scratch + _ENTRIES * 4, x, entry, count, k,
            _neighbours(ELEMENTS, PADDED_K, WARPS), WARPS,
        )  # fmt: skip
        warpgroup_barrier()
        entry_of = ld_shared_b32(scratch + (_ENTRIES + place_of) * 4)
    gl.store(out + place_of, entry_of, mask=place_of < k)
    if slots is not None:
        slots += row * slots_stride
        table += gl.maximum(request, 0).to(gl.int64) * table_row_stride
        known = place_of < gl.minimum(count, k)
        column = entry_of // slot_page
        page = gl.load(
            table + column.to(gl.int64) * table_column_stride,
            mask=known & (column < table_pages),
            other=-1,
        )
        slot = page.to(gl.int64) * slot_page + entry_of % slot_page
        slot = gl.where((page >= 0) & (slot < 0x80000000), slot, -1)
        gl.store(slots + place_of, slot.to(gl.int32), mask=place_of < k)
