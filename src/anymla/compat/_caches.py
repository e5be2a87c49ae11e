"""Caches by FlashMLA's names of their formats, or by the width of their entries."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import (
    MAIN_FP8,
    V32_FP8,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    get_layout,
)
from anymla.ops.registry import require

# Formats by FlashMLA's names. In V4.1's pages the scales follow each entry since September 2026; in
# the older, now legacy, kernels a page held all values and then all scales.
_FORMATS = {
    "V4": MAIN_FP8,
    "V32": V32_FP8,
    "V41": V41_MAIN_FP8,
    "V41_FP4": V41_COMPRESSED_NVFP4,
}
_LEGACY_FORMATS = _FORMATS | {
    "V41": V41_MAIN_FP8_SPLIT,
    "V41_FP4": V41_COMPRESSED_NVFP4_SPLIT,
}
_OTHER_FORMATS = ("V32_NO_ROPE",)


def cache_of(
    name: str, argument: str, cache: Tensor, legacy: bool, kv_format: str | None = None
) -> tuple[Tensor, str]:
    """Return a cache as bytes, and its layout by the width of its entries and its format."""
    if not isinstance(cache, Tensor) or cache.dtype.itemsize != 1:
        kind = cache.dtype if isinstance(cache, Tensor) else type(cache).__name__
        raise TypeError(f"{name}: {argument} must be a tensor of bytes (FP8 rows), got {kind}")
    formats = _LEGACY_FORMATS if legacy else _FORMATS
    if kv_format is not None:
        if kv_format in _OTHER_FORMATS:
            raise NotImplementedError(
                f"anymla.compat.flash_mla: {name} with kv_format={kv_format!r} is not provided; "
                f"the formats are {', '.join(formats)}"
            )
        known = kv_format in formats
        require(known, name, "kv_format", f"None or one of {', '.join(formats)}", repr(kv_format))
        formats = {kv_format: formats[kv_format]}
    layouts = {get_layout(layout).row_elements: layout for layout in formats.values()}
    found = layouts.get(cache.shape[-1]) if cache.ndim == 4 else None
    if found is None:
        rows = " or ".join(f"[P, B, 1, {width}]" for width in layouts)
        told = "" if kv_format is None else f" for kv_format={kv_format!r}"
        raise ValueError(f"{name}: {argument} must be {rows}{told}, got {list(cache.shape)}")
    return cache.view(torch.uint8), found
