"""The k best of scores on Hopper, by counting them in bins.

Every few neighbours have a largest score, and there are at least k such few, so k scores reach the
least of these. What reaches it is counted in bins of equal width from there to the largest score:

    scores  ->  bins  ->  scan  ->  bin of the k-th, scores above it  ->  its candidates, ranked
                                                                      ->  the k-th, and its entry

A bin rises with the score, so all scores of a higher bin are larger. Few share the bin of the k-th
(one or two of 8,192 normally distributed ones), and each of these counts how many of them are
better. Rows that this does not suit (scores that are not finite, all alike, too few or too many
where they are looked for) are selected from by digits.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops.indexer.gluon_sm90_counters import (
    CANDIDATES,
    EXTREMES,
    FOUND,
    MOST_CANDIDATES,
    SUMS,
    clear,
    get,
    get2,
    get4,
    increment,
    meet,
    note,
    put,
    put3,
    put_in_order,
)
from anymla.ops.indexer.gluon_sm90_digits import NOTHING, clear_digits, kth_largest, ordered, places
from anymla.ops.indexer.gluon_sm90_warps import (
    extremes,
    put_crossing,
    sums_before,
    tell_extremes,
    tell_sum,
)

_KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)
# As a float32, 2^23 + n has n in its lowest bits.
_MAGIC = gl.constexpr(0x4B000000)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_KEEP_NAN)


@gluon.jit
def clear_bins(words, WARPS: gl.constexpr):
    """The counters of ``put_best``, that of candidates, and what a scan finds."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, 32 * WARPS, layout=L)
    clear(words + line * 16)
    clear(words + CANDIDATES * 4 + line * 0)
    clear(words + FOUND * 4 + line * 0)


@gluon.jit
def _extremes_of(words, x, FEW: gl.constexpr, WARPS: gl.constexpr):
    """(largest score, minus the least of the largest of each FEW)."""
    N: gl.constexpr = x.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    nothing = float("-inf")
    best = gl.reduce(gl.reshape(x, [N // FEW, FEW]), 1, _larger)
    # Where there is nothing, there is no lower bound.
    bound = gl.where(best == nothing, nothing, -best)
    EACH: gl.constexpr = N // FEW // (32 * WARPS)
    best = gl.reduce(gl.reshape(best, [32 * WARPS, EACH]), 1, _larger)
    bound = gl.reduce(gl.reshape(bound, [32 * WARPS, EACH]), 1, _larger)
    warp = gl.arange(0, 32 * WARPS, layout=ONE) // 32
    tell_extremes(
        words + (EXTREMES + 2 * warp) * 4,
        gl.convert_layout(best, ONE),
        gl.convert_layout(bound, ONE),
    )
    meet()
    return extremes(words + EXTREMES * 4, WARPS)


@gluon.jit
def _scan(words, wanted, BINS: gl.constexpr, WARPS: gl.constexpr):
    """(bin, scores in higher bins, zero, 1) where the ``wanted``-th lies, or zeros."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, BINS // 4, layout=L)
    a, b, c, d = get4(words + (BINS - 4 - 4 * line) * 4)
    own = tell_sum(words + (SUMS + line // 32) * 4, a + b + c + d)
    meet()
    before = sums_before(words + SUMS * 4, line // 32)
    found = words + FOUND * 4
    put_crossing(found, before, own, d, c, b, a, wanted, BINS - 1 - 4 * line)
    meet()
    return get4(found)


@gluon.jit
def _rank(words, count, wanted, WARPS: gl.constexpr):
    """(score, entry, equals behind) of the ``wanted``-th best of ``count`` candidates."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    who = gl.arange(0, 32 * WARPS, layout=L)
    at = words + CANDIDATES * 4 + 16
    x, entry = get2(at + gl.minimum(who, MOST_CANDIDATES - 1) * 8)
    better, behind = gl.zeros_like(who), gl.zeros_like(who)
    for i in range(0, count):
        other, its_entry = get2(at + i * 8)
        same = other == x
        better += ((other > x) | (same & (its_entry < entry))).to(gl.int32)
        behind += (same & (its_entry > entry)).to(gl.int32)
    it = (who < count) & (better == wanted - 1)
    bits = x.to(gl.int32, bitcast=True)
    put3(gl.zeros_like(who) + words + FOUND * 4, bits, entry, behind, it)
    meet()
    bits, entry, behind, _ = get4(words + FOUND * 4)
    return bits.to(gl.float32, bitcast=True), entry, behind


@gluon.jit
def put_best(
    words, at, x, entry, start, end, wanted, FEW: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Write the entries of the ``wanted`` best scores to the words from ``at`` on, in order.

    Counters are zeros, which all threads know, and are not afterwards.

    Args:
        words: of ``reserve``.
        at: a place in shared memory.
        x: float32, -inf where an entry is not in [start, end); neighbours in a thread.
        entry: int32, rising; of equal scores the lower entry is better.
        start: first entry.
        end: one past the last; at least ``wanted`` there are.
        wanted: at least 1.
        FEW: neighbours in a thread that have a largest score.
        WARPS: of the program, at least 4.
    """
    BINS: gl.constexpr = 128 * WARPS
    most, least = _extremes_of(words, x, FEW, WARPS)
    width = most + least
    # Neither NaN nor infinite, nor so small that bins would be.
    found = (width > 1e-30) & (width < 1e38)
    limit, last, behind = most, gl.to_tensor(0), gl.to_tensor(0)
    if found:
        scale = (BINS - 2) / width
        # What is below the bound has a bin to itself, the lowest.
        number = gl.maximum(gl.fma(x + least, scale, 8388609.0), 8388608.0)
        increment(words + (number.to(gl.int32, bitcast=True) - _MAGIC) * 4)
        meet()
        its, above, zero, crossed = _scan(words, wanted, BINS, WARPS)
        # Once more, with a zero that compilers do not know, so that nothing has to be remembered.
        number = gl.fma(x + (least + zero.to(gl.float32, bitcast=True)), scale, 8388609.0)
        note(
            words + CANDIDATES * 4, number.to(gl.int32, bitcast=True), its + _MAGIC, x, entry, WARPS
        )
        meet()
        count = get(words + CANDIDATES * 4)
        # Where entries are few, fewer than are wanted may reach the bound.
        found = (crossed > 0) & (its > 0) & (count <= MOST_CANDIDATES)
        if found:
            limit, last, behind = _rank(words, count, wanted - above, WARPS)
    if found:
        if behind > 0:
            x = gl.where((x == limit) & (entry > last), float("-inf"), x)
        put_in_order(words, at, x, limit, entry, WARPS)
    else:
        zero = get(words + FOUND * 4 + 8)
        meet()
        clear_digits(words, WARPS)
        meet()
        # Asked anew, which is rare, so that nothing has to be remembered.
        there = (entry >= start + zero) & (entry < end + zero)
        key = gl.where(there, ordered(x.to(gl.int32, bitcast=True)), NOTHING)
        key_limit, above = kth_largest(words, key, wanted, WARPS)
        place, taken = places(key, key_limit, wanted - above)
        put(at + place * 4, entry, taken)
