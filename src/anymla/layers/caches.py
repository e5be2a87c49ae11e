"""The cache tensors of one layer, and the row formats a model's caches are kept in."""

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
    """Layout ids of a model's caches.

    Attributes:
        main: layout of the window, and of the compressed entries unless they have their own.
        index: layout of the indexer's keys.
        compressed: layout of the compressed entries, or None.
    """

    main: str
    index: str
    compressed: str | None = None

    @property
    def entries(self) -> str:
        """Layout of the compressed entries."""
        return self.compressed or self.main

    def of(self, kind: str) -> str:
        """Layout of the rows in a field of ``LayerCache``, or of those its states become."""
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
    """Paged caches of one layer; None where it has none, its own or another layer's that it reads.

    Attributes:
        format: their row formats.
        window: [P, B, row] of ``format.main``.
        compressed: [P, B, row] of ``format.entries``.
        state: float32 [P, bs, 2 * width], partial states of the compressor.
        index: [P, B, row] of ``format.index``.
        index_state: float32 [P, bs, 2 * width], partial states of the index compressor.
    """

    format: CacheFormat
    window: Tensor
    compressed: Tensor | None = None
    state: Tensor | None = None
    index: Tensor | None = None
    index_state: Tensor | None = None
