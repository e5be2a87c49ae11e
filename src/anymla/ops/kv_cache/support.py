"""Calls that the Triton kernels of cache rows take."""

from __future__ import annotations

from typing import Any

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.records import InlineFp8Layout
from anymla.ops.device import float32_support
from anymla.ops.registry import Support


def row_support(*args: Any, layout: str = MAIN_FP8, **keywords: Any) -> Support:
    """``supports`` of operations that read or write whole rows of a cache in ``layout``."""
    if isinstance(get_layout(layout), InlineFp8Layout):
        return Support(False, f"rows of {layout} are coded by torch")
    return float32_support(*args, **keywords)
