"""Quantise rows and store them in a cache."""

from __future__ import annotations

from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._pages import write_rows


def quantize_and_insert_k_cache(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, layout: str = MAIN_FP8
) -> None:
    """See ``interface.quantize_and_insert_k_cache``."""
    write_rows(k_cache, slot_mapping, k[: slot_mapping.shape[0]], layout)
