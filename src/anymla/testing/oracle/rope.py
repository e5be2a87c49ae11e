"""Rotary embedding of the last channels, in interleaved pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anymla.testing.oracle.config import OracleConfig


def frequencies(config: OracleConfig, *, compressed: bool) -> Tensor:
    """Return float32 radians per position of each pair, as in DeepSeek's inference/model.py.

    The frequencies and the angle position * frequency are float32 numbers by definition: at
    position 6000 their rounding is an angle of 2e-4, which the model was trained with. All later
    steps are float64.
    """
    dim = config.rope_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not compressed or config.yarn is None:
        return inverse
    yarn = config.yarn

    def correction_dim(rotations: float) -> float:
        return dim * math.log(yarn.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction_dim(yarn.beta_fast)), 0)
    high: float = min(math.ceil(correction_dim(yarn.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    blend = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    smooth = 1 - blend
    return inverse / yarn.factor * (1 - smooth) + inverse * smooth


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * len(inv_freq) channels of x [T, ..., D] by each token's position."""
    angle = (positions.float().unsqueeze(1) * inv_freq).double()
    angle = angle.view(len(positions), *([1] * (x.ndim - 2)), len(inv_freq))
    cos, sin = angle.cos(), angle.sin()
    if inverse:
        sin = -sin
    start = x.shape[-1] - 2 * len(inv_freq)
    even, odd = x[..., start::2], x[..., start + 1 :: 2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :start], rotated), -1)
