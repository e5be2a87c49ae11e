"""Cosine and sine tables that grow with the longest sequence seen."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.norm_rope.rope_tables import YarnScaling, cos_sin_table, inv_freq


class RopeTable:
    """One rotary table, shared by all layers with the same base.

    Attributes:
        inv_freq: float32 [rope_dim / 2], angle in radians per position.
    """

    def __init__(
        self, rope_dim: int, theta: float, yarn: YarnScaling | None, device: torch.device
    ) -> None:
        self.inv_freq = inv_freq(rope_dim, theta, yarn).to(device)
        self._table = cos_sin_table(self.inv_freq, 0, 0)

    def table_for(self, length: int) -> Tensor:
        """Return float32 [n, rope_dim], n >= ``length``: cosines, then sines, of positions 0..n-1.

        The table grows by doubling, so that a long generation computes each row about once.
        """
        have = len(self._table)
        if have < length:
            grown = max(length, 2 * have, 1024)
            rest = cos_sin_table(self.inv_freq, have, grown)
            self._table = torch.cat((self._table, rest))
        return self._table
