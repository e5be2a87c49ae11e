"""What kernels with a paged cache are built for: every layout, and pages of the sizes in use."""

from __future__ import annotations

from anymla.formats.page_layout import INDEX_LAYOUTS, MAIN_FP8, MAIN_LAYOUTS

LAYOUTS = MAIN_LAYOUTS + INDEX_LAYOUTS
# Layouts, types of rows and entries of a page, each at least once: they are independent.
# Two entries are what 256 tokens leave at ratio 128.
KINDS = (
    *((layout, "bf16", 64) for layout in LAYOUTS),
    (MAIN_FP8, "fp32", 64),
    (MAIN_FP8, "bf16", 2),
)
