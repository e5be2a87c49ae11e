"""Plans of attention, shared by the layers of a step."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from anymla.layers.rows import Rows
from anymla.ops.attention import sparse_attention_plan


class Plans:
    """Plans of one step; the first layer that needs a plan builds it.

    A graph under capture builds its own plans: a plan from outside the graph may be freed before a
    replay, and a plan inside is not filled before it.
    """

    def __init__(self) -> None:
        """Start without plans."""
        self._made: dict[Hashable, Tensor | None] = {}

    def of(self, kind: Hashable, heads: int, window: Rows, entries: Rows | None) -> Tensor | None:
        """Return the plan of a layer, for ``sparse_attention``.

        Args:
            kind: key that layers with the same list lengths share.
            heads: number of query heads.
            window: listed rows of the first cache.
            entries: listed rows of the second cache, or None.
        """
        extra = None if entries is None else entries.indices.shape[-1]
        captured = window.lengths.is_cuda and torch.cuda.is_current_stream_capturing()
        key = (kind, heads, window.indices.shape, extra, captured)
        if key not in self._made:
            self._made[key] = sparse_attention_plan(
                window.lengths,
                None if entries is None else entries.lengths,
                heads=heads,
                width=window.indices.shape[-1],
                extra_width=extra,
            )
        return self._made[key]
