"""Arithmetic of AMD's vector unit in NumPy, as functions of arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

Array = Any

_LEAST_NORMAL = np.float32(2.0**-126)


def fma(a: Array, b: Array, c: Array, power: Array = 0) -> Array:
    """Return ``(a * b + c) * 2**power`` of float32 values, rounded to float32 once.

    The product is exact in float64. The sum is rounded twice, which differs from one rounding only
    if the first ends midway between two float32; those are found, and rounded to odd first.
    """
    product = np.asarray(a, np.float64) * b
    c = np.asarray(c, np.float64)
    total = np.asarray(product + c)
    bits = total.view(np.int64)
    scaled = np.ldexp(total, power) if np.any(power) else total
    midway = (bits & 0x1FFFFFFF) == 0x10000000
    midway |= (np.abs(scaled) < 2.0**-125) & (total != 0)
    if midway.any():
        other = total - product
        error = (product - (total - other)) + (c - other)
        fix = midway & (error != 0) & np.isfinite(error) & ((bits & 1) == 0)
        away = (error > 0) == (total > 0)
        total = np.where(fix, np.where(away, bits + 1, bits - 1), bits).view(np.float64)
        scaled = np.ldexp(total, power)
    return scaled.astype(np.float32)


def round_odd_fma16(a: Array, b: Array, c: Array) -> Array:
    """Return ``a * b + c`` of float16 values, rounded to float16 once: float64 holds it exactly."""
    return (np.asarray(a, np.float64) * b + c).astype(np.float16)


def to_bf16(x: Array) -> Array:
    """Round float32 to bfloat16, ties to even; return the codes as uint32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded)


