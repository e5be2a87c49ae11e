"""The k-th largest of any keys by their digits, in counters that programs on Hopper share.

Three digits of 11, 11 and 10 bits are looked at in turn: keys that begin as the k-th does are
counted by their next digit, and a scan from the largest digit down finds the one in which the k-th
lies. It is found early when all keys of that digit are wanted.

    keys  ->  2,048 counters  ->  scan  ->  digit, keys above it, keys of it  ->  next digit
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops.indexer.gluon_sm90_counters import (
    DIGITS,
    FOUND,
    REST,
    add,
    clear,
    get4,
    increment,
    meet,
    put3,
)

NOTHING = gl.constexpr(-0x80000000)


@gluon.jit
def ordered(bits):
    """Keys of scores: ``triton_order.ordered_result``, where arithmetic makes one NaN only."""
    bits = (bits.to(gl.float32, bitcast=True) + 0.0).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def clear_digits(words, WARPS: gl.constexpr):
    """The counters of all three."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, DIGITS // 4, layout=L)
    for digit in gl.static_range(3):
        clear(words + (line + digit * (DIGITS // 4)) * 16)


@gluon.jit
def _scan(words, first, wanted, WARPS: gl.constexpr):
    """(digit, keys of larger digits, keys of the digit) where the ``wanted``-th key lies.

    ``first`` is the first of its counters. All threads have counted.
    """
    L: gl.constexpr = gl.BlockedLayout([DIGITS // 4 // (32 * WARPS)], [32], [WARPS], [0])
    line = gl.arange(0, DIGITS // 4, layout=L)
    a, b, c, d = get4(words + (first + DIGITS - 4 - 4 * line) * 4)
    total = a + b + c + d
    reached = gl.associative_scan(total, 0, add)
    above = reached - total
    crosses = (above < wanted) & (reached >= wanted)
    past_d = above + d < wanted
    past_c = above + d + c < wanted
    past_b = above + d + c + b < wanted
    digit = DIGITS - 1 - 4 * line
    digit -= past_d.to(gl.int32) + past_c.to(gl.int32) + past_b.to(gl.int32)
    hits = gl.where(past_b, a, gl.where(past_c, b, gl.where(past_d, c, d)))
    above += gl.where(past_d, d, 0) + gl.where(past_c, c, 0) + gl.where(past_b, b, 0)
    found = gl.zeros_like(line) + words + FOUND * 4
    put3(found, digit, above, hits, crosses)
    meet()
    digit, above, hits, _ = get4(words + FOUND * 4)
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
    number = key ^ NOTHING
    increment(words + ((number >> 21) & 2047) * 4)
    meet()
    prefix, above, hits = _scan(words, 0, wanted, WARPS)
    shift = 21
    if above + hits > wanted:
        # What does not begin so is counted where nobody looks: cheaper than leaving it out.
        digit = gl.where(((number >> 21) & 2047) == prefix, (number >> 10) & 2047, REST - DIGITS)
        increment(words + (DIGITS + digit) * 4)
        meet()
        digit, more, hits = _scan(words, DIGITS, wanted - above, WARPS)
        above += more
        prefix = (prefix << 11) | digit
        shift = 10
        if above + hits > wanted:
            digit = gl.where(
                ((number >> 10) & 0x3FFFFF) == prefix, number & 1023, REST - 2 * DIGITS
            )
            increment(words + (2 * DIGITS + digit) * 4)
            meet()
            digit, more, hits = _scan(words, 2 * DIGITS, wanted - above, WARPS)
            above += more
            prefix = (prefix << 10) | digit
            shift = 0
    limit = (prefix << shift) ^ NOTHING
    whole = above + hits == wanted
    return gl.where(whole, limit - 1, limit), gl.where(whole, wanted, above)


@gluon.jit
def places(key, limit, need):
    """``triton_emit.places`` of keys in one dimension."""
    beyond = key > limit
    same = (key == limit) & (key != NOTHING)
    # Two counts side by side.
    running = gl.associative_scan(beyond.to(gl.int32) + (same.to(gl.int32) << 16), 0, add)
    equal = running >> 16
    place = (running & 0xFFFF) + gl.minimum(equal, need) - 1
    return place, beyond | (same & (equal <= need))
