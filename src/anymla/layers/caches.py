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
)


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """Layout ids of a model's caches.

    Attributes:
        main: layout of the window and the compressed entries.
        index: layout of the indexer's keys.
    """

    main: str
    index: str


CACHE_FORMATS = {
    "fp8": CacheFormat(MAIN_FP8, INDEX_FP8),
    "fp8-mxfp4-index": CacheFormat(MAIN_FP8, INDEX_MXFP4),
    "bf16": CacheFormat(ROWS_BF16_512, ROWS_BF16_128),
    "fp32": CacheFormat(ROWS_FP32_512, ROWS_FP32_128),
}


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Paged caches of one layer; None where the layer keeps none.

    Attributes:
        format: their row formats.
        window: [P, B, row] of ``format.main``.
        compressed: [P, B, row] of ``format.main``.
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
