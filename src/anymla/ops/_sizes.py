"""Integer arithmetic of configs, without Triton, which need not be installed."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n; 1 for n = 0."""
    return 1 << max(0, n - 1).bit_length()
