"""Named real shapes of caches whose rows are stored and read, for builds, benchmarks and tests."""

from __future__ import annotations

import dataclasses

from anymla.formats.page_layout import (
    INDEX_LAYOUTS,
    MAIN_FP8,
    MAIN_LAYOUTS,
    ROWS_FP32_512,
    V41_LAYOUTS,
)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Layout of a cache, and dtype of the rows that are stored to it or read.

    Attributes:
        layout: identifier of the cache's layout.
        dtype: Triton's name of the rows' dtype.
        page_size: number of entries in a page.
    """

    layout: str
    dtype: str
    page_size: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.dtype}, pages of {self.page_size}"


LAYOUTS = MAIN_LAYOUTS + V41_LAYOUTS + INDEX_LAYOUTS
# Entries in a page of main and index caches, and in one of 256 tokens at ratio 128.
PAGE_SIZE, COMPRESSED_PAGE_SIZE = 64, 2
# Every layout, the main ones with pages of both sizes; dtypes vary independently of layouts.
CACHES = (
    *(CacheShape(layout, "bf16", PAGE_SIZE) for layout in LAYOUTS),
    *(CacheShape(layout, "bf16", COMPRESSED_PAGE_SIZE) for layout in MAIN_LAYOUTS),
    *(CacheShape(MAIN_FP8, dtype, PAGE_SIZE) for dtype in ("fp16", "fp32")),
    CacheShape(ROWS_FP32_512, "fp32", PAGE_SIZE),
)
