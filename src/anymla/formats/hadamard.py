"""The normalised Walsh-Hadamard transform that spreads outliers before 4-bit quantisation."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply the last dim by the Sylvester-ordered Hadamard matrix, scaled by n^-0.5.

    The matrix is symmetric and orthogonal: the transform is its own inverse and leaves dot
    products unchanged.

    Args:
        x: floating point tensor [..., n], n a power of two.

    Returns:
        [..., n], same dtype; sums in float32 (float64 for float64 input), rounded once.

    Raises:
        ValueError: if n is not a power of two.
    """
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"hadamard_transform: last dim must be a power of two, got {n}")
    y = x if x.dtype == torch.float64 else x.float()
    half = 1
    while half < n:
        pair = y.unflatten(-1, (-1, 2, half))
        first, second = pair[..., 0, :], pair[..., 1, :]
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return (y * n**-0.5).to(x.dtype)
