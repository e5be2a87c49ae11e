"""A layer of transformers' cache whose rows of the batch are sequences of different lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from anymla.engines.transformers.batch import Kept, Plan


class Joined:
    """One layer's tensors of a forward pass, each sequence behind what the cache holds of it.

    Attributes:
        ends: tensors that later tokens of each span's sequence need, by name.
    """

    def __init__(self, plan: Plan, kept: Sequence[Kept | None]) -> None:
        """Begin with what the layer's cache holds of each row of the batch; empty for nothing."""
        self._before = [kept[s.row] if s.past else None for s in plan.spans]
        self.ends: list[dict[str, Tensor]] = [{} for _ in plan.spans]

    def join(self, name: str, new: Tensor, counts: Sequence[int], last: Sequence[int]) -> Tensor:
        """Return what is kept of each sequence and its new rows, sequence after sequence.

        Args:
            name: name of the tensor.
            new: new rows [N, D] of all sequences side by side.
            counts: number of new rows of each sequence, N in sum.
            last: number of each sequence's last rows that are kept for later tokens.
        """
        parts = []
        for before, part, end, n in zip(
            self._before, new.split(list(counts)), self.ends, last, strict=True
        ):
            whole = [part] if before is None else [before.tensors[name], part]
            parts += whole
            tail = torch.cat([piece[max(len(piece) - n, 0) :].detach() for piece in whole])
            end[name] = tail[max(len(tail) - n, 0) :]
        return new if len(parts) == len(self.ends) else torch.cat(parts)


class SequenceLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Cache of one attention layer by sequences, in place of transformers' tensors.

    Attributes:
        kept: the tensors that each row of the batch ends with; None for rows without real tokens.
            Empty before the first call.
    """

    is_croppable = False

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.kept: list[Kept | None] = []

    def advance(self, plan: Plan, joined: Joined) -> None:
        """Keep what follows a forward pass: of each row of the batch, its last sequence."""
        kept = list(self.kept) or [None] * plan.shape[0]
        for span, end in zip(plan.spans, joined.ends, strict=True):
            kept[span.row] = Kept(span.length, span.first, end)
        self.kept = kept
        self.cumulative_length += plan.shape[1]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse the rows of another attention implementation.

        Raises:
            ValueError: another implementation attends with this cache.
        """
        raise ValueError(
            'the cache was filled with attn_implementation="anymla", and only it can go on: begin '
            "with a new cache"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget tokens: a window that was pooled cannot be opened again.

        Raises:
            ValueError: the cache is asked to forget tokens.
        """
        raise ValueError('a cache of attn_implementation="anymla" cannot forget its last tokens')

    def reset(self) -> None:
        """Forget everything."""
        self.kept, self.cumulative_length, self.is_initialized = [], 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows of the batch by number, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows of the batch by number, or by a mask of booleans."""
        if self.kept:
            chosen = torch.arange(len(self.kept))[indices.cpu()].tolist()
            self.kept = [_copy(self.kept[row]) for row in chosen]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self.kept = [_copy(one) for one in self.kept for _ in range(repeats)]


def _copy(kept: Kept | None) -> Kept | None:
    return None if kept is None else dataclasses.replace(kept)


def layer_of(cache: Any, index: int, window: int, rows: int) -> SequenceLayer:
    """Return a cache's layer as a ``SequenceLayer``, which replaces transformers' empty one.

    Args:
        cache: cache that transformers hands to the layers.
        index: number of the layer.
        window: largest number of rows that a token sees, itself included.
        rows: number of rows of the batch.

    Raises:
        ValueError: the cache is of another kind, or holds other rows.
    """
    dynamic = isinstance(cache, DynamicCache) and not cache.offloading
    layer = cache.layers[index] if dynamic and index < len(cache.layers) else None
    if not isinstance(layer, DynamicSlidingWindowLayer):
        raise ValueError(
            'attn_implementation="anymla" takes DynamicCache(config=model.config) without '
            f"offloading, as generate makes it by default, not this {type(cache).__name__}"
        )
    if not isinstance(layer, SequenceLayer):
        if layer.is_initialized:
            raise ValueError(
                "the cache was filled by another attn_implementation: begin with a new cache"
            )
        layer = cache.layers[index] = SequenceLayer(window)
    if layer.kept and len(layer.kept) != rows:
        raise ValueError(f"the cache holds {len(layer.kept)} sequences, the batch {rows}")
    return layer
