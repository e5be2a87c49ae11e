"""Range of cache row scales that float16 represents exactly, shared by all attention kernels.

A value of an FP8 row is an e4m3 code times a scale. float16 holds the product exactly if the scaled
smallest step of e4m3, 2^-9, is at least float16's, 2^-24, and the scaled largest magnitude, 448,
is at most 65504. A kernel may multiply every row by 2^lift first and divide by it at the end, which
moves that window.

Nothing outside the window may be lost silently: a kernel must notice such a row among those that a
token lists, and compute that token, or its share of it, in bfloat16 instead.
"""

from __future__ import annotations

import math

from anymla.formats.e2m1 import E2M1_MAX
from anymla.formats.e4m3 import E4M3_MAX

FLOAT16_MAX = 65504.0
UE8M0_BIAS = 127
_LEAST_CODE = -9  # exponents of the smallest steps of e4m3 and of float16
_LEAST_FLOAT16 = -24

# This lift moves the window down to the smallest scale byte that a writer emits, 105 for an
# all-zero block. In return, magnitudes above 448 * 2^0 are outside.
LIFT = 7


def exact_scale_exponents(lift: int = 0) -> tuple[int, int]:
    """Return first and last e such that float16 holds every e4m3 code times 2^(e + lift)."""
    return (
        _LEAST_FLOAT16 - _LEAST_CODE - lift,
        math.floor(math.log2(FLOAT16_MAX / E4M3_MAX)) - lift,
    )


def exact_scale_bytes(lift: int = 0) -> tuple[int, int]:
    """Return first and last ue8m0 byte that is exact: 112 and 134, or 105 and 127 with ``LIFT``."""
    first, last = exact_scale_exponents(lift)
    return first + UE8M0_BIAS, last + UE8M0_BIAS


def largest_nvfp4_scale(lift: int = 0) -> float:
    """Return the largest e4m3 scale whose lifted products with e2m1 codes fit float16.

    It is 80 for a lift of 7. All smaller scales are exact: the smallest product, 2^-10, is far
    above float16's smallest step.
    """
    scale = FLOAT16_MAX / (E2M1_MAX * 2.0**lift)
    step = 2.0 ** (math.floor(math.log2(scale)) - 3)  # of e4m3's mantissa
    return min(math.floor(scale / step) * step, E4M3_MAX)
