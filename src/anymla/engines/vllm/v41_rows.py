"""Rows of V4.1's caches: rotation by their first position, quantisation, and the write."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.norm_rope import rope


def insert(
    rows: Tensor,
    positions: Tensor,
    cache: Tensor,
    metadata: Any,
    cos_sin: Tensor,
    *,
    ratio: int,
    layout: str,
    backend: str | None = None,
) -> None:
    """Write rows of complete windows.

    Args:
        rows: [T, D], rows of window, entries or index keys, not rotated.
        positions: int64 [T], position of each token.
        cache: cache pages in ``layout``, written.
        metadata: metadata of the cache. Slots are negative for rows that are not complete, and
            there are fewer slots than rows if a batch is padded.
        cos_sin: float32 rotation table of the layer.
        ratio: tokens per row.
        layout: layout id of ``cache``.
        backend: name of the operations' backend; None for the best.
    """
    slots = metadata.slot_mapping[: len(rows)]
    some, first = rows[: len(slots)].unsqueeze(1), positions[: len(slots)] + (1 - ratio)
    rotated = rope(some, first, cos_sin, backend=backend).squeeze(1)
    quantize_and_insert_k_cache(rotated, cache, slots, layout=layout, backend=backend)
