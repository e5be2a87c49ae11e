"""The cache tensors of one layer, and the row formats of a model's caches."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from anymla.formats.page_layout import (
    INDEX_FP8,
    INDEX_MXFP4,
    MAIN_FP8,
    ROWS_BF16_128,
    ROWS_BF16_512,
    ROWS_FP32_128,
    ROWS_FP32_512,
    V41_COMPRESSED_NVFP4,
    V41_MAIN_FP8,
)


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """Layout ids of a model's caches, which name row formats.

    Attributes:
        main: layout id of the window, and of the compressed entries unless they have their own.
        index: layout id of the indexer's keys.
        compressed: layout id of the compressed entries, or None.
    """

    main: str
    index: str
    compressed: str | None = None

    @property
    def entries(self) -> str:
        """Layout id of the compressed entries."""
        return self.compressed or self.main

    def of(self, kind: str) -> str:
        """Return the layout id of a field of ``LayerCache``; for states, that of their entries."""
        if kind in ("index", "index_state"):
            return self.index
        return self.main if kind == "window" else self.entries


CACHE_FORMATS = {
    "fp8": CacheFormat(MAIN_FP8, INDEX_FP8),
    "fp8-mxfp4-index": CacheFormat(MAIN_FP8, INDEX_MXFP4),
    "fp8-nvfp4": CacheFormat(MAIN_FP8, INDEX_FP8, V41_COMPRESSED_NVFP4),
    "nvfp4": CacheFormat(V41_MAIN_FP8, INDEX_MXFP4, V41_COMPRESSED_NVFP4),
    "bf16": CacheFormat(ROWS_BF16_512, ROWS_BF16_128),
    "fp32": CacheFormat(ROWS_FP32_512, ROWS_FP32_128),
}


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Paged caches of one layer, shared ones included; a field is None if it has no such cache.

    Attributes:
        format: row formats of the caches.
        window: cache pages [P, B, row] in ``format.main``.
        compressed: cache pages [P, B, row] in ``format.entries``.
        state: float32 [P, bs, 2 * width], partial states of the compressor.
        index: cache pages [P, B, row] in ``format.index``.
        index_state: float32 [P, bs, 2 * width], partial states of the index compressor.
    """

    format: CacheFormat
    window: Tensor
    compressed: Tensor | None = None
    state: Tensor | None = None
    index: Tensor | None = None
    index_state: Tensor | None = None
