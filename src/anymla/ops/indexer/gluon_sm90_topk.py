"""Top-k of rows on Hopper in registers and shared memory, by histogram or radix select.

Selects the same entries as ``triton_select.row_topk_kernel``, of rows that are short or have
maxima. Grid: (rows,). A row's scores, or the maxima of its groups, stay in registers; the top-k
entries are put in order in shared memory and stored contiguously, with their slots in attention's
cache.

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
key's digit. It stops early if all keys of that digit are wanted.

    keys  ->  2,048 counters  ->  scan  ->  digit, keys above it, keys of it  ->  next digit
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import gdc_launch_dependents, gdc_wait, warpgroup_barrier
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


# --- reductions and scans over the warps of a CTA -----------------------------------------------
# A warp reduces in one instruction and stores its result in its own place; after a barrier, every
# warp reduces all stored results. So there is one barrier, and no chain of shuffles to wait for.


# Each lane adds the sums of the lanes below it.
_SUM_UP = gl.constexpr(
    " ".join(
        f"shfl.sync.up.b32 r|q, i, {step}, 0, 0xffffffff; @q add.s32 i, i, r;"
        for step in (1, 2, 4, 8, 16)
    )
)


@gluon.constexpr_function
def _extremes_text(before, reduced, behind):
    """Text that makes numbers in the order of scores of a and b, or scores of them again."""
    text = before
    for x in ("a", "b"):
        text += f"shr.s32 s, {x}, 31; and.b32 s, s, 0x7fffffff; xor.b32 {x}, {x}, s; "
        if reduced:
            text += f"redux.sync.max.s32 {x}, {x}, 0xffffffff; "
    return text + behind


@gluon.jit
def _warp_extremes(at, a, b):
    """Store the largest a and the largest b of each warp in its place; NaN is larger."""
    TEXT: gl.constexpr = _extremes_text(
        "{ .reg .pred p; .reg .b32 l, a, b, s; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;"
        " mov.b32 a, $2; mov.b32 b, $3; ",
        True,
        " @p st.shared.v2.b32 [$1], {a, b}; mov.b32 $0, 0; }",
    )
    gl.inline_asm_elementwise(
        TEXT, "=r,r,f,f", [at, a, b], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _cta_extremes(at, WARPS: gl.constexpr):
    """The largest of what all warps have stored, from ``at`` on."""
    FIRST: gl.constexpr = (
        "{ .reg .b32 l, a, b, s; mov.u32 l, %laneid; min.u32 l, l, $3; shl.b32 l, l, 3;"
        " add.u32 l, l, $2; ld.shared.v2.b32 {a, b}, [l];"
        " redux.sync.max.s32 a, a, 0xffffffff; redux.sync.max.s32 b, b, 0xffffffff; "
    )
    TEXT: gl.constexpr = _extremes_text(FIRST, False, " mov.b32 $0, a; mov.b32 $1, b; }")
    return gl.inline_asm_elementwise(
        TEXT, "=f,=f,r,r", [at, WARPS - 1], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _warp_sum(at, x):
    """The sum of each warp's x, which it also stores in its place."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;"
        " redux.sync.add.s32 $0, $2, 0xffffffff; @p st.shared.b32 [$1], $0; }",
        "=r,r,r", [at, x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _warp_ranks(at, x):
    """The sum of x in lanes below; each warp's sum is stored in its place."""
    TEXT: gl.constexpr = (
        "{ .reg .pred p, q; .reg .b32 i, r; mov.b32 i, $2; "
        + _SUM_UP
        + " mov.u32 r, %laneid; setp.eq.u32 p, r, 31; @p st.shared.b32 [$1], i;"
        " sub.s32 $0, i, $2; }"
    )
    return gl.inline_asm_elementwise(
        TEXT, "=r,r,r", [at, x], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _sum_of_warps_before(at, warp):
    """The sum of what warps before this one have stored, from ``at`` on."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l, a; mov.u32 l, %laneid; setp.lt.u32 p, l, $2; mov.b32 a, 0;"
        " shl.b32 l, l, 2; add.u32 l, l, $1; @p ld.shared.b32 a, [l];"
        " redux.sync.add.s32 $0, a, 0xffffffff; }",
        "=r,r,r", [at, warp], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _store_crossing(at, before, own, d, c, b, a, wanted, number):
    """Where counts from the first thread's on reach ``wanted``: (number, count before it, 0, 1).

    Args:
        at: where it is put.
        before: what warps before this one count.
        own: what this one counts.
        d: a thread's first count, of what has ``number``.
        c: its next, of number - 1.
        b: of number - 2.
        a: of number - 3.
        wanted: at least 1.
        number: of each thread.
    """
    TEXT: gl.constexpr = (
        "{ .reg .pred p, q; .reg .b32 i, r, t, n; setp.ge.s32 p, $2, $8; @p bra DONE;"
        " add.s32 i, $2, $3; setp.lt.s32 p, i, $8; @p bra DONE;"
        " add.s32 i, $4, $5; add.s32 i, i, $6; add.s32 i, i, $7; mov.b32 t, i; "
        + _SUM_UP
        + " add.s32 i, i, $2; setp.lt.s32 p, i, $8; @p bra DONE;"
        " sub.s32 i, i, t; setp.ge.s32 p, i, $8; @p bra DONE; mov.b32 n, $9;"
        " add.s32 t, i, $4; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " add.s32 t, i, $5; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " add.s32 t, i, $6; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " PUT: mov.b32 r, 0; mov.b32 t, 1; st.shared.v4.b32 [$1], {n, i, r, t};"
        " DONE: mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(
        TEXT, "=r,r,r,r,r,r,r,r,r,r", [at, before, own, d, c, b, a, wanted, number],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# --- instructions on the reserved shared memory -------------------------------------------------


@gluon.jit
def _reserve_scratch():
    """Address of the reserved shared memory."""
    return gl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 anymla_topk[28960]; mov.u32 $0, anymla_topk; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _clear4(at):
    """Store four zeros each."""
    gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.b32 $0, z; }",
        "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _increment(at):
    """Increment a counter."""
    gl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1; mov.b32 $0, 0;",
        "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _mask_text(each):
    """Text and constraints: a thread's ``each`` scores, whose entries rise, before an end."""
    lines = ["{ .reg .pred h;"] + [f"mov.b32 ${i}, ${each + i};" for i in range(each)]
    lines += [f"setp.lt.s32 h, ${3 * each - 1}, ${3 * each}; @h bra ALL;"]
    for i in range(each):
        lines += [f"setp.lt.s32 h, ${2 * each + i}, ${3 * each}; @!h mov.b32 ${i}, 0xff800000;"]
    outputs, scratch, floats = ["=f"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines) + " ALL: }", ",".join(outputs + floats + scratch + scratch)


@gluon.jit
def _mask_from(x, entry, end, WARPS: gl.constexpr):
    """x, but -inf from entry ``end`` on, which few threads have."""
    EACH: gl.constexpr = x.shape[0] // (32 * WARPS)
    HIDING: gl.constexpr = _mask_text(EACH)
    return gl.inline_asm_elementwise(
        HIDING[0], HIDING[1], [x, entry, end], dtype=gl.float32, is_pure=False, pack=EACH
    )  # fmt: skip


@gluon.constexpr_function
def _store_text(each):
    """Text and constraints: a thread's ``each`` entries, of those x that reach a limit."""
    lines = ["{ .reg .pred p; .reg .b32 a;", f"mov.b32 a, ${each};"]
    for i in range(each):
        x, entry, limit = (f"${(2 + n) * each + i}" for n in range(3))
        lines += [
            f"setp.ge.f32 p, {x}, {limit}; @p st.shared.b32 [a], {entry}; @p add.u32 a, a, 4;",
            f"mov.b32 ${i}, 0;",
        ]
    outputs, scratch, floats = ["=r"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines) + " }", ",".join(outputs + scratch + floats + scratch + floats)


@gluon.jit
def _store_in_order(scratch, at, x, limit, entry, WARPS: gl.constexpr):
    """Write the entries of all x that reach ``limit`` from ``at`` on, in order."""
    THREADS: gl.constexpr = 32 * WARPS
    EACH: gl.constexpr = x.shape[0] // THREADS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # As float32, whose sums are not taken where comparisons are.
    count = gl.sum(gl.reshape(gl.where(x >= limit, 1.0, 0.0), [THREADS, EACH]), 1).to(gl.int32)
    LINE: gl.constexpr = count.type.layout
    warp = gl.arange(0, THREADS, layout=ONE) // 32
    before = _warp_ranks(scratch + (_RANKS + warp) * 4, gl.convert_layout(count, ONE))
    warpgroup_barrier()
    before += _sum_of_warps_before(scratch + _RANKS * 4, warp)
    before = gl.expand_dims(gl.convert_layout(before, LINE), 1)
    before = gl.reshape(gl.broadcast(before, gl.reshape(entry, [THREADS, EACH]))[0], [x.shape[0]])
    before = gl.convert_layout(before, x.type.layout)
    STORING: gl.constexpr = _store_text(EACH)
    gl.inline_asm_elementwise(
        STORING[0], STORING[1], [at + before * 4, x, entry, limit],
        dtype=gl.int32, is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.jit
def _prefetch_l2(address, size):
    """Prefetch ``size`` bytes into the L2, by one thread."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _store1(at, x, there):
    """Store an int32 each of those that are ``there``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,r,r,r", [at, x, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load1(at):
    """Load an int32."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load2(at):
    """Load a float32 and an int32."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=f,=r,r", [at],
        dtype=(gl.float32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load4(at):
    """Load four int32."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [at],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _store3(at, x, y, z, there):
    """Store three int32 of those that are ``there``; the fourth becomes 1."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5};"
        " mov.b32 $0, 0; }",
        "=r,r,r,r,r,r", [at, x, y, z, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _collect_text(each):
    """Text and constraints: a thread's ``each`` scores, of those whose number is wanted."""
    at, number, wanted, x, entry = (
        [f"${(1 + n) * each + i}" for i in range(each)] for n in range(5)
    )
    same = [f"{number[i]}, {wanted[i]}" for i in range(each)]
    # Few threads have one.
    lines = [f"{{ .reg .pred p, q; .reg .b32 s, a; setp.eq.u32 p, {same[0]};"]
    lines += [f"setp.eq.or.u32 p, {those}, p;" for those in same[1:]] + ["@!p bra DONE;"]
    for i in range(each):
        lines += [
            f"setp.ne.u32 q, {same[i]}; @q bra PAST{i}; atom.shared.add.u32 s, [{at[i]}], 1;",
            f"setp.ge.u32 q, s, 128; @q bra PAST{i}; shl.b32 a, s, 3; add.u32 a, a, {at[i]};",
            f"st.shared.v2.b32 [a+16], {{{x[i]}, {entry[i]}}}; PAST{i}:",
        ]
    lines += ["DONE:", *(f"mov.b32 ${i}, 0;" for i in range(each)), "}"]
    outputs, scratch, floats = ["=r"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines), ",".join(outputs + 3 * scratch + floats + scratch)


@gluon.jit
def _collect_candidates(at, number, wanted, x, entry, WARPS: gl.constexpr):
    """Where ``number`` is ``wanted``: x and entry go into the list behind the counter ``at``."""
    EACH: gl.constexpr = x.shape[0] // (32 * WARPS)
    NOTING: gl.constexpr = _collect_text(EACH)
    gl.inline_asm_elementwise(
        NOTING[0], NOTING[1], [at, number, wanted, x, entry],
        dtype=gl.int32, is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    """For scans."""
    return a + b


# --- radix select -------------------------------------------------------------------------------


@gluon.jit
def _ordered(bits):
    """Keys of scores: ``triton_topk.ordered_result``, where arithmetic makes one NaN only."""
    bits = (bits.to(gl.float32, bitcast=True) + 0.0).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _clear_digits(scratch, WARPS: gl.constexpr):
    """Clear the counters of all three digits."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, _DIGITS // 4, layout=L)
    for digit in gl.static_range(3):
        _clear4(scratch + (line + digit * (_DIGITS // 4)) * 16)


@gluon.jit
def _scan_digits(scratch, first, wanted, WARPS: gl.constexpr):
    """(digit, keys of larger digits, keys of the digit) where the ``wanted``-th key lies.

    ``first`` is the first of its counters. All threads have counted.
    """
    L: gl.constexpr = gl.BlockedLayout([_DIGITS // 4 // (32 * WARPS)], [32], [WARPS], [0])
    line = gl.arange(0, _DIGITS // 4, layout=L)
    a, b, c, d = _load4(scratch + (first + _DIGITS - 4 - 4 * line) * 4)
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
    _store3(found, digit, above, hits, crosses)
    warpgroup_barrier()
    digit, above, hits, _ = _load4(scratch + _FOUND * 4)
    return digit, above, hits


@gluon.jit
def _radix_select(scratch, key, wanted, WARPS: gl.constexpr):
    """(limit, above): the ``above`` keys > limit and ``wanted - above`` of those == limit are best.

    Counters are zeros, which all threads know, and are not afterwards.

    Args:
        scratch: of ``_reserve_scratch``.
        key: int32, NOTHING where there is none; more than ``wanted`` are there. NOTHING is counted
            without harm, as no key begins with its first digit.
        wanted: at least 1.
        WARPS: of the CTA.
    """
    # As unsigned numbers in the same order.
    number = key ^ _NOTHING
    _increment(scratch + ((number >> 21) & 2047) * 4)
    warpgroup_barrier()
    prefix, above, hits = _scan_digits(scratch, 0, wanted, WARPS)
    shift = 21
    if above + hits > wanted:
        # What does not begin so is counted where nobody reads: cheaper than leaving it out.
        digit = gl.where(
            ((number >> 21) & 2047) == prefix, (number >> 10) & 2047, _UNREAD - _DIGITS
        )
        _increment(scratch + (_DIGITS + digit) * 4)
        warpgroup_barrier()
        digit, more, hits = _scan_digits(scratch, _DIGITS, wanted - above, WARPS)
        above += more
        prefix = (prefix << 11) | digit
        shift = 10
        if above + hits > wanted:
            digit = gl.where(
                ((number >> 10) & 0x3FFFFF) == prefix, number & 1023, _UNREAD - 2 * _DIGITS
            )
            _increment(scratch + (2 * _DIGITS + digit) * 4)
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
    """``triton_topk.places`` of keys in one dimension."""
    beyond = key > limit
    same = (key == limit) & (key != _NOTHING)
    # Two counts side by side.
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
    """Clear the histogram, the number of candidates, and what a scan finds."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, 32 * WARPS, layout=L)
    _clear4(scratch + line * 16)
    _clear4(scratch + _CANDIDATES * 4 + line * 0)
    _clear4(scratch + _FOUND * 4 + line * 0)


@gluon.jit
def _score_range(scratch, x, FEW: gl.constexpr, WARPS: gl.constexpr):
    """(largest score, minus the least of the largest of each FEW)."""
    N: gl.constexpr = x.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    nothing = float("-inf")
    best = gl.reduce(gl.reshape(x, [N // FEW, FEW]), 1, _max_nan)
    # Where there is nothing, there is no lower bound.
    bound = gl.where(best == nothing, nothing, -best)
    EACH: gl.constexpr = N // FEW // (32 * WARPS)
    best = gl.reduce(gl.reshape(best, [32 * WARPS, EACH]), 1, _max_nan)
    bound = gl.reduce(gl.reshape(bound, [32 * WARPS, EACH]), 1, _max_nan)
    warp = gl.arange(0, 32 * WARPS, layout=ONE) // 32
    _warp_extremes(
        scratch + (_EXTREMES + 2 * warp) * 4,
        gl.convert_layout(best, ONE),
        gl.convert_layout(bound, ONE),
    )
    warpgroup_barrier()
    return _cta_extremes(scratch + _EXTREMES * 4, WARPS)


@gluon.jit
def _scan_bins(scratch, wanted, BINS: gl.constexpr, WARPS: gl.constexpr):
    """(bin, scores in higher bins, zero, 1) where the ``wanted``-th lies, or zeros."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, BINS // 4, layout=L)
    a, b, c, d = _load4(scratch + (BINS - 4 - 4 * line) * 4)
    own = _warp_sum(scratch + (_WARP_SUMS + line // 32) * 4, a + b + c + d)
    warpgroup_barrier()
    before = _sum_of_warps_before(scratch + _WARP_SUMS * 4, line // 32)
    found = scratch + _FOUND * 4
    _store_crossing(found, before, own, d, c, b, a, wanted, BINS - 1 - 4 * line)
    warpgroup_barrier()
    return _load4(found)


@gluon.jit
def _kth_candidate(scratch, count, wanted, WARPS: gl.constexpr):
    """(score, entry, equals behind) of the ``wanted``-th best of ``count`` candidates."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    who = gl.arange(0, 32 * WARPS, layout=L)
    at = scratch + _CANDIDATES * 4 + 16
    x, entry = _load2(at + gl.minimum(who, _MAX_CANDIDATES - 1) * 8)
    better, behind = gl.zeros_like(who), gl.zeros_like(who)
    for i in range(0, count):
        other, its_entry = _load2(at + i * 8)
        same = other == x
        better += ((other > x) | (same & (its_entry < entry))).to(gl.int32)
        behind += (same & (its_entry > entry)).to(gl.int32)
    it = (who < count) & (better == wanted - 1)
    bits = x.to(gl.int32, bitcast=True)
    _store3(gl.zeros_like(who) + scratch + _FOUND * 4, bits, entry, behind, it)
    warpgroup_barrier()
    bits, entry, behind, _ = _load4(scratch + _FOUND * 4)
    return bits.to(gl.float32, bitcast=True), entry, behind


@gluon.jit
def _store_topk(scratch, at, x, entry, end, wanted, FEW: gl.constexpr, WARPS: gl.constexpr):
    """Store the entries of the top ``wanted`` scores from ``at`` on, in order.

    Counters are zeros, which all threads know, and are not afterwards.

    Args:
        scratch: of ``_reserve_scratch``.
        at: a place in shared memory.
        x: float32, -inf from entry ``end`` on; neighbours in a thread.
        entry: int32, rising; of equal scores the lower entry is better.
        end: one past the last entry; at least ``wanted`` there are.
        wanted: at least 1.
        FEW: neighbours in a thread that share a maximum.
        WARPS: of the CTA, at least 4.
    """
    BINS: gl.constexpr = 128 * WARPS
    most, least = _score_range(scratch, x, FEW, WARPS)
    width = most + least
    # Neither NaN nor infinite, nor so small that bins would be.
    found = (width > 1e-30) & (width < 1e38)
    limit, last, behind = most, gl.to_tensor(0), gl.to_tensor(0)
    if found:
        scale = (BINS - 2) / width
        # What is below the bound has a bin to itself, the lowest.
        number = gl.maximum(gl.fma(x + least, scale, 8388609.0), 8388608.0)
        _increment(scratch + (number.to(gl.int32, bitcast=True) - _MAGIC) * 4)
        warpgroup_barrier()
        its, above, zero, crossed = _scan_bins(scratch, wanted, BINS, WARPS)
        # Once more, with a zero that compilers do not know, so that registers keep nothing.
        number = gl.fma(x + (least + zero.to(gl.float32, bitcast=True)), scale, 8388609.0)
        _collect_candidates(
            scratch + _CANDIDATES * 4,
            number.to(gl.int32, bitcast=True),
            its + _MAGIC,
            x,
            entry,
            WARPS,
        )
        warpgroup_barrier()
        count = _load1(scratch + _CANDIDATES * 4)
        # Where entries are few, fewer than are wanted may reach the bound.
        found = (crossed > 0) & (its > 0) & (count <= _MAX_CANDIDATES)
        if found:
            limit, last, behind = _kth_candidate(scratch, count, wanted - above, WARPS)
    if found:
        if behind > 0:
            x = gl.where((x == limit) & (entry > last), float("-inf"), x)
        _store_in_order(scratch, at, x, limit, entry, WARPS)
    else:
        zero = _load1(scratch + _FOUND * 4 + 8)
        warpgroup_barrier()
        _clear_digits(scratch, WARPS)
        warpgroup_barrier()
        # Computed again, which is rare, so that nothing has to be kept in registers.
        there = entry < end + zero
        key = gl.where(there, _ordered(x.to(gl.int32, bitcast=True)), _NOTHING)
        key_limit, above = _radix_select(scratch, key, wanted, WARPS)
        place, taken = _places(key, key_limit, wanted - above)
        _store1(at + place * 4, entry, taken)


# --- the kernel ---------------------------------------------------------------------------------


@gluon.constexpr_function
def _neighbours(elements, kept, warps):
    """Return the group size for which there are at least twice as many maxima as are kept."""
    return max(1, min(elements // (2 * kept), elements // (32 * warps)))


@gluon.jit
def _row_length(lengths, row_requests, row, first_row, per_request, num_requests, covered):
    """Request and number of entries of a row."""
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
    """Top-k of a row; arguments as of ``triton_select.row_topk_kernel``.

    GROUPS and ELEMENTS fill the threads.
    """
    ALL: gl.constexpr = gl.BlockedLayout([ELEMENTS // (32 * WARPS)], [32], [WARPS], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    scratch = _reserve_scratch()
    _clear_bins(scratch, WARPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = gl.program_id(0).to(gl.int64)
    request, count = _row_length(
        lengths, row_requests, row, first_row, per_request, num_requests, covered
    )
    # Whole lines are read, which rows are padded to, without having waited for lengths.
    scores += row * scores_stride
    element = gl.arange(0, ELEMENTS, layout=ALL)
    if GROUPS == 0:
        entry = element
        bits = gl.load(scores + entry, mask=entry < (covered + 3) // 4 * 4, other=0)
        # The row of a CTA that begins when this one ends.
        if gl.program_id(0) + _PREFETCHED < gl.num_programs(0):
            _prefetch_l2(
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
                _store1(scratch + (_GROUPS_CHOSEN + number) * 4, number, best != _NOTHING)
            _clear_bins(scratch, WARPS)
            warpgroup_barrier()
            line = element // _G
            group = _load1(scratch + (_GROUPS_CHOSEN + gl.minimum(line, PADDED_K - 1)) * 4)
            entry = gl.where(line < gl.minimum(last, k), group, _NO_GROUP) * _G
            entry = gl.max_contiguous(gl.multiple_of(entry + element % _G, 4), 4)
            bits = gl.load(scores + entry, mask=entry < _NO_GROUP * _G, other=0)
        x = bits.to(gl.float32, bitcast=True)
        x = _mask_from(x, entry, count, WARPS)
        _store_topk(
            scratch, scratch + _ENTRIES * 4, x, entry, count, k,
            _neighbours(ELEMENTS, PADDED_K, WARPS), WARPS,
        )  # fmt: skip
        warpgroup_barrier()
        entry_of = _load1(scratch + (_ENTRIES + place_of) * 4)
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
