"""Which cache rows float16 arithmetic holds: the one definition that all attention kernels use.

A value of an FP8 row is an e4m3 code times a scale. float16 holds the product exactly if the code's
smallest step, 2^-9, does not fall below float16's, 2^-24, and its largest magnitude, 448, not
above 65504. A kernel may multiply every row by 2^lift first and take the power out again at the
end, which moves that window.

Outside of it nothing may be lost in silence: a kernel must notice such a row among those that a
token lists, and compute that token (or the share of it that it has) in bfloat16 instead.
"""

from __future__ import annotations

import math

from anymla.formats.e2m1 import E2M1_MAX
from anymla.formats.e4m3 import E4M3_MAX

FLOAT16_MAX = 65504.0
UE8M0_BIAS = 127
_LEAST_CODE = -9  # exponents of the smallest steps of e4m3 and of float16
_LEAST_FLOAT16 = -24

# Moves the window down to the smallest scale that a writer emits (105: the floor of an all-zero
# block), at the price of magnitudes above 448 * 2^0.
LIFT = 7


def exact_scale_exponents(lift: int = 0) -> tuple[int, int]:
    """First and last e such that every e4m3 code times 2^e is exact in float16 after the lift."""
    return (
        _LEAST_FLOAT16 - _LEAST_CODE - lift,
        math.floor(math.log2(FLOAT16_MAX / E4M3_MAX)) - lift,
    )


def exact_scale_bytes(lift: int = 0) -> tuple[int, int]:
    """First and last ue8m0 byte of ``exact_scale_exponents``: 112 to 134, or 105 to 127 lifted."""
    first, last = exact_scale_exponents(lift)
    return first + UE8M0_BIAS, last + UE8M0_BIAS


def largest_nvfp4_scale(lift: int = 0) -> float:
    """Largest e4m3 scale whose products with e2m1 codes float16 holds after the lift: 80 after 7.

    All smaller ones are exact: the smallest product, 2^-10, is far above float16's smallest step.
    """
    scale = FLOAT16_MAX / (E2M1_MAX * 2.0**lift)
    step = 2.0 ** (math.floor(math.log2(scale)) - 3)  # of e4m3's mantissa
    return min(math.floor(scale / step) * step, E4M3_MAX)
