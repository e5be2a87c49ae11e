"""Order of scores inside Triton kernels, and the search for the k-th of many.

A score becomes an int32 that orders as scores do ("key"): -0 is 0, every NaN the largest. No key is
``NOTHING``, which stands for an entry that is not there.

The search counts how many keys reach two probes at a time and narrows (low, high] until the count
is the wanted one or one key is left. Where probes are set decides how long it takes, never what
comes out:

    first    around the quantile of a normal distribution with the keys' mean and deviation
    then     around where the logarithm of the count, interpolated, is the wanted one
    fifth    at thirds of the range, which bounds the search whatever the scores are
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_KEY = tl.constexpr(0x7F800001)  # just above +inf's bits
NOTHING = tl.constexpr(-0x80000000)
_LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(bits):
    """Keys of float32 scores, given as their bits."""
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(magnitude == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(magnitude > 0x7F800000, NAN_KEY, key)


@triton.jit
def ordered_result(x, CANONICAL: tl.constexpr):
    """Keys of float32 results; CANONICAL where arithmetic makes no NaN but the one of all ones."""
    if CANONICAL:
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        return tl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)
    else:
        return ordered(x.to(tl.int32, bitcast=True))


@triton.jit
def _as_float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _as_key(x):
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _log2(count):
    """Roughly, by the bits of a float32; of 0 as of a half."""
    x = tl.maximum(count.to(tl.float32), 0.5)
    return x.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 8388608)


@triton.jit
def _normal_quantile(count, wanted):
    """Deviations above the mean that ``wanted`` of ``count`` normal values exceed, roughly.

    Source: Abramowitz and Stegun, 26.2.23.
    """
    r = tl.sqrt(1.3862944 * (_log2(count) - _log2(wanted)))
    above = 2.515517 + r * (0.802853 + r * 0.010328)
    return r - above / (1.0 + r * (1.432788 + r * (0.189269 + r * 0.001308)))


@triton.jit
def _probes(low, high, count_low, count_high, wanted, step, guess, margin):
    """Two keys in (low, high] to count at, in order."""
    top, bottom = _log2(count_low), _log2(count_high)
    first, last = _as_float(low), _as_float(high)
    middle = first + (last - first) * ((top - _log2(wanted)) / (top - bottom))
    # The share is off by about the root of what lies between.
    spread = (last - first) * 0.25 / tl.sqrt((count_low - count_high).to(tl.float32))
    middle = tl.where(step == 0, guess, middle)
    spread = tl.where(step == 0, margin, spread)
    lower, upper = _as_key(middle - spread), _as_key(middle + spread)
    if step % 5 == 4:
        # A quarter of the difference cannot overflow.
        third = ((high >> 2) - (low >> 2)) // 3 * 4
        lower, upper = low + third, high - third
    lower = tl.minimum(tl.maximum(lower, low + 1), high)
    return lower, tl.minimum(tl.maximum(upper, lower), high)


@triton.jit
def narrow(key, count, wanted, slack, NORMAL: tl.constexpr):
    """(low, reach, above): ``reach`` keys are >= low, and ``above`` are > low or, nearly, so.

    Either ``reach`` is at least ``wanted`` and at most ``slack`` more, or low is the ``wanted``-th
    largest key and ``above`` the number of larger ones.

    Args:
        key: int32 of any shape, at most 32,767, NOTHING where there is none.
        count: how many keys there are; at least ``wanted``.
        wanted: at least 1.
        slack: at least 0.
        NORMAL: look first where normally distributed scores would have it.
    """
    there = key != NOTHING
    high = tl.max(key)
    low = tl.min(tl.where(there, key, _LARGEST))
    guess, margin, step = _as_float(low), 0.0, 1
    if NORMAL:
        x = tl.where(there, _as_float(key), 0.0)
        number = count.to(tl.float32)
        mean = tl.sum(x) / number
        deviation = tl.sqrt(tl.maximum(tl.sum(x * x) / number - mean * mean, 0.0))
        guess = mean + deviation * _normal_quantile(count, wanted)
        margin, step = deviation * 0.075, 0
    # Always: reach = count(>= low) >= wanted > above = count(> high).
    reach, above = count, tl.zeros_like(count)
    while (low < high) & (reach > wanted + slack):
        lower, upper = _probes(low, high, reach, above, wanted, step, guess, margin)
        found = tl.sum((key >= lower).to(tl.int32) + ((key >= upper).to(tl.int32) << 16))
        more, less = found & 0xFFFF, found >> 16
        if less >= wanted:
            low = upper
            reach = less
        else:
            high = upper - 1
            above = less
            if more >= wanted:
                low = lower
                reach = more
            else:
                high = lower - 1
                above = more
        step += 1
    return low, reach, above


@triton.jit
def kth_largest(key, count, wanted, NORMAL: tl.constexpr):
    """(limit, above): the ``above`` keys > limit and ``wanted - above`` of those == limit are best.

    Arguments are those of ``narrow``.
    """
    low, reach, above = narrow(key, count, wanted, 0, NORMAL)
    whole = reach == wanted
    return tl.where(whole, low - 1, low), tl.where(whole, wanted, above)
