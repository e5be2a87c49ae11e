"""Named real shapes of caches whose rows are stored and read, which builds and tests share."""

from __future__ import annotations

import dataclasses

from anymla.formats.page_layout import INDEX_LAYOUTS, MAIN_FP8, MAIN_LAYOUTS


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """A cache and the rows that are stored to it, or read.

    Attributes:
        layout: layout id.
        dtype: Triton's name of the rows' dtype.
        page_size: entries of a page.
    """

    layout: str
    dtype: str
    page_size: int


LAYOUTS = MAIN_LAYOUTS + INDEX_LAYOUTS
# Entries of a page of main and index caches, and what 256 tokens leave of them at ratio 128.
PAGE_SIZE, COMPRESSED_PAGE_SIZE = 64, 2
# Layouts, dtypes and page sizes, each at least once: they are independent.
CACHES = (
    *(CacheShape(layout, "bf16", PAGE_SIZE) for layout in LAYOUTS),
    CacheShape(MAIN_FP8, "fp32", PAGE_SIZE),
    CacheShape(MAIN_FP8, "bf16", COMPRESSED_PAGE_SIZE),
)
