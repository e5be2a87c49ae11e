"""Rows of V4.1's caches: rotated by their first position, coded, and written where vLLM says."""

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
    """Write the rows that close.

    Args:
        rows: [T, D], of window, entries or index keys; not rotated.
        positions: int64 [T].
        cache: pages of ``layout``, written.
        metadata: of the cache; its slots are negative where a row does not close, and end before
            the rows where a batch is padded.
        cos_sin: float32 table of the layer.
        ratio: tokens of a row.
        layout: layout id of ``cache``.
        backend: of the operations.
    """
    slots = metadata.slot_mapping[: len(rows)]
    some, first = rows[: len(slots)].unsqueeze(1), positions[: len(slots)] + (1 - ratio)
    rotated = rope(some, first, cos_sin, backend=backend).squeeze(1)
    quantize_and_insert_k_cache(rotated, cache, slots, layout=layout, backend=backend)
