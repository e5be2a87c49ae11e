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
    FOUND,
    MOST_CANDIDATES,
    add,
    clear,
    count_reaching,
    get,
    get2,
    get4,
    here,
    meet,
    note,
    put,
    put3,
    put_in_order,
)
from anymla.ops.indexer.gluon_sm90_digits import NOTHING, clear_digits, kth_largest, ordered, places

_KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)
# As a float32, 2^23 + n has n in its lowest bits.
_MAGIC = gl.constexpr(0x4B000000)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_KEEP_NAN)


@gluon.jit
def _both_larger(a, b, c, d):
    return _larger(a, c), _larger(b, d)


@gluon.jit
def clear_bins(words, WARPS: gl.constexpr):
    """The counters of ``put_best``, that of candidates, and what a scan finds."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, 32 * WARPS, layout=L)
    clear(words + line * 16)
    clear(words + CANDIDATES * 4 + line * 0)
    clear(words + FOUND * 4 + line * 0)


@gluon.jit
def _scan(words, wanted, BINS: gl.constexpr, WARPS: gl.constexpr):
    """(bin, scores in higher bins, 1) where the ``wanted``-th lies, or zeros."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, BINS // 4, layout=L)
    a, b, c, d = get4(words + (BINS - 4 - 4 * line) * 4)
    total = a + b + c + d
    reached = gl.associative_scan(total, 0, add)
    above = reached - total
    crosses = (above < wanted) & (reached >= wanted)
    past_d = above + d < wanted
    past_c = above + d + c < wanted
    past_b = above + d + c + b < wanted
    number = BINS - 1 - 4 * line
    number -= past_d.to(gl.int32) + past_c.to(gl.int32) + past_b.to(gl.int32)
    above += gl.where(past_d, d, 0) + gl.where(past_c, c, 0) + gl.where(past_b, b, 0)
    put3(gl.zeros_like(line) + words + FOUND * 4, number, above, 0 * above, crosses)
    meet()
    number, above, _, there = get4(words + FOUND * 4)
    return number, above, there


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
    N: gl.constexpr = x.shape[0]
    BINS: gl.constexpr = 128 * WARPS
    nothing = float("-inf")
    best = gl.reduce(gl.reshape(x, [N // FEW, FEW]), 1, _larger)
    # Where there is nothing, there is no lower bound.
    bound = gl.where(best == nothing, nothing, -best)
    most, least = gl.reduce((best, bound), 0, _both_larger)
    width = most + least
    # Neither NaN nor infinite, nor so small that bins would be.
    found = (width > 1e-30) & (width < 1e38)
    limit, last, behind = most, gl.to_tensor(0), gl.to_tensor(0)
    if found:
        scale = (BINS - 1) / width
        number = gl.fma(x + least, scale, 8388608.0).to(gl.int32, bitcast=True)
        count_reaching(words + (number - _MAGIC) * 4, x, -least)
        meet()
        its, above, crossed = _scan(words, wanted, BINS, WARPS)
        note(gl.zeros_like(entry) + words + CANDIDATES * 4, number, its + _MAGIC, x, entry)
        meet()
        count = get(words + CANDIDATES * 4)
        found = (crossed > 0) & (count <= MOST_CANDIDATES)
        if found:
            limit, last, behind = _rank(words, count, wanted - above, WARPS)
    if found:
        if behind > 0:
            x = gl.where((x == limit) & (entry > last), nothing, x)
        put_in_order(at, x, limit, entry, WARPS)
    else:
        meet()
        clear_digits(words, WARPS)
        meet()
        # Asked anew, which is rare, so that nothing has to be remembered.
        there = (entry >= here(start)) & (entry < end)
        key = gl.where(there, ordered(x.to(gl.int32, bitcast=True)), NOTHING)
        key_limit, above = kth_largest(words, key, wanted, WARPS)
        place, taken = places(key, key_limit, wanted - above)
        put(at + place * 4, entry, taken)
