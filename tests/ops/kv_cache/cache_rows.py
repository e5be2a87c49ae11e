"""Rows, slots and codes that tests of caches share."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout

HOSTILE = (-1, -2, -(2**31), -(2**62), 2**31, 2**62)
E4M3 = torch.tensor(
    [
        (-1.0) ** (c >> 7)
        * (
            (c & 7) / 8 * 2.0**-6
            if (c >> 3) & 15 == 0
            else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3 & 15) - 7)
        )
        if c & 127 != 127
        else float("nan")
        for c in range(256)
    ],
    dtype=torch.float64,
)


def rows_of(layout_id: str, count: int, *, spread: float = 3.0) -> Tensor:
    """Rows whose magnitudes differ by orders between rows and between blocks."""
    channels = get_layout(layout_id).channels
    blocks = torch.randn(count, channels // 64, 1) * spread
    return torch.randn(count, channels) * blocks.exp2().repeat_interleave(64, 1).squeeze(2)
