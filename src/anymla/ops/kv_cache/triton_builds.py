"""What kernels with a paged cache are built for: every layout, and pages of the sizes in use."""

from __future__ import annotations

from anymla.formats.page_layout import (
    INDEX_FP8,
    INDEX_MXFP4,
    MAIN_FP8,
    ROWS_BF16_128,
    ROWS_BF16_512,
    ROWS_FP32_128,
    ROWS_FP32_512,
)

MAIN_LAYOUTS = (MAIN_FP8, ROWS_BF16_512, ROWS_FP32_512)
INDEX_LAYOUTS = (INDEX_FP8, INDEX_MXFP4, ROWS_BF16_128, ROWS_FP32_128)
LAYOUTS = MAIN_LAYOUTS + INDEX_LAYOUTS
# Two entries: what 256 tokens leave at ratio 128.
PAGE_SIZES = (2, 64)