@functools.cache
def fp8_values(name: str) -> Array:
    """Return the float32 values of the 256 codes of "e4m3", "e5m2", "e4m3fnuz" or "e5m2fnuz"."""
    fnuz = name.endswith("fnuz")
    exponent_bits, mantissa_bits = (4, 3) if name.startswith("e4m3") else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1 + fnuz
    codes = np.arange(256)
    exponent = codes >> mantissa_bits & (2**exponent_bits - 1)
    fraction = (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    size = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    if fnuz:
        size[0x80] = np.nan
    elif name == "e4m3":
        size[[0x7F, 0xFF]] = np.nan
    else:
        top = exponent == 31
        size[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return (np.where(codes >> 7, -1.0, 1.0) * size).astype(np.float32)


def to_fp8(x: Array, name: str, clamps: Array = False) -> Array:
    """Round to the nearest code of "e4m3" or "e4m3fnuz", ties to even; return uint32.

    Values beyond the largest by half a step or more become NaN, or the largest where ``clamps``.
    """
    nan = 0x80 if name.endswith("fnuz") else 0x7F
    values = fp8_values(name)[: 0x80 if name.endswith("fnuz") else 0x7F].astype(np.float64)
    top = len(values) - 1
    size = np.abs(np.asarray(x, np.float64))
    above = np.clip(np.searchsorted(values, size), 1, top)
    below = above - 1
    to_below, to_above = size - values[below], values[above] - size
    code = np.where(
        (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above
    )
    beyond = (size >= values[top] + (values[top] - values[top - 1]) / 2) & ~np.asarray(clamps)
    code = code | np.where(np.signbit(x), 0x80, 0)
    if name.endswith("fnuz"):
        code = np.where(code & 0x7F == 0, 0, code)
    return np.where(np.isnan(x) | beyond, nan, code).astype(np.uint32)


def flushed(x: Array) -> Array:
    """Replace subnormal float32 by zeros: the transcendental unit neither takes nor gives them."""
    return np.where(np.abs(x) < _LEAST_NORMAL, np.copysign(np.float32(0), x), x)


def transcendental(function: Any) -> Any:
    """Make a float32 function without subnormals of a float64 function."""

    def computed(x: Array) -> Array:
        exact = function(np.asarray(flushed(x), np.float64))
        return flushed(np.asarray(exact).astype(np.float32))

    return computed


def median_float(a: Array, b: Array, c: Array) -> Array:
    """Return the median of three floats; the least of the numbers if there is a NaN."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    least = np.fmin(np.fmin(a, b), c)
    return np.where(nan, least, np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c)))


def median(a: Array, b: Array, c: Array) -> Array:
    """Return the median of three integers."""
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def bit_field(x: Array, offset: Array, width: Array) -> Array:
    """Return ``width & 31`` bits of uint32 from bit ``offset & 31`` on."""
    one = np.uint32(1)
    return (x >> (offset & np.uint32(31))) & ((one << (width & np.uint32(31))) - one)


def signed_bit_field(x: Array, offset: Array, width: Array) -> Array:
    """Return what ``bit_field`` does, as signed integers of that width."""
    offset, width = offset & np.uint32(31), width & np.uint32(31)
    # Bits above the register's repeat its sign.
    wide = np.asarray(x, np.uint32).view(np.int32).astype(np.int64) >> offset.astype(np.int64)
    field = wide & ((np.int64(1) << width.astype(np.int64)) - 1)
    sign = np.int64(1) << np.maximum(width.astype(np.int64) - 1, 0)
    return np.where(width == 0, 0, (field ^ sign) - sign).astype(np.int32)


def reversed_bits(x: Array) -> Array:
    """Return uint32 with its bits in the opposite order."""
    x = np.asarray(x, np.uint32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        s, m = np.uint32(shift), np.uint32(mask)
        x = ((x >> s) & m) | ((x & m) << s)
    return (x >> np.uint32(16)) | (x << np.uint32(16))


def leading_zeros(x: Array) -> Array:
    """Return the number of zeros above the highest one of uint32; 0xFFFFFFFF for 0."""
    _, exponent = np.frexp(np.asarray(x, np.float64))
    return np.where(np.asarray(x) == 0, -1, 32 - exponent).astype(np.int32).view(np.uint32)


def trailing_zeros(x: Array) -> Array:
    """Return the number of zeros below the lowest one of uint32; 0xFFFFFFFF for 0."""
    x = np.asarray(x, np.uint32)
    _, exponent = np.frexp(np.asarray(x & (~x + np.uint32(1)), np.float64))
    return np.where(x == 0, -1, exponent - 1).astype(np.int32).view(np.uint32)


def permuted_bytes(a: Array, b: Array, selectors: Array) -> Array:
    """Return the bytes of ``v_perm_b32``: of b (0 to 3), a (4 to 7), a sign, 0x00 or 0xFF."""
    both = (np.asarray(a, np.uint64) << np.uint64(32)) | b
    result = np.uint32(0)
    for place in range(4):
        selector = (np.asarray(selectors, np.uint32) >> np.uint32(8 * place)) & np.uint32(255)
        shift = np.minimum(selector, 7).astype(np.uint64) * np.uint64(8)
        byte = (both >> shift) & np.uint64(255)
        if (selector > 7).any():
            # 8 to 11 repeat the sign of bits 15, 31, 47 and 63.
            sign = (np.clip(selector, 8, 11).astype(np.uint64) - np.uint64(8)) * np.uint64(16)
            repeated = ((both >> (sign + np.uint64(15))) & np.uint64(1)) * np.uint64(255)
            byte = np.where(selector > 7, repeated, byte)
            byte = np.where(selector == 12, 0, np.where(selector > 12, 255, byte))
        result = result | (byte.astype(np.uint32) << np.uint32(8 * place))
    return result


def saturated(low: int, high: int, kind: Any) -> Any:
    """Make the conversion of floats to integers that truncates, clamps, and takes NaN for 0."""

    def converted(x: Array) -> Array:
        x = np.nan_to_num(np.asarray(x, np.float64), nan=0.0, posinf=1e20, neginf=-1e20)
        return np.clip(np.trunc(x), low, high).astype(np.int64).astype(kind)

    return converted


def scaled_by_power(x: Array, exponent: Array) -> Array:
    """Return ``x * 2**exponent`` in float32."""
    exponent = np.clip(exponent, -400, 400).astype(np.int32)
    return np.ldexp(np.asarray(x, np.float64), exponent).astype(np.float32)


def division_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """Return the quotient with its sign, or what IEEE 754 says for zeros, infinities and NaN.

    So of quotients that certainly overflow or underflow, whose computation ends in NaN.
    """
    sign = np.where(np.signbit(numerator) ^ np.signbit(denominator), np.float32(-1), np.float32(1))
    n, d = numerator, denominator
    apart = exponent_of(n) - exponent_of(d)
    infinite, zero = np.isinf(n) | (d == 0) | (apart >= 129), np.isinf(d) | (n == 0)
    result = np.where(infinite, np.float32(np.inf), np.abs(quotient))
    result = np.where(zero | ((apart < -150) & ~infinite), np.float32(0), result)
    invalid = ((n == 0) & (d == 0)) | (np.isinf(n) & np.isinf(d)) | np.isnan(n) | np.isnan(d)
    return np.where(invalid, np.float32(np.nan), np.copysign(result, sign)).astype(np.float32)


def exponent_of(x: Array) -> Array:
    """Return the biased exponents of float32 as int64."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits >> np.uint32(23)) & np.uint32(255)).astype(np.int64)


def division_scale(x: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Return ``v_div_scale_f32``'s value and condition.

    ``x`` is the numerator or the denominator; it is scaled by 2**64 or 2**-64 where a step of the
    division would leave float32's normal numbers. A denominator whose inverse is subnormal is made
    smaller: the manuals say larger, by which it would overflow.
    """
    x, d, n = np.broadcast_arrays(*(np.asarray(v, np.float32) for v in (x, denominator, numerator)))
    same = np.ascontiguousarray(x).view(np.uint32)
    is_d = same == np.ascontiguousarray(d).view(np.uint32)
    is_n = same == np.ascontiguousarray(n).view(np.uint32)
    tiny_d = (np.abs(d) < _LEAST_NORMAL) & (d != 0)
    tiny_inverse = np.abs(1.0 / d.astype(np.float64)) < _LEAST_NORMAL
    tiny_quotient = np.abs(n.astype(np.float64) / d) < _LEAST_NORMAL
    far = exponent_of(n) - exponent_of(d) >= 96
    up, down = (x * np.float32(2.0**64)), (x * np.float32(2.0**-64))
    zero = (d == 0) | (n == 0)
    # The first case that holds decides: its value where something is scaled, and the condition.
    cases = (
        (zero, np.float32(np.nan), False),
        (far, np.where(is_d, up, x), True),
        (tiny_d, up, False),
        (tiny_inverse & tiny_quotient, np.where(is_d, down, x), True),
        (tiny_inverse, down, False),
        (tiny_quotient, np.where(is_n, up, x), True),
        (exponent_of(n) <= 23, up, False),
    )
    value = np.select([holds for holds, _, _ in cases], [value for _, value, _ in cases], x)
    condition = np.select([holds for holds, _, _ in cases], [flag for _, _, flag in cases], False)
    return value.astype(np.float32), condition
