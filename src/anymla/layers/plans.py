"""Plans of attention that the layers of a step share."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from anymla.layers.rows import Rows
from anymla.ops.attention import sparse_attention_plan


class Plans:
    """Plans of one step, each made by the first layer that needs it.

    A graph that is being captured makes those that it follows: one from outside may be gone when
    it is replayed, and nothing has filled one from inside before.
    """

    def __init__(self) -> None:
        """None so far."""
        self._made: dict[Hashable, Tensor | None] = {}

    def of(self, kind: Hashable, heads: int, window: Rows, entries: Rows | None) -> Tensor | None:
        """The plan of a layer, for ``sparse_attention``.

        Args:
            kind: what its lists have in common with those of other layers.
            heads: query heads.
            window: rows of the first cache.
            entries: rows of the second, or None.
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
