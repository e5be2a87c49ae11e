"""Rotary frequencies, and the cosine/sine tables that every rotating operation reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class YarnScaling:
    """Scaling of rotary frequencies for long contexts: static YaRN, the same at every position.

    Pairs that rotate more than ``beta_fast`` times within the original context keep their
    frequency; pairs that rotate less than ``beta_slow`` times are slowed down by ``factor``; a
    linear ramp over the pair index joins the two. DeepSeek-V4 scales neither the tables nor the
    softmax (no mscale).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def inv_freq(rope_dim: int, theta: float, yarn: YarnScaling | None = None) -> Tensor:
    """Return the angle per position of each rotated pair, ``theta^(-2i / rope_dim)`` with YaRN.

    Computed in float32, in the order of DeepSeek-V4's ``inference/model.py``: at positions around
    10^6, one unit in the last place of a frequency is a visible angle.

    Args:
        rope_dim: number of rotated channels, even and positive.
        theta: base of the frequencies, > 1.
        yarn: scaling in layers that compress, or None.

    Returns:
        Frequencies of the pairs, [rope_dim / 2] float32 on the CPU.

    Raises:
        ValueError: if ``rope_dim`` is not even and positive, or ``theta`` is not above 1.
    """
    if rope_dim <= 0 or rope_dim % 2:
        raise ValueError(f"inv_freq: rope_dim must be even and positive, got {rope_dim}")
    if not theta > 1:
        raise ValueError(f"inv_freq: theta must be above 1, got {theta}")
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    freqs = 1.0 / (theta**exponents)
    if yarn is None:
        return freqs

    def pair_of(rotations: float) -> float:
        """Return the (real) index of the pair that rotates this often in the original context."""
        wavelength = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
        return rope_dim * math.log(wavelength) / (2 * math.log(theta))

    low = float(max(math.floor(pair_of(yarn.beta_fast)), 0))
    high = float(min(math.ceil(pair_of(yarn.beta_slow)), rope_dim - 1))
    if low == high:
        high += 0.001
    pair = torch.arange(rope_dim // 2, dtype=torch.float32)
    kept = 1 - ((pair - low) / (high - low)).clamp(0, 1)
    return freqs / yarn.factor * (1 - kept) + freqs * kept


def cos_sin_table(inv_freq: Tensor, start: int, stop: int) -> Tensor:
    """Return the table of positions ``start .. stop - 1``: cosines, then sines, in each row.

    The angle is the float32 product of position and frequency, as in DeepSeek-V4's
    ``inference/model.py``.

    Args:
        inv_freq: frequencies of the pairs from ``inv_freq``, [rope_dim / 2] float32.
        start: first position of the table, >= 0.
        stop: one past the last position, >= ``start``.

    Returns:
        Rotary table, [stop - start, rope_dim] float32 on the device of ``inv_freq``.

    Raises:
        ValueError: if not ``0 <= start <= stop``.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"cos_sin_table: need 0 <= start <= stop, got {start} and {stop}")
    positions = torch.arange(start, stop, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq.float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
